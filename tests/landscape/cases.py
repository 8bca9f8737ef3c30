"""Calls of the landscape's Triton kernels, and their comparison with the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.ops.landscape import laplacian_stencil
from loco_ext.reference import landscape as reference
from tests.tolerances import assert_within_ulps

MEMORY_OF_FAR = 2**31 + 64  # elements
# Results are sums of hundreds of terms, of which the slope cancels some.
ULPS_OF_SUMS = 2**10
GRAD = torch.tensor(1.5, dtype=torch.float64)  # of the loss


def run(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    from loco_ext.triton_kernels import landscape

    forward = landscape.landscape(g, weights, stencil, target)
    return *forward, *landscape.landscape_backward(g, weights, forward[-1], grad)


def far_gradients(axis: int, memory: Tensor) -> Tensor:
    """Return gradients whose first and last rows (``axis`` 2) or pixels (3) lie more than 2^31 elements apart.

    memory: ``[MEMORY_OF_FAR]``, which they are written to.
    """
    shape, strides = (2, 2, 3, 3), [9, 18, 3, 1]
    strides[axis] = 2**30 + 1
    return memory.as_strided(shape, strides).copy_(torch.randn(shape))


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
