"""block_sparse_matmul and its gradients against a dense matrix in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import loco_ext
from loco_ext import ops
from loco_ext.ops import backends
from tests.block_sparse.cases import (
    BACKENDS,
    CASES,
    FLOATS,
    Case,
    channels_first,
    dense_matmul,
    dense_results,
    in_wider_rows,
    make_problem,
    results,
    shifted,
    sizes_of_terms,
    spread,
)
from tests.covering import covering, slow
from tests.tolerances import assert_sum_of_products, same_bits

LEVELS = tuple(name.removeprefix("native, ") for name in BACKENDS[1:])


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use one of BACKENDS inside the context."""
    backend, _, level = name.partition(", ")
    with loco_ext.backend(backend):
        if level:
            backends.library.use_cpu_capability(level)
        try:
            yield
        finally:
            if level:
                backends.library.use_cpu_capability(LEVELS[0])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def test_the_compiled_kernels_are_here():
    assert LEVELS
    assert LEVELS[-1] == "portable"


@pytest.mark.parametrize(
    ("name", "dtype", "backend"), covering(CASES, FLOATS, BACKENDS, sweep=True), ids=str, indirect=["backend"]
)
def test_results_are_those_of_a_dense_matrix(backend, name, dtype):
    problem = make_problem(CASES[name], dtype)
    operands = (tensor.to(dtype) for tensor in (problem.x, problem.values, problem.bias, problem.grad))
    found = results(*operands, problem.pattern)
    for actual, expected, sizes in zip(found, dense_results(problem), sizes_of_terms(problem), strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert_sum_of_products(actual, expected, sizes)


def test_without_a_bias(backend):
    problem = make_problem(CASES["convolution"])
    found = ops.block_sparse_matmul(problem.x, problem.values, problem.pattern)
    expected = dense_matmul(problem.x, problem.values, None, problem.live)
    assert_sum_of_products(found, expected, dense_matmul(problem.x.abs(), problem.values.abs(), None, problem.live))


@pytest.mark.parametrize(
    ("name", "layout", "dtype", "backend"),
    covering(
        [
            *("convolution", "odd groups", "not a multiple of anything", "rgb, side by side", "short, several strips"),
            *("depthwise", "depthwise, several parts", "depthwise, rows in any order", "depthwise, all of many pixels"),
        ],
        [spread, shifted, channels_first, in_wider_rows],
        FLOATS,
        BACKENDS,
    ),
    indirect=["backend"],
)
def test_layouts_change_nothing(backend, name, layout, dtype):
    problem = make_problem(CASES[name], dtype)
    operands = [tensor.to(dtype) for tensor in (problem.x, problem.values, problem.bias, problem.grad)]
    for expected, found in zip(
        results(*operands, problem.pattern), results(*map(layout, operands), problem.pattern), strict=True
    ):
        assert same_bits(found, expected)


def in_wider_pixels(tensor: Tensor) -> Tensor:
    """Return the same numbers with 3 others after each row of the last dimension."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        # These have so many sums that a different order of terms would show even in bfloat16.
        *(Case(64, 1, 3, 64, 64, 64, kernel=5), CASES["short, several strips"]),
        *(CASES["odd groups"], CASES["depthwise"]),
    ],
    ids=str,
)
def test_pixels_that_lie_apart_change_nothing(backend, case, dtype):
    problem = make_problem(case, dtype)
    x, *others = (tensor.to(dtype) for tensor in (problem.x, problem.values, problem.bias, problem.grad))
    for expected, found in zip(
        results(x, *others, problem.pattern), results(in_wider_pixels(x), *others, problem.pattern), strict=True
    ):
        assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("level", "shape", "dtype"),
    covering(LEVELS, [(2, 64, 100), (3, 1, 7), (1, 37, 1), (2, 130, 16), (0, 3, 4), (2, 17, 33)], FLOATS),
    ids=str,
)
def test_activations_are_brought_into_order(level, shape, dtype):
    samples, pixels, channels = shape
    with using(f"native, {level}"):
        for strange in (
            torch.randn(samples, channels, pixels).to(dtype).transpose(1, 2),
            torch.randn(samples, channels + 3, pixels + 1).to(dtype)[:, 3:, 1:].transpose(1, 2),
            torch.randn(channels, pixels, samples).to(dtype).permute(2, 1, 0),
            torch.randn(channels, 1, pixels).to(dtype).expand(-1, samples, -1).permute(1, 2, 0),
        ):
            found = torch.ops.loco_ext.block_sparse_by_pixel(strange)
            assert found.is_contiguous()
            assert same_bits(found, strange)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_expanded_operands(backend, dtype):
    problem = make_problem(CASES["convolution"], dtype)
    x, values, bias = (t.to(dtype) for t in (problem.x, problem.values, problem.bias))
    narrow = [x[:1], values[:1], bias[:1, :1]]
    wide = [part.expand_as(whole) for part, whole in zip(narrow, (x, values, bias), strict=True)]
    grad = torch.ones((), dtype=dtype).expand(problem.grad.shape)
    expected = results(*(t.contiguous() for t in (*wide, grad)), problem.pattern)
    for found, other in zip(results(*wide, grad, problem.pattern), expected, strict=True):
        assert same_bits(found, other)


def test_images_in_channels_last_are_read_in_place():
    image = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    problem = make_problem(CASES["convolution"], torch.float32)
    values = problem.values.float().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.block_sparse_matmul(image.permute(0, 2, 3, 1).flatten(1, 2), values, problem.pattern)
    floats = [tensor for tensor in kept if tensor.is_floating_point()]
    assert [tensor.data_ptr() for tensor in floats] == [image.data_ptr(), values.data_ptr()]


def test_depthwise_products_read_images_in_place():
    class Calls(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **kwargs or {})

    problem = make_problem(CASES["depthwise, several parts"], torch.float32)
    x, values = channels_first(problem.x.float()), problem.values.float()
    with loco_ext.backend("native"), Calls() as calls:
        ops.block_sparse_matmul(x, values, problem.pattern)
    assert [name for name in calls.names if "aten" not in name] == ["loco_ext.block_sparse_matmul.default"]
    assert not [name for name in calls.names if "clone" in name or "copy" in name]


@pytest.mark.parametrize(
    ("level", "case", "dtype"),
    covering(
        LEVELS,
        [
            Case(64, 1, 32, 48, 36, 36, kernel=3),
            Case(70, 1, 3, 64, 36, 36, kernel=3),
            Case(70, 24, 1, 1, 64, 64, kernel=5),
            Case(300, 2, 8, 16, 16, 16, kernel=3),
        ],
        FLOATS,
    ),
    ids=str,
)
def test_the_number_of_threads_changes_no_bit(level, case, dtype):
    problem = make_problem(case, dtype)
    operands = [tensor.to(dtype) for tensor in (problem.x, problem.values, problem.bias, problem.grad)]
    with using(f"native, {level}"):
        torch.set_num_threads(1)
        expected = results(*operands, problem.pattern)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for found, other in zip(results(*operands, problem.pattern), expected, strict=True):
                assert same_bits(found, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 20, 24), (1, 3, 24), (1, 3, 64), (20, 1, 1)], ids=str)
def test_a_sample_does_not_depend_on_the_others(sizes, dtype):
    problem = make_problem(Case(140, *sizes, 9, 9, kernel=3), dtype)
    x, values, bias, grad = (t.to(dtype) for t in (problem.x, problem.values, problem.bias, problem.grad))
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
    live = problem.live
    pixels = {"y": live.sum(0).argmax(), "grad of x": live.sum(1).argmax()}
    readers = {"y": live[:, pixels["y"]], "grad of x": live[pixels["grad of x"]]}
    for place, (result, pixel) in enumerate(pixels.items()):
        x, values, bias, grad = (t.to(dtype) for t in (problem.x, problem.values, problem.bias, problem.grad))
        (x if result == "y" else grad)[1, pixel] = value
        found = results(x, values, bias, grad, problem.pattern)[place]
        touched = torch.zeros(found.shape[:2], dtype=torch.bool)
        touched[1] = readers[result]
        assert torch.equal(~found.isfinite(), touched[..., None].expand_as(found)), result


@pytest.mark.parametrize("fast_mode", [True, slow(False)])  # along random directions, or in each number
@pytest.mark.parametrize("name", ["odd groups", "depthwise", "no sample", "no entries"])
def test_derivatives_of_first_and_second_order(backend, name, fast_mode):
    case = CASES[name]
    small = Case(min(case.batch, 2), min(case.groups, 3), min(case.depth, 3), min(case.width, 2), 3, 4, case.share)
    problem = make_problem(small)
    operands = [t.requires_grad_() for t in (problem.x, problem.values, problem.bias)]

    def function(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return ops.block_sparse_matmul(x, values, problem.pattern, bias)

    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands, fast_mode=fast_mode)


def test_no_gradient_is_computed_that_nobody_wants(monkeypatch):
    problem = make_problem(CASES["odd groups"])
    calls: list[str] = []
    for name in ("block_sparse_input_gradient", "block_sparse_value_gradient"):
        original = getattr(ops.block_sparse._reference, name)
        monkeypatch.setattr(
            ops.block_sparse._reference,
            name,
            lambda *a, name=name, original=original: calls.append(name) or original(*a),
        )
    with loco_ext.backend("reference"):
        ops.block_sparse_matmul(problem.x, problem.values.requires_grad_(), problem.pattern).sum().backward()
        assert calls == ["block_sparse_value_gradient"]
        ops.block_sparse_matmul(problem.x.requires_grad_(), problem.values.detach(), problem.pattern).sum().backward()
    assert calls == ["block_sparse_value_gradient", "block_sparse_input_gradient"]
