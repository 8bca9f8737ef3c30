"""Tests of elements beyond 2^31, without the memory for them: many virtual pages share a few physical ones.

A parameter of 2^31 + 100 elements maps one small block of memory over and over, except for its last page. Its gradients
are zero pages that are only read, except for the last. A step that indexes correctly changes only the last elements.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.reference.rounding import philox
from tests.tolerances import same_bits

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux's mmap and 64 bits"),
]

BULK = 2**31  # elements
TAIL = 100
BLOCK_BYTES = 2**21
ALLOWED_MEMORY = 100 * 2**20
HYPER = torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10


def _mmap(address: int | None, size: int, flags: int, file: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    mapped = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if mapped in (None, ctypes.c_void_p(-1).value):
        pytest.skip(f"no address space: {os.strerror(ctypes.get_errno())}")
    return mapped


class Region:
    """Virtual memory of elements + TAIL elements; if ``aliased``, one small block backs everything but the tail."""

    def __init__(self, dtype: torch.dtype, elements: int, aliased: bool) -> None:
        bulk = elements * dtype.itemsize
        self.size = bulk + mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _mmap(None, self.size, private, -1)
        if aliased:
            file = os.memfd_create("block")
            os.ftruncate(file, BLOCK_BYTES)
            for offset in range(0, bulk, BLOCK_BYTES):
                _mmap(self.address + offset, BLOCK_BYTES, mmap.MAP_SHARED | _MAP_FIXED, file)
            os.close(file)
        memory = (ctypes.c_char * (bulk + TAIL * dtype.itemsize)).from_address(self.address)
        self.tensor = torch.frombuffer(memory, dtype=dtype)

    def close(self) -> None:
        del self.tensor
        ctypes.CDLL(None).munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size))


@pytest.fixture(autouse=True)
def _last_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the GPU's kernels on the CPU to the last blocks; all elements would take minutes."""
    monkeypatch.setenv("CUDA_ON_CPU_LAST_BLOCKS", "8")


@pytest.fixture
def large(request: pytest.FixtureRequest) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a parameter and its gradient of the requested dtype and number of elements (default BULK)."""
    dtype, elements = request.param if isinstance(request.param, tuple) else (request.param, BULK)
    regions = [Region(dtype, elements, aliased=True), Region(dtype, elements, aliased=False)]
    before = memory_in_use()
    yield regions[0].tensor, regions[1].tensor
    used = memory_in_use() - before
    for region in regions:
        region.close()
    assert used < ALLOWED_MEMORY, "the region took physical memory"


def memory_in_use() -> int:
    """Return the process' memory in bytes; a page that is mapped many times counts once."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def fill_tails(w: Tensor, g: Tensor) -> None:
    w[: BLOCK_BYTES // w.element_size()] = 1.5  # fills the whole bulk, which is backed by one block
    w[-TAIL:] = torch.randn(TAIL)
    g[-TAIL:] = torch.randn(TAIL)


BULK_PLACES = [0, 12345, 2**30, BULK - 1]


@pytest.mark.slow
@pytest.mark.parametrize("large", [torch.float32], indirect=True, ids=str)
def test_elements_beyond_2_to_the_31_are_stepped(large):
    w, g = large
    fill_tails(w, g)
    expected = (w[-TAIL:].float() - 0.25 * g[-TAIL:].float()).to(w.dtype)
    ops.optim_step_sgd([w], [g], [], HYPER)
    assert same_bits(w[-TAIL:], expected)
    assert w[BULK_PLACES].tolist() == [1.5] * 4


@pytest.mark.slow
@pytest.mark.parametrize("large", [(torch.bfloat16, 2 * BULK)], indirect=True)
def test_elements_beyond_2_to_the_32_are_rounded_by_their_own_random_numbers(large):
    w, g = large
    fill_tails(w, g)
    exact = w[-TAIL:].float() - 0.25 * g[-TAIL:].float()
    ops.optim_step_sgd([w], [g], [], HYPER, seed=5)
    random = philox(torch.arange(2 * BULK, 2 * BULK + TAIL), seed=5, tensor=0, step=0)[0] & 0xFFFF
    expected = ((exact.view(torch.int32) + random.to(torch.int32)) & ~0xFFFF).view(torch.float32).bfloat16()
    assert same_bits(w[-TAIL:], expected)


@pytest.mark.parametrize("large", [torch.bfloat16, torch.float32, torch.float64], indirect=True, ids=str)
def test_views_that_reach_beyond_2_to_the_31_are_stepped(large):
    """Views of few elements that are far apart: one whose rows have a stride of 2^31, and one that begins beyond it."""
    w, g = large
    fill_tails(w, g)
    w[:3], g[:3] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    far = [t.as_strided((2, 3), (BULK, 1)) for t in (w, g)]  # elements 0 to 2 and BULK to BULK + 2
    beyond = [t.as_strided((7, 3), (9, 3), BULK + 11) for t in (w, g)]
    expected = [(w.double() - 0.25 * g.double()).to(w.dtype) for w, g in (far, beyond)]
    untouched = w[BULK + 3 : BULK + 11].clone()
    ops.optim_step_sgd([far[0], beyond[0]], [far[1], beyond[1]], [], HYPER)
    assert same_bits(far[0], expected[0])
    assert same_bits(beyond[0], expected[1])
    assert same_bits(w[BULK + 3 : BULK + 11], untouched)
    assert w[BULK - 1] == 1.5
