"""Parameters, penalties and optimizers for the tests of penalties."""

import torch
from torch import nn

import loco_ext
from loco_ext import optim, sparsity
from tests.optim.stepping import LAYOUTS
from tests.tolerances import assert_within_ulps

SHAPES = [(6, 20, 3, 3), (4, 3, 5, 5), (8, 1, 3, 3), (7,), (5, 33, 3), (3, 2, 3, 3, 3)]

KINDS = {
    "plain": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "locality": (0.5, 2.0)}),
    "dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.1, "locality": (0.5, 2.0)}),
    "l1": ("SGD", {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "locality": (0.5, 2.0), "norm": "l1"}),
    "Adam, short memory": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.3, 0.9)}),
}

PENALTIES = {
    "rings": sparsity.RingPenalty(20.0),
    "full rings": sparsity.RingPenalty(100.0, kind="full", weighting="normalized"),
    "largest": sparsity.RingPenalty(8.0, norm="linf"),
    "squared": sparsity.RingPenalty(3.0, power=2),
    "kernels": sparsity.KernelPenalty(15.0, weighting="scaled"),
}

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_params(dtype=torch.float32, layout="contiguous", shapes=SHAPES):
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(LAYOUTS[layout](value.to(dtype))) for value in values]


def make(kind, params, penalty, **options):
    name, arguments = KINDS[kind]
    return getattr(optim, name)(params, **{**arguments, "penalty": penalty, **options})


def stepped(params, kind, penalty, backend="native", steps=1, gradients=1.0, **options):
    """Make steps with gradients of the parameters' strides and about this size; return the parameters."""
    optimizer = make(kind, params, penalty, **options)
    generator = torch.Generator().manual_seed(8)
    with loco_ext.backend(backend):
        for _ in range(steps):
            for p in params:
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * gradients)
            optimizer.step()
    return params


def assert_near(ours, theirs, before):
    """Assert the same zeros and strides, and values that differ by roundings of what parameters were before.

    Shrinking a weight to almost zero leaves few digits.
    """
    for p, q, old in zip(ours, theirs, before, strict=True):
        assert_within_ulps(p.detach(), q.detach(), scale=old.detach().abs().amax().item())
        assert torch.equal(p == 0, q == 0)
        assert p.stride() == old.stride()


def make_norm(channels):
    generator = torch.Generator().manual_seed(0)
    norm = nn.BatchNorm2d(channels, eps=0.1)
    norm.weight.data = torch.randn(channels, generator=generator)
    norm.running_var = torch.rand(channels, generator=generator) + 0.05
    return norm
