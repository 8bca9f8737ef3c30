"""A small float64 classifier, its images, and everything that measures one."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext import analysis
from tests.tolerances import ULPS

F64 = torch.float64
CLOSE = {"rtol": 100 * ULPS[F64] * torch.finfo(F64).eps, "atol": 1e-14}
UNITS = torch.tensor([[0, 0, 0], [1, 2, 1], [1, 1, 3]])


def network(bend=None):
    """Return a network in training mode, with one flag that differs from its parent's."""
    torch.manual_seed(1)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), bend or nn.Tanh(), nn.Dropout(0.4), nn.AvgPool2d(2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 3)).to(F64)
    model[3].eval()
    model[1].running_var.fill_(2.5)
    return model


def images(count=7, seed=0):
    """Return images and their targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, 4, 7, generator=generator, dtype=F64)
    return x, torch.randint(3, (count,), generator=generator)


def string(model, x, targets):
    """Return the parameters in the middle of a string between a model and a copy of it."""
    options = {"loss": cross_entropy, "data": [(x, targets)], "steps": 2}
    path = analysis.interpolate(model, copy.deepcopy(model), 3, "string", **options)
    return torch.cat([parameter.detach().flatten() for parameter in list(path)[1][1].parameters()])


MEASURES = {
    "permutation": lambda model, x, targets: analysis.permutation_importance(model, x, targets, UNITS),
    "gradient": analysis.gradient_importance,
    "integrated": lambda model, x, targets: analysis.integrated_gradients(model, x, targets, x[:1], steps=7),
    "ablation": lambda model, x, targets: analysis.ablation_curve(model, x, targets, x, (1, 5)),
    "norm": lambda model, x, targets: analysis.gradient_norm(model, cross_entropy, [(x, targets)]),
    "eigenvalue": lambda model, x, targets: (
        analysis.top_hessian_eigenvalue(model, cross_entropy, [(x, targets)], iterations=3).value
    ),
    "string": string,
}
