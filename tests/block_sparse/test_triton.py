"""Tests of the Triton kernels of block_sparse in Triton's interpreter, against a dense matrix in float64.

The interpreter must be chosen before triton is imported, so it runs in a process of its own. Its tl.dot is wrong for
bfloat16, which tests/block_sparse/test_triton_gpu.py covers. Activations are surrounded by NaN, results by numbers that
must stay unchanged.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import loco_ext
from loco_ext import ops
from loco_ext.ops import backends
from loco_ext.reference import block_sparse as reference
from tests.block_sparse.cases import (
    CASES,
    TRITON_CASES,
    Case,
    Problem,
    assert_is_dense,
    assert_only_readers_are_not_finite,
    channels_first,
    dense_results,
    in_wider_rows,
    make_problem,
    shifted,
    sizes_of_terms,
    spread,
)
from tests.covering import slow
from tests.tolerances import assert_sum_of_products, same_bits
from tests.triton_runs import Guarded, interpret, needs_mmap, needs_triton, reserved

pytestmark = needs_triton

F64, F32, F16 = torch.float64, torch.float32, torch.float16


@dataclass
class Call:
    """Operands, the pattern's index tensors by output and by input pixel, and settings of the launcher."""

    x: Tensor
    values: Tensor
    bias: Tensor | None
    grad: Tensor
    by_output: tuple[Tensor, Tensor]
    by_input: tuple[Tensor, Tensor, Tensor]
    most: dict[str, int] = field(default_factory=dict)
    blocks_of_a_program: int | None = None
    gpu: dict[str, int] | None = None
    tf32: bool = False  # the interpreter multiplies in float32 all the same

    def products(self, module: Any) -> tuple[Tensor, ...]:
        """Return the product and the gradients of x and values."""
        of_values = "block_sparse_value_gradient" + ("" if self.values.dtype == self.x.dtype else "_float32")
        return (
            module.block_sparse_matmul(self.x, self.values, *self.by_output, self.bias),
            module.block_sparse_input_gradient(self.grad, self.values, *self.by_input),
            getattr(module, of_values)(self.x, self.grad, *self.by_output, self.values.shape[1]),
        )


# ---- in the interpreter's process


def run(*calls: Call) -> list[tuple[Tensor, ...]]:
    """Compute the products of calls, in the interpreter's process, and assert that nothing else is written."""
    from loco_ext.triton_kernels import block_sparse, block_sparse_tiles

    results = []
    for call in calls:
        empty = Guarded(torch.empty)
        operands = (call.x, call.values, call.grad)
        before = [operand.clone() for operand in operands]
        with pytest.MonkeyPatch.context() as patch:
            tiles = {kind: replace(most, **call.most) for kind, most in block_sparse_tiles.MOST.items()}
            patch.setattr(block_sparse_tiles, "MOST", tiles)
            forget_plans()
            if call.blocks_of_a_program is not None:
                patch.setattr(block_sparse_tiles, "BLOCKS_OF_A_PROGRAM", call.blocks_of_a_program)
            if call.gpu is not None:
                gpu = block_sparse_tiles.GpuLimits(**call.gpu)
                patch.setattr(block_sparse, "_gpu", lambda _device, gpu=gpu: gpu)
            patch.setattr(block_sparse, "_tf32", lambda dtype, call=call: call.tf32)
            patch.setattr(torch, "empty", empty)
            results.append(call.products(block_sparse))
        assert all(same_bits(*pair) for pair in zip(operands, before, strict=True)), "an operand was written"
        empty.check()
        assert all(result.is_contiguous() for result in results[-1])
    forget_plans()
    return results


def forget_plans() -> None:
    """Let plans be made anew, as the largest tiles that they depend on have changed."""
    from loco_ext.triton_kernels import block_sparse_tiles

    for plan in (block_sparse_tiles.product, block_sparse_tiles.gradient, block_sparse_tiles.depthwise):
        plan.cache_clear()


FAR_PATTERN = (
    (torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])),
    (torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])),
)


def far_activations(depth: int) -> tuple[Tensor, ...]:
    """Return results and operands of a call whose samples lie 2^31 elements apart, and pixels farther."""
    from loco_ext.triton_kernels import block_sparse

    groups = 3 if depth == 1 else 1
    channels = groups * depth
    strides = (2**31, 3 * 2**31, 1) if depth == 16 else (2**31 + 3, 3 * 2**31 + 11, 1)
    size = 2 * strides[0] + strides[1] + channels
    x, grad = (reserved(size, F16).as_strided((3, 2, channels), strides) for _ in range(2))
    x.copy_(torch.randn(3, 2, channels))
    grad.copy_(torch.randn(3, 2, channels))
    values = torch.randn(3, groups, depth, depth).to(F16)
    results = Call(x, values, None, grad, *FAR_PATTERN).products(block_sparse)
    return tuple(tensor.contiguous() for tensor in (*results, x, values, grad))


def far_blocks(depth: int) -> bool:
    """Return whether products by blocks beyond element 2^31 equal those by the same blocks at the beginning."""
    from loco_ext.triton_kernels import block_sparse

    groups = 1 if depth > 1 else 2**12
    first = 2**31 // (groups * depth * depth) + 5
    values, pixels = reserved((first + 2) * groups * depth * depth, F16), reserved(first + 2, torch.int64)
    values = values.view(-1, groups, depth, depth)
    values[first:] = torch.randn(2, groups, depth, depth)
    pixels[first:] = torch.tensor([1, 0])
    x = torch.randn(3, 2, groups * depth).to(F16)
    pairs = [
        block_sparse.block_sparse_matmul(x, v, crow, p, None)
        for v, p, crow in [
            (values, pixels, torch.tensor([first, first + 2])),
            (values[first:], pixels[first:], torch.tensor([0, 2])),
        ]
    ]
    transposed = [
        block_sparse.block_sparse_input_gradient(x, v, torch.tensor([0, 2]), torch.tensor([0, 1]), blocks)
        for v, blocks in [(values, torch.tensor([first + 1, first])), (values[first:], torch.tensor([1, 0]))]
    ]
    return same_bits(*pairs) and same_bits(*transposed)


# ---- in this process


@pytest.fixture
def results_of(interpreter_process: ProcessPoolExecutor) -> Callable[..., list[tuple[Tensor, ...]]]:
    """Return the function that computes the products of calls in the interpreter."""
    return partial(interpret, interpreter_process, run)


def make_call(problem: Problem, dtype: torch.dtype, **settings: Any) -> Call:
    pattern = problem.pattern
    by_output = pattern.crow_indices, pattern.col_indices
    return Call(*problem.operands(dtype), by_output, tuple(pattern.transpose()), **settings)


def assert_is_reference(call: Call, results: Sequence[Tensor]) -> None:
    """Compare with the float64 reference, which tests/block_sparse/test_product.py compares with a dense matrix."""

    def of(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x, values, grad = (change(t) for t in (call.x, call.values, call.grad))
        bias = None if call.bias is None else change(call.bias)
        return replace(call, x=x, values=values, bias=bias, grad=grad).products(reference)

    for result, expected, sizes in zip(results, of(Tensor.double), of(lambda t: t.double().abs()), strict=True):
        assert_sum_of_products(result, expected, sizes)


# Tiles, accumulators and loads, which depend on the dtype, differ only by kernel.
ORDINARY = ("not a multiple of anything", "few channels, not whole vectors", "no entries")
EVERY_DTYPE = ("odd groups", "depthwise")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(EVERY_DTYPE, [F64, F32, F16]),
        *((name, F32) if name in ORDINARY else slow((name, F32)) for name in TRITON_CASES if name not in EVERY_DTYPE),
    ],
    ids=str,
)
def test_results_are_those_of_a_dense_matrix(results_of, name, dtype):
    problem = make_problem(TRITON_CASES[name], dtype)
    assert_is_dense(problem, *results_of(make_call(problem, dtype)), dtype)


# Tiles of 16 by 16 by 16, so that each call has several of each kind, the last not whole.
SMALL = {"samples": 16, "summed": 16, "channels": 16, "few_samples": 16, "block": 16, "part": 16}


MANY = {"shared_memory": 2**17, "multiprocessors": 1000, "capability": 8}


@pytest.mark.parametrize(
    ("case", "dtype", "settings"),
    [
        (Case(35, 1, 37, 20, 2, 2), F32, {"most": SMALL}),
        (Case(20, 1, 5, 6, 6, 7), F32, {"blocks_of_a_program": 1}),
        (Case(3, 6, 1, 1, 6, 7), F32, {"blocks_of_a_program": 2}),
        (Case(33, 3, 5, 2, 2, 3), F32, {"gpu": MANY}),
        *(slow((Case(35, 1, 37, 20, 2, 2), dtype, {"most": SMALL})) for dtype in (F64, F16)),
        slow((Case(20, 2, 33, 18, 1, 2, 1.0), F32, {"most": SMALL})),
        slow((Case(20, 1, 5, 6, 6, 7), F32, {"blocks_of_a_program": 2, "most": SMALL})),
        slow((Case(35, 1, 20, 37, 2, 3, 1.0), F32, {"gpu": MANY, "tf32": True})),
    ],
    ids=str,
)
def test_tiles_and_programs_come_together(results_of, case, dtype, settings):
    problem = make_problem(case, dtype)
    assert_is_dense(problem, *results_of(make_call(problem, dtype, **settings)), dtype)


# The numbers of blocks of an output pixel differ; on the second GPU, several programs share them.
@pytest.mark.parametrize(
    ("case", "multiprocessors", "dtype", "tf32"),
    [slow((Case(18, 1, 18, 5, 4, 9, 0.8), 1, F16, False)), (Case(50, 2, 16, 7, 5, 4, 0.6), 100, F32, True)],
    ids=str,
)
def test_gradients_of_several_blocks_at_a_time(results_of, monkeypatch, case, multiprocessors, dtype, tf32):
    from loco_ext.triton_kernels import block_sparse_tiles as tiles

    monkeypatch.setattr(tiles, "MOST", {kind: replace(most, **SMALL) for kind, most in tiles.MOST.items()})
    problem = make_problem(case, dtype)
    counts = problem.live.sum(1)
    assert counts.unique().numel() > 1
    gpu = {"shared_memory": 2**11 * dtype.itemsize, "multiprocessors": multiprocessors}
    products, mean = case.groups * case.n_out, counts.sum().item() / case.n_out
    units = (tiles.unit_of(case.depth), tiles.unit_of(case.width))
    plan = tiles.gradient(
        case.batch, case.depth, case.width, dtype, tf32, tiles.GpuLimits(**gpu), units, products, mean
    )
    assert plan.form.blocks == 2 ** math.ceil(math.log2(min(4, mean))) > 1
    assert (counts % plan.form.blocks).any()
    assert (plan.form.slices > 1) == (multiprocessors > 1)
    call = make_call(problem, dtype, most=SMALL, gpu=gpu, tf32=tf32)
    assert_is_dense(problem, *results_of(call), dtype)


@pytest.mark.parametrize("name", ["odd groups", slow("depthwise")])
def test_values_in_float32_are_rounded_to_half_precision_and_their_gradients_are_not(results_of, name):
    problem = make_problem(TRITON_CASES[name], F16)
    call = make_call(problem, F16)
    wide = replace(call, values=call.values.float() * (1 + 2.0**-13))  # rounds to what it was
    assert same_bits(wide.values.half(), call.values)
    expected, (y, grad_x, grad_values) = results_of(call, wide)
    assert same_bits(y, expected[0])
    assert same_bits(grad_x, expected[1])
    assert grad_values.dtype == F32
    assert same_bits(grad_values.half(), expected[2])
    assert_sum_of_products(grad_values, dense_results(problem)[2], sizes_of_terms(problem)[2])


LAYOUTS = {
    "odd groups": (spread, channels_first),
    "depthwise": (shifted, in_wider_rows),
    "rgb": (shifted,),
    "even groups": (in_wider_rows,),
}


@pytest.mark.parametrize("name", ["odd groups", "depthwise", slow("rgb"), slow("even groups")])
def test_layouts_change_nothing(results_of, name):
    """Layouts are those that the operator passes on: adjacent channels of a pixel, contiguous blocks and bias."""
    call = make_call(make_problem(TRITON_CASES[name], F32), F32)
    calls = []
    for layout in LAYOUTS[name]:
        x, grad = (ops.block_sparse._adjacent(layout(t)) for t in (call.x, call.grad))
        values, bias = (layout(t).contiguous() for t in (call.values, call.bias))
        calls.append(replace(call, x=x, grad=grad, values=values, bias=bias))
    expected, *results = results_of(call, *calls)
    for found in results:
        assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [slow("odd groups"), "depthwise"])
def test_expanded_and_negated_operands_without_a_bias(results_of, name):
    call = make_call(make_problem(TRITON_CASES[name]), F64)
    x, grad, values = (torch.complex(t, -t).conj().imag for t in (call.x, call.grad, call.values))
    assert x.is_neg()
    calls = [
        replace(call, x=call.x[:1].expand_as(call.x), grad=call.grad[:, :1].expand_as(call.grad)),
        replace(call, x=x, grad=grad, values=values, bias=None),
    ]
    for each, results in zip(calls, results_of(*calls), strict=True):
        assert_is_reference(each, results)


@pytest.mark.parametrize(
    ("name", "value", "dtype"), [("depthwise", torch.nan, F16), ("not a multiple of anything", torch.inf, F32)], ids=str
)
def test_nan_and_infinity_reach_what_reads_them_and_nothing_else(results_of, name, value, dtype):
    problem = make_problem(TRITON_CASES[name], dtype)
    call = make_call(problem, dtype)
    pixel = problem.live.sum(0).argmax()
    call.x[1, pixel] = value
    ((y, _, values),) = results_of(call)
    assert_only_readers_are_not_finite(y, problem.live, pixel)
    touched = problem.live.nonzero()[:, 1] == pixel
    assert torch.equal(~values.isfinite(), touched[:, None, None, None].expand_as(values))


@needs_mmap
@pytest.mark.parametrize("depth", [1, 5, 16])
def test_activations_that_lie_farther_apart_than_2_to_the_31(interpreter_process, depth):
    *results, x, values, grad = interpret(interpreter_process, far_activations, depth)
    assert_is_reference(Call(x, values, None, grad, *FAR_PATTERN), results)


@needs_mmap
@pytest.mark.parametrize("depth", [slow(1), 64])
def test_blocks_beyond_the_2_to_the_31st_number(interpreter_process, depth):
    assert interpret(interpreter_process, far_blocks, depth)


# ---- the choice of the backend


def test_gpus_run_triton_and_the_cpu_does_not():
    assert backends.missing("block_sparse", "triton", "cuda") is None
    assert backends.choose("block_sparse", torch.device("cuda")) == "triton"
    for name in ("block_sparse_matmul", "block_sparse_input_gradient", "block_sparse_value_gradient"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"loco_ext::{name}", "CUDA")
    problem = make_problem(CASES["convolution"])
    refused = pytest.raises(RuntimeError, match="block_sparse has no triton kernel for cpu")
    with loco_ext.backend("triton"), refused:
        ops.block_sparse_matmul(problem.x, problem.values, problem.pattern)


@pytest.fixture
def called(monkeypatch) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """Run the reference in place of the Triton kernels, without the library; return the names and dtypes of calls."""
    from loco_ext.triton_kernels import block_sparse

    calls: list[tuple[str, torch.dtype, torch.dtype]] = []
    monkeypatch.setattr(backends, "library", None)
    monkeypatch.setattr(backends, "choose", lambda *_: "triton")
    for name in ("matmul", "input_gradient", "value_gradient", "value_gradient_float32"):
        kernel = getattr(reference, f"block_sparse_{name}")

        def record(first, second, *rest, name=name, kernel=kernel):
            calls.append((name, first.dtype, second.dtype))
            with torch.autocast("cpu", enabled=False):
                return kernel(first, second, *rest)

        monkeypatch.setattr(block_sparse, f"block_sparse_{name}", record)
    return calls


@pytest.mark.parametrize("cast", [torch.bfloat16, F16], ids=str)
def test_autocast_leaves_values_to_the_kernels(called, cast):
    problem = make_problem(CASES["convolution"], cast)
    operands = [t.float().requires_grad_() for t in (problem.x, problem.values, problem.bias)]
    with torch.autocast("cpu", cast):
        y = ops.block_sparse_matmul(*operands[:2], problem.pattern, operands[2])
        gradients = torch.autograd.grad(y, operands, problem.grad.to(cast), create_graph=True)
    assert y.dtype == cast
    assert called == [("matmul", cast, F32), ("input_gradient", cast, F32), ("value_gradient_float32", cast, cast)]
    assert [t.dtype for t in gradients] == [F32] * 3
    assert_sum_of_products(gradients[1], dense_results(problem)[2], sizes_of_terms(problem)[2])
    second = torch.autograd.grad(gradients[1].sum(), operands[0])[0]
    ones = replace(problem, values=torch.ones_like(problem.values))
    assert_sum_of_products(second.to(cast), dense_results(ones)[1], sizes_of_terms(ones)[1])
    with pytest.raises(TypeError, match=r"values: expected torch.float64 as x"):
        ops.block_sparse_matmul(problem.x, operands[1], problem.pattern)
