"""Tests of the prox of CPU and GPU against the reference: dtypes, sizes, layouts, threads; inputs stay as they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import loco_ext
from loco_ext import ops, sparsity
from loco_ext.reference.dtypes import compute_dtype
from tests.covering import covering, label
from tests.optim_step.layouts import GUARD
from tests.ring_prox.cases import BACKENDS, FLOATS, LAYOUTS, LIBRARIES, MODES, Rings, covered_modes, make_case, mode_id
from tests.tolerances import ULPS_OF_ROOTS, assert_within_ulps, largest_of_kernels, same_bits

pytestmark = pytest.mark.usefixtures("native")
cpu_only = pytest.mark.parametrize("native", ["cpu"], indirect=True)
ALL_MODES = pytest.mark.parametrize("mode", MODES, ids=mode_id)
FLAT_MODES = [mode for mode in MODES if not (mode["metric"] and mode["power"] != "plain")]  # their reference is fast
# Rings and channels: 1-d, 2-d, 3-d, rectangular, one tap, one channel, sums of no multiple of 16 terms, over 64 taps;
# filters for many warps of a GPU, and too large for its shared memory.
SIZES = {
    "1x1": (Rings((1, 1), "half", "auto"), 37),
    "1x1_depthwise": (Rings((1, 1), "half", "auto"), 1),
    "1d": (Rings((7,), "half", "auto"), 5),
    "3x3": (Rings((3, 3), "half", "auto"), 33),
    "3x3_depthwise": (Rings((3, 3), "half", "bottom_right"), 1),
    "4x4": (Rings((4, 4), "half", "auto"), 16),
    "5x5_full": (Rings((5, 5), "full", "auto"), 7),
    "1x7": (Rings((1, 7), "half", "auto"), 20),
    "7x2": (Rings((7, 2), "half", "auto"), 3),
    "3d": (Rings((3, 2, 4), "half", "top_left"), 9),
    "3d_full": (Rings((3, 3, 5), "full", "auto"), 2),
    "9x9_and_16_channels_more": (Rings((9, 9), "full", "auto"), 17),
    "11x11": (Rings((11, 11), "half", "auto"), 3),
    "many_warps": (Rings((3, 3), "half", "auto"), 480),
    "too_large": (Rings((3, 3), "half", "auto"), 1150),
}


def assert_near(actual: Tensor, expected: Tensor, weight: Tensor) -> None:
    """Assert that results agree to some ulp of each filter's largest weight and are 0 in the same places."""
    assert actual.dtype == expected.dtype == weight.dtype
    assert actual.shape == weight.shape
    scale = largest_of_kernels(weight).expand_as(weight)
    assert_within_ulps(actual, expected, ULPS_OF_ROOTS[weight.dtype], scale)
    assert torch.equal(actual == 0, expected == 0)


def assert_native_is_reference(case) -> None:
    assert_near(case.prox("native"), case.prox("reference"), case.weight)


@pytest.mark.parametrize(
    ("mode", "size", "dtype", "native"),
    covering(FLAT_MODES, SIZES, FLOATS, LIBRARIES),
    ids=label,
    indirect=["native"],
)
def test_kernels_find_what_the_reference_finds(mode, size, dtype):
    rings, channels = SIZES[size]
    case = make_case(rings, 11 if channels < 100 else 3, channels, **mode).to(dtype)
    assert_native_is_reference(case)


@pytest.mark.parametrize(
    ("size", "dtype", "native"),
    covering(["1x1", "3x3", "5x5_full"], [torch.float64, torch.float32], LIBRARIES, strength=1, sweep=True),
    ids=str,
    indirect=["native"],
)
def test_weak_thresholds_in_a_metric_move_weights_by_what_they_should(size, dtype):
    rings, channels = SIZES[size]
    strong = make_case(rings, 24, channels, metric=True)
    for weakness in (1e-1, 1e-3, 1e-6):
        case = replace(strong, thresholds=weakness * strong.thresholds).to(dtype)
        wide = case.to(torch.float64)
        moved, expected = wide.weight - case.prox("native").double(), wide.weight - wide.prox("reference")
        rounding = torch.finfo(dtype).eps * wide.weight.abs()
        allowed = {torch.float64: 1e-10, torch.float32: 1e-6}[dtype]
        assert ((moved - expected).abs() <= allowed * expected.abs() + 2 * rounding).all()
        assert (expected[wide.weight != 0] != 0).all()


@pytest.mark.parametrize(
    ("mode", "dtype", "native"),
    covering([mode for mode in MODES if mode not in FLAT_MODES], FLOATS, LIBRARIES, strength=1, sweep=True),
    ids=label,
    indirect=["native"],
)
def test_kernels_find_what_the_reference_finds_with_squares_in_a_metric(mode, dtype):
    assert_native_is_reference(make_case(Rings((3, 2), "half", "auto"), 9, 17, **mode).to(dtype))


@pytest.mark.parametrize(
    ("metric", "squared", "linf", "native"), covering(*[[False, True]] * 3, LIBRARIES), ids=str, indirect=["native"]
)
def test_rings_may_be_any_division_of_the_taps(metric, squared, linf):
    """There may be 64 rings, some without taps; taps may be in any order; and the tap axes may be missing."""
    nine_taps, no_taps = torch.randn(5, 3, 9, dtype=torch.float64), torch.randn(5, 70)
    divisions = [(nine_taps, [5, 1, 3, 3, 4, 4, 1, 1, 5], 6), (no_taps, [0], 1)]
    if not (metric and squared):  # for which the reference is slow
        divisions.append((nine_taps, [63, 0, 5, 5, 9, 62, 1, 0, 63], 64))
    for weight, rings, count in divisions:
        thresholds = torch.linspace(0.3, 0.0, count, dtype=torch.float64).roll(-1)
        d, q = weight.abs() + 0.5 if metric else None, thresholds / 4 if squared else None
        found = []
        for backend in ("native", "reference"):
            with loco_ext.backend(backend):
                found.append(ops.ring_prox(weight, rings, thresholds, q, d, linf=linf))
        assert_near(*found, weight)


LAID_OUT = [Rings((3, 5), "half", "auto"), Rings((3, 2, 4), "half", "auto")]


@pytest.mark.parametrize(
    ("mode", "rings", "layout", "dtype", "native"),
    covering(MODES, LAID_OUT, LAYOUTS, FLOATS, LIBRARIES),
    ids=label,
    indirect=["native"],
)
def test_a_weight_may_lie_in_any_layout_and_its_metric_in_another_of_another_dtype(mode, rings, layout, dtype):
    case = make_case(rings, 5, 18, **mode).to(dtype)
    moved = replace(case, weight=LAYOUTS[layout](case.weight))
    if case.metric is not None:
        metric = case.metric.to(FLOATS[MODES.index(mode) % 4])
        case = replace(case, metric=metric.to(compute_dtype(dtype)))
        moved = replace(moved, metric=LAYOUTS["kernels_fastest"](metric))
    before = moved.weight.clone()
    result = moved.prox("native")
    assert same_bits(moved.weight, before)
    assert_near(result, case.prox("native"), case.weight)
    assert result.stride() == torch.empty_like(moved.weight).stride()


@cpu_only
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_weight_may_be_expanded(backend):
    for mode in FLAT_MODES:
        case = make_case(Rings((3, 3), "half", "auto"), 4, 6, **mode)
        for view in (case.weight[:, :1], case.weight[:1], case.weight[:, :, :1]):
            expanded = replace(case, weight=view.expand_as(case.weight))
            copied = replace(expanded, weight=expanded.weight.contiguous())
            assert_near(expanded.prox(backend), copied.prox(backend), copied.weight)


@ALL_MODES
def test_thresholds_may_be_a_row_for_each_kernel_in_any_layout(mode):
    case = make_case(Rings((4, 4), "half", "auto"), 6, 5, **mode)
    rows = case.thresholds.expand(6, -1) * torch.linspace(0, 2, 6, dtype=torch.float64)[:, None]
    squared = None if case.squared is None else case.squared.t().contiguous().t()
    by_rows = replace(case, thresholds=rows.t().contiguous().t(), squared=squared)
    one_by_one = []
    for o in range(6):
        metric = None if case.metric is None else case.metric[o : o + 1]
        q = None if squared is None else squared[o]
        alone = replace(case, weight=case.weight[o : o + 1], thresholds=rows[o], squared=q, metric=metric)
        one_by_one.append(alone.prox("native"))
    assert same_bits(by_rows.prox("native"), torch.cat(one_by_one))


@cpu_only
@pytest.mark.parametrize(("mode", "dtype"), covered_modes(FLOATS), ids=label)
def test_the_number_of_threads_changes_no_bit(mode, dtype):
    """There are enough weights for every thread to get some."""
    case = make_case(Rings((3, 3), "half", "auto"), 48, 31, **mode).to(dtype)
    norms = []
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(case.prox("native"))
        norms.append(sparsity.ring_norms(case.weight))
    assert same_bits(*results)
    assert same_bits(*norms)


@cpu_only
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_layer_without_kernels_gives_none(backend):
    for mode in FLAT_MODES if backend == "reference" else MODES:
        case = make_case(Rings((3, 3), "half", "auto"), 1, 2, **mode)
        empty = replace(case, weight=case.weight[:0], metric=None if case.metric is None else case.metric[:0])
        if case.squared is not None:
            empty = replace(empty, thresholds=case.thresholds[:0], squared=case.squared[:0])
        assert empty.prox(backend).shape == (0, 2, 3, 3)


@cpu_only
@pytest.mark.parametrize(
    ("mode", "backend"),
    [(mode, each) for each in BACKENDS for mode in (FLAT_MODES if each == "reference" else MODES)],
    ids=label,
    indirect=["backend"],
)
def test_nothing_that_is_given_is_written_nor_part_of_the_result(mode, backend):
    case = make_case(Rings((3, 3), "half", "auto"), 4, **mode)
    case = replace(case, weight=torch.nn.Parameter(case.weight))
    given = [t for t in (case.weight, case.thresholds, case.squared, case.metric) if t is not None]
    before = [t.clone() for t in given]
    result = case.prox(backend)
    assert not result.requires_grad
    result.fill_(GUARD)
    assert all(same_bits(a, b) for a, b in zip(given, before, strict=True))


def test_rounding_takes_no_level_below_0():
    """The thresholds take away all but the last bits of a group."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(4000, 3, 3, dtype=torch.float64, generator=generator)
    weight[:, 0] *= 1e-17
    rows = weight.flatten(1).sum(1, keepdim=True) * (1 - 2.0**-53 * torch.randint(0, 4, (4000, 1), generator=generator))
    for metric in (None, torch.ones_like(weight)):
        x = sparsity.ring_prox(weight, rows * torch.tensor([0.0, 0.0, 1.0]), norm="linf", metric=metric)
        assert (x <= weight).all()
        assert (x >= 0).all()
        assert (x <= 1e-14).all()
