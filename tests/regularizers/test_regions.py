"""Radii of linear regions against one backward pass per unit, brute-force searches and random points."""

import copy
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from loco_ext import regularizers
from loco_ext.regularizers.linear_regions import region_patterns
from tests import tolerances
from tests.regularizers import piecewise
from tests.regularizers.memory import peak_bytes

NETWORKS = list(piecewise.networks())
NORMS = [1, 1.01, 2, 3.5, math.inf]


@pytest.mark.parametrize("name", NETWORKS)
def test_radius_and_unit_are_those_of_a_loop_over_units(name):
    model, x = piecewise.network(name, 3, 0)
    references = [piecewise.gradients(model, sample) for sample in x]
    for p in NORMS:
        radii, units = regularizers.region_radius(model, x, p, return_unit=True)
        assert torch.equal(radii, regularizers.region_radius(model, x, p))
        for radius, unit, (names, values, gradients) in zip(radii, units, references, strict=True):
            expected, place = piecewise.smallest_ratio(values, gradients, p)
            torch.testing.assert_close(radius.item(), expected, **tolerances.REGIONS)
            assert unit.module == names[place]


class Viewed(nn.Module):
    """The network "local", by a view of what its locally connected layer returns."""

    def __init__(self, modules):
        super().__init__()
        self.local, self.rest = modules[0], modules[1:]

    def forward(self, x):
        return self.rest(self.local(x).view(x.size(0), -1).view(-1, 3, 5, 4))


@pytest.mark.parametrize(("name", "kind"), [("cnn", piecewise.Functional), ("local", Viewed)])
def test_functions_and_methods_are_understood_like_modules(name, kind):
    model, x = piecewise.network(name, 3, 0)
    twin = kind(model)
    torch.testing.assert_close(twin(x), model(x))
    for measure in (regularizers.region_radius, regularizers.count_regions, regularizers.ROLL(1.0, 0.5)):
        torch.testing.assert_close(measure(twin, x), measure(model, x), **tolerances.REGIONS)
    units, others = (regularizers.region_radius(each, x, return_unit=True)[1] for each in (twin, model))
    assert [unit.index for unit in units] == [unit.index for unit in others]
    assert name == "local" or {unit.module for unit in units} <= {"relu()", "max_pool2d()"}


class Keywords(nn.Module):
    """Four layers whose weights are passed by keyword, with a batch normalisation that synchronises when it trains."""

    def __init__(self, computed):
        super().__init__()
        make = nn.utils.parametrizations.weight_norm if computed else lambda layer: layer
        self.first, self.conv = make(nn.Linear(6, 8)), make(nn.Conv1d(2, 3, 2, padding=1, padding_mode="circular"))
        self.norm, self.last, self.slope = nn.SyncBatchNorm(3), nn.Linear(15, 4), nn.Parameter(torch.tensor([0.3]))

    def forward(self, x):
        x = functional.prelu(functional.linear(x, weight=self.first.weight, bias=self.first.bias), weight=self.slope)
        x = (self.norm(self.conv(x.view(-1, 2, 4))) + torch.ones(3, 1)).relu()
        return torch.matmul(x.flatten(1).unsqueeze(2).flatten(1), other=self.last.weight.t()).relu()


def plain_bends(model, x):
    """Return the bends of Keywords for one sample, by torch alone."""
    first = model.first(x[None])
    hidden = model.conv(torch.where(first > 0, first, model.slope * first).view(1, 2, 4))
    norm = model.norm
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    hidden = ((hidden - norm.running_mean[:, None]) * scale[:, None]) + norm.bias[:, None] + 1
    return torch.cat([first[0], hidden.flatten(), hidden.relu().flatten() @ model.last.weight.t()])


@pytest.mark.parametrize("computed", [False, True])
def test_keywords_computed_weights_and_constants(computed):
    torch.manual_seed(6)
    model, x = Keywords(computed).double().eval(), torch.randn(4, 6, dtype=torch.float64)
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    radius = regularizers.region_radius(model, x)
    for sample, found in zip(x, radius.tolist(), strict=True):
        values = plain_bends(model, sample)
        gradients = torch.autograd.functional.jacobian(lambda s: plain_bends(model, s), sample)
        expected = (values.abs() / gradients.norm(dim=1)).min()
        torch.testing.assert_close(found, expected.item(), **tolerances.REGIONS)
    names = set(vars(model))
    regularizers.ROLL(1.0, 1.0)(model, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter is not model.last.bias)
    assert set(vars(model)) == names  # torch.fx attaches constants to models


def test_the_index_of_the_unit_leads_to_its_value():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.MaxPool2d(2)).double()
    x = torch.randn(20, 1, 4, 6, dtype=torch.float64)
    radii, units = regularizers.region_radius(model, x, return_unit=True)
    assert {unit.module for unit in units} == {"1", "3"}
    for sample, radius, unit in zip(x, radii, units, strict=True):
        sample = sample.clone().requires_grad_()
        z = model[0](sample)
        if unit.module == "1":
            value = z[unit.index]
        else:
            channel, row, column, tap = unit.index
            window = model[2](z.relu())[channel, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
            value = window.max() - window[tap]
        gradient = torch.autograd.grad(value, sample)[0]
        torch.testing.assert_close(value.abs() / gradient.norm(), radius, **tolerances.REGIONS)


def dual_step(gradient, p):
    """Return the step of l_p norm 1 along which a linear function with this gradient changes fastest."""
    if p == 1:
        return torch.zeros_like(gradient).index_fill_(0, gradient.abs().argmax(), 1) * gradient.sign()
    if p == math.inf:
        return gradient.sign()
    step = gradient.sign() * (gradient.abs() / gradient.abs().max()) ** (1 / (p - 1))
    return step / step.norm(p)


@pytest.mark.parametrize(("name", "p"), list(zip(NETWORKS, itertools.cycle([1, 2, math.inf, 3.5]))))
def test_no_point_inside_the_radius_is_in_another_region(name, p):
    """Random points near the boundary are in the same region, and the nearest unit's step leads out of it."""
    model, x = piecewise.network(name, 4, 1)
    graph = regularizers.linear_regions.FrozenNetwork(model, x)
    radii = regularizers.region_radius(model, x, p)
    generator = torch.Generator().manual_seed(1)
    for sample, radius, here in zip(x, radii, region_patterns(graph, x), strict=True):
        assert 0 < radius < math.inf
        steps = torch.randn(200, *sample.shape, generator=generator, dtype=torch.float64)
        corners = steps.flatten(1)[:50]  # points of the ball that are extreme in few or all coordinates
        corners.copy_(
            corners.sign() if p == math.inf else corners * (corners.abs() > corners.abs().amax(1, True) * 0.8)
        )
        steps *= 0.999 * radius / steps.flatten(1).norm(p, dim=1).view(-1, *[1] * sample.dim())
        assert set(region_patterns(graph, sample + steps)) == {here}
        _, values, gradients = piecewise.gradients(model, sample)
        _, place = piecewise.smallest_ratio(values, gradients, p)
        step = -values[place].sign() * dual_step(gradients[place].flatten(), p).view_as(sample)
        outside, inside = ((sample + factor * radius * step).unsqueeze(0) for factor in (1.001, 0.999))
        assert region_patterns(graph, outside) != [here]
        assert region_patterns(graph, inside) == [here]


def test_boundaries_and_units_without_gradient():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()).double()
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
    radius, units = regularizers.region_radius(model, x, return_unit=True)
    assert radius.tolist() == [math.inf, math.inf]
    assert units == [None, None]
    model[0].weight.data[1, 0] = 2.0  # z = 2 * x0, whose boundary is at distance x0
    radius, units = regularizers.region_radius(model, x, return_unit=True)
    assert radius.tolist() == [1.0, 0.0]
    assert units == [regularizers.Unit("1", 0, (1,))] * 2
    assert regularizers.region_radius(nn.Linear(2, 2).double(), x).tolist() == [math.inf, math.inf]
    assert regularizers.region_radius(model, x[:0]).shape == (0,)
    assert regularizers.region_radius(nn.Sequential(nn.MaxPool1d(1)), x.float()[None]).tolist() == [math.inf]
    x[0, 0] = math.nan
    assert regularizers.region_radius(model, x).isnan().tolist() == [True, False]


def test_ties_of_pooling_windows():
    """One colour is on the boundary of all windows; dead units that tie do not depend on the input at all."""
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    pool = nn.MaxPool2d(2)
    assert regularizers.region_radius(pool, x).item() == 0
    dead = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), pool).double()
    nn.init.constant_(dead[0].weight, 1.0)
    nn.init.constant_(dead[0].bias, -3.0)
    assert regularizers.region_radius(dead, x).item() == pytest.approx(2.0)


def test_small_gradients_and_large_exponents_do_not_underflow():
    model = nn.Sequential(nn.Linear(3, 1), nn.ReLU())
    nn.init.constant_(model[0].weight, 1e-30)
    nn.init.constant_(model[0].bias, 1e-30)
    for p, norm in ((1.001, 3 ** (1 / 1001)), (2, math.sqrt(3)), (1e9, 3.0)):
        radius = regularizers.region_radius(model, torch.zeros(1, 3), p)
        torch.testing.assert_close(radius.item(), 1 / norm, rtol=tolerances.SMALL_GRADIENTS, atol=0)


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_a_memory_limit_changes_nothing_but_the_chunks(name):
    model, x = piecewise.network(name, 5, 0)
    expected = regularizers.region_radius(model, x)
    torch.testing.assert_close(
        regularizers.region_radius(model, x, memory_limit=30_000), expected, **tolerances.REGIONS
    )
    with pytest.raises(ValueError, match="memory_limit: expected at least"):
        regularizers.region_radius(model, x, memory_limit=100)


@pytest.mark.parametrize("middle", [nn.ReLU(), nn.MaxPool2d(3, 2, 1)], ids=["relu", "pooling"])
def test_no_more_memory_is_taken_than_the_limit(middle):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), middle, nn.Conv2d(8, 8, 3), nn.LeakyReLU())
    x, limit = torch.randn(4, 1, 16, 16), 2**19
    taken, plenty = (
        peak_bytes(lambda most=most: regularizers.region_radius(model, x, 3, memory_limit=most))
        for most in (limit, 2**30)
    )
    assert taken < limit < plenty


def test_regions_are_counted():
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    model[0].weight.data.fill_(1.0)
    model[0].bias.data.copy_(torch.tensor([1.0, 0.0, -1.0]))
    x = torch.linspace(-2, 2, 101, dtype=torch.float64).unsqueeze(1)
    assert regularizers.count_regions(model, x) == 4
    assert regularizers.count_regions(model, x, batch_size=7) == 4
    assert regularizers.count_regions(model, x[:1]) == 1
    assert regularizers.count_regions(model, x[:0]) == 0
    assert regularizers.count_regions(nn.Hardtanh(), x) == 3
    assert regularizers.count_regions(nn.Linear(1, 1).double(), x) == 1


def test_precision_and_model_are_as_before():
    """Autocast is off inside; settings, modes, statistics, gradients and random numbers stay."""
    model, x = piecewise.network("residual", 3, 0)
    model.float()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    precision = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with torch.autocast("cpu", torch.bfloat16):
            rounded = regularizers.region_radius(model, x.float())
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision
    assert rounded.dtype == torch.float32
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    exact = regularizers.region_radius(model.double(), x.float().double())
    torch.testing.assert_close(rounded.double(), exact, rtol=tolerances.FLOAT32_RADIUS, atol=0)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


class Mixing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.relu = function, nn.ReLU()

    def forward(self, x):
        return self.relu(self.function(x))


class Two(nn.Module):
    def forward(self, x, y):
        return x + y


class Replaced(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU())
        self[1].forward = torch.tanh


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def hooked(model, module):
    module.register_forward_hook(lambda module, args, result: 2 * result)
    return model


LAYERS = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
REFUSED = {
    "hooks": (hooked(LAYERS[0], LAYERS[0][0]), "got some at 0"),
    "hooks of the model": (hooked(LAYERS[1], LAYERS[1]), "got some at the model itself"),
    "inner sigmoid": (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), nn.ReLU()), "got Sigmoid at 0.1"),
    "function": (Mixing(torch.tanh), r"got tanh\(\) in the model"),
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), "BatchNorm1d at 1; call eval"),
    "spectral norm": (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
        "_SpectralNorm at 0.parametrizations.weight.0; call eval",
    ),
    "replaced": (Replaced(), "got ReLU at 1 whose forward is replaced"),
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()), "Dropout at 1 that is active; call eval"),
    "batch norm by a function": (Mixing(lambda x: functional.batch_norm(x, None, None, None, None, True)), "call eval"),
    "asks for tensors": (
        Mixing(lambda x: x + 1 if isinstance(x, torch.Tensor) else x),
        "whose graph returns other numbers",
    ),
    "batch norm whose arguments have another order": (
        Mixing(lambda x: torch.batch_norm(x, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False)),
        "got batch_norm",
    ),
    "without statistics": (
        nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        "normalises by the batch",
    ),
    "product": (Mixing(lambda x: x * x), r"got mul\(\)"),
    "batch mean": (Mixing(lambda x: x - x.mean(0, keepdim=True)), "axis of samples"),
    "whole mean": (Mixing(lambda x: x - x.mean()), "axis of samples"),
    "transposed": (Mixing(lambda x: x.transpose(0, 1)), "axis of samples"),
    "merged": (Mixing(lambda x: x.view(-1, 2)), "axis of samples"),
    "first": (Mixing(lambda x: x[0]), "axis of samples"),
    "first behind an ellipsis": (Mixing(lambda x: x[..., 0, :]), "axis of samples"),
    "constants by sample": (Mixing(lambda x: x + torch.arange(4.0).view(4, 1)), "a constant for each sample"),
    "weight of the input": (Mixing(lambda x: functional.linear(x, x)), r"depends on the input: linear\(\)"),
    "by keyword": (Mixing(lambda x: torch.cat(tensors=[x, x], dim=1)), r"by keyword: cat\(\)"),
    "a new axis of samples": (Mixing(lambda x: x.unsqueeze(-3)), "axis of samples"),
    "two inputs": (Two(), "got one that needs y"),
    "branches": (Branching(), "torch.fx can trace"),
}


@pytest.mark.parametrize(
    "function",
    [lambda x: x[()], lambda x: x[..., :, 1:], lambda x: x.view(-1, 2, 2)[..., :, :, 0], lambda x: x[..., None, 1]],
    ids=["no index", "every sample", "every sample and channel", "a new axis"],
)
def test_indices_behind_an_ellipsis_may_name_all_axes(function):
    features = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(3, 4)
    expected = function(features).flatten(1).amin(1)
    assert torch.equal(regularizers.region_radius(Mixing(function), features, 2), expected)


@dataclass
class Output(dict):
    """A result as transformers has them."""

    logits: torch.Tensor

    def __post_init__(self):
        self["logits"] = self.logits


class Wrapping(nn.Module):
    def forward(self, x):
        return Output(x.relu())


def test_a_result_may_be_a_dataclass():
    x = torch.randn(3, 4)
    assert torch.equal(regularizers.region_radius(Wrapping(), x, 2), x.abs().amin(1))


def test_layers_in_place_leave_the_samples_alone():
    x = torch.randn(3, 4)
    before = x.clone()
    assert torch.equal(regularizers.region_radius(nn.Sequential(nn.ReLU(inplace=True)), x, 2), before.abs().amin(1))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_be_piecewise_linear_is_refused(name):
    model, said = REFUSED[name]
    before = copy.deepcopy(model.state_dict())
    for measure in (regularizers.region_radius, regularizers.count_regions):
        with pytest.raises(regularizers.NotPiecewiseLinearError, match=said):
            measure(model, torch.randn(4, 4))  # as many samples as numbers, so that shapes do not tell them apart
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


BAD = [
    ({"model": "relu"}, TypeError, "model: expected a module, got str"),
    ({"x": [[1.0]]}, TypeError, "x: expected a tensor, got list"),
    ({"x": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "x: expected float32 or float64, got torch.int64"),
    ({"x": torch.ones(3, 4).double()}, TypeError, "x: expected torch.float32, as weight of the model has it"),
    ({"x": torch.ones(4)}, ValueError, "x: expected an axis of samples"),
    ({"x": torch.ones(3, 0)}, ValueError, r"x: expected an axis of samples and numbers in each, got shape \(3, 0\)"),
    ({"p": 0.9}, ValueError, "p: expected at least 1, got 0.9"),
    ({"p": math.nan}, ValueError, "p: expected at least 1, got nan"),
    ({"p": "2"}, TypeError, "p: expected a number, got '2'"),
    ({"memory_limit": 0}, ValueError, "memory_limit: expected at least 1"),
]


@pytest.mark.parametrize(("change", "error", "said"), BAD, ids=range(len(BAD)))
def test_bad_arguments_are_named(change, error, said):
    arguments = {"model": nn.Linear(4, 2), "x": torch.ones(3, 4)} | change
    with pytest.raises(error, match=said):
        regularizers.region_radius(**arguments)
    if change.keys() <= {"model", "x"}:
        with pytest.raises(error, match=said):
            regularizers.count_regions(**arguments)
