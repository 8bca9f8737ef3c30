"""Tests of block_sparse's Triton kernels on a GPU: each case in each dtype, without syncs, and in CUDA graphs.

``make device-check`` also runs those named ``test_kernels_...`` under compute-sanitizer.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import loco_ext
from loco_ext import ops
from loco_ext.geometry import BlockPattern
from loco_ext.nn import LocallyConnected2d
from loco_ext.ops import block_sparse
from tests.block_sparse.cases import (
    CASES,
    FLOATS,
    LAYOUTS,
    TRITON_CASES,
    Case,
    Problem,
    assert_is_dense,
    assert_only_readers_are_not_finite,
    dense_results,
    make_problem,
    results,
    sizes_of_terms,
)
from tests.covering import covering
from tests.gpu import needs_gpu, no_syncs
from tests.tolerances import TF32, assert_sum_of_products, same_bits
from tests.triton_runs import needs_triton

pytestmark = [needs_triton, needs_gpu]

EVERY = TRITON_CASES | {
    **{name: CASES[name] for name in ("convolution", "one sample, whole vectors", "large batch")},
    "reference layer, small image": Case(250, 1, 64, 64, 36, 36, kernel=3),
    "256 channels": Case(70, 1, 256, 256, 9, 9, kernel=3),
    "large batch, groups": Case(1024, 4, 16, 32, 9, 9, kernel=3),
    "long rows": Case(17, 1, 20, 24, 7, 300),
}


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Return combinations in which all values of every two axes meet, all of them ordinary tests."""
    return [each.values for each in covering(*axes)]


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with loco_ext.backend("triton"), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def on_gpu(problem: Problem, dtype: torch.dtype) -> tuple[list[Tensor], BlockPattern]:
    """Return ([x, values, bias, grad], pattern) on the GPU."""
    return [t.cuda() for t in problem.operands(dtype)], problem.pattern.to("cuda")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_results_are_those_of_a_dense_matrix(name, dtype):
    problem = make_problem(EVERY[name], dtype)
    operands, pattern = on_gpu(problem, dtype)
    assert_is_dense(problem, results(*operands, pattern), dtype)


@pytest.mark.parametrize("name", ["convolution", "100 channels", "reference layer, small image", "odd groups"])
def test_tf32_where_convolutions_use_it(name):
    problem = make_problem(EVERY[name], torch.float32)
    operands, pattern = on_gpu(problem, torch.float32)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert_is_dense(problem, results(*operands, pattern), torch.float32, TF32)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    pairs(["convolution", "odd groups", "depthwise", "100 channels"], LAYOUTS, FLOATS),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_kernels_take_any_layout(name, layout, dtype):
    problem = make_problem(EVERY[name], dtype)
    laid_out = [layout(t).cuda() for t in problem.operands(dtype)]
    assert_is_dense(problem, results(*laid_out, problem.pattern.to("cuda")), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), pairs(["reference layer, small image", "depthwise", "100 channels"], FLOATS), ids=str
)
def test_every_run_gives_the_same_bits(name, dtype):
    operands, pattern = on_gpu(make_problem(EVERY[name], dtype), dtype)
    expected = results(*operands, pattern)
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            busy @ busy
        assert all(same_bits(*pair) for pair in zip(results(*operands, pattern), expected, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    pairs(["convolution", "depthwise", "not a multiple of anything"], FLOATS, [torch.nan, torch.inf]),
    ids=str,
)
def test_nan_and_infinity_reach_what_reads_them_and_nothing_else(name, dtype, value):
    problem = make_problem(EVERY[name], dtype)
    pixel = problem.live.sum(0).argmax()
    problem.x[1, pixel] = value
    (x, values, bias, _), pattern = on_gpu(problem, dtype)
    y = ops.block_sparse_matmul(x, values, pattern, bias).cpu()
    assert_only_readers_are_not_finite(y, problem.live, pixel)


def test_calls_do_not_wait_for_the_gpu():
    operands, pattern = on_gpu(make_problem(EVERY["reference layer, small image"], torch.bfloat16), torch.bfloat16)
    expected = results(*operands, pattern)  # compiles
    with no_syncs():
        found = results(*operands, pattern)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


def test_a_graph_repeats_what_it_has_recorded():
    operands, pattern = on_gpu(make_problem(EVERY["convolution"], torch.float32), torch.float32)
    results(*operands, pattern)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(*operands, pattern)
    for _ in range(3):
        for operand in operands:
            operand.normal_()
        graph.replay()
        assert all(same_bits(*pair) for pair in zip(found, results(*operands, pattern), strict=True))


def test_no_memory_is_taken_but_for_results():
    operands, pattern = on_gpu(make_problem(EVERY["reference layer, small image"], torch.bfloat16), torch.bfloat16)
    results(*operands, pattern)
    torch.cuda.synchronize()
    x, _, _, grad = operands
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = results(*operands, pattern)
    more = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in kept)
    assert more <= 0.01 * (x.nbytes + grad.nbytes) + 512 * len(kept)


def test_a_training_step_compiles_into_one_graph():
    operands, pattern = on_gpu(make_problem(CASES["convolution"], torch.bfloat16), torch.float32)
    leaves = [t.requires_grad_() for t in operands[:3]]
    pattern.transpose()

    def loss(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return ops.block_sparse_matmul(x * 2, values, pattern, bias).float().sin().sum()

    eager, compiled = (f(*leaves) for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")))
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves) for value in (eager, compiled)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    pairs(["convolution", "depthwise", "odd groups"], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_autocast_computes_in_its_dtype_and_keeps_gradients_of_values_in_float32(name, dtype):
    problem = make_problem(EVERY[name], dtype)
    (x, values, bias, grad), pattern = on_gpu(problem, torch.float32)
    operands = [t.requires_grad_() for t in (x, values, bias)]
    with torch.autocast("cuda", dtype):
        y = ops.block_sparse_matmul(x, values, pattern, bias)
    assert same_bits(y, ops.block_sparse_matmul(x.to(dtype), values.to(dtype), pattern, bias.to(dtype)))
    found = torch.autograd.grad(y, operands, grad.to(dtype))
    assert [t.dtype for t in found] == [torch.float32] * 3
    assert_sum_of_products(found[1].cpu(), dense_results(problem)[2], sizes_of_terms(problem)[2])


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    pairs(
        [(3, 64, 1024), (2, 67, 131), (1, 16, 4096), (2, 1000, 3)],
        [*zip(FLOATS, FLOATS, strict=True), *itertools.permutations(FLOATS[1:], 2)],
    ),
    ids=str,
)
def test_kernels_that_transpose_copy_every_bit(shape, dtypes):
    x = torch.randn(shape).to("cuda", dtypes[0]).transpose(1, 2)
    found = torch.ops.loco_ext.block_sparse_transposed(x, dtypes[1])
    assert found.is_contiguous()
    assert same_bits(found, x.to(dtypes[1]))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_nchw_images_give_what_channels_last_ones_do(monkeypatch, autocast):
    monkeypatch.setattr(block_sparse, "_LEAST_TRANSPOSED", 0)
    layer = LocallyConnected2d(16, 32, 3, padding=1, input_size=(7, 8), device="cuda")
    x, grad = torch.randn(20, 16, 7, 8, device="cuda"), torch.randn(20, 32, 7, 8, device="cuda")
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        image = x.contiguous(memory_format=memory_format).requires_grad_()
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            y = layer(image)
        assert y.is_contiguous(memory_format=memory_format)
        gradients = torch.autograd.grad(y, (image, *layer.parameters()), grad.to(y.dtype))
        assert gradients[0].stride() == image.stride()
        found.append((y, *gradients))
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
