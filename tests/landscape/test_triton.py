"""Tests of the landscape's Triton kernels: in Triton's interpreter against the reference, and compiled for GPUs."""

import pytest
import torch
from torch import Tensor

from bench.ahead_of_time import launches, resources
from tests.covering import slow
from tests.landscape.cases import CASES, GRAD, MEMORY_OF_FAR, assert_is_reference, far_gradients, make_call, run
from tests.triton_runs import CUDA, compiles, interpret, needs_mmap, needs_triton, reserved

pytestmark = needs_triton


def far(axis: int) -> tuple[Tensor, ...]:
    """Return results and, first, gradients far apart."""
    gradients = far_gradients(axis, reserved(MEMORY_OF_FAR, torch.bfloat16))
    call = make_call(gradients.shape, torch.bfloat16, 3, False)
    return gradients.contiguous(), *call[1:3], *run(gradients, *call[1:])


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("curvature", "more pixels than a block") else name for name in CASES]
)
def test_the_kernels_compute_what_the_reference_does(interpreter_process, name):
    call = make_call(*CASES[name])
    g = call[0]
    others = (g.contiguous(memory_format=torch.channels_last), torch.zeros_like(g))
    for gradients in (g, *(others if name in ("target", "one sample, one pixel") else ())):
        assert_is_reference(interpret(interpreter_process, run, gradients, *call[1:]), gradients, *call[1:])


@needs_mmap
@pytest.mark.parametrize("axis", [2, slow(3)])
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
    [("target", 90), *map(slow, zip(COMPILED, [*CUDA, 120], strict=True))],
)
@compiles
def test_the_kernels_compile_within_their_budgets(name, arch):
    from loco_ext.triton_kernels import landscape

    call = make_call((16, 3, 64, 64), *COMPILED[name])
    found = launches(lambda: run(*call), landscape, BUDGET, ("cuda", arch))
    assert [kernel for kernel, *_ in found] == list(BUDGET)
    for kernel, _, options, compiled in found:
        assert options["enable_fp_fusion"] is True
        used = resources(compiled.asm["cubin"])
        registers, stack = BUDGET[kernel]
        assert used["REG"] <= registers, kernel
        assert used["STACK"] <= stack, kernel
