"""Every benchmark runs at a tiny size and writes its report; figures follow from timings; the docs have the results."""

import importlib
import itertools
import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import loco_ext
from bench import bench_optim_step, generated, gpu_timer, harness, tables
from tests.bench.tiny import on_the_cpu, tiny
from tests.covering import slow

OPTIONS = {
    "optim_step": ["--threads", "1", "2"],
    "train": ["--threads", "1"],
    "compact": ["--networks", "small", "--patterns", "mixed", "--formats", "contiguous", "--threads", "1"],
    "zoo": ["--networks", "tv:resnet18"],
    **{name: ["--threads", "1"] for name in ("landscape", "ring_prox", "block_sparse")},
    "regions": ["--threads", "1", "--batches", "1", "8"],
    "optim_step_gpu": ["--networks", "resnet50", "thousand_small", "--rules", "adamw"],
    "ring_prox_gpu": ["--rules", "sgd"],
    "block_sparse_gpu": [],
}


def timings(value):
    """Return all timings in a report."""
    if isinstance(value, dict) and "p20" in value:
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [timing for entry in entries for timing in timings(entry)]


@pytest.mark.parametrize("name", [name if name == "train" else slow(name) for name in OPTIONS])
def test_a_benchmark_runs_and_its_tables_are_made(name, tmp_path):
    path = tmp_path / f"{name}-tiny.json"
    with tiny(), on_the_cpu() if name.endswith("gpu") else nullcontext():
        assert importlib.import_module(f"bench.bench_{name}").main([*OPTIONS[name], "--quick", "--out", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert len(timings(report["results"])) >= 2
    assert all(0 < timing["best"] <= timing["p20"] <= timing["p80"] for timing in timings(report))
    text = generated.section(name, tables.RENDERERS, tmp_path)
    assert all(f"\n{table.title}\n" in text for table in tables.RENDERERS[name](report) if table.rows)
    assert text.count("\n| ") > len(report["results"])


def test_the_pages_have_the_committed_results(tmp_path, capsys):
    assert tables.main(["--check"]) == 0
    sections = generated.all_sections(tables.RENDERERS, tmp_path)
    with pytest.raises(ValueError, match="expected markers of optim_step"):
        generated.render("no markers", "bench", sections)
    page = tmp_path / "page.md"
    page.write_text((generated.DOCS / "benchmarks.md").read_text())
    assert generated.main("bench", {page: sections}, ["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().err
    assert generated.main("bench", {page: sections}, []) == 0
    assert "No GPU has been measured yet" in page.read_text()
    assert "| many_small |" not in page.read_text()


@pytest.mark.parametrize("rule", bench_optim_step.RULES)
def test_candidates_of_a_kind_compute_the_same_step(monkeypatch, rule):
    # The benchmark's own decay changes less than the comparison's tolerance.
    monkeypatch.setattr(bench_optim_step, "LEARNING_RATE", 0.1)
    monkeypatch.setattr(bench_optim_step, "WEIGHT_DECAY", 0.5)
    results = {}
    with tiny(), loco_ext.backend("native"):
        for name, candidate in bench_optim_step.CANDIDATES.items():
            results[name] = bench_optim_step.make_parameters("resnet50")
            candidate(bench_optim_step.RULES[rule], results[name])()
    for name, parameters in results.items():
        mapped = name.endswith(("_map", "_loco"))
        torch.testing.assert_close(parameters, results["torch_loop_map" if mapped else "torch_loop"])
    differ = [not torch.allclose(a, b) for a, b in zip(results["torch_loop"], results["torch_loop_map"], strict=True)]
    assert differ == [True, False, False]


def test_a_wrong_result_is_not_timed():
    for wrong in (torch.full((3,), 0.9), torch.full((3,), torch.nan)):
        with pytest.raises(RuntimeError, match="a: expected the reference's result"):
            harness.check("a", wrong, torch.ones(3), 1e-2)


def test_candidates_take_turns_until_both_minima_are_reached_and_ratios_are_of_calls_in_one_round():
    """The machine becomes slower from round to round, and is another one in the second build."""
    calls, order = itertools.count(), []
    seconds = {"a": 1.02, "b": 1.0}

    def clock(name, call, before):
        order.append(name)
        return seconds[name] * (1 + (next(calls) // 2) ** 3)

    build = partial(dict.fromkeys, seconds, int)
    found = harness.compare(build, harness.Effort(min_rounds=20, min_seconds=0.0, warmup=1, builds=2), clock=clock)
    rounds = [order[at : at + 2] for at in range(0, len(order), 2)]
    assert {tuple(names) for names in rounds} == {("a", "b"), ("b", "a")}
    assert found.ratio("a", "b") == pytest.approx(1.02)
    assert found["a"].rounds == 40
    assert harness.compare(build, harness.Effort(min_rounds=2, min_seconds=0.1, builds=1))["a"].rounds > 20


def test_summary_of_known_values():
    summary = harness.summarise([[5.0, 0.0, 4.0, 1.0, 3.0], [2.0]])
    assert summary == harness.Timing(median=2.5, p20=1.0, p80=4.0, best=0.0, rounds=6)
    # The two values are two states of the caches: the median is between them, however often each occurs.
    assert harness.summarise([[1.0] * 9, [2.0] * 2]).median == 1.5


@pytest.mark.slow
def test_peak_memory_sees_memory_that_is_freed_again():
    extra = harness.in_fresh_process(harness.peak_extra_memory, partial(torch.ones, 1 << 26, dtype=torch.uint8))
    assert extra is None or 0.9 < extra / 2**26 < 1.5


def test_bandwidth_counts_the_arrays_of_a_step():
    medians = {"step": 2.0, "copy": 1.0, "triad": 1.0, "update": 0.5}
    rates = bench_optim_step.step_bandwidth(medians, arrays=5, elements=10)
    assert rates["step"] == {"bytes_per_second": 100.0, "of_triad": 100 / 120}
    assert [rates[name]["bytes_per_second"] for name in ("copy", "triad", "update")] == [80.0, 120.0, 240.0]


@pytest.mark.parametrize(
    "name", ["optim_step_gpu", "ring_prox", "block_sparse", "block_sparse_gpu", "landscape", "regions"]
)
def test_the_committed_targets_follow_from_what_was_measured(name):
    (path,) = harness.RESULTS.glob(f"{name}-*.json")
    report = json.loads(path.read_text())
    rows = importlib.import_module(f"bench.bench_{name}").targets(report)
    assert rows == [row | {"measured": pytest.approx(row["measured"])} for row in report["targets"]]


def test_an_eager_step_takes_the_longer_of_the_times_of_gpu_and_host():
    gpu, host = ({"a": harness.summarise([[seconds]])} for seconds in (1.0, 2.0))
    assert [gpu_timer.step_seconds(gpu, host, mode) for mode in ("eager", "graph")] == [{"a": 2.0}, {"a": 1.0}]
