"""The benchmark's shapes, timing, report and tables. Speed itself is not tested here."""

import itertools
import json
import math
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loco_ext
from bench import bench_optim_step, harness, shapes, tables

TINY = harness.Effort(min_rounds=4, min_seconds=0.0, warmup=1, builds=2)


@pytest.mark.parametrize(
    ("network", "tensors", "elements"),
    [
        ("resnet18", 62, 11_689_512),
        ("resnet50", 161, 25_557_032),
        ("vgg13", 42, 9_416_010),
        ("mobilenet", 83, 4_231_976),
        ("many_small", 161, 161 * 64),
        ("large", 1, 100_009_998),
    ],
)
def test_network_has_known_number_of_parameters(network: str, tensors: int, elements: int) -> None:
    found = list(shapes.NETWORKS[network]())
    assert (len(found), sum(map(math.prod, found))) == (tensors, elements)


@pytest.mark.parametrize(("network", "count"), [("resnet18", 17), ("resnet50", 17), ("vgg13", 10), ("mobilenet", 14)])
def test_number_of_convolutions_that_have_a_map(network: str, count: int) -> None:
    assert sum(len(shape) == 4 and shape[2:] != (1, 1) for shape in shapes.NETWORKS[network]()) == count


def test_compare_calls_every_candidate_once_a_round_in_changing_order() -> None:
    calls: list[str] = []

    def build() -> dict[str, Callable[[], object]]:
        calls.append("|")
        return {name: lambda name=name: calls.append(name) for name in "abc"}

    timings = harness.compare(
        build,
        harness.Effort(min_rounds=20, min_seconds=0.0, warmup=1, builds=2),
        before=lambda name: calls.append(name.upper()),
    )
    nothing, *builds = "".join(calls).split("|")
    assert nothing == ""
    assert len(builds) == 2
    for text in builds:
        warmup, *rounds = [text[i : i + 6] for i in range(0, len(text), 6)]
        assert warmup == "AaBbCc"
        assert len(rounds) == 20
        assert all(sorted(turn[1::2]) == ["a", "b", "c"] and turn[::2] == turn[1::2].upper() for turn in rounds)
        assert len(set(rounds)) > 1
    assert {timing.rounds for timing in timings.values()} == {40}


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
    # The two values are two states of the caches: the median lies between them, however often each occurs.
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


def have_tiny_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the networks by two of a few elements; the one named "large" keeps its special treatment."""

    def tiny() -> Iterator[shapes.Shape]:
        yield from shapes.conv(3, 5, 3)
        yield (7, 5, 1, 1)

    monkeypatch.setattr(shapes, "NETWORKS", {"tiny": tiny, "large": lambda: iter([(7, 5, 3, 3)])})
    # The memory of a step is measured in a new process, which has the real networks.
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *arguments: function(*arguments))
    bandwidth = harness.bandwidth
    monkeypatch.setattr(harness, "bandwidth", lambda threads, effort: bandwidth(threads, TINY, elements=1000))
    monkeypatch.setattr(harness, "Effort", lambda **arguments: TINY)


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "optim_step-tiny.json"
    with pytest.MonkeyPatch.context() as monkeypatch:
        have_tiny_networks(monkeypatch)
        assert bench_optim_step.main(["--quick", "--threads", "1", "2", "--out", str(path)]) == 0
    return path


def test_report_has_every_field(report_path: Path) -> None:
    report = json.loads(report_path.read_text())
    assert set(report) == {"benchmark", "machine", "settings", "bandwidth", "results", "peak_memory"}
    known = {"cpu", "cores", "caches", "cpu_capability", "memory_bytes", "system", "python", "torch", "loco_ext"}
    assert set(report["machine"]) == known | {"commit", "date"}
    assert [row["threads"] for row in report["bandwidth"]] == [1, 2]
    cases = [(record["network"], record["rule"], record["threads"]) for record in report["results"]]
    assert cases == list(itertools.product(("tiny", "large"), ("sgd", "adamw"), (1, 2)))
    for record in report["results"]:
        large = record["network"] == "large"
        names = bench_optim_step.LARGE_CANDIDATES if large else bench_optim_step.CANDIDATES
        assert set(record["candidates"]) == set(names)
        for timing in record["candidates"].values():
            assert 0 < timing["best"] <= timing["p20"] <= timing["p80"]
            assert timing["best"] <= timing["median"]
        assert ("bandwidth" in record) == large
    rows = [(row["rule"], row["candidate"]) for row in report["peak_memory"]]
    assert rows == list(itertools.product(("sgd", "adamw"), bench_optim_step.LARGE_CANDIDATES))


def test_ratio_is_that_of_calls_in_one_round() -> None:
    """The machine becomes slower from round to round, and is another one in the second build."""
    calls = itertools.count()
    seconds = {"a": 1.02, "b": 1.0}

    def clock(name: str, call: Callable[[], object], before: Callable[[str], object] | None) -> float:
        return seconds[name] * (1 + (next(calls) // 2) ** 3)

    found = harness.compare(lambda: dict.fromkeys(seconds, int), TINY, clock=clock)
    assert found.ratio("a", "b") == pytest.approx(1.02)
    assert found["a"].rounds == 8


def test_ratios_have_their_names(report_path: Path) -> None:
    results = json.loads(report_path.read_text())["results"]
    of_one_thread = list(bench_optim_step.RATIOS)
    assert list(results[0]["ratios"]) == of_one_thread
    assert list(results[1]["ratios"]) == [*of_one_thread, "uniform, 2 threads / 1", "loco, 2 threads / 1"]
    assert all(set(record["alone"]) == {"ours_uniform", "ours_loco"} for record in results)


def test_bandwidth_counts_the_arrays_of_a_step() -> None:
    rates = bench_optim_step.step_bandwidth(
        {"step": 2.0, "copy": 1.0, "triad": 1.0, "update": 0.5}, arrays=5, elements=10
    )
    assert rates["step"] == {"bytes_per_second": 100.0, "of_triad": 100 / 120}
    assert rates["triad"] == {"bytes_per_second": 120.0, "of_triad": 1.0}
    assert rates["copy"] == {"bytes_per_second": 80.0, "of_triad": 80 / 120}
    assert rates["update"] == {"bytes_per_second": 240.0, "of_triad": 2.0}


@pytest.mark.parametrize("rule", bench_optim_step.RULES)
def test_candidates_of_a_kind_compute_the_same_step(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    have_tiny_networks(monkeypatch)
    # The benchmark's own decay changes less than the comparison's tolerance.
    monkeypatch.setattr(bench_optim_step, "LEARNING_RATE", 0.1)
    monkeypatch.setattr(bench_optim_step, "WEIGHT_DECAY", 0.5)
    results = {}
    with loco_ext.backend("native"):
        for name, candidate in bench_optim_step.CANDIDATES.items():
            parameters = bench_optim_step.make_parameters("tiny")
            candidate(bench_optim_step.RULES[rule], parameters)()
            results[name] = parameters
    for name, parameters in results.items():
        mapped = name.endswith(("_map", "_loco"))
        torch.testing.assert_close(parameters, results["torch_loop_map" if mapped else "torch_loop"])
    # The map makes a difference, in the 3x3 convolution only.
    differs = [not torch.allclose(a, b) for a, b in zip(results["torch_loop"], results["torch_loop_map"], strict=True)]
    assert differs == [True, False, False, False]


def test_only_a_full_run_writes_the_committed_file() -> None:
    assert bench_optim_step.parse([]).out.parent == harness.RESULTS
    for arguments in (["--quick"], ["--flush"], ["--networks", "vgg13"], ["--rules", "sgd"]):
        assert bench_optim_step.parse(arguments).out is None


def test_readme_section_is_rewritten_and_checked(report_path: Path, tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", Path(shutil.copy(report_path, tmp_path))
    readme.write_text("before\n<!-- bench:optim_step -->\nold\n<!-- /bench -->\nafter\n")
    assert tables.main(["--check"], readme, tmp_path) == 1
    assert tables.main([], readme, tmp_path) == 0
    assert tables.main(["--check"], readme, tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench:optim_step -->\n")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in text
    assert "\n| tiny | AdamW | 2 |" in text
    report = json.loads(results.read_text())
    report["results"][0]["candidates"]["ours_loco"]["median"] *= 10
    results.write_text(json.dumps(report))
    assert tables.main(["--check"], readme, tmp_path) == 1


@pytest.mark.parametrize("text", ["no markers", "<!-- bench:other -->\n<!-- /bench -->"])
def test_readme_without_known_markers_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="markers of optim_step"):
        tables.render(text, tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0567, "0.0567"), (0.25, "0.250"), (8.4, "8.40"), (68.04, "68.0"), (1234.5, "1234")]
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert tables.significant(value) == text
