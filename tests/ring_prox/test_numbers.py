"""Tests of the prox on extreme numbers: zeros, subnormals, very large weights, infinities and NaN."""

from dataclasses import replace

import pytest
import torch

from loco_ext import sparsity
from tests.covering import covering, label
from tests.ring_prox.cases import BACKENDS, FLOATS, MODES, Rings, covered_modes, make_case
from tests.tolerances import RESIDUAL, ULPS_OF_ROOTS, largest_of_kernels, same_bits

BOTH = pytest.mark.parametrize("backend", BACKENDS)
ALL_MODES = pytest.mark.parametrize(("mode", "dtype", "backend"), covered_modes(FLOATS, BACKENDS), ids=label)
RINGS = Rings((3, 3), "half", "auto")


def case_of(mode, dtype=torch.float64):
    return make_case(RINGS, 6, 4, **mode).to(dtype)


@pytest.fixture(autouse=True)
def _not_all_of_the_slow(request):
    """Run the reference of squared penalties with a metric, which nests two searches, in one dtype only."""
    given = request.node.callspec.params
    mode = given.get("mode", {"metric": False, "power": "plain"})
    slow = given["backend"] == "reference" and mode["metric"] and mode["norm"] == "l2" and mode["power"] != "plain"
    told = given.get("dtype") == torch.float32 and mode["power"] == "both"
    if slow and (not told or "magnitude" in given or given.get("where") == "outermost"):
        pytest.skip("slow, and one dtype with both powers tells what others would")


@ALL_MODES
def test_zeros_stay_zeros(mode, dtype, backend):
    case = case_of(mode, dtype)
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


@ALL_MODES
def test_huge_thresholds_leave_nothing_or_with_squares_almost_nothing(mode, dtype, backend):
    case = case_of(mode, dtype)
    many = replace(case, thresholds=case.thresholds + 1e300).prox(backend)
    assert torch.count_nonzero(many) == 0
    if mode["power"] == "squared":
        squared = replace(case, squared=torch.full_like(case.squared, 1e8)).prox(backend)
        assert squared.isfinite().all()
        assert (squared.double().abs() <= 1e-8 * case.weight.double().abs().amax() * 10).all()


@BOTH
@pytest.mark.parametrize("strength", [1e-12, 1e-6, 1e3, 1e6])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_squares_of_any_strength_are_balanced(norm, strength, backend):
    """The root may be anywhere in the search interval.

    Where squares are strong, x is about 1/q^2 of the weights, so the weights' rounding error moves the penalty, which
    depends only on x, by q^2 times as much.
    """
    case = case_of({"norm": norm, "power": "squared"})
    case = replace(case, squared=case.squared * strength)
    q = case.squared.max().item()
    result = case.prox(backend)
    assert case.residual(result).max() <= RESIDUAL[torch.float64] * max(1.0, 1e3 * q * q)
    strong = case.squared.amin(1) > 1e3
    of_weights = result.abs().amax((1, 2, 3)) / case.weight.abs().amax((1, 2, 3))
    assert (of_weights[strong] <= 1e-6).all()


@pytest.mark.parametrize(
    ("mode", "dtype", "where", "backend"), covered_modes(FLOATS, ["outermost", "innermost"], BACKENDS), ids=label
)
def test_infinite_weights_and_nan_stay_and_change_no_other_kernel(where, mode, dtype, backend):
    case = case_of(mode, dtype)
    clean = case.prox(backend)
    place = (2, 1, 0, 0) if where == "outermost" else (2, 1, 1, 1)
    others = torch.arange(6) != 2
    for value in (torch.inf, -torch.inf, torch.nan):
        case.weight[place] = value
        result = case.prox(backend)
        assert result[place].isnan() if value != value else result[place] == value
        assert value != value or not result.isnan().any()
        assert same_bits(result[others], clean[others])
    assert replace(case, thresholds=case.thresholds + 1e300).prox(backend)[place].isnan()


# Factors that turn normal random weights into subnormal, tiny and huge numbers.
SCALES = [
    (torch.float32, 1e-42),
    (torch.float32, 1e-30),
    (torch.float32, 1e30),
    (torch.float64, 5e-324),
    (torch.float64, 1e-320),
    (torch.float64, 1e-300),
    (torch.float64, 1e-160),
    (torch.float64, 1e160),
    (torch.float64, 1e300),
    (torch.bfloat16, 1e-39),
    (torch.bfloat16, 1e30),
    (torch.float16, 1e-7),
]


@pytest.mark.parametrize(
    ("mode", "magnitude", "backend"),
    covering([mode for mode in MODES if mode["power"] != "squared"], SCALES, BACKENDS),
    ids=label,
)
def test_tiny_and_huge_weights_are_shrunk_as_others_are(mode, magnitude, backend):
    """Weights and thresholds times a power of two give the result times it, up to the spacing of subnormal numbers."""
    dtype, scale = magnitude
    case = make_case(RINGS, 6, 4, **mode)
    factor = 2.0 ** round(torch.tensor(scale, dtype=torch.float64).log2().item())
    if mode["power"] == "both" and not 1e-300 < factor * factor < 1e300:
        pytest.skip("squares do not scale with the rest")
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


@BOTH
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_of_zeros_infinities_nan_and_tiny_and_huge_weights(dtype, backend):
    weight = torch.zeros(6, 2, 3, dtype=dtype)
    info = torch.finfo(dtype)
    weight[1, :, 0] = torch.tensor([torch.inf, 1.0])
    weight[2, :, 1] = torch.tensor([torch.nan, torch.inf])
    weight[3] = info.smallest_normal * info.eps
    weight[4, 0, 2] = -info.max
    weight[5, :, 0] = torch.tensor([3.0, 4.0])
    norms = sparsity.ring_norms(weight, first="top_left").double()  # taps 0, 2, 1 are rings 0, 1, 2
    assert norms[0].tolist() == [0, 0, 0]
    assert norms[1].tolist() == [torch.inf, 0, 0]
    assert norms[2, :2].tolist() == [0, 0]
    assert norms[2, 2].isnan()
    subnormal = torch.tensor(2.0, dtype=torch.float64).sqrt() * weight[3, 0, 0].double()
    assert ((norms[3] - subnormal).abs() <= subnormal).all()
    assert (norms[3] > 0).all()
    assert norms[4].tolist() == [0, info.max, 0]
    assert norms[5].tolist() == [5, 0, 0]
