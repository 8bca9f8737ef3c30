"""Tests of the harness that times all benchmarks: its rounds, memory, threads, summaries and files."""

import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from bench import bench_optim_step, harness
from tests.processes import SERVER

TINY = harness.Effort(min_rounds=4, min_seconds=0.0, warmup=1, builds=2)


def test_compare_goes_on_until_both_minima_are_reached(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock) / 1000)

    def rounds(**minima):
        return harness.compare(lambda: {"a": int}, harness.Effort(**minima, warmup=0, builds=1))["a"].rounds

    assert rounds(min_rounds=30, min_seconds=0.0) == 30
    assert 20 < rounds(min_rounds=2, min_seconds=0.2) < 200


def test_candidates_are_free_before_they_are_built_again():
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    found = []

    def build():
        found.append(len(alive))
        tensor = torch.zeros(3)
        alive.add(tensor)
        return {"a": tensor.zero_}

    harness.compare(build, TINY)
    assert found == [0, 0]


def test_summary_of_known_values():
    summary = harness.summarise([[5.0, 0.0, 4.0, 1.0, 3.0], [2.0]])
    assert summary == harness.Timing(median=2.5, p20=1.0, p80=4.0, best=0.0, rounds=6)
    # The two values are two states of the caches: the median is between them, however often each occurs.
    assert harness.summarise([[1.0] * 9, [2.0] * 2]).median == 1.5


def test_stream_kernels_compute_what_they_say():
    results = [(name, kernel().tolist()) for name, kernel in harness.stream_kernels(5).items()]
    assert results == [("copy", [1.0] * 5), ("triad", [7.0] * 5), ("update", [10.0] * 5)]


def grown(size):
    """Return by how much the process grows while it takes so much memory, and while it takes none."""
    return harness.peak_extra_memory(lambda: torch.ones(size, dtype=torch.uint8)), harness.peak_extra_memory(int)


def test_peak_memory_sees_memory_that_is_freed_again():
    size = 1 << 26
    with ProcessPoolExecutor(1, SERVER) as pool:  # this process may hold freed memory that it would reuse
        extra, nothing = pool.submit(grown, size).result()
    if extra is None:
        pytest.skip("this system does not tell")
    assert 0.9 * size < extra < 1.5 * size
    assert nothing < 0.1 * size


def test_bandwidth_counts_the_arrays_of_a_step():
    rates = bench_optim_step.step_bandwidth(
        {"step": 2.0, "copy": 1.0, "triad": 1.0, "update": 0.5}, arrays=5, elements=10
    )
    assert rates["step"] == {"bytes_per_second": 100.0, "of_triad": 100 / 120}
    assert rates["triad"] == {"bytes_per_second": 120.0, "of_triad": 1.0}
    assert rates["copy"] == {"bytes_per_second": 80.0, "of_triad": 80 / 120}
    assert rates["update"] == {"bytes_per_second": 240.0, "of_triad": 2.0}
