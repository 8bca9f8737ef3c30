"""Tests of bad arguments to rings, prox, residual and penalties: typed errors name the argument, what was expected and
what was received."""

import pytest
import torch

from loco_ext import ops, sparsity
from loco_ext.sparsity import KernelPenalty, RingPenalty

WEIGHT = torch.randn(4, 2, 3, 3)
ONES = torch.ones(4, 2, 3, 3)
T = [0.1, 0.2, 0.3]
ROW = torch.tensor(T, dtype=torch.float64)
PENALTIES = (RingPenalty(0.1), KernelPenalty(0.1), KernelPenalty(0.1, power=2))


def prox(weight=WEIGHT, thresholds=T, **more):
    return sparsity.ring_prox(weight, thresholds, **more)


def residual(weight=WEIGHT, thresholds=T, **more):
    return sparsity.kkt_residual(weight, weight, thresholds, **more)


def expect(error, message, function, **arguments):
    """Assert that the call raises the error, whose message begins with the pattern, and writes to no argument."""
    before = WEIGHT.clone()
    with pytest.raises(error, match=f"^{message}"):
        function(**arguments)
    assert torch.equal(WEIGHT, before)


OF_WEIGHTS = {
    "ring_prox": prox,
    "kkt_residual": residual,
    "ring_norms": sparsity.ring_norms,
    "kernel_sizes": sparsity.kernel_sizes,
    **{f"value_{i}": penalty.value for i, penalty in enumerate(PENALTIES)},
    **{f"prox_{i}": lambda weight, p=penalty: p.prox(weight, 1.0) for i, penalty in enumerate(PENALTIES)},
}
# The weight, the error, and what its message says was received.
BAD_WEIGHTS = {
    "no_tensor": ([[1.0]], TypeError, "list"),
    "0_d": (torch.tensor(1.0), ValueError, r"\(\)"),
    "2_d": (torch.ones(3, 4), ValueError, r"\(3, 4\)"),
    "6_d": (torch.ones(2, 2, 1, 1, 1, 1), ValueError, r"\(2, 2, 1, 1, 1, 1\)"),
    "no_channels": (torch.ones(4, 0, 3, 3), ValueError, r"\(4, 0, 3, 3\)"),
    "no_rows": (torch.ones(4, 2, 0, 3), ValueError, r"\(4, 2, 0, 3\)"),
    "int": (ONES.long(), TypeError, "int64"),
    "bool": (ONES.bool(), TypeError, "bool"),
    "complex": (ONES.to(torch.complex64), TypeError, "complex64"),
    "sparse": (ONES.to_sparse(), TypeError, "sparse"),
}


@pytest.mark.parametrize("function", OF_WEIGHTS.values(), ids=OF_WEIGHTS)
def test_what_is_no_convolutions_weight(function):
    for weight, error, came in BAD_WEIGHTS.values():
        expect(error, f"weight: expected .*{came}", function, weight=weight)


BAD_THRESHOLDS = [
    ([0.1, 0.2], ValueError, r"expected 3 numbers.*\(2,\)"),
    ([0.1] * 4, ValueError, r"expected 3 numbers.*\(4,\)"),
    (0.1, ValueError, r"expected 3 numbers.*\(\)"),
    (torch.ones(5, 3), ValueError, r"4 filters.*\(5, 3\)"),
    (torch.ones(1, 4, 3), ValueError, r"\(1, 4, 3\)"),
    ([[0.1], [0.2, 0.3]], TypeError, "expected .*numbers"),
    ("abc", TypeError, "expected .*numbers, got 'abc'"),
    ([0.1, -0.2, 0.3], ValueError, r"finite numbers of at least 0, got .*-0\.2"),
    ([0.1, float("nan"), 0.3], ValueError, "finite numbers of at least 0, got .*nan"),
    ([0.1, float("inf"), 0.3], ValueError, "finite numbers of at least 0, got .*inf"),
]


@pytest.mark.parametrize("function", [prox, residual])
def test_thresholds_and_names_of_groups_that_cannot_be(function):
    for bad, error, message in BAD_THRESHOLDS:
        for name in ("thresholds", "squared"):
            expect(error, f"{name}: .*{message}", function, **{name: bad})
    expect(TypeError, "thresholds: .*expected .*None", function, thresholds=None)
    expect(ValueError, "kind: expected .*'quarter'", function, kind="quarter")
    expect(ValueError, "first: expected .*'left'", function, first="left")
    expect(ValueError, "norm: expected one of 'l2', 'linf', got 'l1'", function, norm="l1")


RINGS_OF_WEIGHTS = [prox, residual, sparsity.ring_norms, sparsity.kernel_sizes]


@pytest.mark.parametrize("function", [*RINGS_OF_WEIGHTS, lambda weight, kind: RingPenalty(0.1, kind).prox(weight, 1.0)])
def test_even_kernels_have_no_full_rings(function):
    message = r"kernel_size: expected odd sizes for full rings, got \(3, 4\)"
    expect(ValueError, message, function, weight=torch.ones(4, 2, 3, 4), kind="full")


BAD_METRICS = [
    (0.5, TypeError, "float"),
    (torch.ones(4, 2, 3), ValueError, r"\(4, 2, 3, 3\), got \(4, 2, 3\)"),
    (torch.ones(1, 2, 3, 3), ValueError, r"\(4, 2, 3, 3\), got \(1, 2, 3, 3\)"),
    (ONES.int(), TypeError, "int32"),
    (torch.ones(4, 2, 3, 3, device="meta"), TypeError, "device cpu .*meta"),
    (ONES.to_sparse(), TypeError, "sparse"),
    (ONES.index_fill(0, torch.tensor(1), 0.0), ValueError, r"positive numbers, got 0\.0"),
    (-ONES, ValueError, r"positive numbers, got -1\.0"),
]


@pytest.mark.parametrize(
    "function", [prox, residual, *(lambda metric, p=p: p.prox(WEIGHT, 1.0, metric) for p in PENALTIES)]
)
def test_metrics_that_cannot_be(function):
    for bad, error, came in BAD_METRICS:
        expect(error, f"metric: expected .*{came}", function, metric=bad)


def test_results_of_another_shape():
    for result in (torch.ones(4, 2, 3), torch.ones(1, 2, 3, 3)):
        message = r"result: expected weight's shape \(4, 2, 3, 3\), got"
        expect(ValueError, message, sparsity.kkt_residual, weight=WEIGHT, result=result, thresholds=T)
    message = "result: expected a tensor, got list"
    expect(TypeError, message, sparsity.kkt_residual, weight=WEIGHT, result=[1.0], thresholds=T)


BAD_PENALTIES = [
    ({"strength": -0.1}, ValueError, r"strength: expected a finite number of at least 0, got -0\.1"),
    ({"strength": float("nan")}, ValueError, "strength: expected a finite .*nan"),
    ({"strength": float("inf")}, ValueError, "strength: expected a finite .*inf"),
    ({"strength": "1"}, TypeError, "strength: expected a number, got '1'"),
    ({"strength": True}, TypeError, "strength: expected a number, got True"),
    ({"weighting": "heavy"}, ValueError, "weighting: expected one of 'plain', .*'heavy'"),
    ({"weighting": ["plain"]}, ValueError, "weighting: expected"),
    ({"norm": "l1"}, ValueError, "norm: expected .*'l1'"),
    ({"power": 3}, ValueError, "power: expected 1 or 2, got 3"),
    ({"power": True}, ValueError, "power: expected 1 or 2, got True"),
    ({"power": "2"}, ValueError, "power: expected 1 or 2, got '2'"),
]


def test_penalties_and_steps_that_cannot_be():
    for options, error, message in BAD_PENALTIES:
        for make in (RingPenalty, KernelPenalty):
            expect(error, message, make, **{"strength": 0.1, **options})
    expect(ValueError, "kind: expected one of 'half', 'full', got 'quarter'", RingPenalty, strength=0.1, kind="quarter")
    expect(ValueError, "first: expected .*'left'", RingPenalty, strength=0.1, first="left")
    for penalty in PENALTIES:
        for step in (-1.0, float("nan"), float("inf")):
            message = f"step: expected a finite number of at least 0, got {step}"
            expect(ValueError, message, penalty.prox, weight=WEIGHT, step=step)
        for step in ("1", None, True):
            expect(TypeError, f"step: expected a number, got {step!r}", penalty.prox, weight=WEIGHT, step=step)


RINGS = [0, 0, 0, 0, 2, 1, 0, 1, 1]
BAD_CALLS = [
    ({"rings": RINGS[1:]}, ValueError, "rings: expected one entry for each of the 9 taps of weight, got 8"),
    ({"rings": [3, *RINGS[1:]]}, ValueError, r"rings: expected entries from 0 to 2, got \[3"),
    ({"rings": [-1, *RINGS[1:]]}, ValueError, r"rings: expected entries from 0 to 2, got \[-1"),
    ({"thresholds": ROW[:0]}, ValueError, "rings: expected 1 to 64 of them, got 0"),
    ({"thresholds": ROW[:1].repeat(65)}, ValueError, "rings: expected 1 to 64 of them, got 65"),
    ({"thresholds": ROW.float()}, TypeError, "thresholds: expected a float64 tensor .*float32"),
    ({"thresholds": ROW[0]}, ValueError, r"thresholds: expected shape .*\(\)"),
    ({"weight": torch.ones(9)}, ValueError, r"weight: expected shape .*\(9,\)"),
    ({"weight": torch.ones(4, 2, 9, dtype=torch.int32)}, TypeError, "weight: expected .*int32"),
    ({"metric": WEIGHT.int()}, TypeError, "metric: expected .*int32"),
]


def test_calls_of_the_operator_that_cannot_be():
    expect(ValueError, r"squared: expected shape \(3,\), got \(4, 3\)", prox, squared=torch.ones(4, 3))
    for given, error, message in BAD_CALLS:
        expect(error, message, ops.ring_prox, **{"weight": WEIGHT, "rings": RINGS, "thresholds": ROW, **given})


BAD_NATIVE_CALLS = [
    ({"rings": RINGS[1:]}, "rings: expected one entry"),
    ({"rings": [64, *RINGS[1:]]}, "rings: expected"),
    ({"rings": [-1, *RINGS[1:]]}, "rings: expected"),
    ({"thresholds": ROW[:2]}, "rings: expected entries from 0 to 1"),
    ({"thresholds": ROW.float()}, "thresholds: expected a contiguous float64"),
    ({"thresholds": ROW.repeat(3, 1)}, "thresholds: expected 4 rows, got 3"),
    ({"thresholds": ROW.repeat(2)[::2]}, "thresholds: expected"),
    ({"squared": ROW[:2]}, "squared: expected"),
    ({"metric": WEIGHT[:2]}, "metric: expected weight's shape"),
    ({"weight": WEIGHT[:, :0]}, "weight: expected filters of at least one"),
    ({"weight": WEIGHT[0, 0, 0]}, "weight: expected"),
    ({"weight": WEIGHT.int()}, "weight.*: expected float32"),
]


@pytest.mark.usefixtures("native")
def test_compiled_operators_read_no_memory_that_is_not_there():
    operators = ops.backends.operators()
    plain = {"weight": WEIGHT, "rings": RINGS, "thresholds": ROW, "squared": None, "metric": None, "linf": False}
    for given, message in BAD_NATIVE_CALLS:
        expect(RuntimeError, message, operators.ring_prox, **{**plain, **given})
    expect(RuntimeError, "rings: expected 1 to 64", operators.ring_norms, weight=WEIGHT, rings=RINGS, count=65)
