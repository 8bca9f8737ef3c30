"""block_sparse_matmul and its gradients against a dense matrix in float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import loco_ext
from loco_ext import ops
from tests.block_sparse.cases import (
    CASES,
    FLOATS,
    LAYOUTS,
    Case,
    assert_is_dense,
    assert_only_readers_are_not_finite,
    channels_first,
    dense_matmul,
    in_wider_pixels,
    make_problem,
    results,
)
from tests.covering import covering
from tests.instruction_sets import BACKENDS, using
from tests.tolerances import assert_sum_of_products, same_bits


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from using(request.param)


def test_the_compiled_kernels_are_here():
    assert BACKENDS[-1] == "native, portable"


@pytest.mark.parametrize(
    ("name", "dtype", "backend"), covering(CASES, FLOATS, BACKENDS, sweep=True), ids=str, indirect=["backend"]
)
def test_results_are_those_of_a_dense_matrix(backend, name, dtype):
    problem = make_problem(CASES[name], dtype)
    assert_is_dense(problem, results(*problem.operands(dtype), problem.pattern), dtype)


def test_without_a_bias(backend):
    problem = make_problem(CASES["convolution"])
    found = ops.block_sparse_matmul(problem.x, problem.values, problem.pattern)
    expected = dense_matmul(problem.x, problem.values, None, problem.live)
    assert_sum_of_products(found, expected, dense_matmul(problem.x.abs(), problem.values.abs(), None, problem.live))


LAID_OUT = {
    # These two have so many sums that a different order of terms would show even in bfloat16.
    "many sums": Case(64, 1, 3, 64, 64, 64, kernel=5),
    "short, several strips": CASES["short, several strips"],
    **{name: CASES[name] for name in ("convolution", "odd groups", "not a multiple of anything", "depthwise")},
    **{
        f"depthwise, {name}": CASES[f"depthwise, {name}"]
        for name in ("several parts", "rows in any order", "all of many pixels")
    },
}


@pytest.mark.parametrize(
    ("name", "layout", "dtype", "backend"), covering(LAID_OUT, LAYOUTS, FLOATS, BACKENDS), indirect=["backend"]
)
def test_layouts_change_nothing(backend, name, layout, dtype):
    problem = make_problem(LAID_OUT[name], dtype)
    operands = problem.operands(dtype)
    expected, found = results(*operands, problem.pattern), results(*map(layout, operands), problem.pattern)
    kernels = 3 if layout is in_wider_pixels else 4  # torch's sum, the gradient of bias, then has another order
    assert all(same_bits(*pair) for pair in zip(found[:kernels], expected[:kernels], strict=True))


@pytest.mark.parametrize(("dtype", "backend"), covering(FLOATS, BACKENDS), ids=str, indirect=["backend"])
def test_expanded_operands(backend, dtype):
    problem = make_problem(CASES["convolution"], dtype)
    x, values, bias, grad = problem.operands(dtype)
    wide = [x[:1].expand_as(x), values[:1].expand_as(values), bias[:1, :1].expand_as(bias), grad[:1].expand_as(grad)]
    expected = results(*(t.contiguous() for t in wide), problem.pattern)
    for found, other in zip(results(*wide, problem.pattern), expected, strict=True):
        assert same_bits(found, other)


@pytest.mark.parametrize(
    ("backend", "shape", "dtype"),
    covering(BACKENDS[1:], [(2, 64, 100), (3, 1, 7), (1, 37, 1), (2, 130, 16), (0, 3, 4), (2, 17, 33)], FLOATS),
    ids=str,
    indirect=["backend"],
)
def test_activations_are_brought_into_order(backend, shape, dtype):
    samples, pixels, channels = shape
    for strange in (
        torch.randn(samples, channels, pixels).to(dtype).transpose(1, 2),
        torch.randn(samples, channels + 3, pixels + 1).to(dtype)[:, 3:, 1:].transpose(1, 2),
        torch.randn(channels, pixels, samples).to(dtype).permute(2, 1, 0),
        torch.randn(channels, 1, pixels).to(dtype).expand(-1, samples, -1).permute(1, 2, 0),
    ):
        found = torch.ops.loco_ext.block_sparse_by_pixel(strange)
        assert found.is_contiguous()
        assert same_bits(found, strange)


class Calls(TorchDispatchMode):
    """Dispatch mode that records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("name", "layout"), [("convolution", Tensor.contiguous), ("depthwise, several parts", channels_first)]
)
def test_images_are_read_and_saved_in_place(name, layout):
    problem = make_problem(CASES[name], torch.float32)
    x, values, *_ = problem.operands(torch.float32)
    x, saved = layout(x), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with loco_ext.backend("native"), Calls() as calls, hooks:
        ops.block_sparse_matmul(x, values.requires_grad_(), problem.pattern)
    assert [name for name in calls.names if "aten" not in name] == ["loco_ext.block_sparse_matmul.default"]
    assert not [name for name in calls.names if "clone" in name or "copy" in name]
    assert [t.data_ptr() for t in saved if t.is_floating_point()] == [x.data_ptr(), values.data_ptr()]


@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    covering(
        BACKENDS[1:],
        [
            Case(64, 1, 32, 48, 36, 36, kernel=3),
            Case(70, 1, 3, 64, 36, 36, kernel=3),
            Case(70, 24, 1, 1, 64, 64, kernel=5),
            Case(300, 2, 8, 16, 16, 16, kernel=3),
        ],
        FLOATS,
    ),
    ids=str,
    indirect=["backend"],
)
def test_the_number_of_threads_changes_no_bit(backend, case, dtype):
    problem = make_problem(case, dtype)
    operands = problem.operands(dtype)
    torch.set_num_threads(1)
    expected = results(*operands, problem.pattern)
    for threads in (2, 7):
        torch.set_num_threads(threads)
        for found, other in zip(results(*operands, problem.pattern), expected, strict=True):
            assert same_bits(found, other)


@pytest.mark.parametrize(
    ("sizes", "dtype"), covering([(1, 20, 24), (1, 3, 24), (1, 3, 64), (20, 1, 1)], FLOATS), ids=str
)
def test_a_sample_does_not_depend_on_the_others(sizes, dtype):
    problem = make_problem(Case(140, *sizes, 9, 9, kernel=3), dtype)
    x, values, bias, grad = problem.operands(dtype)
    with loco_ext.backend("native"):
        whole = results(x, values, bias, grad, problem.pattern)[:2]
        for some in (slice(0, 1), slice(3, 10), slice(100, 140)):
            parts = results(x[some], values, bias, grad[some], problem.pattern)[:2]
            assert all(same_bits(part, full[some]) for part, full in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    ("value", "name", "dtype", "backend"),
    covering(
        [torch.nan, torch.inf],
        ["convolution", "rgb, whole vectors", "depthwise, whole vectors", "not a multiple of anything"],
        FLOATS,
        BACKENDS,
    ),
    ids=str,
    indirect=["backend"],
)
def test_nan_and_infinity_reach_what_reads_them_and_nothing_else(backend, name, value, dtype):
    problem = make_problem(CASES[name], dtype)
    for place, live in enumerate((problem.live, problem.live.T)):  # of the product, and of the gradient of x
        x, values, bias, grad = problem.operands(dtype)
        pixel = live.sum(0).argmax()
        (x, grad)[place][1, pixel] = value
        assert_only_readers_are_not_finite(results(x, values, bias, grad, problem.pattern)[place], live, pixel)


def test_no_gradient_is_computed_that_nobody_wants():
    problem = make_problem(CASES["odd groups"])
    x, values = problem.x.requires_grad_(), problem.values.requires_grad_()
    for operand, name in ((x, "input_gradient"), (values, "value_gradient")):
        operands = [t if t is operand else t.detach() for t in (x, values)]
        y = ops.block_sparse_matmul(*operands, problem.pattern)
        with loco_ext.backend("native"), Calls() as calls:
            y.backward(problem.grad)
        ours = [name for name in calls.names if "aten" not in name]
        assert ours == [f"loco_ext.block_sparse_{name}.default"]
