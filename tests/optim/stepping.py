"""Helpers that step one of our optimizers beside one of torch.optim's, from the same state at every step."""

import copy
import io
from contextlib import contextmanager

import torch
from torch import nn

from loco_ext import optim
from tests.tolerances import ULPS_OF_TORCHS_LOOP, assert_within_ulps

SHAPES = [(), (1,), (17,), (33, 65), (0, 4), (3, 2, 3, 3), (5, 2, 5, 5)]
CLASSES = ["SGD", "Adam", "AdamW"]
LOCALITY = (0.5, 2.0)
# Options under which every state and every hyperparameter of a class matters.
RICH = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
}
# Each gives a tensor other strides.
LAYOUTS = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "reversed": lambda t: t.permute([*reversed(range(t.dim()))]).contiguous().permute([*reversed(range(t.dim()))]),
    "spaced": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "channels_last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t.clone(),
}


def make_params(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def clones(params):
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def set_gradients(params, seed, frozen=()):
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in frozen else grad


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def pair(name, groups, theirs=None, **options):
    """Return our optimizer, and torch's for-loop one on copies of the parameters; only torch's takes ``theirs``."""
    copied = copy.deepcopy(groups)
    return getattr(optim, name)(groups, **options), torch_loop(name, copied, **{**options, **(theirs or {})})


def torch_loop(name, groups, **options):
    return getattr(torch.optim, name)(groups, **options, foreach=False, fused=False)


def train(optimizer, steps, start=0, step=None):
    """Make steps, by ``step`` if it is given, with gradients that depend only on the number of the step."""
    for number in range(start, start + steps):
        set_gradients(params_of(optimizer), number)
        (step or optimizer.step)()


@contextmanager
def correct_sqrt():
    """Round torch's square root correctly, by computing it in float64: the one of its vector library may be off."""
    sqrt = torch.Tensor.sqrt
    torch.Tensor.sqrt = lambda x: sqrt(x.double()).to(x.dtype)
    try:
        yield
    finally:
        torch.Tensor.sqrt = sqrt


def follow(ours, theirs, seed=0, frozen=()):
    """Step both with the same gradients and assert that they agree; then copy torch's parameters and states to ours."""
    for optimizer in (ours, theirs):
        set_gradients(params_of(optimizer), seed, frozen)
    before = [p.detach().clone() for p in params_of(ours)]
    states = [copy.deepcopy(theirs.state.get(q, {})) for q in params_of(theirs)]
    ours.step()
    with correct_sqrt():
        theirs.step()
    compare_step(ours, theirs, before, states)


def compare_step(ours, theirs, before, states, ulps=ULPS_OF_TORCHS_LOOP):
    """Assert that both agree after one step from the parameters ``before`` and torch's ``states``.

    Ours then takes over torch's parameters and states.
    """
    pairs = zip(params_of(ours), params_of(theirs), strict=True)
    decays = [group["weight_decay"] for group in theirs.param_groups for _ in group["params"]]
    for (p, q), old, state, decay in zip(pairs, before, states, decays, strict=True):
        size = old.abs().maximum(q.detach().abs()).maximum((q.detach() - old).abs())
        assert_within_ulps(p.detach(), q.detach(), ulps, size)
        pull = 0 * old if q.grad is None else q.grad.abs() + decay * old.abs()
        _compare_states(ours.state.get(p, {}), theirs.state.get(q, {}), state, pull)
        with torch.no_grad():
            p.copy_(q)


def _compare_states(ours, theirs, before, pull):
    expected = {key: value for key, value in theirs.items() if value is not None}
    assert {key for key, value in ours.items() if value is not None} == expected.keys()
    for key, value in expected.items():
        if key == "step" or not torch.is_tensor(value):
            assert ours[key] == value
            continue
        old = before.get(key)
        size = pull**2 if key.endswith("sq") else pull
        size = size if old is None else size.maximum(old.abs())
        assert_within_ulps(ours[key], value, ULPS_OF_TORCHS_LOOP, size)
        ours[key].copy_(value)


def through_a_file(state):
    """Return a copy of state dicts from torch.save and torch.load, which executes no code with weights_only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def nearly(a, b):
    """Return whether results of two float64 runs differ by no more than roundings accumulated over the steps."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def assert_same(ours, theirs, equal=torch.equal):
    """Assert that two optimizers hold equal parameters and states."""
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        assert equal(p.detach(), q.detach())
        mine, other = ours.state.get(p, {}), theirs.state.get(q, {})
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert equal(value, other[key]), key
