"""Tests of the prox, norms and values derived from them, for weights, metrics and thresholds of any float64 size."""

import itertools

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import ops, optim, sparsity
from tests.covering import slow
from tests.ring_prox.cases import BACKENDS, Rings, make_case
from tests.tolerances import BY_INTERIOR_POINTS, BY_PROXIMAL_GRADIENT, BY_SPAMS, RESIDUAL, assert_near_by_kernel

RINGS = Rings((3, 3), "half", "auto")
EXACT = BY_PROXIMAL_GRADIENT
# Exponents of two by which weights and the metric are scaled.
WEIGHT_POWERS = [(power, 0) for power in (-1000, -265, 255, 1000)]
POWERS = [*WEIGHT_POWERS, (0, -1000), (0, -300), (0, 400), (0, 1000), (-700, 700), (600, -800)]


def times_power(x, exponent):
    """Return x * 2^exponent, even where 2^exponent alone overflows or underflows."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


@pytest.mark.parametrize(
    ("norm", "power", "backend"),
    [
        slow(each) if each == ("l2", "both", "reference") else each
        for each in itertools.product(["l2", "linf"], ["plain", "both"], BACKENDS)
    ],
)
def test_powers_of_two_of_weights_and_metric_change_nothing_else(norm, power, backend):
    case = make_case(RINGS, 3, 4, norm=norm, metric=True, power=power)
    kinds = {"norm": norm, "kind": "half"}
    with loco_ext.backend(backend):
        q = case.squared
        expected = sparsity.ring_prox(case.weight, case.thresholds, metric=case.metric, squared=q, **kinds)
        for of_weight, of_metric in POWERS[:: 1 if backend == "native" else 4]:
            weight, metric = times_power(case.weight, of_weight), times_power(case.metric, of_metric)
            t = times_power(case.thresholds, of_weight + of_metric)
            squared = None if q is None else times_power(q, of_metric // 2)
            result = sparsity.ring_prox(weight, t, metric=metric, squared=squared, **kinds)
            assert_near_by_kernel(times_power(result, -of_weight), expected, case.weight, BY_SPAMS)
            assert torch.equal(result == 0, expected == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_metrics_of_any_size_that_float32_has(norm, backend):
    case = make_case(RINGS, 3, 4, norm=norm, metric=True, power="plain").to(torch.float32)
    with loco_ext.backend(backend):
        expected = sparsity.ring_prox(case.weight, case.thresholds, norm=norm, metric=case.metric)
        for exponent in (-110, -60, 60, 90, 120) if backend == "native" else (-110, 120):
            metric, t = case.metric * 2.0**exponent, case.thresholds * 2.0**exponent
            result = sparsity.ring_prox(case.weight, t, norm=norm, metric=metric)
            assert_near_by_kernel(result, expected, case.weight, RESIDUAL[torch.float32])


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", [3, 50, 150, 290])
def test_metrics_of_all_sizes_in_one_kernel(spread, backend):
    generator = np.random.default_rng(spread)
    for _ in range(3 if backend == "native" else 1):
        u = generator.standard_normal(6) * 10.0 ** generator.uniform(-5, 5, 6)
        d = 10.0 ** generator.uniform(-spread, spread, 6)
        t = np.abs(u * d).max() * 10.0 ** generator.uniform(-spread / 3, 0.1)
        weight, metric = (torch.from_numpy(x).view(1, 6, 1) for x in (u, d))
        with loco_ext.backend(backend):
            result = ops.ring_prox(weight, [0], torch.tensor([t]).double(), None, metric)
        expected = torch.tensor(oracle(u, d, t), dtype=torch.float64).view(1, 6, 1)
        assert_near_by_kernel(result, expected, weight, EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_infinite_metric_lets_its_weight_stay(dtype, backend):
    """Adam's metric is infinite where the square of a gradient has overflowed."""
    metric = torch.tensor([[[1.0, torch.inf, 2.0, torch.finfo(dtype).max]]], dtype=dtype)
    with loco_ext.backend(backend):
        result = ops.ring_prox(torch.ones(1, 1, 4, dtype=dtype), [0] * 4, torch.ones(1).double(), None, metric)
    assert torch.equal(result[0, 0, [1, 3]], torch.ones(2, dtype=dtype))
    assert bool((result[0, 0, [0, 2]] < 0.8).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [1, 2])
def test_an_infinite_metric_lets_its_weight_stay_under_the_largest_norm(channels, dtype, backend):
    """Other weights are clipped as if it were absent, but not below it; expected values are worked out by hand."""
    weight = torch.tensor([[[1.0, -0.5, 2.0, 0.25]]], dtype=dtype).repeat(1, channels, 1)
    metric = torch.tensor([[[1.0, torch.inf, 2.0, 1.0]]], dtype=dtype).repeat(1, channels, 1)
    for rings, thresholds, expected in [
        ([0, 0, 0, 0], [9.0], [0.5, -0.5, 0.5, 0.25]),
        ([0, 0, 0, 0], [0.5], [1.0, -0.5, 1.75, 0.25]),
        ([1, 0, 0, 1], [1.0, 9.0], [0.5, -0.5, 0.5, 0.25]),
        ([0, 1, 0, 1], [1.0, 0.125], [1.0, -0.5, 1.4375, 0.25]),
    ]:
        t = channels * torch.tensor(thresholds, dtype=torch.float64)
        with loco_ext.backend(backend):
            result = ops.ring_prox(weight, rings, t, None, metric, linf=True)
        assert result[0].tolist() == channels * [expected]


@pytest.mark.parametrize("exponent", [-600, 600])
@pytest.mark.parametrize("penalty", [sparsity.RingPenalty, sparsity.KernelPenalty])
def test_adam_ends_with_the_same_prox_for_weights_and_gradients_of_any_size(penalty, exponent):
    weights = []
    for power in (0, exponent):
        torch.manual_seed(0)
        p = nn.Parameter(times_power(torch.randn(4, 3, 3, 3, dtype=torch.float64), power))
        strength = times_power(0.02, power + (power // 2 if power < 0 else 0))
        of_gradient = power // 2 if power < 0 else 0
        optimizer = optim.Adam([p], lr=times_power(0.05, power), eps=0.0, penalty=penalty(strength / 2.0**power))
        for _ in range(2):
            p.grad = times_power(torch.randn(4, 3, 3, 3, dtype=torch.float64), of_gradient)
            optimizer.step()
        weights.append(times_power(p.detach(), -power))
    assert_near_by_kernel(weights[1], weights[0], weights[0], BY_SPAMS)
    assert not torch.equal(weights[0], torch.zeros_like(weights[0]))


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 1000])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_values_gradients_residuals_and_dual_norms(norm, exponent):
    case = make_case(RINGS, 3, 4, norm=norm, metric=True, power="plain")
    penalty, large = sparsity.RingPenalty(0.5, norm=norm), times_power(case.weight, exponent)
    for weight, power in ((case.weight, 0), (large, exponent)):
        weight = weight.clone().requires_grad_()
        value = penalty.value(weight)
        (gradient,) = torch.autograd.grad(value, weight)
        if power == 0:
            expected = value.detach(), gradient, sparsity.dual_norm(penalty, case.weight)
            continue
        torch.testing.assert_close(times_power(value.detach(), -power), expected[0])
        torch.testing.assert_close(gradient, expected[1])
        assert times_power(sparsity.dual_norm(penalty, large), -power) == pytest.approx(expected[2])
    t = times_power(case.thresholds, exponent)
    result = sparsity.ring_prox(large, t, norm=norm, metric=case.metric)
    residual = sparsity.kkt_residual(large, result, t, norm=norm, metric=case.metric)
    assert (residual <= RESIDUAL[torch.float64]).all()
    wrong = sparsity.kkt_residual(large, large / 2, t, norm=norm, metric=case.metric)
    assert (wrong > BY_INTERIOR_POINTS).all()
