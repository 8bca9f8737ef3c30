"""Tests of the landscape's Triton kernels: in Triton's interpreter against the reference, and compiled for GPUs."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bench.ahead_of_time import launches, resources
from loco_ext.ops.landscape import laplacian_stencil
from loco_ext.reference import landscape as reference
from tests.covering import slow
from tests.tolerances import assert_within_ulps
from tests.triton_runs import CUDA, compiles, interpret, needs_mmap, needs_triton, reserved

pytestmark = needs_triton

# Results are sums of hundreds of terms, of which the slope cancels some.
ULPS_OF_SUMS = 2**10
GRAD = torch.tensor(1.5, dtype=torch.float64)  # of the loss


def run(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    from loco_ext.triton_kernels import landscape

    forward = landscape.landscape(g, weights, stencil, target)
    return *forward, *landscape.landscape_backward(g, weights, forward[-1], grad)


def far(axis: int) -> tuple[Tensor, ...]:
    """Return results and, first, gradients whose rows (``axis`` 2) or pixels (3) lie more than 2^31 elements apart."""
    shape, strides = (2, 2, 3, 3), [9, 18, 3, 1]
    strides[axis] = 2**30 + 1
    gradients = reserved(2**31 + 64, torch.bfloat16).as_strided(shape, strides)
    gradients.copy_(torch.randn(shape))
    call = make_call(shape, torch.bfloat16, 3, False)
    return gradients.contiguous(), *call[1:3], *run(gradients, *call[1:])


def make_call(shape: tuple[int, ...], dtype: torch.dtype, width: int, with_target: bool) -> tuple[Tensor | None, ...]:
    g = torch.randn(shape, dtype=torch.float64).to(dtype)
    stencil = laplacian_stencil(width) * torch.rand(width, width, dtype=torch.float64)
    target = torch.rand(shape[2:]) if with_target else None
    return g, torch.rand(shape[0], dtype=torch.float64), stencil, target, GRAD


def assert_is_reference(
    found: Sequence[Tensor], g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None, grad: Tensor
) -> None:
    forward = reference.landscape(g, weights, stencil, target)
    expected = (*forward, *reference.landscape_backward(g, weights, forward[-1], grad))
    for actual, right in zip(found, expected, strict=True):
        assert actual.dtype == right.dtype
        assert_within_ulps(actual, right, ULPS_OF_SUMS, scale=right.abs().max())


CASES = {
    "curvature": ((5, 3, 7, 9), torch.float32, 3, False),
    "target": ((17, 2, 6, 5), torch.float64, 3, True),
    "wide stencil, half precision": ((2, 1, 3, 3), torch.bfloat16, 5, False),
    "one sample, one pixel": ((1, 1, 1, 1), torch.float32, 1, False),
    "more pixels than a block": ((2, 1, 33, 35), torch.float32, 3, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_the_reference_does(interpreter_process, name):
    call = make_call(*CASES[name])
    g = call[0]
    others = (g.contiguous(memory_format=torch.channels_last), torch.zeros_like(g))
    for gradients in (g, *(others if name in ("target", "one sample, one pixel") else ())):
        assert_is_reference(interpret(interpreter_process, run, gradients, *call[1:]), gradients, *call[1:])


@needs_mmap
@pytest.mark.parametrize("axis", [2, 3])
def test_rows_and_pixels_that_lie_farther_apart_than_2_to_the_31(interpreter_process, axis):
    g, weights, stencil, *found = interpret(interpreter_process, far, axis)
    assert_is_reference(found, g, weights, stencil, None, GRAD)


# Most registers of a thread and bytes of its stack. The map is computed by a single program, which may spill a little.
BUDGET = {"sums_kernel": (96, 0), "map_kernel": (255, 128), "backward_kernel": (64, 0)}
COMPILED = {
    "target": (torch.float32, 3, True),
    "curvature": (torch.float32, 3, False),
    "wide stencil, double precision": (torch.float64, 7, False),
    "target, half precision": (torch.bfloat16, 3, True),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [("target", 90), *map(slow, [*zip(COMPILED, [*CUDA, 120], strict=True), ("wide stencil, double precision", 120)])],
)
@compiles
def test_the_kernels_compile_within_their_budgets(name, arch):
    from loco_ext.triton_kernels import landscape

    call = make_call((16, 3, 64, 64), *COMPILED[name])
    found = launches(lambda: run(*call), landscape, BUDGET, ("cuda", arch))
    assert [kernel for kernel, *_ in found] == list(BUDGET)
    for kernel, _, _, compiled in found:
        used = resources(compiled.asm["cubin"])
        registers, stack = BUDGET[kernel]
        assert used["REG"] <= registers, kernel
        assert used["STACK"] <= stack, kernel
