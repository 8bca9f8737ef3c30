"""Tests of bad arguments to rings, prox, residual and penalties: typed errors name the argument, what was expected and
what was received."""

import pytest
import torch

from loco_ext import ops, sparsity
from loco_ext.sparsity import KernelPenalty, RingPenalty

WEIGHT = torch.randn(4, 2, 3, 3)
T = [0.1, 0.2, 0.3]
ROW = torch.tensor(T, dtype=torch.float64)
FUNCTIONS = {
    "ring_prox": lambda weight=WEIGHT, thresholds=T, **more: sparsity.ring_prox(weight, thresholds, **more),
    "kkt_residual": lambda weight=WEIGHT, thresholds=T, **more: sparsity.kkt_residual(
        weight, weight, thresholds, **more
    ),
}
BOTH = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
OF_WEIGHTS = {
    **FUNCTIONS,
    "ring_norms": sparsity.ring_norms,
    "kernel_sizes": sparsity.kernel_sizes,
    "ring_value": RingPenalty(0.1).value,
    "ring_prox_of_penalty": lambda weight: RingPenalty(0.1).prox(weight, 1.0),
    "kernel_value": KernelPenalty(0.1, power=2).value,
    "kernel_prox_of_penalty": lambda weight: KernelPenalty(0.1, power=2).prox(weight, 1.0),
}
# The weight, the error, and what its message says was received.
BAD_WEIGHTS = {
    "no_tensor": ([[1.0]], TypeError, "list"),
    "0_d": (torch.tensor(1.0), ValueError, r"\(\)"),
    "2_d": (torch.ones(3, 4), ValueError, r"\(3, 4\)"),
    "6_d": (torch.ones(2, 2, 1, 1, 1, 1), ValueError, r"\(2, 2, 1, 1, 1, 1\)"),
    "no_channels": (torch.ones(4, 0, 3, 3), ValueError, r"\(4, 0, 3, 3\)"),
    "no_rows": (torch.ones(4, 2, 0, 3), ValueError, r"\(4, 2, 0, 3\)"),
    "int": (torch.ones(4, 2, 3, 3, dtype=torch.int64), TypeError, "int64"),
    "bool": (torch.ones(4, 2, 3, 3, dtype=torch.bool), TypeError, "bool"),
    "complex": (torch.ones(4, 2, 3, 3, dtype=torch.complex64), TypeError, "complex64"),
    "sparse": (torch.ones(4, 2, 3, 3).to_sparse(), TypeError, "sparse"),
}


@pytest.mark.parametrize("function", OF_WEIGHTS.values(), ids=OF_WEIGHTS)
@pytest.mark.parametrize("bad", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_what_is_no_convolutions_weight(bad, function):
    weight, error, came = bad
    with pytest.raises(error, match=rf"^weight: expected .*{came}"):
        function(weight)


BAD_OPTIONS = {
    "kind": ({"kind": "quarter"}, "kind: expected .*'quarter'"),
    "first": ({"first": "left"}, "first: expected .*'left'"),
    "norm": ({"norm": "l1"}, "norm: expected 'l2' or 'linf', got 'l1'"),
}


@BOTH
@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_unknown_names(options, message, function):
    with pytest.raises(ValueError, match=message):
        function(**options)


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), sparsity.ring_norms, sparsity.kernel_sizes])
def test_even_kernels_have_no_full_rings(function):
    with pytest.raises(ValueError, match=r"kernel_size: expected odd sizes for full rings, got \(3, 4\)"):
        function(torch.ones(4, 2, 3, 4), kind="full")
    with pytest.raises(ValueError, match="kernel_size: expected odd sizes"):
        RingPenalty(0.1, "full").value(torch.ones(4, 2, 3, 4))
    with pytest.raises(ValueError, match="kernel_size: expected odd sizes"):
        RingPenalty(0.1, "full").prox(torch.ones(4, 2, 3, 4), 1.0)


BAD_THRESHOLDS = {
    "too_few": ([0.1, 0.2], ValueError, r"expected 3 numbers.*\(2,\)"),
    "too_many": ([0.1] * 4, ValueError, r"expected 3 numbers.*\(4,\)"),
    "one_number": (0.1, ValueError, r"expected 3 numbers.*\(\)"),
    "rows_of_other_kernels": (torch.ones(5, 3), ValueError, r"4 filters.*\(5, 3\)"),
    "3_d": (torch.ones(1, 4, 3), ValueError, r"\(1, 4, 3\)"),
    "ragged": ([[0.1], [0.2, 0.3]], TypeError, "expected .*numbers"),
    "no_numbers": ("abc", TypeError, "expected .*numbers, got 'abc'"),
    "none": (None, TypeError, "expected .*None"),
    "negative": ([0.1, -0.2, 0.3], ValueError, r"finite numbers of at least 0, got .*-0\.2"),
    "nan": ([0.1, float("nan"), 0.3], ValueError, "finite numbers of at least 0, got .*nan"),
    "inf": ([0.1, float("inf"), 0.3], ValueError, "finite numbers of at least 0, got .*inf"),
}


@BOTH
@pytest.mark.parametrize(("bad", "error", "message"), BAD_THRESHOLDS.values(), ids=BAD_THRESHOLDS)
def test_thresholds_that_cannot_be(bad, error, message, function):
    with pytest.raises(error, match=f"^thresholds: .*{message}"):
        function(thresholds=bad)
    if bad is not None:
        with pytest.raises(error, match=f"^squared: .*{message}"):
            function(squared=bad)


def test_squared_thresholds_have_the_shape_of_the_plain_ones():
    with pytest.raises(ValueError, match=r"^squared: expected shape \(3,\), got \(4, 3\)"):
        sparsity.ring_prox(WEIGHT, T, squared=torch.ones(4, 3))


BAD_METRICS = {
    "no_tensor": (0.5, TypeError, "float"),
    "shape": (torch.ones(4, 2, 3), ValueError, r"\(4, 2, 3, 3\), got \(4, 2, 3\)"),
    "shape_that_broadcasts": (torch.ones(1, 2, 3, 3), ValueError, r"\(4, 2, 3, 3\), got \(1, 2, 3, 3\)"),
    "int": (torch.ones(4, 2, 3, 3, dtype=torch.int32), TypeError, "int32"),
    "device": (torch.ones(4, 2, 3, 3, device="meta"), TypeError, "device cpu .*meta"),
    "sparse": (torch.ones(4, 2, 3, 3).to_sparse(), TypeError, "sparse"),
    "zero": (torch.ones(4, 2, 3, 3).index_fill(0, torch.tensor(1), 0.0), ValueError, r"positive numbers, got 0\.0"),
    "negative": (-torch.ones(4, 2, 3, 3), ValueError, r"positive numbers, got -1\.0"),
}
PROX_IN_METRIC = {
    **FUNCTIONS,
    "ring_penalty": lambda metric: RingPenalty(0.1).prox(WEIGHT, 1.0, metric),
    "kernel_penalty": lambda metric: KernelPenalty(0.1).prox(WEIGHT, 1.0, metric),
    "kernel_penalty_squared": lambda metric: KernelPenalty(0.1, power=2).prox(WEIGHT, 1.0, metric),
}


@pytest.mark.parametrize("function", PROX_IN_METRIC.values(), ids=PROX_IN_METRIC)
@pytest.mark.parametrize(("bad", "error", "came"), BAD_METRICS.values(), ids=BAD_METRICS)
def test_metrics_that_cannot_be(bad, error, came, function):
    with pytest.raises(error, match=f"^metric: expected .*{came}"):
        function(metric=bad)


@pytest.mark.parametrize("result", [torch.ones(4, 2, 3), torch.ones(1, 2, 3, 3)])
def test_results_of_another_shape(result):
    with pytest.raises(ValueError, match=r"^result: expected weight's shape \(4, 2, 3, 3\), got"):
        sparsity.kkt_residual(WEIGHT, result, T)
    with pytest.raises(TypeError, match=r"^result: expected a tensor, got list"):
        sparsity.kkt_residual(WEIGHT, [1.0], T)


BAD_PENALTIES = {
    "negative": ({"strength": -0.1}, ValueError, r"strength: expected a finite number of at least 0, got -0\.1"),
    "nan": ({"strength": float("nan")}, ValueError, "strength: expected a finite .*nan"),
    "inf": ({"strength": float("inf")}, ValueError, "strength: expected a finite .*inf"),
    "text": ({"strength": "1"}, TypeError, "strength: expected a number, got '1'"),
    "bool": ({"strength": True}, TypeError, "strength: expected a number, got True"),
    "weighting": ({"weighting": "heavy"}, ValueError, "weighting: expected 'plain', .*'heavy'"),
    "unhashable_weighting": ({"weighting": ["plain"]}, ValueError, "weighting: expected"),
    "norm": ({"norm": "l1"}, ValueError, "norm: expected .*'l1'"),
    "power_3": ({"power": 3}, ValueError, "power: expected 1 or 2, got 3"),
    "power_true": ({"power": True}, ValueError, "power: expected 1 or 2, got True"),
    "power_text": ({"power": "2"}, ValueError, "power: expected 1 or 2, got '2'"),
}


@pytest.mark.parametrize("penalty", [RingPenalty, KernelPenalty])
@pytest.mark.parametrize(("options", "error", "message"), BAD_PENALTIES.values(), ids=BAD_PENALTIES)
def test_penalties_that_cannot_be(options, error, message, penalty):
    with pytest.raises(error, match=f"^{message}"):
        penalty(**{"strength": 0.1, **options})


def test_ring_penalties_of_unknown_rings():
    with pytest.raises(ValueError, match=r"^kind: expected 'half' or 'full', got 'quarter'"):
        RingPenalty(0.1, "quarter")
    with pytest.raises(ValueError, match=r"^first: expected .*'left'"):
        RingPenalty(0.1, first="left")


@pytest.mark.parametrize("penalty", [RingPenalty(0.1), KernelPenalty(0.1), KernelPenalty(0.1, power=2)], ids=repr)
def test_steps_that_cannot_be(penalty):
    for step in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^step: expected a finite number of at least 0, got {step}"):
            penalty.prox(WEIGHT, step)
    for step in ("1", None, True):
        with pytest.raises(TypeError, match=f"^step: expected a number, got {step!r}"):
            penalty.prox(WEIGHT, step)


RINGS = [0, 0, 0, 0, 2, 1, 0, 1, 1]
BAD_CALLS = {
    "few_rings": (
        {"rings": RINGS[1:]},
        ValueError,
        "rings: expected one entry for each of the 9 taps of weight, got 8",
    ),
    "ring_too_large": ({"rings": [3, *RINGS[1:]]}, ValueError, r"rings: expected entries from 0 to 2, got \[3"),
    "ring_below_0": ({"rings": [-1, *RINGS[1:]]}, ValueError, r"rings: expected entries from 0 to 2, got \[-1"),
    "no_groups": ({"thresholds": ROW[:0]}, ValueError, "rings: expected 1 to 64 of them, got 0"),
    "65_groups": ({"thresholds": ROW[:1].repeat(65)}, ValueError, "rings: expected 1 to 64 of them, got 65"),
    "float32": ({"thresholds": ROW.float()}, TypeError, "thresholds: expected a float64 tensor .*float32"),
    "0_d": ({"thresholds": ROW[0]}, ValueError, r"thresholds: expected shape .*\(\)"),
    "weight_1_d": ({"weight": torch.ones(9)}, ValueError, r"weight: expected shape .*\(9,\)"),
    "weight_int": ({"weight": torch.ones(4, 2, 9, dtype=torch.int32)}, TypeError, "weight: expected .*int32"),
    "metric_int": ({"metric": WEIGHT.int()}, TypeError, "metric: expected .*int32"),
}


@pytest.mark.parametrize(("given", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_calls_of_the_operator_that_cannot_be(given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        ops.ring_prox(**{"weight": WEIGHT, "rings": RINGS, "thresholds": ROW, **given})


BAD_NATIVE_CALLS = {
    "rings": ((WEIGHT, RINGS[1:], ROW, None, None, False), "rings: expected"),
    "ring": ((WEIGHT, [64, *RINGS[1:]], ROW, None, None, False), "rings: expected"),
    "negative_ring": ((WEIGHT, [-1, *RINGS[1:]], ROW, None, None, False), "rings: expected"),
    "thresholds": ((WEIGHT, RINGS, ROW.float(), None, None, False), "thresholds: expected"),
    "rows": ((WEIGHT, RINGS, ROW.repeat(3, 1), None, None, False), "thresholds: expected"),
    "strided": ((WEIGHT, RINGS, ROW.repeat(2)[::2], None, None, False), "thresholds: expected"),
    "squared": ((WEIGHT, RINGS, ROW, ROW[:2], None, False), "squared: expected"),
    "metric": ((WEIGHT, RINGS, ROW, None, WEIGHT[:2], False), "metric: expected"),
    "no_weights": ((WEIGHT[:, :0], RINGS, ROW, None, None, False), "weight: expected"),
    "1_d": ((WEIGHT[0, 0, 0], RINGS, ROW, None, None, False), "weight: expected"),
    "int": ((WEIGHT.int(), RINGS, ROW, None, None, False), "weight.*: expected float32"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_NATIVE_CALLS.values(), ids=BAD_NATIVE_CALLS)
def test_torchs_operator_reads_no_memory_that_is_not_there(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.loco_ext.ring_prox(*arguments)


def test_nothing_is_written():
    before = WEIGHT.clone()
    for bad in ([0.1, -0.2, 0.3], [0.1]):
        with pytest.raises(ValueError, match=r"^thresholds"):
            sparsity.ring_prox(WEIGHT, bad)
    assert torch.equal(WEIGHT, before)
