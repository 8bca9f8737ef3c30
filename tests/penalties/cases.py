"""Parameters, penalties and optimizers for the tests of penalties."""

import torch
from torch import nn

from loco_ext import optim, sparsity

SHAPES = [(6, 20, 3, 3), (4, 3, 5, 5), (8, 1, 3, 3), (7,), (5, 33, 3), (3, 2, 3, 3, 3)]

KINDS = {
    "plain": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "locality": (0.5, 2.0)}),
    "dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.1, "locality": (0.5, 2.0)}),
}

PENALTIES = {
    "rings": sparsity.RingPenalty(20.0),
    "full rings": sparsity.RingPenalty(100.0, kind="full", weighting="normalized"),
    "largest": sparsity.RingPenalty(8.0, norm="linf"),
    "squared": sparsity.RingPenalty(3.0, power=2),
    "kernels": sparsity.KernelPenalty(15.0, weighting="scaled"),
}

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

LAYOUTS = {
    "contiguous": lambda p: p,
    "channels_last": lambda p: p.movedim(1, -1).contiguous().movedim(-1, 1) if p.dim() > 2 else p,
    "sliced": lambda p: torch.cat([p, p], -1)[..., : p.shape[-1]],
    "transposed": lambda p: p.transpose(0, -1).contiguous().transpose(0, -1),
}


def make_params(dtype=torch.float32, layout="contiguous", shapes=SHAPES):
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(LAYOUTS[layout](value.to(dtype))) for value in values]


def make(kind, params, penalty, **options):
    name, arguments = KINDS[kind]
    return getattr(optim, name)(params, **{**arguments, "penalty": penalty, **options})


def make_norm(channels):
    generator = torch.Generator().manual_seed(0)
    norm = nn.BatchNorm2d(channels, eps=0.1)
    norm.weight.data = torch.randn(channels, generator=generator)
    norm.running_var = torch.rand(channels, generator=generator) + 0.05
    return norm
