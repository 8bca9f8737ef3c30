"""Every benchmark runs at a tiny size and writes its report; the docs have the committed results."""

import importlib
import itertools
import json

import pytest
import torch

import loco_ext
from bench import bench_optim_step, generated, harness, tables
from tests.bench import tiny

OPTIONS = {
    "optim_step": ["--quick", "--threads", "1", "2"],
    "train": ["--models", "small", "--threads", "1"],
    "compact": ["--networks", "small", "--patterns", "mixed", "--formats", "contiguous", "--threads", "1"],
    "landscape": ["--quick", "--threads", "1"],
    "ring_prox": ["--quick", "--threads", "1"],
    "block_sparse": ["--quick", "--threads", "1"],
    "regions": ["--quick", "--threads", "1", "--batches", "1", "8"],
    "optim_step_gpu": ["--networks", "resnet50", "thousand_small", "--rules", "adamw"],
    "ring_prox_gpu": ["--rules", "sgd"],
    "block_sparse_gpu": [],
}
ORDINARY = ("optim_step", "train")


def timings(value):
    """Return all timings in a report."""
    if isinstance(value, list):
        return [timing for each in value for timing in timings(each)]
    if not isinstance(value, dict):
        return []
    return [value] if "p20" in value else [timing for each in value.values() for timing in timings(each)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ORDINARY else pytest.mark.slow) for n in OPTIONS])
def test_a_benchmark_runs_and_its_tables_are_made(name, tmp_path, monkeypatch):
    tiny.make_small(monkeypatch)
    if name.endswith("gpu"):
        tiny.run_on_the_cpu(monkeypatch)
    path = tmp_path / f"{name}-tiny.json"
    assert importlib.import_module(f"bench.bench_{name}").main([*OPTIONS[name], "--out", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert len(timings(report["results"])) > 2
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
    assert "| many_small |" in page.read_text()
    assert generated.main("bench", {page: sections}, ["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().err
    assert generated.main("bench", {page: sections}, []) == 0
    assert "No GPU has been measured yet" in page.read_text()
    assert "| many_small |" not in page.read_text()


@pytest.mark.parametrize("rule", bench_optim_step.RULES)
def test_candidates_of_a_kind_compute_the_same_step(monkeypatch, rule):
    tiny.make_small(monkeypatch)
    # The benchmark's own decay changes less than the comparison's tolerance.
    monkeypatch.setattr(bench_optim_step, "LEARNING_RATE", 0.1)
    monkeypatch.setattr(bench_optim_step, "WEIGHT_DECAY", 0.5)
    results = {}
    with loco_ext.backend("native"):
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


def test_candidates_take_turns_and_ratios_are_of_calls_in_one_round():
    """The machine becomes slower from round to round, and is another one in the second build."""
    calls, order = itertools.count(), []
    seconds = {"a": 1.02, "b": 1.0}

    def clock(name, call, before):
        order.append(name)
        return seconds[name] * (1 + (next(calls) // 2) ** 3)

    effort = harness.Effort(min_rounds=20, min_seconds=0.0, warmup=1, builds=2)
    found = harness.compare(lambda: dict.fromkeys(seconds, int), effort, clock=clock)
    rounds = [order[at : at + 2] for at in range(0, len(order), 2)]
    assert all(sorted(names) == ["a", "b"] for names in rounds)
    assert {tuple(names) for names in rounds} == {("a", "b"), ("b", "a")}
    assert found.ratio("a", "b") == pytest.approx(1.02)
    assert found["a"].rounds == 40
