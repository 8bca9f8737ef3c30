"""Tests of the prox of nested rings against other solvers: SPAMS, accelerated proximal gradient, CVXPY and SciPy."""

import pytest
import torch
from scipy.optimize import brentq

from tests.covering import covering, label
from tests.ring_prox.cases import BACKENDS, MODES, WEIGHTINGS, Case, Rings, group_norms, make_case, square_rings
from tests.ring_prox.solvers import by_cvxpy, by_proximal_gradient, by_spams
from tests.tolerances import BY_INTERIOR_POINTS, BY_PROXIMAL_GRADIENT, BY_SPAMS, BY_SPAMS_FLOAT32, assert_near_by_kernel

ALL_RINGS = square_rings()
KERNELS = 64


@pytest.mark.parametrize(
    ("weighting", "norm", "backend"), covering(WEIGHTINGS, ["l2", "linf"], BACKENDS, sweep=True), indirect=["backend"]
)
def test_the_prox_and_what_it_takes_to_zero_are_those_of_spams(weighting, norm, backend):
    """Six tests of 28 divisions of 64 kernels check 10,752 kernels for each backend."""
    assert len(ALL_RINGS) * KERNELS * len(WEIGHTINGS) * 2 >= 10_000
    sizes_seen = set()
    for seed, rings in enumerate(ALL_RINGS):
        case = make_case(rings, KERNELS, 1 + seed % 4, weighting=weighting, norm=norm, seed=seed)
        x, expected = case.prox(backend), by_spams(case)
        assert_near_by_kernel(x, expected, case.weight, BY_SPAMS)
        assert torch.equal(x == 0, expected == 0), rings
        sizes_seen |= set(case.sizes_left(x).tolist())
    assert sizes_seen == set(range(12))  # every possible number of rings has vanished at least once


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_prox_of_float32_weights_and_with_thresholds_of_0_is_that_of_spams(norm):
    for seed, rings in enumerate(ALL_RINGS):
        case = make_case(rings, KERNELS, 1 + seed % 4, norm=norm, seed=seed).to(torch.float32)
        x, expected = case.prox(), by_spams(case.to(torch.float64))
        assert_near_by_kernel(x, expected, case.weight, BY_SPAMS_FLOAT32)
        assert torch.equal(x == 0, expected == 0)
        case = case.to(torch.float64)
        case.thresholds[seed % 3 :: 3] = 0
        assert_near_by_kernel(case.prox(), by_spams(case), case.weight, BY_SPAMS)


METRIC_RINGS = [
    Rings((1, 1), "half", "auto"),
    Rings((3, 3), "half", "top_left"),
    Rings((4, 4), "half", "bottom_right"),
    Rings((5, 5), "half", "bottom_right"),
    Rings((5, 5), "full", "auto"),
    Rings((7, 7), "half", "top_left"),
]


@pytest.mark.parametrize(
    ("rings", "norm", "backend"),
    covering(METRIC_RINGS, ["l2", "linf"], BACKENDS, strength=1, sweep=True),
    ids=str,
    indirect=["backend"],
)
def test_in_a_metric_the_prox_is_where_proximal_gradient_converges(rings, norm, backend):
    case = make_case(rings, 32, 2, norm=norm, metric=True)
    x, expected = case.prox(backend), by_proximal_gradient(case)
    assert_near_by_kernel(x, expected, case.weight, BY_PROXIMAL_GRADIENT)
    assert torch.equal(x == 0, expected == 0)


MODES_BEYOND_SPAMS = [mode for mode in MODES if mode["metric"] or mode["power"] != "plain"]
CVXPY_RINGS = [Rings((3, 3), "half", "top_left"), Rings((2, 2), "half", "auto"), Rings((5, 3), "full", "auto")]


@pytest.mark.parametrize(("mode", "rings"), covering(MODES_BEYOND_SPAMS, CVXPY_RINGS), ids=label)
def test_the_prox_is_the_minimum_that_an_interior_point_method_finds(mode, rings):
    """30 tests of 9 filters each check 270 filters."""
    case = make_case(rings, 9, 2, seed=1, **mode)
    assert_near_by_kernel(case.prox(), by_cvxpy(case), case.weight, BY_INTERIOR_POINTS)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_squared_penalty_is_a_plain_one_with_thresholds_of_twice_its_own_value(norm):
    for seed, rings in enumerate(METRIC_RINGS[1:]):
        case = make_case(rings, 4, 2, norm=norm, power="squared", seed=seed)
        expected = [
            squared_by_spams(rings, case.weight[o : o + 1], case.squared[o], norm) for o in range(len(case.weight))
        ]
        assert_near_by_kernel(case.prox(), torch.cat(expected), case.weight, BY_PROXIMAL_GRADIENT)


def squared_by_spams(rings, kernel, q, norm):
    """Return SPAMS' prox with thresholds f * q, with the f (by SciPy) that equals twice its penalty with weights q."""

    def plain(factor):
        return by_spams(Case(rings, kernel, factor * q, norm=norm))

    def twice_the_penalty(x):
        return 2 * (group_norms(x, rings, norm) @ q).item()

    upper = twice_the_penalty(kernel)
    accuracy = {"xtol": upper * 1e-16, "rtol": 1e-15}
    return plain(brentq(lambda f: f - twice_the_penalty(plain(f)), upper * 1e-12, upper, **accuracy))
