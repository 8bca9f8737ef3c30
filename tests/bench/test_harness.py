"""Tests of the harness that times all benchmarks: its rounds, memory, threads, summaries and files."""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_optim_step, harness

TINY = harness.Effort(min_rounds=4, min_seconds=0.0, warmup=1, builds=2)


def test_compare_goes_on_until_both_minima_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock) / 1000)

    def rounds(**minima: Any) -> int:
        return harness.compare(lambda: {"a": int}, harness.Effort(**minima, warmup=0, builds=1))["a"].rounds

    assert rounds(min_rounds=30, min_seconds=0.0) == 30
    assert 20 < rounds(min_rounds=2, min_seconds=0.2) < 200


def test_compare_wants_a_candidate() -> None:
    with pytest.raises(ValueError, match="candidate"):
        harness.compare(dict, TINY)


def test_candidates_are_free_before_they_are_built_again() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    found = []

    def build() -> dict[str, Callable[[], object]]:
        found.append(len(alive))
        tensor = torch.zeros(3)
        alive.add(tensor)
        return {"a": tensor.zero_}

    harness.compare(build, TINY)
    assert found == [0, 0]


def test_summary_of_known_values() -> None:
    summary = harness.summarise([[5.0, 0.0, 4.0, 1.0, 3.0], [2.0]])
    assert summary == harness.Timing(median=2.5, p20=1.0, p80=4.0, best=0.0, rounds=6)
    # The two values are two states of the caches: the median is between them, however often each occurs.
    assert harness.summarise([[1.0] * 9, [2.0] * 2]).median == 1.5


def test_stream_kernels_compute_what_they_say() -> None:
    results = [(name, kernel().tolist()) for name, kernel in harness.stream_kernels(5).items()]
    assert results == [("copy", [1.0] * 5), ("triad", [7.0] * 5), ("update", [10.0] * 5)]


def test_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with harness.num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_peak_memory_sees_memory_that_is_freed_again() -> None:
    size = 1 << 26
    code = f"""
import json, torch
from bench import harness
extra = harness.peak_extra_memory(lambda: torch.ones({size}, dtype=torch.uint8))
print(json.dumps([extra, harness.peak_extra_memory(lambda: None)]))
"""
    # The process is a new one, because this one may hold freed memory that it would reuse.
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    extra, nothing = json.loads(process.stdout)
    if extra is None:
        pytest.skip("this system does not tell")
    assert 0.9 * size < extra < 1.5 * size
    assert nothing < 0.1 * size


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        harness.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_bandwidth_counts_the_arrays_of_a_step() -> None:
    rates = bench_optim_step.step_bandwidth(
        {"step": 2.0, "copy": 1.0, "triad": 1.0, "update": 0.5}, arrays=5, elements=10
    )
    assert rates["step"] == {"bytes_per_second": 100.0, "of_triad": 100 / 120}
    assert rates["triad"] == {"bytes_per_second": 120.0, "of_triad": 1.0}
    assert rates["copy"] == {"bytes_per_second": 80.0, "of_triad": 80 / 120}
    assert rates["update"] == {"bytes_per_second": 240.0, "of_triad": 2.0}
