"""Decay factors against plain Python, planted profiles, and weights of any magnitude."""

import itertools
import math
import sys
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from loco_ext import optim
from loco_ext.analysis import estimate_locality
from loco_ext.geometry import distance_classes
from tests.analysis.distances import class_means
from tests.covering import covering

RULES = ["local", "paper"]
STATS = ["signed", "abs", "rms"]


def are_sure(means):
    """Return whether means over the matrices have one sign and exceed 3 standard errors in every class."""
    if len(means) == 1:
        return False
    mean, error = means.mean(0), scipy.stats.sem(means)
    return bool((abs(mean) > 3 * error).all() and abs(np.sign(mean).sum()) == means.shape[1])


def expected_factors(weights, c, eta_rule, stat):
    """Return one factor per class for a layer, from its weights in all models."""
    models = [class_means(weight, stat) for weight in weights]
    pooled = np.concatenate(models)
    if not are_sure(pooled):
        return [1.0] * pooled.shape[1]
    sums = [means.sum(0) for means in (models if all(map(are_sure, models)) else [pooled])]

    def a(i, j):
        r = sum(s[i] / s[j] for s in sums) / len(sums)
        return min(max(1 + c * (r - 1), 1 / 4), 4)

    factors = [a(1, 0), 1.0]
    for d in range(1, len(sums[0]) - 1):
        factors.append(factors[-1] / (a(d + 1, d) if eta_rule == "local" else a(d, d + 1)))
    return factors


def local_weight(*shape, profile=None, deviation=0.2):
    """Return random float64 weights around a mean that falls with distance, or around the means in ``profile``."""
    index, distances = distance_classes(shape[2:])
    means = profile or [0.5 / (1 + distance / 3) for distance in distances]
    return torch.tensor(means, dtype=torch.float64)[index] + deviation * torch.randn(shape, dtype=torch.float64)


SHAPES = {
    "3x3": (16, 8, 3, 3),
    "depthwise": (64, 1, 3, 3),
    "1-d": (32, 8, 3),
    "1x7": (16, 16, 1, 7),
    "5x5": (16, 16, 5, 5),
    "3x3x3": (16, 16, 3, 3, 3),
    "1x3x1": (16, 16, 1, 3, 1),
}


def as_locality(factors):
    return factors if len(factors) > 3 else [factors[0], factors[2] if len(factors) == 3 else 1.0]


@pytest.mark.parametrize(("name", "eta_rule", "stat"), covering(SHAPES, RULES, STATS))
def test_factors_against_loops(name, eta_rule, stat):
    shape = SHAPES[name]
    models = [{"conv.weight": local_weight(*shape)} for _ in range(3)]
    weights = [model["conv.weight"] for model in models]
    for c in (0.0, 0.5, 1.5):
        for count in (1, 3):
            expected = expected_factors(weights[:count], c, eta_rule, stat)
            result = estimate_locality(models[:count], c=c, eta_rule=eta_rule, stat=stat)
            assert list(result) == ["conv"]
            assert result["conv"] == pytest.approx(as_locality(expected), rel=1e-10)
            assert all(type(factor) is float for factor in result["conv"])


NOISY_SHAPES = [(6, 1, 3, 3), (1, 1, 3, 3), (3, 2, 3), (4, 3, 1, 5), (2, 2, 3, 3, 3)]


@pytest.mark.filterwarnings("ignore:estimate_locality leaves")
@pytest.mark.parametrize("stat", STATS)
def test_the_guard_against_loops(stat):
    """Matrices are so few and noisy that some layers pass in each model, some only pooled, and some not at all."""
    seen = set()
    for deviation in (0.1, 0.4, 2.0):
        for shape in NOISY_SHAPES:
            models = [{"weight": local_weight(*shape, deviation=deviation)} for _ in range(4)]
            for count in (1, 2, 4):
                weights = [model["weight"] for model in models[:count]]
                result = estimate_locality(models[:count], stat=stat)[""]
                assert result == pytest.approx(as_locality(expected_factors(weights, 1.5, "local", stat)), rel=1e-9)
                alone = all(are_sure(class_means(weight, stat)) for weight in weights)
                seen.add("uniform" if len(set(result)) == 1 else "each model" if alone else "only pooled")
    assert seen == {"uniform", "each model", "only pooled"}


def test_profiles_without_noise_are_recovered_exactly():
    """``a`` is clamped to [1/4, 4]: it is 0 at a ratio of 1/3, and grows without bound."""
    for shape, c, profile, expected in (
        ((3, 3), 1.5, (3.0, 1.0, 1 / 3), (0.25, 4.0)),
        ((3, 3), 1.5, (1.0, 100.0, 10000.0), (4.0, 0.25)),
        ((3, 3), 1.5, (100.0, 1.0, 1e-4), (0.25, 4.0)),
        ((3, 3), 1.5, (1.0, 2.9, 1.5), (3.85, 1 / (1 + 1.5 * (1.5 / 2.9 - 1)))),
        ((3, 3), 1.5, (1e-310, 1.0, 1.0), (4.0, 1.0)),  # whose ratio is infinite, and NaN times 0
        ((3, 3), 0.0, (1e-310, 1.0, 1.0), (1.0, 1.0)),
        ((3, 3), sys.float_info.max, (1.0, 0.9, 0.95), (0.25, 0.25)),
        ((5, 5), 1.5, (2.0, 1.0, 0.75, 0.5, 0.5, 0.25), (0.25, 1.0, 1.6, 3.2, 3.2, 12.8)),
    ):
        weight = local_weight(4, 4, *shape, profile=profile, deviation=0.0)
        for models in ({"weight": weight}, [{"weight": weight}] * 3):
            assert estimate_locality(models, c=c)[""] == pytest.approx(expected, rel=1e-12)


def test_modules_and_mappings_mix_and_the_optimizer_takes_the_result():
    model = nn.Sequential(*(nn.Conv2d(4, 4, size) for size in (3, 5, 1, (1, 3), 2)), nn.ConvTranspose2d(4, 4, 3))
    with torch.no_grad():
        for layer in model:
            layer.weight += 1
    factors, mixed = estimate_locality(model), estimate_locality((model, model.state_dict()))
    assert {name: len(entry) for name, entry in factors.items()} == {"0": 2, "1": 6, "3": 2, "5": 2}
    assert list(mixed) == list(factors)
    for name, entry in factors.items():
        alone = estimate_locality({"weight": model[int(name)].weight.detach()})[""]
        assert entry == alone == pytest.approx(mixed[name])
    groups = optim.parameter_groups(model, 1e-3, per_layer=factors)
    assert groups[0]["locality"] == [factors.get(str(i)) for i in range(6)]
    optim.SGD(groups, lr=0.1)


FAR = (1.0, 0.9, 0.8)
UNSURE = {
    "signs differ": (1.0, -1.0, 1.0),
    "centre near 0": (0.001, 0.9, 0.8),
    "neighbours near 0": (1.0, 0.0, 0.8),
    "corners near 0": (1.0, 0.9, -0.001),
}


@pytest.mark.parametrize("profile", UNSURE.values(), ids=UNSURE.keys())
def test_unsure_means_leave_a_layer_uniform(profile):
    """Other layers keep their factors, and one warning lists all uniform layers."""
    good = [{f"{i}.weight": local_weight(16, 16, 3, 3, profile=FAR) for i in range(3)} for _ in range(2)]
    bad = [model | {"1.weight": local_weight(16, 16, 3, 3, profile=profile)} for model in good]
    with pytest.warns(UserWarning, match=r"^estimate_locality leaves '1' uniform") as record:
        result = estimate_locality(bad)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert result["1"] == (1.0, 1.0)
    for name in ("0", "2"):
        assert result[name] == pytest.approx(estimate_locality(good)[name])
        assert result[name] != (1.0, 1.0)


@pytest.mark.filterwarnings("ignore:estimate_locality leaves")
@pytest.mark.parametrize("stat", STATS)
def test_a_class_of_tiny_weights_beside_large_ones(stat):
    """Centres have mean 0.1 and deviation 0.02 or 2, times 1e-200: their squares underflow, their errors do not."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8).view(4, 4)
    for deviation, count in itertools.product((0.02, 2.0), (1, 2)):
        weight = torch.ones(4, 4, 3, 3, dtype=torch.float64)
        weight[..., 1, 1] = 1e-200 * (0.1 + deviation * signs)
        uniform = stat == "signed" and deviation == 2.0
        assert estimate_locality([{"weight": weight}] * count, stat=stat)[""] == ((1.0, 1.0) if uniform else (4.0, 1.0))


@pytest.mark.parametrize("shape", [(8, 16, 3, 3), (8, 16, 5, 5)], ids=str)
def test_nothing_to_estimate_from(shape):
    for weight, stat in itertools.product((torch.zeros(shape), torch.rand(1, 1, *shape[2:]) + 1), STATS):
        with pytest.warns(UserWarning, match=r"leaves 'a', 'b\.c' uniform") as record:
            result = estimate_locality({"a.weight": weight, "b.c.weight": weight}, stat=stat)
        assert len(record) == 1
        assert result == dict.fromkeys(["a", "b.c"], (1.0,) * (6 if shape[2] == 5 else 2))


@pytest.mark.parametrize("matrices", [2, 10])
def test_three_standard_errors(matrices):
    """The corners' means over matrices have mean 1, and a standard error just above or just below 1/3."""
    values = torch.linspace(-1, 1, matrices, dtype=torch.float64)
    values *= math.sqrt(matrices) / 3 / values.std()
    for factor, sure in ((0.999, True), (1.001, False)):
        weight = torch.ones(matrices, 1, 3, 3, dtype=torch.float64) * 2
        weight[..., 1, 1] = 4
        weight[..., ::2, ::2] = 1 + factor * values.view(-1, 1, 1, 1)
        for signed in (weight, -weight):
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                result = estimate_locality({"weight": signed}, c=0.5)[""]
            assert len(record) == (not sure)
            assert result == (pytest.approx((0.75, 4 / 3)) if sure else (1.0, 1.0))


@pytest.mark.parametrize(
    ("stat", "dtype"),
    [("signed", torch.float16), ("abs", torch.bfloat16), ("rms", torch.float32), ("rms", torch.float64)],
)
def test_scale_and_precision_change_nothing(stat, dtype):
    """Weights are integers times a power of two, down to denormal numbers and up to the dtype's largest."""
    integers = (local_weight(16, 16, 5, 5) * 32).round()
    expected = estimate_locality({"weight": integers}, stat=stat)[""]
    largest = integers.abs().max()
    limits = torch.finfo(dtype)
    for scale in (1.0, limits.smallest_normal * limits.eps, 2.0 ** math.floor(math.log2(limits.max / largest))):
        weight = integers.mul(scale).to(dtype)
        assert torch.equal(weight.double() / scale, integers)
        assert estimate_locality({"weight": weight}, stat=stat)[""] == pytest.approx(expected, rel=1e-10)


def test_other_layers():
    model = {"a.weight": local_weight(4, 4, 3, 3), "b.weight": local_weight(4, 4, 3, 3)}
    others = {
        r"'b' of shape \(4, 4, 3, 3\) in models\[0\] and None in models\[2\]": {"a.weight": model["a.weight"]},
        r"'c' of shape None in models\[0\] and \(4, 4, 3\) in models\[2\]": model | {"c.weight": torch.ones(4, 4, 3)},
        r"'a' of .* and \(4, 4, 5, 5\) in models\[2\]": model | {"a.weight": torch.ones(4, 4, 5, 5)},
        r"'b' of .* and \(8, 4, 3, 3\) in models\[2\]": model | {"b.weight": torch.ones(8, 4, 3, 3)},
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=f"models: expected the same layers in all, got layer {message}"):
            estimate_locality([model, model, other])
    expected, reordered = estimate_locality(model), estimate_locality([model, dict(reversed(model.items()))])
    assert list(reordered) == ["a", "b"]
    assert all(reordered[name] == pytest.approx(expected[name]) for name in reordered)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": torch.ones(4, 4, 3, 3)}, TypeError, "models: expected a model or a sequence of models, got Tensor"),
        ({"models": iter(())}, TypeError, "models: expected .* got tuple_iterator"),
        ({"models": []}, ValueError, r"models: expected at least one, got \[\]"),
        ({"models": [None]}, TypeError, "model: expected a module or a mapping of names to tensors, got NoneType"),
        ({"c": -0.5}, ValueError, "c: expected a finite number of at least 0, got -0.5"),
        ({"c": "1"}, TypeError, "c: expected a number, got '1'"),
        ({"eta_rule": "printed"}, ValueError, "eta_rule: expected one of 'local', 'paper', got 'printed'"),
        ({"stat": "mean"}, ValueError, "stat: expected one of 'signed', 'abs', 'rms', got 'mean'"),
    ],
    ids=range(8),
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        estimate_locality(**{"models": {"weight": local_weight(4, 4, 3, 3)}, **arguments})
