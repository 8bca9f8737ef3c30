"""Importance by resampling against an exact mean over all images; Lemma 1 where its assumptions hold and where not."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext.analysis import (
    gradient_importance,
    gradient_norm,
    integrated_gradients,
    permutation_importance,
    top_hessian_eigenvalue,
)
from tests.tolerances import STANDARD_ERRORS, ULPS

F64 = torch.float64
CLOSE = {"rtol": 100 * ULPS[F64] * torch.finfo(F64).eps, "atol": 1e-14}
UNITS = torch.tensor([[0, 0, 0], [1, 2, 1], [1, 1, 3]])


def network(bend):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), bend, nn.Flatten(), nn.Linear(6, 3)).to(F64)


def images(count=7):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, 3, 4, generator=generator, dtype=F64)
    return x, torch.randint(3, (count,), generator=generator)


def exact(model, x, targets, unit):
    """Return eq. 10 with the mean over all images in the place of draws."""
    channel, row, column = unit
    total = 0.0
    for i, target in enumerate(targets):
        changed = x[i].repeat(len(x), 1, 1, 1)
        changed[:, channel, row, column] = x[:, channel, row, column]
        total += (model(changed)[:, target].mean() - model(x[i][None])[0, target]).square().item()
    return total / len(x)


def test_resampling_has_the_exact_importance_as_its_mean():
    model, (x, targets) = network(nn.Tanh()).eval(), images()
    model[4].weight.data *= 3  # far from linear
    seeds = 100
    runs = [permutation_importance(model, x, targets, UNITS, draws=2, seed=seed) for seed in range(seeds)]
    found = torch.stack(runs)
    expected = torch.tensor([exact(model, x, targets, unit) for unit in UNITS.tolist()], dtype=F64)
    error = (found.mean(0) - expected).abs() / (found.std(0) / seeds**0.5)
    assert (error < STANDARD_ERRORS).all()
    assert torch.equal(runs[5], permutation_importance(model, x, targets, UNITS, draws=2, seed=5))
    more = permutation_importance(model, x, targets, UNITS, draws=1000)
    assert ((more - expected).abs() < 0.1 * expected).all()


def test_the_lemma_is_exact_for_a_linear_network():
    """There the exact importance is ``(h'_i)^2 V[x_i]``, if ``h`` is one logit."""
    model, (x, _) = network(nn.Identity()), images()
    targets = torch.ones(len(x), dtype=torch.int64)
    model[1].running_var.fill_(2.5)
    modes = [module.training for module in model.modules()]
    found = gradient_importance(model, x, targets)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    expected = [exact(model, x, targets, unit) for unit in itertools.product(range(2), range(3), range(4))]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=F64), **CLOSE)


class Normalised(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.sub_(0.5).div_(0.25) if self.in_place else (x - 0.5) / 0.25


def test_models_that_write_to_their_input_are_measured_like_others():
    x, targets = images()
    before, rest = x.clone(), network(nn.Tanh())
    measures = {
        "permutation": lambda model: permutation_importance(model, x, targets, UNITS),
        "gradient": lambda model: gradient_importance(model, x, targets),
        "integrated": lambda model: integrated_gradients(model, x, targets, torch.zeros_like(x), steps=7),
        "norm": lambda model: gradient_norm(model, cross_entropy, [(x, targets)]),
        "eigenvalue": lambda model: top_hessian_eigenvalue(model, cross_entropy, [(x, targets)], iterations=3).value,
    }
    for name, measure in measures.items():
        one, other = (measure(nn.Sequential(Normalised(in_place), rest)) for in_place in (True, False))
        torch.testing.assert_close(one, other, msg=name)
        assert torch.equal(x, before), name


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"units": torch.zeros(1, 3)}, TypeError),
        ({"units": torch.tensor([[0, 0]])}, ValueError),
        ({"units": torch.tensor([[0, 0, 4]])}, ValueError),
        ({"units": torch.tensor([[0, -1, 0]])}, ValueError),
        ({"draws": 1}, ValueError),
        ({"draws": 2.5}, TypeError),
        ({"seed": -1}, ValueError),
        ({"targets": torch.zeros(7)}, TypeError),
        ({"x": torch.zeros(7, 24)}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_named(bad, error):
    x, targets = images()
    arguments = {"model": network(nn.ReLU()), "x": x, "targets": targets, "units": UNITS} | bad
    with pytest.raises(error, match=f"^{next(iter(bad))}: expected .*got"):
        permutation_importance(**arguments)
