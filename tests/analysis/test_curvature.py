"""The gradient's norm and the Hessian's largest eigenvalue against autograd's full Hessian."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, mse_loss

from loco_ext import analysis, optim, regularizers
from loco_ext import nn as loco_nn

GENERATOR = torch.Generator().manual_seed(0)


class Magnitudes(nn.Module):
    """Model with a complex parameter, whose outputs are squares of magnitudes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

    def forward(self, x):
        products = x.to(self.weight.dtype) @ self.weight
        return products.real.square() + products.imag.square()


def network(kind):
    """Return a small float64 network whose loss has curvature in all parameters, and the shape of its inputs."""
    torch.manual_seed(5)
    if kind == "mlp":
        model, shape = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,)
        model[0].weight.requires_grad_(False)
    elif kind == "complex":
        return Magnitudes(), (3,)
    elif kind == "attention":
        encoder = nn.TransformerEncoderLayer(3, 1, 2, dropout=0, batch_first=True)
        model, shape = nn.Sequential(encoder, nn.Flatten(), nn.Linear(6, 3)), (2, 3)
    else:
        conv, shape = nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 3, 4)
        model = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3))
        model = loco_nn.to_efcn(model, torch.zeros(1, *shape), 1)
    return model.double(), shape


def batches(shape):
    return [
        (
            torch.randn(size, *shape, generator=GENERATOR, dtype=torch.float64),
            torch.randint(3, (size,), generator=GENERATOR),
        )
        for size in (5, 2)
    ]


def flat_loss(model, data):
    """Return the mean loss over all samples as a function of the vector of all parameters, and the current vector."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    real = {name: torch.view_as_real(p) if p.is_complex() else p for name, p in trained.items()}
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))

    def value(vector):
        parts = vector.split([p.numel() for p in real.values()])
        weights = {name: part.view(p.shape) for (name, p), part in zip(real.items(), parts, strict=True)}
        weights |= {name: torch.view_as_complex(weights[name]) for name, p in trained.items() if p.is_complex()}
        return cross_entropy(functional_call(model, weights, (x,)), y)

    return value, torch.cat([p.flatten() for p in real.values()])


@pytest.mark.parametrize("kind", ["mlp", "complex", "attention", "efcn"])
def test_gradient_and_curvature_are_those_of_the_whole_hessian(kind):
    """A weight of the first network is frozen, and takes no part."""
    model, shape = network(kind)
    data = batches(shape)
    value, here = flat_loss(model, data)
    with sdpa_kernel(SDPBackend.MATH):  # torch cannot differentiate the other kinds twice
        eigenvalues = torch.linalg.eigvalsh(hessian(value, here))
    found = analysis.top_hessian_eigenvalue(model, cross_entropy, data, iterations=3000, tolerance=1e-6)
    assert found.residual <= 1e-6
    assert found.value == pytest.approx(eigenvalues[-1].item(), rel=1e-9)
    norm = analysis.gradient_norm(model, cross_entropy, data)
    assert norm == pytest.approx(torch.func.grad(value)(here).norm().item(), rel=1e-9)


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_the_curvature_of_weight_norms_is_that_of_differences_of_gradients(normed):
    """Autograd's own Hessian of them is not symmetric."""
    model, shape = network("mlp")
    model[2] = normed(model[2])
    data = batches(shape)
    value, here = flat_loss(model, data)
    steps = 1e-5 * torch.eye(len(here), dtype=here.dtype)
    gradient = torch.func.grad(value)
    rows = torch.stack([(gradient(here + step) - gradient(here - step)) / 2e-5 for step in steps])
    found = analysis.top_hessian_eigenvalue(model, cross_entropy, data, iterations=3000, tolerance=1e-6)
    assert found.value == pytest.approx(torch.linalg.eigvalsh((rows + rows.mT) / 2)[-1].item(), rel=1e-6)


def test_many_batches_in_half_precision_add_up():
    torch.manual_seed(3)
    model = nn.Linear(4, 3).bfloat16()
    x, y = torch.rand(300, 4).bfloat16(), torch.zeros(300, dtype=torch.int64)
    data = list(zip(x.split(1), y.split(1), strict=True))
    exact, whole = copy.deepcopy(model).double(), [(x.double(), y)]
    expected = analysis.gradient_norm(exact, cross_entropy, whole)
    assert analysis.gradient_norm(model, cross_entropy, data) == pytest.approx(expected, rel=0.01)
    (expected, *_), (found, *_) = (
        analysis.top_hessian_eigenvalue(each, cross_entropy, pairs, iterations=2)
        for each, pairs in ((exact, whole), (model, data))
    )
    assert found == pytest.approx(expected, rel=0.01)


class Quadratic(nn.Module):
    """Model whose output is ``sum of curvature * x**2 / 2`` for any input."""

    def __init__(self, *curvatures):
        super().__init__()
        self.x = nn.Parameter(torch.arange(1.0, len(curvatures) + 1, dtype=torch.float64))
        self.curvatures = torch.tensor(curvatures, dtype=torch.float64)

    def forward(self, inputs):
        return ((self.curvatures * self.x**2).sum() / 2).expand(len(inputs))


def mean(outputs, targets):
    return outputs.mean()


@pytest.mark.parametrize(
    ("curvatures", "largest"),
    [((3.0, 1.0), 3.0), ((-9.0, 2.0, 1.0), 2.0), ((-5.0, -4.0), -4.0), ((0.0, 0.0), 0.0), ((-2.0, 0.0), 0.0)],
)
def test_the_largest_eigenvalue_is_not_that_of_the_largest_magnitude(curvatures, largest):
    data = [(torch.zeros(3), torch.zeros(3))]
    found = analysis.top_hessian_eigenvalue(Quadratic(*curvatures), mean, data, iterations=500, tolerance=1e-6)
    assert found.value == pytest.approx(largest, abs=1e-6)
    slopes = [curvature * place for place, curvature in enumerate(curvatures, 1)]
    assert analysis.gradient_norm(Quadratic(*curvatures), mean, data) == pytest.approx(math.hypot(*slopes))


@pytest.mark.parametrize("curvatures", [(-9.0, 2.0, 1.0), (3.0, 2.0, 1.0)], ids=str)
def test_few_iterations_say_how_far_they_are(curvatures):
    """The reference iterates on plain matrices, once more on what is left above a negative eigenvalue."""
    hessian, data = np.diag(curvatures), [(torch.zeros(3), torch.zeros(3))]
    start = torch.randn(3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()

    def iterate(matrix):
        vector = start / np.linalg.norm(start)
        for _ in range(5):
            value, image, last = vector @ matrix @ vector, matrix @ vector, vector
            vector = image / np.linalg.norm(image)
        return value, last

    value, vector = iterate(hessian)
    if value < 0:
        above, vector = iterate(hessian - value * np.eye(3))
        value += above
    residual = np.linalg.norm(hessian @ vector - value * vector) / abs(value)
    found = analysis.top_hessian_eigenvalue(Quadratic(*curvatures), mean, data, iterations=5, tolerance=0, seed=4)
    assert found == pytest.approx((value, residual, 10 if curvatures[0] < 0 else 5), rel=1e-9)


def test_losses_that_are_linear_in_the_weights_or_not_finite():
    data = [(torch.randn(4, 3), torch.zeros(4))]
    assert analysis.top_hessian_eigenvalue(nn.Linear(3, 1), mean, data) == (0.0, 0.0, 1)
    found = analysis.top_hessian_eigenvalue(Quadratic(math.nan, 1.0), mean, data, iterations=50)
    assert math.isnan(found.value)
    assert found.iterations == 1
    assert math.isnan(analysis.gradient_norm(Quadratic(math.nan, 1.0), mean, data))


def test_layers_that_step_in_backward_are_measured_and_stay_as_they_are():
    model, shape = network("efcn")
    data = batches(shape)

    def measure():
        found = analysis.top_hessian_eigenvalue(model, cross_entropy, data, iterations=3)
        return analysis.gradient_norm(model, cross_entropy, data), *found

    expected, before = measure(), copy.deepcopy(model.state_dict())
    optim.step_in_backward(optim.SGD(model.parameters(), lr=0.1), model)
    assert measure() == expected
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    cross_entropy(model(data[0][0]), data[0][1]).backward()
    assert model[0].weight.grad is None
    assert not torch.equal(model[0].weight, before["0.weight"])


BATCH = (torch.zeros(2, 3), torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model": "linear"}, TypeError, "model: expected a module, got str"),
        ({"model": nn.ReLU()}, ValueError, "model: expected parameters that require gradients"),
        ({"data": iter([BATCH])}, TypeError, "data: expected a sequence of pairs"),
        ({"data": [torch.zeros(3)]}, TypeError, "data: expected a sequence of pairs"),
        ({"data": []}, ValueError, "data: expected at least one sample"),
        ({"iterations": 0}, ValueError, "iterations: expected at least 1, got 0"),
        ({"seed": None}, TypeError, "seed: expected an int, got None"),
        ({"tolerance": -1.0}, ValueError, "tolerance: expected a finite number"),
    ],
    ids=range(8),
)
def test_bad_arguments_are_named(change, error, said):
    arguments = {"model": nn.Linear(3, 1), "loss": mse_loss, "data": [BATCH]} | change
    with pytest.raises(error, match=said):
        analysis.top_hessian_eigenvalue(**arguments)
    if change.keys() <= {"model", "data"}:
        with pytest.raises(error, match=said):
            analysis.gradient_norm(**arguments)


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x: analysis.gradient_norm(model, mse_loss, [(x, torch.ones(2, 9))]),
        lambda model, x: analysis.top_hessian_eigenvalue(model, mse_loss, [(x, torch.ones(2, 9))]),
        lambda model, x: regularizers.PILCRO()(model, x),
    ],
    ids=["gradient_norm", "top_hessian_eigenvalue", "PILCRO"],
)
def test_sharded_parameters_are_refused(measure, mesh):
    """FSDP computes with others, in which the loss has no gradient; those of tensor parallelism have it in parts."""
    model = fully_shard(nn.Sequential(nn.Flatten(), nn.Linear(9, 9)), mesh=mesh)
    with pytest.raises(TypeError, match="model: expected parameters that are whole, got DTensor"):
        measure(model, torch.ones(2, 1, 3, 3))
