"""The chunks that the CUDA step divides tensors into keep all multiprocessors busy until the end."""

import heapq
import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench.shapes import resnet50
from tests.cuda_on_cpu import build

SOURCES = (build.CSRC / "optim_step/gpu_table.cpp", build.CSRC / "ring_prox/gpu_table.cpp")
MOST = 8192  # elements
# The most blocks that run at a time: three for each multiprocessor of an A100, an H100, a B200 and an RTX 5090.
SLOTS = (3 * 108, 3 * 132, 3 * 148, 3 * 170)


@pytest.fixture(scope="module")
def program(compiled: Path) -> Path:
    return build.compile_program([*SOURCES, build.HERE / "print_chunks.cpp"], compiled / "print_chunks")


def chunks_of(program: Path, sizes: Iterable[int]) -> list[tuple[int, int, int]]:
    done = build.run_program(program, *sizes)
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def tail(lengths: list[int], slots: int) -> float:
    """Return the part of the time that slots are idle, where a chunk takes as long as it has elements."""
    free = [0] * slots  # when each slot is free
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return 1 - sum(lengths) / (slots * max(free))


def test_the_tail_of_resnet50_is_short(program):
    sizes = [math.prod(shape) for shape in resnet50()]
    equal = [min(MOST, size - begin) for size in sizes for begin in range(0, size, MOST)]
    chunks = [end - begin for _, begin, end in chunks_of(program, sizes)]
    for slots in SLOTS:
        assert tail(sorted(equal, reverse=True), slots) > 0.01
        assert tail(chunks, slots) < 0.01


@pytest.mark.parametrize("sizes", [[1], [511, 513, 0, 8192], [10**7 + 1, 3, 5 * 10**6], [2**31 + 5]])
def test_every_element_is_in_one_chunk(program, sizes):
    ends = [0] * len(sizes)
    for tensor, begin, end in chunks_of(program, sizes):
        assert begin == ends[tensor]
        assert 0 < end - begin <= MOST
        ends[tensor] = end
    assert ends == sizes


def test_a_short_launch_has_whole_chunks(program):
    """Its table would otherwise grow with the parameters."""
    assert len(chunks_of(program, [22500] * 3)) == 9
    assert len(chunks_of(program, [MOST * 455])) == 455
    assert len(chunks_of(program, [MOST * 456])) > 1000
