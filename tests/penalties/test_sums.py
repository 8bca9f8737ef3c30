"""Tests of steps that sum each ring while they update its weights: kernels that consist of whole vectors."""

import pytest
import torch
from torch import Tensor, nn

import loco_ext
from loco_ext import optim, sparsity
from tests.covering import covering
from tests.tolerances import assert_within_ulps, same_bits

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:locality. kernels of an even size:UserWarning"),
]

# Kernels of 1 to 4 vectors, of multiples of four vectors and a rest, and of no whole vectors; with 1 to 4 rings.
SHAPES = [
    *[(3, 16, 1, 1), (2, 80, 1), (2, 16, 3, 3), (3, 48, 3, 3), (2, 64, 3, 3), (2, 17, 3, 3), (2, 16, 2, 2)],
    *[(2, 32, 5, 5), (2, 16, 7, 7), (2, 16, 3, 3, 3), (2, 144, 3), (2, 8, 2, 2), (16, 1, 5, 5)],
]
DECAY = {"weight_decay": 0.1, "locality": (0.5, 2.0)}
MOMENTUM = {"lr": 0.03, "momentum": 0.9}
KINDS = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, decay": ("SGD", {"lr": 0.1} | DECAY),
    "momentum": ("SGD", MOMENTUM),
    "momentum, decay": ("SGD", MOMENTUM | {"dampening": 0.3} | DECAY),
    "nesterov": ("SGD", MOMENTUM | {"nesterov": True, "weight_decay": 0.1}),
    "l1": ("SGD", MOMENTUM | DECAY | {"norm": "l1"}),
    "Adam": ("Adam", {"lr": 0.02}),
    "Adam, decay": ("Adam", {"lr": 0.02} | DECAY),
    "Adam, short memory": ("Adam", {"lr": 0.02, "betas": (0.3, 0.9)}),
    "amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02} | DECAY),
}
PENALTIES = {
    "rings": sparsity.RingPenalty(15.0),
    "kernels": sparsity.KernelPenalty(10.0),
    "largest": sparsity.RingPenalty(4.0, norm="linf"),
}
LAYOUTS = {
    "contiguous": lambda p: p,
    "channels_last": lambda p: p.movedim(1, -1).contiguous().movedim(-1, 1),
}


def make_params(layout="contiguous", sizes=1.0):
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator) * sizes for shape in SHAPES]
    return [nn.Parameter(LAYOUTS[layout](value)) for value in values]


def stepped(kind, penalty, backend, layout="contiguous", steps=2, gradients=1.0, sizes=1.0, **options):
    """Return parameters, scaled by ``sizes``, after some steps with gradients of the same strides."""
    params = make_params(layout, sizes)
    name, arguments = KINDS[kind]
    optimizer = getattr(optim, name)(params, **arguments | options, penalty=penalty)
    generator = torch.Generator().manual_seed(8)
    with loco_ext.backend(backend):
        for _ in range(steps):
            for p in params:
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * gradients)
            optimizer.step()
    return params


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter], before: list[nn.Parameter]) -> None:
    for p, q, size in zip(ours, theirs, before, strict=True):
        assert_within_ulps(p.detach(), q.detach(), scale=size.detach().abs().amax().item())
        assert torch.equal(p == 0, q == 0)
        assert p.stride() == q.stride() == size.stride()


@pytest.mark.parametrize("native", ["cpu"], indirect=True)  # a GPU always sums a kernel after updating it
@pytest.mark.parametrize(("kind", "penalty", "layout"), covering(KINDS, PENALTIES, LAYOUTS))
def test_the_fused_step_is_that_of_the_reference(kind, penalty, layout):
    penalty = PENALTIES[penalty]
    ours = stepped(kind, penalty, "native", layout)
    assert_same(ours, stepped(kind, penalty, "reference", layout), make_params(layout))


@pytest.mark.parametrize("size", [1e-30, 1e22])
@pytest.mark.parametrize("kind", ["momentum", "Adam"])
def test_squares_beyond_float32_are_summed(kind, size):
    # Adam's steps and thresholds scale with its learning rate.
    options = {"lr": 0.02 * size} if kind == "Adam" else {"gradients": size}
    penalty = sparsity.RingPenalty(15.0 * options.get("gradients", 1.0))
    ours = stepped(kind, penalty, "native", sizes=size, **options)
    theirs = stepped(kind, penalty, "reference", sizes=size, **options)
    assert_same(ours, theirs, make_params(sizes=size))
    assert all(p.isfinite().all() for p in ours)
    assert any(p.any() for p in ours)


def poisoned(kind: str, backend: str, value: float) -> list[Tensor]:
    """Return the parameters after a step in which the gradient's last element was ``value``."""
    params = make_params()
    name, arguments = KINDS[kind]
    optimizer = getattr(optim, name)(params, **arguments, penalty=PENALTIES["rings"])
    with loco_ext.backend(backend):
        for last in (1.0, value):
            for p in params:
                p.grad = torch.ones_like(p)
                p.grad.view(-1)[-1] = last
            optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize(("kind", "value"), [("momentum", torch.inf), ("Adam", torch.nan)])
def test_a_gradient_that_is_no_number_spoils_its_kernel_alone(kind, value):
    for ours, theirs in zip(poisoned(kind, "native", value), poisoned(kind, "reference", value), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours[:-1].isfinite().all()
        assert not ours[-1].isfinite().all()


@pytest.mark.parametrize("native", ["cpu"], indirect=True)
@pytest.mark.parametrize("kind", ["momentum, decay", "AdamW"])
def test_the_number_of_threads_changes_no_bit(kind, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SHAPES", [(shape[0] * 40, *shape[1:]) for shape in SHAPES])
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(stepped(kind, PENALTIES["rings"], "native"))
    for other in results[1:]:
        assert all(same_bits(p.detach(), q.detach()) for p, q in zip(results[0], other, strict=True))
