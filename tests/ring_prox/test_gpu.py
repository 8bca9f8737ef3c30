"""Tests of ring_prox's CUDA and Triton kernels on a GPU: every mode, without synchronizing, and in CUDA graphs.

``make device-check`` also runs those named ``test_kernels_...`` under compute-sanitizer.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.reference import ring_prox as reference
from tests.gpu import no_syncs, using
from tests.ring_prox.cases import LAYOUTS
from tests.ring_prox.triton_calls import BF16, F16, F32, F64, Call, assert_same, make
from tests.tolerances import ULPS_OF_ROOTS, largest_of_kernels

on_a_gpu = pytest.mark.usefixtures("backend")


@pytest.fixture(params=["native", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force our CUDA or our Triton kernels."""
    yield from using("ring_prox", request.param)


MODES = list(itertools.product([False, True], repeat=3))  # linf, metric, squared
SHAPES = [(70, 30, 3, 3), (2, 400, 5), (10, 1, 7, 7), (30, 300, 1, 1), (5, 3, 3, 3, 3)]


def on_gpu(call: Call) -> Call:
    """Move the call's tensors to the GPU with their strides."""
    weight, metric = (
        None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)
        for t in (call.weight, call.metric)
    )
    return replace(call, weight=weight, metric=metric)


def prox(call: Call) -> Tensor:
    weight, rings, thresholds, squared, metric, linf = call.arguments()
    return ops.ring_prox(weight, rings, thresholds, squared, metric, linf=linf)


def assert_is_reference(call: Call, result: Tensor | None = None) -> None:
    result = prox(on_gpu(call)) if result is None else result
    scale = largest_of_kernels(call.weight).expand_as(call.weight)
    assert_same(result.cpu(), reference.ring_prox(*call.arguments()), scale, ULPS_OF_ROOTS[call.weight.dtype])


@on_a_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_kernels_of_every_mode_find_what_the_reference_finds(shape, dtype):
    for (linf, metric, squared), layout in itertools.product(MODES, ("contiguous", "channels_last", "gaps")):
        call = make(shape, dtype, linf, squared, dtype if metric else None)
        assert_is_reference(replace(call, weight=LAYOUTS[layout](call.weight)))


@on_a_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_kernels_find_the_references_norms(shape, dtype):
    call = make(shape, dtype)
    count = call.thresholds.shape[-1]
    expected = reference.ring_norms(call.weight, call.rings, count)
    assert_same(ops.ring_norms(call.weight.cuda(), call.rings, count).cpu(), expected, expected)


@pytest.mark.usefixtures("cuda_on_cpu")
def test_the_tests_of_kernels_find_no_fault_in_cuda_kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(sys.modules[__name__], "on_gpu", lambda call: call)
    test_kernels_of_every_mode_find_what_the_reference_finds((2, 3, 3, 3), F32)
    test_kernels_find_the_references_norms((2, 3, 3, 3), BF16)
    test_kernels_leave_nan_and_infinity_in_their_filters(torch.nan)


@on_a_gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_kernels_leave_nan_and_infinity_in_their_filters(value):
    for (linf, metric, squared), dtype in itertools.product(MODES[::2], (F64, F32)):
        call = make((3, 20, 3, 3), dtype, linf, squared, F32 if metric else None)
        call.weight[1, 2, 1, 1] = value
        assert_is_reference(call)


@on_a_gpu
def test_calls_do_not_wait_for_the_gpu():
    calls = [make((8, 20, 3, 3), F32, *mode[::2], F32 if mode[1] else None) for mode in MODES]
    there = [on_gpu(call) for call in calls]
    for call in there:
        prox(call)  # compiles
    with no_syncs():
        results = [prox(replace(call, thresholds=call.thresholds * 0.5)) for call in there]
    for call, result in zip(calls, results, strict=True):
        assert_is_reference(replace(call, thresholds=call.thresholds * 0.5), result)


@on_a_gpu
def test_a_graph_repeats_what_it_has_recorded_whatever_comes_between():
    call = make((8, 20, 3, 3), F32, metric=F32)
    there = on_gpu(call)
    prox(there)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = prox(there)
    for i in range(600):  # evicts the first eager tables from the cache
        prox(replace(there, thresholds=call.thresholds * i))
    for seed in range(3):
        call.weight.copy_(torch.randn(call.weight.shape, generator=torch.Generator().manual_seed(seed)))
        there.weight.copy_(call.weight)
        graph.replay()
        assert_is_reference(call, result)


@on_a_gpu
def test_streams_do_not_disturb_each_other():
    calls = [make((8, 20, 3, 3), F32, linf) for linf in (False, True)] * 2
    there = [on_gpu(call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results = []
    for call, stream in zip(there, streams, strict=True):
        with torch.cuda.stream(stream):
            results.append(prox(call))
    torch.cuda.synchronize()
    for call, result in zip(calls, results, strict=True):
        assert_is_reference(call, result)
