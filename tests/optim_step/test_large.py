"""Tests of elements beyond 2^31, without the memory for them: many virtual pages share a few physical ones.

A parameter of 2^31 + 100 elements maps one small block of memory over and over, except for its last page. Its gradients
are zero pages that are only read, except for the last. A step that indexes correctly changes only the last elements.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.reference.rounding import philox
from tests.tolerances import same_bits
from tests.triton_runs import needs_mmap, reserved

pytestmark = [needs_mmap, pytest.mark.usefixtures("native")]

BULK = 2**31  # elements
TAIL = 100
BLOCK_BYTES = 2**21
ALLOWED_MEMORY = 100 * 2**20
HYPER = torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)
_MAP_FIXED = 0x10


def aliased(elements: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of elements + TAIL elements; one small block of memory backs all of it but the tail."""
    tensor = reserved(elements + TAIL, dtype)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    file = os.memfd_create("block")
    os.ftruncate(file, BLOCK_BYTES)
    for offset in range(0, elements * dtype.itemsize, BLOCK_BYTES):
        place = tensor.data_ptr() + offset
        mapped = libc.mmap(place, BLOCK_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
        assert mapped == place
    os.close(file)
    return tensor


@pytest.fixture(autouse=True)
def _last_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the GPU's kernels on the CPU to the last blocks: all of a table's upload, but not all elements."""
    monkeypatch.setenv("CUDA_ON_CPU_LAST_BLOCKS", "32")


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    before = memory_in_use()
    yield
    assert memory_in_use() - before < ALLOWED_MEMORY


def memory_in_use() -> int:
    """Return the process' memory in bytes; a page that is mapped many times counts once."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def large(elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a parameter of 1.5, and its gradient of zeros; both end with random numbers."""
    w, g = aliased(elements, dtype), reserved(elements + TAIL, dtype)
    w[: BLOCK_BYTES // w.element_size()] = 1.5  # fills the whole bulk, which is backed by one block
    w[-TAIL:] = torch.randn(TAIL)
    g[-TAIL:] = torch.randn(TAIL)
    return w, g


@pytest.mark.slow
def test_elements_beyond_2_to_the_31_are_stepped():
    w, g = large(BULK, torch.float32)
    expected = w[-TAIL:] - 0.25 * g[-TAIL:]
    ops.optim_step_sgd([w], [g], [], HYPER)
    assert same_bits(w[-TAIL:], expected)
    assert w[[0, 12345, 2**30, BULK - 1]].tolist() == [1.5] * 4


@pytest.mark.slow
def test_elements_beyond_2_to_the_32_are_rounded_by_their_own_random_numbers():
    w, g = large(2 * BULK, torch.bfloat16)
    exact = w[-TAIL:].float() - 0.25 * g[-TAIL:].float()
    ops.optim_step_sgd([w], [g], [], HYPER, seed=5)
    random = philox(torch.arange(2 * BULK, 2 * BULK + TAIL), seed=5, tensor=0, step=0)[0] & 0xFFFF
    expected = ((exact.view(torch.int32) + random.to(torch.int32)) & ~0xFFFF).view(torch.float32).bfloat16()
    assert same_bits(w[-TAIL:], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_views_that_reach_beyond_2_to_the_31_are_stepped(dtype):
    """Views of few elements that are far apart: one whose rows have a stride of 2^31, and one that begins beyond it."""
    w, g = (reserved(BULK + TAIL, dtype) for _ in range(2))
    for tensor in (w, g):
        tensor[-TAIL:], tensor[:3] = torch.randn(TAIL), torch.randn(3)
    far = [t.as_strided((2, 3), (BULK, 1)) for t in (w, g)]  # elements 0 to 2 and BULK to BULK + 2
    beyond = [t.as_strided((7, 3), (9, 3), BULK + 11) for t in (w, g)]
    expected = [(w.double() - 0.25 * g.double()).to(w.dtype) for w, g in (far, beyond)]
    untouched = w[BULK + 3 : BULK + 11].clone()
    ops.optim_step_sgd([far[0], beyond[0]], [far[1], beyond[1]], [], HYPER)
    assert same_bits(far[0], expected[0])
    assert same_bits(beyond[0], expected[1])
    assert same_bits(w[BULK + 3 : BULK + 11], untouched)
    assert w[BULK - 1] == 0
