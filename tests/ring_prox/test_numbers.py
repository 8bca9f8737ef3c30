"""Tests of the prox, norms and values derived from them on extreme numbers: zeros, infinities, NaN, and any size."""

import itertools
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import ops, optim, sparsity
from tests.covering import covering, label
from tests.ring_prox.cases import BACKENDS, FLOATS, MODES, Rings, covered_modes, make_case
from tests.tolerances import (
    BY_INTERIOR_POINTS,
    BY_PROXIMAL_GRADIENT,
    BY_SPAMS,
    RESIDUAL,
    ULPS_OF_ROOTS,
    assert_near_by_kernel,
    largest_of_kernels,
    same_bits,
)

RINGS = Rings((3, 3), "half", "auto")


ALL_MODES = pytest.mark.parametrize(
    ("mode", "dtype", "backend"), covered_modes(FLOATS, BACKENDS), ids=label, indirect=["backend"]
)


def case_of(mode, dtype=torch.float64):
    return make_case(RINGS, 6, 4, **mode).to(dtype)


@ALL_MODES
def test_zeros_stay_zeros_and_huge_thresholds_leave_nothing_or_with_squares_almost_nothing(mode, dtype, backend):
    case = case_of(mode, dtype)
    many = replace(case, thresholds=case.thresholds + 1e300).prox(backend)
    assert torch.count_nonzero(many) == 0
    if mode["power"] == "squared":
        squared = replace(case, squared=torch.full_like(case.squared, 1e8)).prox(backend)
        assert squared.isfinite().all()
        assert (squared.double().abs() <= 1e-8 * case.weight.double().abs().amax() * 10).all()
    case.weight[1] = 0
    case.weight[2, :, 0] = 0  # most of the outermost ring
    case.weight[3, :, 1:, 1:] = 0  # all but the outermost ring
    case.weight[4] = -0.0
    result = case.prox(backend)
    assert result.isfinite().all()
    assert (result[case.weight == 0] == 0).all()


@ALL_MODES
def test_without_thresholds_nothing_changes(mode, dtype, backend):
    case = case_of(mode, dtype)
    case.weight[1] = 0
    case.weight[2, 1, 1, 1] = torch.inf
    case.weight[3, 1, 1, 1] = torch.nan
    case.weight[4, 0] = torch.finfo(dtype).smallest_normal / 4
    squared = None if case.squared is None else torch.zeros_like(case.squared)
    none = replace(case, thresholds=torch.zeros_like(case.thresholds), squared=squared)
    assert same_bits(none.prox(backend), case.weight)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_squares_of_any_strength_are_balanced(norm, backend):
    """The root may be anywhere in the search interval.

    Where squares are strong, x is about 1/q^2 of the weights, so the weights' rounding error moves the penalty, which
    depends only on x, by q^2 times as much.
    """
    plain = case_of({"norm": norm, "power": "squared"})
    for strength in (1e-12, 1e-6, 1e3, 1e6):
        case = replace(plain, squared=plain.squared * strength)
        q = case.squared.max().item()
        result = case.prox(backend)
        assert case.residual(result).max() <= RESIDUAL[torch.float64] * max(1.0, 1e3 * q * q)
        strong = case.squared.amin(1) > 1e3
        of_weights = result.abs().amax((1, 2, 3)) / case.weight.abs().amax((1, 2, 3))
        assert (of_weights[strong] <= 1e-6).all()


@ALL_MODES
def test_infinite_weights_and_nan_stay_and_change_no_other_kernel(mode, dtype, backend):
    case = make_case(RINGS, 8, 4, **mode).to(dtype)
    clean, values = case.prox(backend), torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    case.weight[1:7] = 1.0
    case.weight[1:4, 1, 0, 0] = case.weight[4:7, 1, 1, 1] = values
    result = case.prox(backend)
    for at_place in (result[1:4, 1, 0, 0], result[4:7, 1, 1, 1]):
        assert torch.equal(at_place[:2], values[:2])
        assert at_place[2].isnan()
    assert not result[[1, 2, 4, 5]].isnan().any()
    assert same_bits(result[[0, 7]], clean[[0, 7]])
    huge = replace(case, thresholds=case.thresholds + 1e300).prox(backend)
    assert huge[3, 1, 0, 0].isnan()
    assert huge[6, 1, 1, 1].isnan()


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_a_metric_an_infinite_weight_takes_the_whole_pull_of_its_groups(dtype, backend):
    weight = torch.tensor([[[torch.inf, 1.0, 2.0, 3.0]]], dtype=dtype)
    rings, t = [1, 3, 2, 0], torch.full((4,), 0.25, dtype=torch.float64)
    result = ops.ring_prox(weight, rings, t, None, torch.full_like(weight, 2.0))
    assert result.tolist() == [[[torch.inf, 1.0, 2.0, 2.875]]]


# Factors that turn normal random weights into subnormal, tiny and huge numbers.
SCALES = [
    (torch.float32, 1e-42),
    (torch.float32, 1e-30),
    (torch.float32, 1e30),
    (torch.float64, 5e-324),
    (torch.float64, 1e-320),
    (torch.float64, 1e-160),
    (torch.float64, 1e300),
    (torch.bfloat16, 1e-39),
    (torch.bfloat16, 1e30),
    (torch.float16, 1e-7),
]


@pytest.mark.parametrize(
    ("mode", "magnitude", "backend"),
    [
        each
        for each in covering([mode for mode in MODES if mode["power"] != "squared"], SCALES, BACKENDS)
        # Squares do not scale with the rest.
        if (each.values[0]["power"] == "plain" or 1e-150 < each.values[1][1] < 1e150)
    ],
    ids=label,
    indirect=["backend"],
)
def test_tiny_and_huge_weights_are_shrunk_as_others_are(mode, magnitude, backend):
    """Weights and thresholds times a power of two give the result times it, up to the spacing of subnormal numbers."""
    dtype, scale = magnitude
    case = make_case(RINGS, 6, 4, **mode)
    factor = 2.0 ** round(torch.tensor(scale, dtype=torch.float64).log2().item())
    small = replace(case, weight=(case.weight * factor).to(dtype), thresholds=case.thresholds * factor)
    # The weights after rounding to subnormal numbers, scaled back to an ordinary size.
    ordinary = replace(case, weight=small.weight.double() / factor, thresholds=small.thresholds / factor)
    result, expected = small.prox(backend), ordinary.prox(backend) * factor
    assert result.isfinite().all()
    if scale == 5e-324 and case.norm == "linf":  # each product with the metric rounds to 0 or 5e-324
        assert (result.abs() <= small.weight.abs()).all()
        return
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    off = (result.double() - expected).abs()
    allowed = ULPS_OF_ROOTS[dtype] * torch.finfo(dtype).eps * largest_of_kernels(small.weight) + 2 * spacing
    assert (off <= allowed).all()
    if case.squared is None:
        assert torch.equal(result == 0, expected.to(dtype) == 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("backend")
def test_norms_of_zeros_infinities_nan_and_tiny_and_huge_weights(dtype):
    weight = torch.zeros(6, 2, 3, dtype=dtype)
    info = torch.finfo(dtype)
    weight[1, :, 0] = torch.tensor([torch.inf, 1.0])
    weight[2, :, 1] = torch.tensor([torch.nan, torch.inf])
    weight[3] = info.smallest_normal * info.eps
    weight[4, 0, 2] = -info.max
    weight[5, :, 0] = torch.tensor([3.0, 4.0])
    norms = sparsity.ring_norms(weight, first="top_left").double()  # taps 0, 2, 1 are rings 0, 1, 2
    assert norms[[0, 1, 4, 5]].tolist() == [[0, 0, 0], [torch.inf, 0, 0], [0, info.max, 0], [5, 0, 0]]
    assert norms[2, :2].tolist() == [0, 0]
    assert norms[2, 2].isnan()
    subnormal = torch.tensor(2.0, dtype=torch.float64).sqrt() * weight[3, 0, 0].double()
    assert ((norms[3] - subnormal).abs() <= subnormal).all()
    assert (norms[3] > 0).all()


def times_power(x, exponent):
    """Return x * 2^exponent, even where 2^exponent alone overflows or underflows."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


# Dtype, and exponents of two by which weights and the metric are scaled.
POWERS = [
    *((torch.float64, power, 0) for power in (-1000, -265, 255, 1000)),
    *((torch.float64, 0, power) for power in (-1000, -300, 400, 1000)),
    *((torch.float64, -700, 700), (torch.float64, 600, -800)),
    *((torch.float32, 0, power) for power in (-110, -60, 90, 120)),
]


@pytest.mark.parametrize(
    ("norm", "power", "backend"),
    covering(["l2", "linf"], ["plain", "both"], BACKENDS, strength=3),
    indirect=["backend"],
)
def test_powers_of_two_of_weights_and_metric_change_nothing_else(norm, power, backend):
    in_float64 = make_case(RINGS, 3, 4, norm=norm, metric=True, power=power)
    for dtype, of_weight, of_metric in POWERS[:: 1 if backend == "cpu" else 4]:
        case = in_float64.to(dtype)
        scaled = replace(
            case,
            weight=times_power(case.weight, of_weight),
            metric=times_power(case.metric, of_metric),
            thresholds=times_power(case.thresholds, of_weight + of_metric),
            squared=None if case.squared is None else times_power(case.squared, of_metric // 2),
        )
        result, expected = times_power(scaled.prox(backend), -of_weight), case.prox(backend)
        tolerance = BY_SPAMS if dtype == torch.float64 else RESIDUAL[dtype]
        assert_near_by_kernel(result, expected, case.weight, tolerance)
        assert torch.equal(result == 0, expected == 0)


def oracle(u, d, t):
    """Return the prox of one group in 40 digits: x = u d / (d + c) with c ||x|| = t, by bisection of log c."""
    with mpmath.workdps(40):
        u, d, t = [mpmath.mpf(x) for x in u], [mpmath.mpf(x) for x in d], mpmath.mpf(t)
        if mpmath.sqrt(sum((a * b) ** 2 for a, b in zip(u, d, strict=True))) <= t:
            return [0.0] * len(u)

        def pull(c):
            return c * mpmath.sqrt(sum((a * b / (b + c)) ** 2 for a, b in zip(u, d, strict=True)))

        low, high = mpmath.mpf(-2000), mpmath.mpf(2000)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (low, middle) if pull(mpmath.exp(middle)) > t else (middle, high)
        c = mpmath.exp(low)
        return [float(a * b / (b + c)) for a, b in zip(u, d, strict=True)]


@pytest.mark.parametrize("spread", [3, 150, 290])
def test_metrics_of_all_sizes_in_one_kernel(spread, backend):
    generator = np.random.default_rng(spread)
    for _ in range(1 if backend == "reference" else 3):
        u = generator.standard_normal(6) * 10.0 ** generator.uniform(-5, 5, 6)
        d = 10.0 ** generator.uniform(-spread, spread, 6)
        t = np.abs(u * d).max() * 10.0 ** generator.uniform(-spread / 3, 0.1)
        weight, metric = (torch.from_numpy(x).view(1, 6, 1) for x in (u, d))
        expected = torch.tensor(oracle(u, d, t), dtype=torch.float64).view(1, 6, 1)
        result = ops.ring_prox(weight, [0], torch.tensor([t]).double(), None, metric)
        assert_near_by_kernel(result, expected, weight, BY_PROXIMAL_GRADIENT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.usefixtures("backend")
def test_an_infinite_metric_lets_its_weight_stay(dtype):
    """Adam's metric is infinite where the square of a gradient has overflowed.

    Other weights are shrunk as beside one whose metric is only large. Under the largest norm, they are clipped as if it
    were absent, but not below it; the expected values are worked out by hand.
    """
    largest = torch.finfo(dtype).max
    metric = torch.tensor([[[1.0, torch.inf, 2.0, largest]]], dtype=dtype)
    result = ops.ring_prox(torch.ones(1, 1, 4, dtype=dtype), [0] * 4, torch.ones(1).double(), None, metric)
    assert torch.equal(result[0, 0, [1, 3]], torch.ones(2, dtype=dtype))
    assert bool((result[0, 0, [0, 2]] < 0.8).all())
    weight = torch.randn(3, 6, 3, dtype=dtype)
    t = torch.full((2,), 20.0, dtype=torch.float64)
    for linf, q in itertools.product((False, True), (None, t)):
        assert same_bits(ops.ring_prox(weight, [0, 1, 0], t, q, torch.full_like(weight, torch.inf), linf=linf), weight)
    for values, place, rings in [([3.0, 0.2, -3.0], 1, [0, 1, 0]), ([3.0, -1.0, -20.0], 2, [1, 1, 1])]:
        weight, t = torch.tensor([[values]], dtype=dtype), torch.tensor([0.5, 2.0], dtype=torch.float64)
        large = torch.ones_like(weight)
        large[0, 0, place] = 1e12
        expected = ops.ring_prox(weight, rings, t, None, large)
        result = ops.ring_prox(weight, rings, t, None, torch.where(large > 1, torch.inf, large))
        assert_near_by_kernel(result, expected, weight, RESIDUAL[dtype])
    metric[0, 0, 3] = 1.0
    weight = torch.tensor([[[1.0, -0.5, 2.0, 0.25]]], dtype=dtype)
    for rings, thresholds, expected in [
        ([0, 0, 0, 0], [9.0], [0.5, -0.5, 0.5, 0.25]),
        ([0, 0, 0, 0], [0.5], [1.0, -0.5, 1.75, 0.25]),
        ([1, 0, 0, 1], [1.0, 9.0], [0.5, -0.5, 0.5, 0.25]),
        ([0, 1, 0, 1], [1.0, 0.125], [1.0, -0.5, 1.4375, 0.25]),
    ]:
        for channels in (1, 2):
            t = channels * torch.tensor(thresholds, dtype=torch.float64)
            u, d = (each.repeat(1, channels, 1) for each in (weight, metric))
            result = ops.ring_prox(u, rings, t, None, d, linf=True)
            assert result[0].tolist() == channels * [expected]


@pytest.mark.parametrize("exponent", [-600, 600])
@pytest.mark.parametrize("penalty", [sparsity.RingPenalty, sparsity.KernelPenalty])
def test_adam_ends_with_the_same_prox_for_weights_and_gradients_of_any_size(penalty, exponent):
    weights = []
    for power in (0, exponent):
        torch.manual_seed(0)
        p = nn.Parameter(times_power(torch.randn(4, 3, 3, 3, dtype=torch.float64), power))
        of_gradient = power // 2 if power < 0 else 0
        strength = times_power(0.02, power + of_gradient)
        optimizer = optim.Adam([p], lr=times_power(0.05, power), eps=0.0, penalty=penalty(strength / 2.0**power))
        for _ in range(2):
            p.grad = times_power(torch.randn(4, 3, 3, 3, dtype=torch.float64), of_gradient)
            optimizer.step()
        weights.append(times_power(p.detach(), -power))
    assert_near_by_kernel(weights[1], weights[0], weights[0], BY_SPAMS)
    assert not torch.equal(weights[0], torch.zeros_like(weights[0]))


@pytest.mark.parametrize("exponent", [-1000, 600])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_values_gradients_residuals_and_dual_norms(norm, exponent):
    case = make_case(RINGS, 3, 4, norm=norm, metric=True, power="plain")
    penalty, large = sparsity.RingPenalty(0.5, norm=norm), times_power(case.weight, exponent)
    found = []
    for weight in (case.weight, large):
        leaf = weight.clone().requires_grad_()
        value = penalty.value(leaf)
        found.append((value.detach(), *torch.autograd.grad(value, leaf), sparsity.dual_norm(penalty, weight)))
    (value, gradient, dual), (large_value, large_gradient, large_dual) = found
    torch.testing.assert_close(times_power(large_value, -exponent), value)
    torch.testing.assert_close(large_gradient, gradient)
    assert times_power(large_dual, -exponent) == pytest.approx(dual)
    scaled = replace(case, weight=large, thresholds=times_power(case.thresholds, exponent))
    assert (scaled.residual(scaled.prox()) <= RESIDUAL[torch.float64]).all()
    assert (scaled.residual(large / 2) > BY_INTERIOR_POINTS).all()
