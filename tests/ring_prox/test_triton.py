"""Tests of ring_prox's Triton kernels against the reference, in Triton's interpreter.

The interpreter must be chosen before triton is imported, so it runs in a process of its own. There, weights are
surrounded by NaN and results by numbers that must stay unchanged.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from loco_ext.triton_kernels.uploads import Uploads
from torch import Tensor

from loco_ext.ops.ring_prox import ProxCall
from loco_ext.reference import ring_prox as reference
from tests.covering import covering, slow
from tests.ring_prox.cases import LAYOUTS
from tests.ring_prox.triton_calls import BF16, F16, F32, F64, Call, assert_same, make
from tests.tolerances import assert_within_ulps, same_bits
from tests.triton_runs import Guarded, interpret, needs_mmap, needs_triton, reserved

pytestmark = needs_triton


# ---- in the interpreter's process


def run(calls: list[Call]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the calls' results, with those of ring_norms where there is no metric and no linf."""
    from loco_ext.triton_kernels import ring_prox

    results = []
    for call in calls:
        with pytest.MonkeyPatch.context() as patch:
            guards = {name: Guarded(getattr(torch, name)) for name in ("empty", "empty_like")}
            for name, value in call.settings.items():
                patch.setattr(ring_prox, name, value)
            patch.setattr(ring_prox, "_UPLOADS", Uploads())
            before = call.weight.clone()
            for name, guard in guards.items():
                patch.setattr(torch, name, guard)
            norms = None
            if call.metric is None and not call.linf:
                norms = ring_prox.ring_norms(call.weight, call.rings, call.thresholds.shape[-1])
            result = ring_prox.ring_prox(*call.arguments())
        assert same_bits(call.weight, before)
        for guard in guards.values():
            guard.check()
        results.append((result, norms))
    return results


def run_together(calls: list[Call]) -> tuple[list[Tensor], int]:
    """Return the proxes of calls made together, with the settings of the first, and the number of launches."""
    from loco_ext.triton_kernels import ring_prox

    launches = Launches(ring_prox.prox_kernel)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (calls[0].settings | {"prox_kernel": launches}).items():
            patch.setattr(ring_prox, name, value)
        patch.setattr(ring_prox, "_UPLOADS", Uploads())
        results = ring_prox.ring_proxes([ProxCall(*call.arguments()) for call in calls])
    return results, launches.number


@dataclass
class Launches:
    """A kernel that counts its launches."""

    kernel: Any
    number: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.number += 1
        return self.kernel[grid]


def is_on_device(thresholds: Tensor) -> bool:
    """Return True: the kernel reads thresholds by their address."""
    return True


def far() -> tuple[Tensor, Tensor]:
    """Return weights whose kernels and channels span more than 2^31 elements, and their result."""
    from loco_ext.triton_kernels import ring_prox

    strides = (2**31 + 3, 2**30 - 1, 2**29 + 1)
    size = sum(strides[i] * n for i, n in enumerate((1, 4, 2))) + 1
    weight = reserved(size, BF16).as_strided((2, 5, 3), strides)
    weight.copy_(torch.randn(2, 5, 3))
    result = ring_prox.ring_prox(weight, [0, 1, 0], torch.tensor([0.5, 0.7], dtype=F64), None, weight.abs(), False)
    return weight.float(), result.float()


# ---- in this process


@pytest.fixture
def interpreter(interpreter_process: ProcessPoolExecutor) -> Callable[..., Any]:
    """Return a function that calls a function, with its arguments, in the interpreter's process."""
    return partial(interpret, interpreter_process)


def assert_is_reference(interpreter: Callable[..., Any], *calls: Call) -> None:
    for call, (result, norms) in zip(calls, interpreter(run, list(calls)), strict=True):
        expected = reference.ring_prox(*call.arguments())
        assert result.dtype == call.weight.dtype
        assert result.stride() == torch.empty_like(call.weight).stride()
        assert_same(result, expected, call.weight.abs())
        if norms is not None:
            of = reference.ring_norms(call.weight, call.rings, call.thresholds.shape[-1])
            assert norms.dtype == of.dtype
            assert_same(norms, of, of)


# linf, dtype of the metric, squared, dtype: every dtype meets every form of the norm without squared thresholds.
MODES = [
    *((False, None, False, BF16), (False, F64, False, F32), (True, F64, False, F64), (True, None, False, F16)),
    (False, None, True, F64),
    *(slow((False, None, False, dtype)) for dtype in (F64, F32, F16)),
    *map(slow, [(True, F16, False, BF16), (False, BF16, False, F64), (False, F32, False, F16)]),
    *map(slow, [(True, None, False, F32), (True, None, True, F64), (False, F64, True, F64), (True, F32, True, F32)]),
]
SMALL = {"BLOCKS": (4, 8)}  # several blocks per ring, the last not whole


@pytest.mark.parametrize(("linf", "metric", "squared", "dtype"), MODES, ids=str)
def test_every_mode_is_the_reference(interpreter, linf, metric, squared, dtype):
    """Thresholds are those of all filters where results are float64, else there is a row for each filter."""
    call = make((1 if squared else 2, 3, 3, 3), dtype, linf, squared, metric, rows=dtype != F64)
    assert_is_reference(interpreter, call)
    assert not same_bits(reference.ring_prox(*call.arguments()), call.weight)


@pytest.mark.parametrize("layout", [name if i % 2 else slow(name) for i, name in enumerate(LAYOUTS)])
def test_any_layout_is_read_and_written_where_it_lies(interpreter, layout):
    call = make((2, 5, 2, 2), F64)
    calls = [replace(call, weight=LAYOUTS[layout](call.weight), settings=SMALL)]
    names = list(LAYOUTS)
    number = names.index(layout)
    other = LAYOUTS[names[number - 2]]
    call = make((2, 5, 2, 2), *((F32, False), (BF16, True))[number % 2], metric=(F32, F16)[number % 2])
    calls.append(replace(call, weight=LAYOUTS[layout](call.weight), metric=other(call.metric)))
    calls.append(make((2, 1, 3, 1)))
    calls[-1].weight = calls[-1].weight.expand(2, 6, 3, 1)  # channels lie on each other
    assert_is_reference(interpreter, *calls[: 3 if layout == "channels_last" else 2])


SIZES = {
    "no_taps": (2, 40),
    "one_weight": (1, 1, 1, 1),
    "pointwise": (1, 33, 1, 1),
    "depthwise": (2, 1, 3, 3),
    "depthwise_7x7": (1, 1, 7, 7),
    "1d": (1, 7, 5),
    "even": (1, 3, 4, 4),
    "flat": (1, 3, 1, 6),
    "3d": (1, 2, 3, 2, 3),
    "two_blocks": (1, 700, 3),
}


@pytest.mark.parametrize("size", [slow(name) if i % 3 else name for i, name in enumerate(SIZES)])
def test_any_size_is_the_reference(interpreter, size):
    shape = SIZES[size]
    rings = [0] if len(shape) == 2 else None
    modes = [(F32, False, None), (F64, False, F64), (F32, True, None)][
        :: 1 if size in ("depthwise", "two_blocks") else 2
    ]
    assert_is_reference(interpreter, *(make(shape, *mode[:2], metric=mode[2], rings=rings) for mode in modes))


@pytest.mark.parametrize("channels", [8, 9])
def test_blocks_that_are_not_whole_end_where_the_ring_does(interpreter, channels):
    calls = [make((1, channels, 3), F32, linf, metric=None if linf else F32) for linf in (False, True)]
    last = [replace(call, weight=LAYOUTS["channels_last"](call.weight)) for call in calls]
    chosen = (calls[0], last[1]) if channels % 2 else (calls[1], last[0])
    assert_is_reference(interpreter, *(replace(call, settings=SMALL) for call in chosen))


@pytest.mark.parametrize("linf", [False, slow(True)])
def test_rings_may_have_any_taps_and_none(interpreter, linf):
    ringses = [[2, 0, 4, 2, 0, 4], [5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5], [3, 0, 0, 0, 0, 0]]
    calls = [
        make((1, 2, 2, 3), *((F64, linf) if i % 2 == linf else (F32, linf, False, F32)), rings=rings)
        for i, rings in enumerate(ringses)
    ]
    calls.append(make((1, 2, 3), F32, linf, squared=True, rings=[1, 1, 4]))
    assert_is_reference(interpreter, *calls, make((1, 2, 3, 1, 2, 2), linf=linf, rings=[*range(6), *range(6)]))


@pytest.mark.parametrize("settings", [{}, slow({"_is_on_device": is_on_device})], ids=["in_table", "on_device"])
def test_weights_of_a_kind_share_a_launch(interpreter, settings):
    """They differ in filters, channels, taps, rings, strides and whether each filter has thresholds of its own."""
    shapes = [(2, 2, 3, 3), (1, 3, 3, 1), (1, 4, 5), (0, 2, 3, 3), (3, 1, 3, 3)]
    plain = [make(shape, rows=k % 2 == 0) for k, shape in enumerate(shapes)]
    plain[1] = replace(plain[1], weight=LAYOUTS["channels_slowest"](plain[1].weight))
    others = [make(shape, BF16, linf, metric=F32) for linf in (False, True) for shape in shapes[:2]]
    double = make((2, 1, 3), F64, metric=F64)
    calls = [replace(call, settings=settings) for call in (*plain[:2], *others, double, *plain[2:])]
    results, launches = interpreter(run_together, calls)
    for call, result in zip(calls, results, strict=True):
        assert_same(result, reference.ring_prox(*call.arguments()), call.weight.abs())
    assert launches == 5  # of two rings, of three, with a metric by both norms, and in float64


@pytest.mark.slow
def test_as_many_rings_as_there_may_be(interpreter):
    rings = torch.randperm(64).tolist()
    calls = [make((1, 2, 64), F32, strength=0.1, rings=rings), make((1, 1, 64), F32, linf=True, rings=rings)]
    calls[1].thresholds[:, :-1] = 0
    assert_is_reference(interpreter, *calls)


def with_thresholds(call: Call, *values: float) -> Call:
    return replace(call, thresholds=torch.tensor(values, dtype=F64))


@pytest.mark.parametrize(
    ("linf", "metric", "dtype"),
    [(False, True, F64), (True, False, F64), *map(slow, [(False, False, BF16), (True, True, BF16)])],
    ids=str,
)
def test_thresholds_of_0_change_nothing_and_large_ones_leave_nothing(interpreter, linf, metric, dtype):
    call = make((2, 2, 3, 3), dtype, linf, metric=dtype if metric else None)
    nothing = with_thresholds(call, 0, 0, 0)
    for result, _norms in interpreter(run, [nothing, replace(nothing, squared=nothing.thresholds)]):
        assert same_bits(result, call.weight)
    calls = [with_thresholds(call, *values) for values in [(1e3, 0, 0), (0, 0, 1e3)]]
    assert_is_reference(interpreter, *calls)
    assert (reference.ring_prox(*calls[1].arguments()) == 0).all()


@pytest.mark.parametrize(
    ("value", "linf", "metric"), covering([torch.nan, -torch.inf], [False, True], [False, True]), ids=str
)
def test_nan_and_infinity_stay_in_their_kernels(interpreter, linf, metric, value):
    calls = []
    for dtype, place in [(F64, 0), (F16, 4), (F32, 8)]:
        call = make((2, 1, 3, 3), dtype, linf, metric=F32 if metric else None, strength=0.3)
        call.weight[1, 0].view(-1)[place] = value
        calls.append(with_thresholds(call, 0.1, 0, 0) if dtype == F16 else call)
    assert_is_reference(interpreter, *calls)


@pytest.mark.parametrize("linf", [False, slow(True)])
def test_weights_with_an_infinite_metric_stay(interpreter, linf):
    for dtype in (F64, F32):
        call = make((3, 2, 5), dtype, linf, metric=dtype, strength=0.5, rings=[0, 1, 0, 1, 1])
        call.metric[0, 0, 2] = torch.inf
        call.metric[1] = torch.inf
        call.metric[2, :, ::2] = torch.inf
        stays = call.metric.isinf()
        expected = reference.ring_prox(*call.arguments())
        assert torch.equal(expected[stays], call.weight[stays])
        assert not torch.equal(expected[0], call.weight[0])
        assert_is_reference(interpreter, call)


def test_nan_spreads_in_its_kernel_where_thresholds_are_squared_and_infinity_only_in_their_groups(interpreter):
    calls = []
    for linf, metric, place in itertools.product([False, True], [False, True], [0, 2]):
        calls.append(make((1, 2, 3), F32, linf, True, F32 if metric else None))
        calls[-1].weight[0, 1, place] = torch.nan
    plain = with_thresholds(make((1, 2, 3), F32, rings=[0, 1, 2]), 0.1, 0, 0)
    plain.weight[0, 0, 2] = torch.inf
    calls.append(replace(plain, squared=torch.tensor([0, 0, 0.1], dtype=F64)))
    *with_nan, (with_infinity, _norms) = interpreter(run, calls)
    for call, (result, _norms) in zip(calls, with_nan, strict=False):
        assert result.isnan().all()
        assert reference.ring_prox(*call.arguments()).isnan().all()
    assert_same(with_infinity, reference.ring_prox(*plain.arguments()), plain.weight.abs())


@pytest.mark.parametrize("size", [1e-320, *map(slow, [1e307, 1e-200, 1e150])])
def test_squares_need_not_fit_into_float64(interpreter, size):
    calls = []
    for metric in (None, F64):
        call = make((2, 2, 3), F64, metric=metric)
        call.weight[1, :, 0] = 0
        calls.append(replace(call, weight=call.weight * size, thresholds=call.thresholds * size))
    assert_is_reference(interpreter, *calls)


def test_rings_of_zeros_stay_and_there_may_be_no_kernels(interpreter):
    calls = [
        make((2, 2, 3), dtype, linf, metric=F32 if metric else None)
        for dtype, linf, metric in (each.values for each in covering([F64, F32], [False, True], [False, True]))
    ]
    for call in calls:
        call.weight[0] = 0
    calls.append(make((0, 2, 3)))  # has no filters
    rings = with_thresholds(make((1, 2, 3), F32, metric=F32, rings=[0, 1, 2]), 0, 0.1, 0.1)
    rings.weight[:, :, 0] = 0
    assert_is_reference(interpreter, *calls, rings)


@pytest.mark.slow
def test_weights_numbered_in_64_bits(interpreter):
    calls = [make((2, 7, 3), F32, linf, metric=F32) for linf in (False, True)]
    calls.append(replace(calls[0], weight=LAYOUTS["channels_last"](calls[0].weight)))
    assert_is_reference(interpreter, *(replace(call, settings={"NARROW": 0, **SMALL}) for call in calls))


@needs_mmap
def test_weights_that_lie_farther_apart_than_2_to_the_31(interpreter):
    weight, result = interpreter(far)
    t = torch.tensor([0.5, 0.7], dtype=F64)
    expected = reference.ring_prox(weight.to(BF16), [0, 1, 0], t, None, weight.to(BF16).abs(), False)
    assert_within_ulps(result.to(BF16), expected, scale=weight.abs())
