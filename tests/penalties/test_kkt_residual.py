"""The residual of the optimality conditions: zero at the optimum, large everywhere else."""

import pytest
import torch

from loco_ext import sparsity
from tests.covering import covering, label
from tests.ring_prox.cases import MODES, Case, Rings, make_case, mode_id
from tests.ring_prox.solvers import outermost_last, shrunk_group_by_group
from tests.tolerances import RESIDUAL

ALL_RINGS = [
    Rings((1, 1), "half", "auto"),
    Rings((2, 2), "half", "top_left"),
    Rings((4, 4), "half", "bottom_right"),
    Rings((5, 5), "half", "top_left"),
    Rings((5, 5), "half", "bottom_right"),
    Rings((5, 5), "full", "auto"),
    Rings((4,), "half", "auto"),
    Rings((7, 3), "half", "auto"),
    Rings((3, 1, 5), "full", "auto"),
    Rings((2, 4, 3), "half", "auto"),
]
ALL_MODES = pytest.mark.parametrize("mode", MODES, ids=mode_id)


@pytest.mark.parametrize(("mode", "dtype"), covering(MODES, RESIDUAL), ids=label)
def test_what_the_kernels_find_is_optimal(mode, dtype):
    for seed, rings in enumerate(ALL_RINGS):
        case = make_case(rings, 24, seed=seed, **mode).to(dtype)
        assert case.residual(case.prox()).max() <= RESIDUAL[dtype], rings


@pytest.mark.parametrize(("mode", "dtype"), covering(MODES, RESIDUAL, strength=1), ids=label)
def test_what_the_reference_finds_is_optimal(mode, dtype):
    nested = mode["metric"] and mode["norm"] == "l2" and mode["power"] != "plain"  # one search in another
    for seed, rings in enumerate(ALL_RINGS[5:6] if nested else ALL_RINGS):
        case = make_case(rings, 24, seed=seed, **mode).to(dtype)
        assert case.residual(case.prox("reference")).max() <= RESIDUAL[dtype], rings


@ALL_MODES
def test_a_perturbed_optimum_has_a_residual_of_the_perturbations_size_and_weights_and_zeros_a_large_one(mode):
    case = make_case(Rings((5, 5), "half", "top_left"), 24, **mode)
    optimum = case.prox()
    for size in (1e-2, 1e-6):
        assert (case.residual(optimum + size * case.weight) > size / 10).all()
    least = 0.1 * case.weight.flatten(1).norm(dim=1)
    far, alive = (optimum - case.weight).flatten(1).norm(dim=1) > least, optimum.flatten(1).norm(dim=1) > least
    assert far.any()
    assert alive.any()
    assert (case.residual(case.weight)[far] > 1e-3).all()
    assert (case.residual(torch.zeros_like(optimum))[alive] > 1e-3).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_ring_too_many_or_too_few_at_zero_is_not_optimal(norm):
    rings = Rings((5, 5), "half", "top_left")
    case = make_case(rings, 200, norm=norm)
    optimum = case.prox()
    left = case.sizes_left(optimum)
    index = torch.tensor(rings.of_taps).view(5, 5)
    some = (left > 0) & (left < 5)
    outermost = torch.where(index == 5 - left[:, None, None], 1.0, 0.0)[:, None]  # the outermost ring that is left
    beyond = torch.where(index == 4 - left[:, None, None], 1.0, 0.0)[:, None]
    assert (case.residual(optimum * (1 - outermost))[some] > 1e-8).all()
    assert (case.residual(optimum + 1e-3 * beyond * case.weight)[some] > 1e-8).all()


@pytest.mark.parametrize(("metric", "most", "shrunk"), [(False, 4, outermost_last), (True, 5, shrunk_group_by_group)])
def test_groups_shrunk_in_the_wrong_order_or_one_by_one_in_a_metric_are_not_optimal(metric, most, shrunk):
    case = make_case(Rings((5, 5), "half", "top_left"), 200, metric=metric)
    optimum, wrong = case.prox(), shrunk(case)
    between = (case.sizes_left(optimum) > 0) & (case.sizes_left(optimum) <= most)
    assert between.sum() > 10
    assert (case.residual(wrong)[between] > 1e-3).double().mean() > 0.5
    assert (case.objective(wrong)[between] > case.objective(optimum)[between] - 1e-9).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_residual_is_the_distance_over_the_size(norm):
    """Without a penalty, it is the weights' relative distance; for zeros, it is the share beyond the thresholds."""
    weight = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])
    moved = weight + torch.tensor([[[0.3, 0.4]], [[0.0, 0.0]]])
    residual = sparsity.kkt_residual(weight, moved, [0.0, 0.0], norm=norm)
    torch.testing.assert_close(residual, torch.tensor([0.1, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    of_zeros = sparsity.kkt_residual(weight, torch.zeros_like(weight), [0.0, 2.5], norm=norm)
    share = 2.5 / (5.0 if norm == "l2" else 7.0)
    torch.testing.assert_close(of_zeros, torch.tensor([1 - share, 0.0], dtype=torch.float64))


def test_half_precision_results_are_as_optimal_as_their_rounding_lets_them_be(backend):
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case(ALL_RINGS[3], 24).to(dtype)
        assert case.residual(case.prox(backend)).max() <= 4 * torch.finfo(dtype).eps


def test_thresholds_may_differ_between_kernels():
    rings = Rings((3,), "half", "auto")
    case = make_case(rings, 12)
    rows = case.thresholds * torch.linspace(0, 3, 12, dtype=torch.float64)[:, None]
    by_rows = Case(rings, case.weight, rows)
    x = by_rows.prox()
    assert by_rows.residual(x).max() <= RESIDUAL[torch.float64]
    assert torch.equal(x[0], case.weight[0])
    one_by_one = [Case(rings, case.weight[o : o + 1], rows[o]).prox() for o in range(12)]
    assert torch.equal(x, torch.cat(one_by_one))
