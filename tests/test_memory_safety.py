"""Operators refuse tensors whose storage is too small, indices that were written to, and pads that reach too far."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loco_ext import geometry, ops, optim, sparsity

needs_library = pytest.mark.skipif(ops.backends.library is None, reason="the compiled library is missing")
HYPER = torch.tensor([[0.1, 0.0, 0.9, 0.0]], dtype=torch.float64)
PATTERN = geometry.BlockPattern.from_conv(6, kernel_size=3)


def step(make: type[torch.optim.Optimizer], which: str, **options: Any) -> Callable[[Callable[[Tensor], None]], None]:
    """Return a function that makes an optimizer step after its argument freed the parameter, gradient or state."""

    def run(free: Callable[[Tensor], None]) -> None:
        w = nn.Parameter(torch.randn(4, 3, 3, 3))
        optimizer = make([w], lr=0.1, **options)
        for _ in range(2):
            w.grad = torch.randn_like(w)
            optimizer.step()
        free({"param": w.data, "grad": w.grad, **optimizer.state[w]}[which])
        optimizer.step()

    return run


def prox(free: Callable[[Tensor], None]) -> None:
    w = torch.randn(4, 3, 3, 3)
    free(w)
    sparsity.RingPenalty(0.1).prox(w, 1.0)


def product(which: int) -> Callable[[Callable[[Tensor], None]], None]:
    def run(free: Callable[[Tensor], None]) -> None:
        operands = torch.randn(2, 6, 3), torch.randn(PATTERN.nnz, 1, 3, 2), torch.randn(4, 2)
        free(operands[which])
        ops.block_sparse_matmul(operands[0], operands[1], PATTERN, operands[2])

    return run


def mixed(which: int) -> Callable[[Callable[[Tensor], None]], None]:
    def run(free: Callable[[Tensor], None]) -> None:
        operands = torch.randn(1, 3, 6, 6), torch.randn(2, 3, 3, 3), torch.randn(2), torch.tensor([1, 0])
        free(operands[which])
        x, weight, bias, order = operands
        torch.ops.loco_ext.mixed_conv2d(x, [weight], [bias], [1] * 4, order, [1, 1], [1, 1], False)

    return run


CALLS = {
    **{f"SGD {which}": step(optim.SGD, which, momentum=0.9) for which in ("param", "grad", "momentum_buffer")},
    **{f"Adam {which}": step(optim.Adam, which) for which in ("param", "grad", "exp_avg", "exp_avg_sq", "step")},
    "ring_prox": prox,
    **{f"block_sparse_matmul {i}": product(i) for i in range(3)},
    **{f"mixed_conv2d {i}": mixed(i) for i in range(4)},
}


@needs_library
@pytest.mark.parametrize("left", [0, 4], ids=["freed", "smaller"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_storage_that_was_freed_or_made_smaller_is_refused(
    call: Callable[[Callable[[Tensor], None]], None], left: int
) -> None:
    def free(tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(min(left, tensor.numel() * tensor.element_size() - 1))

    with pytest.raises(RuntimeError, match=r"\[0\]: expected \d+ bytes of storage, got \d: it has been freed"):
        call(free)


@needs_library
def test_a_view_into_freed_storage_is_refused() -> None:
    """The view's own pointer is not null, because of its storage offset."""
    whole = torch.randn(100)
    w, g = whole[50:], torch.ones(50)
    whole.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"params\[0\]: expected 400 bytes of storage, got 0"):
        ops.optim_step_sgd([w], [g], [], HYPER)


@needs_library
def test_tensors_without_elements_need_no_storage() -> None:
    w = torch.randn(3, 0)
    w.untyped_storage().resize_(0)
    ops.optim_step_sgd([w], [torch.randn(3, 0)], [], HYPER)


@needs_library
@pytest.mark.parametrize(
    ("pads", "stride", "dilation"),
    [
        ((2**30, 0, 0, 0), 2**30, 1),
        ((0, 0, 2**30, 0), 2**30, 1),
        ((2**30, 2**30, 2**30, 2**30), 2**30, 2**30),
        ((2**16, 0, 2**16, 0), 2**16, 1),
        ((0, 2**30, 0, 2**30), 1, 2**29),
    ],
)
def test_far_pads_take_no_more_memory_than_the_result_needs(
    pads: tuple[int, int, int, int], stride: int, dilation: int
) -> None:
    x, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    near = torch.ones(1, 1, 1, 1)
    arguments = (x, [weight, near], [], [*pads, *(0, 0, 0, 0)], None, [stride] * 2, [dilation] * 2, False)
    with pytest.raises(RuntimeError, match=r"pads(\[1\])?: expected"):
        torch.ops.loco_ext.mixed_conv2d(*arguments)


@needs_library
def test_pads_as_networks_have_them_are_taken() -> None:
    """The dilation is so large that only the kernel's centre reads the image."""
    x, weight = torch.randn(1, 64, 8, 8), torch.randn(4, 64, 3, 3)
    result = ops.mixed_conv2d(x, [weight], [], [(96, 96, 96, 96)], dilation=(96, 96))
    torch.testing.assert_close(result, nn.functional.conv2d(x, weight[..., 1:2, 1:2]))


@pytest.mark.parametrize(
    "use",
    [
        lambda pattern: pattern.transpose(),
        lambda pattern: pattern.grow(1),
        lambda pattern: pattern.union(geometry.BlockPattern.full(6, 6)),
        lambda pattern: geometry.BlockPattern.full(6, 6).union(pattern),
        lambda pattern: pattern.taps,
    ],
    ids=["transpose", "grow", "union", "union of another", "taps"],
)
def test_index_tensors_that_were_written_to_are_refused(use: Callable[[geometry.BlockPattern], object]) -> None:
    written, unseen = (geometry.BlockPattern.from_conv(6, kernel_size=3, padding=1) for _ in range(2))
    written.col_indices[3] = 10**12
    unseen.crow_indices.numpy()[2] = 10**12  # a write that no version counter sees
    for pattern in (written, unseen):
        with pytest.raises(ValueError, match=r"c(row|ol)_indices: expected"):
            use(pattern)


@needs_library
@pytest.mark.parametrize("place", [0, 1, 4])
def test_operands_without_memory_beside_those_with_are_refused(place: int) -> None:
    """Otherwise the result would be uninitialised memory."""
    operands = [torch.randn(2, 6, 3), torch.randn(PATTERN.nnz, 1, 3, 2)]
    operands += [PATTERN.crow_indices, PATTERN.col_indices, torch.randn(4, 2)]
    operands[place] = operands[place].to("meta")
    with pytest.raises(TypeError, match="expected device"):
        torch.ops.loco_ext.block_sparse_matmul(*operands)
    weight, t = torch.randn(2, 3, 3, 3), torch.ones(1, dtype=torch.float64)
    with pytest.raises(TypeError, match="metric: expected device"):
        torch.ops.loco_ext.ring_prox(weight, [0] * 9, t, None, weight.to("meta"), False)


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_errors_inside_torch_are_told_without_a_stream():
    """Streams that print a number crash in a library that is linked to the C++ library statically (check.h)."""
    command = ["nm", "--dynamic", "--undefined-only", ops.backends.library.__file__]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "torch_call_dispatcher" in needed
    assert "_ZNSo9_M_insertIlE" not in needed  # a stream's <<, which torch's TORCH_ERROR_CODE_CHECK prints a line with


@needs_library
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch does not tell extensions its errors")
def test_errors_inside_torch_are_told_in_its_words():
    """Training loops look for the words of the allocator to try a smaller batch (accelerate, Lightning)."""
    values = torch.randn(PATTERN.nnz, 1, 3, 2)
    with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory.*new_empty"):
        ops.block_sparse_matmul(torch.zeros(1, 1, 1).expand(1 << 44, 6, 3), values, PATTERN)
