"""ROLL and the margin loss against losses written unit by unit, with their gradients."""

import contextvars
import linecache
import math

import pytest
import torch
from torch import nn

from loco_ext import regularizers
from tests import tolerances
from tests.regularizers import piecewise
from tests.regularizers.memory import peak_bytes


def gradients_of(loss, model):
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def bends_with_graph(model, sample):
    """Return the bends of one sample and the norms of their gradients, both differentiable in the parameters."""
    sample = sample.clone().requires_grad_()
    _, values = piecewise.bends(model, sample)
    each = [torch.autograd.grad(z, sample, create_graph=True, materialize_grads=True)[0].flatten() for z in values]
    return values, torch.stack(each)


@pytest.mark.parametrize("name", ["mlp", "narrow mlp", "1d", "residual"])
def test_losses_are_those_of_a_loop_over_units(name):
    model, x = piecewise.network(name, 2, 7)
    samples = [bends_with_graph(model, sample) for sample in x]

    def assert_close(found, parts):
        expected = sum(parts) / len(x)
        torch.testing.assert_close(found, expected, **tolerances.REGIONS)
        ours, theirs = gradients_of(found, model), gradients_of(expected, model)
        torch.testing.assert_close(ours, theirs, **tolerances.REGION_LOSSES)

    for top_percent, share in ((100, 1), (30, 0.3), ("max", 0), (1e-3, 0)):
        parts = []
        for z, gradients in samples:
            terms = gradients.square().sum(1) + 0.7 * (1 - z.abs()).clamp(min=0)
            count = max(1, round(len(terms) * share))
            parts.append(2.5 * terms.sort(descending=True).values[:count].mean())
        assert_close(regularizers.ROLL(2.5, 0.7, top_percent)(model, x), parts)
    for p, q in ((1, math.inf), (2, 2), (3, 1.5), (math.inf, 1)):
        parts = []
        for z, gradients in samples:
            inside = gradients.abs().amax(1) > 0
            parts.append(-1.5 * (z[inside].abs() / gradients[inside].norm(q, dim=1)).min())
        assert_close(regularizers.MarginLoss(1.5, p)(model, x), parts)


@pytest.mark.parametrize("loss", [regularizers.ROLL(1.0, 0.5), regularizers.MarginLoss(1.0)])
def test_losses_refuse_a_model_whose_graph_is_another(loss):
    class AskingForTensors(nn.Module):
        def forward(self, x):
            return torch.relu(x + 1 if isinstance(x, torch.Tensor) else x)

    model, x = AskingForTensors(), torch.randn(3, 4)
    loss(model, x[:0])
    for _ in range(2):
        with pytest.raises(regularizers.NotPiecewiseLinearError, match="whose graph returns other numbers"):
            loss(model, x)


def test_random_probes_are_unbiased_for_roll_and_its_gradient():
    model, x = piecewise.network("cnn", 2, 7)
    exact = regularizers.ROLL(1.0, 0.5, probes="exact")(model, x)
    auto = regularizers.ROLL(1.0, 0.5)(model, x)
    assert torch.equal(auto, exact)
    generator, draws = torch.Generator().manual_seed(0), []
    estimate = regularizers.ROLL(1.0, 0.5, probes=64, generator=generator)
    for _ in range(60):
        value = estimate(model, x)
        draws.append(torch.cat([value.detach().view(1), gradients_of(value, model)]))
    draws = torch.stack(draws)
    expected = torch.cat([exact.detach().view(1), gradients_of(exact, model)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= tolerances.STANDARD_ERRORS * error + 1e-12).all()


def test_many_directions_are_replaced_by_a_random_one():
    model = nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 18 * 18, 3), nn.ReLU())
    x = torch.randn(2, 4, 20, 20)
    generator = torch.Generator().manual_seed(0)
    roll = regularizers.ROLL(1.0, 0.5, generator=generator)
    assert roll(model, x) != roll(model, x)
    selecting = regularizers.ROLL(1.0, 0.5, 50)
    assert selecting(model, x) == selecting(model, x)


def test_a_memory_limit_changes_no_exact_gradient():
    model, x = nn.Sequential(*piecewise.mlp(40, 60, 60)), torch.randn(8, 40)

    def gradients(memory_limit):
        return gradients_of(regularizers.ROLL(1.0, 0.5, 50, memory_limit=memory_limit)(model, x), model)

    limit = 250_000
    torch.testing.assert_close(gradients(limit), gradients(2**30))
    assert peak_bytes(lambda: gradients(limit)) < limit < peak_bytes(lambda: gradients(2**30))


def test_networks_without_bends_and_infinite_radii_add_nothing():
    x = torch.randn(3, 4)
    assert regularizers.ROLL(1.0, 1.0)(nn.Linear(4, 2), x) == 0
    assert regularizers.MarginLoss(1.0)(nn.Linear(4, 2), x) == 0
    pooled = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.MaxPool2d(2))
    for bent in (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), pooled):
        assert regularizers.ROLL(1.0, 1.0)(bent, x[:0]) == 0


def test_steps_of_a_training_leave_nothing_behind_in_torch():
    model, x = nn.Sequential(*piecewise.mlp(4, 8, 6)), torch.randn(5, 4)
    counts = []
    for _ in range(3):
        regularizers.ROLL(1.0, 0.5)(model, x)
        regularizers.MarginLoss(1.0)(model, x)
        counts.append((len(linecache.cache), len(contextvars.copy_context())))
    assert counts[1] == counts[2]


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_steps_autocast_and_a_scaler_change_no_gradient():
    model, x = nn.Sequential(*piecewise.mlp(4, 8, 6)), torch.randn(5, 4)
    roll = regularizers.ROLL(2.0, 0.5)
    expected = gradients_of(roll(model, x), model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = roll(model, x)
    torch.testing.assert_close(gradients_of(loss, model), expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.testing.assert_close(gradients_of(scaler.scale(roll(model, x)), model), 1024 * expected)

    def step(model):
        (model(x).sum() + roll(model, x)).backward()

    step(model)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(step, backend="eager")(torch.compile(model, backend="eager"))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


BAD = [
    ({"strength": -1.0}, ValueError, "strength: expected a finite number of at least 0"),
    ({"hinge": "1"}, TypeError, "hinge: expected a number, got '1'"),
    ({"top_percent": 0}, ValueError, "top_percent: expected more than 0 and at most 100, or 'max', got 0"),
    ({"top_percent": "most"}, TypeError, "top_percent: expected a number or 'max', got 'most'"),
    ({"probes": 0}, ValueError, "probes: expected at least 1, got 0"),
    ({"probes": "random"}, TypeError, "probes: expected an int, got 'random'"),
    ({"memory_limit": 0}, ValueError, "memory_limit: expected at least 1, got 0"),
    ({"generator": 3}, TypeError, "generator: expected a torch.Generator, got int"),
    ({"probes": 3, "top_percent": 50}, ValueError, "probes: expected 'exact' to select 50 percent"),
]


@pytest.mark.parametrize(("change", "error", "said"), BAD, ids=range(len(BAD)))
def test_bad_arguments_are_named(change, error, said):
    with pytest.raises(error, match=said):
        regularizers.ROLL(**{"strength": 1.0, "hinge": 1.0} | change)


def test_bad_arguments_of_the_margin_loss_and_of_calls_are_named():
    with pytest.raises(ValueError, match="p: expected at least 1, got 0"):
        regularizers.MarginLoss(1.0, 0)
    model, x = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), torch.randn(3, 4)
    for loss in (regularizers.ROLL(1.0, 1.0), regularizers.MarginLoss(1.0)):
        with pytest.raises(regularizers.NotPiecewiseLinearError, match="BatchNorm1d at 1; call eval"):
            loss(model, x)
        with pytest.raises(TypeError, match="x: expected float32 or float64"):
            loss(model, x.long())
