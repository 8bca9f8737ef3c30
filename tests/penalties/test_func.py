"""Tests of penalty values under torch.func, compared with autograd in float64."""

from functools import reduce

import pytest
import torch
from torch import func, nn
from torch.testing import assert_close

from loco_ext.nn import LocallyConnected2d
from loco_ext.sparsity import FoldedPenalty, KernelPenalty, RingPenalty, complexity_penalties

pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.parametrize("backend", ["cpu", "reference"], indirect=True),
]
IMAGES = torch.linspace(-1, 1, 100).view(2, 2, 5, 5).double()


def make_model():
    """Return a model with a ring and a kernel of zeros, which have no norm to divide by."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), LocallyConnected2d(4, 2, 3, padding=1, input_size=3))
    with torch.no_grad():
        model[0].weight[0] = model[0].weight[1, :, 0] = model[0].weight[1, :, :, 0] = 0
        model[2].grow(1)
    return model.double()


PENALTIES = {
    "rings": lambda model: (RingPenalty(0.3), "0.weight"),
    "rings, linf": lambda model: (RingPenalty(0.3, norm="linf"), "0.weight"),
    "kernels, squared": lambda model: (KernelPenalty(0.3, power=2), "0.weight"),
    "folded": lambda model: (FoldedPenalty(RingPenalty(0.3), model[1]), "0.weight"),
    "complexity": lambda model: (complexity_penalties(model[:1], (IMAGES,), 0.3)["0"], "0.weight"),
    "blocks": lambda model: (RingPenalty(0.3), "2.weight"),
}


def gradient_of(value, weight):
    weight = weight.detach().clone().requires_grad_()
    return torch.autograd.grad(value(weight), weight)[0]


@pytest.mark.parametrize("name", PENALTIES)
def test_derivatives_are_autograds(name):
    model = make_model()
    penalty, path = PENALTIES[name](model)
    weight = model.get_parameter(path)
    (expected,) = torch.autograd.grad(penalty.value(weight), weight, create_graph=True)
    assert_close(func.grad(penalty.value)(weight), expected)
    tangent = torch.randn_like(weight)
    value, change = func.jvp(penalty.value, (weight,), (tangent,))
    assert_close(value, penalty.value(weight))
    assert_close(change, (expected * tangent).sum())
    second = torch.autograd.grad((expected * tangent).sum(), weight, allow_unused=True)[0]
    _, twice = func.jvp(func.grad(penalty.value), (weight,), (tangent,))
    assert_close(twice, torch.zeros_like(weight) if second is None else second)


@pytest.mark.parametrize("name", [name for name in PENALTIES if name != "blocks"])
def test_vmap_goes_over_weights(name):
    penalty, path = PENALTIES[name](model := make_model())
    weights = torch.stack([model.get_parameter(path).detach() * factor for factor in (1.0, -2.0, 0.0)], 1)
    assert_close(func.vmap(penalty.value, 1)(weights), torch.stack([penalty.value(w) for w in weights.unbind(1)]))
    gradients = [gradient_of(penalty.value, w) for w in weights.unbind(1)]
    assert_close(func.vmap(func.grad(penalty.value), 1)(weights), torch.stack(gradients))


@pytest.mark.parametrize("name", ["folded", "complexity", "blocks"])
def test_a_loss_with_a_penalty_through_functional_call(name):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model().eval()
            self.penalty, self.path = PENALTIES[name](self.model)

        def forward(self, x):
            return self.model(x).square().sum() + self.penalty.value(reduce(getattr, self.path.split("."), self.model))

    loss = Penalised()
    parameters = dict(loss.named_parameters())
    expected = torch.autograd.grad(loss(IMAGES), list(parameters.values()))
    found = func.grad(lambda given: func.functional_call(loss, given, (IMAGES,)))(parameters)
    assert_close(list(found.values()), list(expected))
