"""Penalties in proportion to what layers cost: eq. 34 written out, block by block."""

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from loco_ext import optim, sparsity


def relaxed_width(*weights):
    """Eq. 12, of the kernels that make the same channels."""
    return torch.cat([w.detach().double().flatten(1) for w in weights], 1).norm(dim=1).sum().item()


def test_the_sum_over_a_plain_network_is_eq_34():
    """Its derivative by one layer's weight, all others held fixed, is that of the layer's penalty."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.Tanh(), nn.Conv2d(4, 2, 1)),
    ).double()
    penalties = sparsity.complexity_penalties(model, (torch.zeros(3, 3, 31, 23).double(),), 0.25, kind="full")
    assert list(penalties) == ["0", "4", "6"]
    pixels = {"0": 14 * 10, "4": 7 * 5, "6": 7 * 5}
    plain = sparsity.RingPenalty(1.0, "full", power=2)
    sizes = {name: plain.value(model.get_submodule(name).weight) for name in penalties}  # sum over j of s'_ij^2
    width = {"0": 3.0, "4": relaxed_width(model[0].weight), "6": relaxed_width(model[4].weight)}
    for name, penalty in penalties.items():
        weight = model.get_submodule(name).weight
        expected = 0.25 * pixels[name] * width[name] * sizes[name]
        torch.testing.assert_close(penalty.value(weight), expected)
        (ours,) = torch.autograd.grad(penalty.value(weight), weight)
        (theirs,) = torch.autograd.grad(expected, weight)
        torch.testing.assert_close(ours, theirs)


class Branches(nn.Module):
    """A residual connection, a concatenation, groups, a layer that runs twice, and channels no convolution makes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 3, padding=1)
        self.inner = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.twice = nn.Conv1d(4, 4, 1)
        self.wide = nn.Conv1d(10, 6, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(6, 5, 2)
        self.after = nn.Conv1d(5, 3, 3)

    def forward(self, x):
        a = self.stem(x)
        b = relu(self.inner(a)) + a
        c = self.twice(self.twice(b))
        d = self.wide(torch.cat([c, b, x], dim=1))
        return self.after(self.up(d))


def test_widths_follow_residual_connections_and_concatenations():
    model = Branches()
    penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 2, 16),), 1.0)
    residual = relaxed_width(model.inner.weight, model.stem.weight)
    twice = relaxed_width(model.twice.weight)
    expected = {
        "stem": 16 * 2.0,
        "inner": 16 * relaxed_width(model.stem.weight) / 2,
        "twice": 16 * (residual + twice),
        "wide": 16 * (twice + residual + 2.0) / 2,
        "after": 15 * 5.0,
    }
    assert {name: penalty.strength for name, penalty in penalties.items()} == pytest.approx(expected)
    assert {penalty.power for penalty in penalties.values()} == {2}


def test_dead_channels_cost_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model[0].weight.data[1:] = 0
    penalty = sparsity.complexity_penalties(model, (torch.zeros(1, 3, 9, 9),), 1.0)["2"]
    assert penalty.strength == pytest.approx(25 * model[0].weight[0].detach().norm().item())


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Conv2d(2, 2, 3))
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sparsity.complexity_penalties(model, (torch.randn(2, 1, 9, 9),), 1.0)
    assert [module.training for module in model] == [True, False, True, True]
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_optimizers_take_them_and_take_them_anew():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.ConvTranspose2d(2, 1, 3))
    images = torch.randn(2, 1, 9, 9)

    def groups():
        penalties = sparsity.complexity_penalties(model, (images,), 1e-3)
        return optim.parameter_groups(model, 0.0, penalty=penalties)

    optimizer = optim.Adam(groups(), lr=1e-2)
    before = optimizer.param_groups[0]["penalty"]
    for _ in range(2):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["penalty"] = groups()[0]["penalty"]
    after = optimizer.param_groups[0]["penalty"]
    assert before[0] == after[0]
    assert before[1].strength > after[1].strength > 0
    assert after[2] is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strength": -1.0}, ValueError, "strength: expected a finite number of at least 0"),
        ({"strength": "1"}, TypeError, "strength: expected a number"),
        ({"strength": 1.0, "kind": "third"}, ValueError, "kind: expected 'half' or 'full'"),
        ({"strength": 1.0, "power": 1}, TypeError, "power"),
    ],
)
def test_a_bad_argument_is_a_typed_error(arguments, error, message):
    model = nn.Conv2d(1, 2, 3)
    with pytest.raises(error, match=message):
        sparsity.complexity_penalties(model, (torch.zeros(1, 1, 5, 5),), **arguments)


def test_a_model_that_cannot_be_traced_is_an_error_and_keeps_its_modes():
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = Decides()
    with pytest.raises(ValueError, match=r"model: expected one that torch\.fx can trace"):
        sparsity.complexity_penalties(model, (torch.zeros(1),), 1.0)
    assert model.training
