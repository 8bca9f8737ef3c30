"""Our optimizers on a GPU beside the reference on the CPU."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from loco_ext import optim
from tests.optim.stepping import RICH, make_params, params_of, set_gradients
from tests.tolerances import same_bits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LOCALITY = (0.5, 2.0)
SCALE = 1024.0  # a power of two: scaling and unscaling are exact


@contextmanager
def no_syncs():
    """Make every torch call that would synchronize with the GPU an error inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(params):
    return [nn.Parameter(p.detach().cuda()) for p in params]


def make_twins(name, dtype=F32, **options):
    """Return our optimizer on the GPU and the reference on the CPU, with equal parameters."""
    params = make_params(dtype=dtype)
    options = {**RICH[name], "locality": LOCALITY, **options}
    make = getattr(optim, name)
    return make(on_gpu(params), **options), make(params, **{**options, "fused": False})


def give_gradients(ours, reference, seed, frozen=()):
    """Give both optimizers the same new gradients, in new memory."""
    set_gradients(params_of(reference), seed, frozen)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.grad = None if q.grad is None else q.grad.to(p.device)


def assert_same(ours, reference):
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert same_bits(p.detach().cpu(), q.detach())
        mine, other = ours.state.get(p, {}), reference.state.get(q, {})
        if not other:  # only the GPU knew that a first step was skipped
            assert not any(value.any() for value in mine.values())
            continue
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert same_bits(value.cpu(), other[key]), key


def step_both(ours, reference, seed, frozen=(), waits=False):
    give_gradients(ours, reference, seed, frozen)
    with nullcontext() if waits else no_syncs():
        ours.step()
    reference.step()
    assert_same(ours, reference)


def set_in_groups(optimizers, **values):
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.update(values)
