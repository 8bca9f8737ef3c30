"""The benchmarks of the prox of ring penalties: agreement of all candidates, and contents of reports and tables."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loco_ext
from bench import bench_ring_prox, bench_ring_prox_gpu, harness, machine, ring_prox_peers, shapes, tables
from bench.bench_ring_prox import CASES, RULES
from loco_ext import sparsity
from tests.bench.gpu_on_cpu import FACTS, TINY, run_on_the_cpu

pytestmark = pytest.mark.slow

SHAPE = (9, 5, 3, 3)


def with_shape(case: bench_ring_prox.Case, shape: tuple[int, ...]) -> bench_ring_prox.Case:
    """Return the case with another shape, and with thresholds so small that some of its kernels vanish and not all."""
    penalty = dataclasses.replace(case.penalty, strength=0.2 if case.penalty.norm == "linf" else 0.05)
    return dataclasses.replace(case, penalty=penalty, shape=shape)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the weights and the network by small ones, and compile nothing."""
    small = {name: with_shape(case, SHAPE) for name, case in CASES.items()}
    for module in (bench_ring_prox, bench_ring_prox_gpu):
        monkeypatch.setattr(module, "CASES", small)
    bandwidth = harness.bandwidth
    monkeypatch.setattr(harness, "bandwidth", lambda threads, effort: bandwidth(threads, TINY, elements=1000))
    monkeypatch.setattr(harness, "Effort", lambda **arguments: TINY)
    monkeypatch.setattr(shapes, "NETWORKS", {"resnet50": lambda: iter([(5, 3, 3, 3), (4, 5, 1, 1), (7,)])})
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "ring_prox-tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        assert bench_ring_prox.main(["--quick", "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize("shape", [SHAPE, (6, 1, 5, 5), (3, 4, 1, 3)])
@pytest.mark.parametrize("name", CASES)
def test_all_candidates_give_the_references_result(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    case = with_shape(CASES[name], shape)
    reference = bench_ring_prox.expected(case)
    assert 0 < (reference == 0).double().mean() < 1
    missing = ring_prox_peers.not_installed()
    names = list(bench_ring_prox.make_candidates(case, bench_ring_prox.make_weight(shape), missing))
    assert names == [*(peer for peer in case.peers if peer not in missing), "ours", "copy"]
    for label in names[:-1]:
        weight = bench_ring_prox.make_weight(shape)
        candidate = bench_ring_prox.make_candidates(case, weight, missing)[label]
        bench_ring_prox.check(label, candidate.result(candidate.call()), reference)


def test_the_benchmarks_weights_lose_kernels_and_rings() -> None:
    for name, case in CASES.items():
        weight = bench_ring_prox.make_weight(case.shape)
        metric = bench_ring_prox.make_metric(weight) if case.metric else None
        sizes = sparsity.kernel_sizes(case.penalty.prox(weight, 1.0, metric))
        found = [(sizes == size).sum().item() for size in (0, 1, 2, 3)]
        assert found[0] > 50, name
        assert found[3] > 50, name
        assert name == "kernels" or found[1] + found[2] > 5, name


def test_a_wrong_result_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: ring_prox_peers.Problem) -> ring_prox_peers.Candidate:
        return ring_prox_peers.Candidate(lambda: problem.weight * 0.999)

    monkeypatch.setitem(ring_prox_peers.PEERS, "torch_masks", wrong)
    reference = bench_ring_prox.expected(bench_ring_prox.CASES["rings"])
    with pytest.raises(RuntimeError, match="rings, torch_masks: expected the reference's result"):
        bench_ring_prox.measure_prox("rings", 1, TINY, reference, {})
    with pytest.raises(RuntimeError, match="got an error of nan"):
        bench_ring_prox.check("a", torch.full((3,), torch.nan), torch.ones(3))


def test_a_peer_that_works_in_place_finds_the_weight_as_it_was(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def in_place(problem: ring_prox_peers.Problem) -> ring_prox_peers.Candidate:
        result = bench_ring_prox.CASES["kernels"].penalty.prox(problem.weight, 1.0)

        def call() -> torch.Tensor:
            found.append(problem.weight.clone())
            return problem.weight.copy_(result)

        return ring_prox_peers.Candidate(call)

    monkeypatch.setitem(ring_prox_peers.PEERS, "torchao", in_place)
    reference = bench_ring_prox.expected(bench_ring_prox.CASES["kernels"])
    bench_ring_prox.measure_prox("kernels", 1, TINY, reference, {"spams": "left out"})
    assert len(found) > 3
    assert all(torch.equal(weight, bench_ring_prox.make_weight(SHAPE)) for weight in found)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, small: None, tmp_path: Path) -> None:
    monkeypatch.setattr(ring_prox_peers, "find_spec", lambda name: None)
    path = tmp_path / "ring_prox-tiny.json"
    arguments = ["--quick", "--threads", "1", "--cases", "kernels", "--rules", "--out", str(path)]
    assert bench_ring_prox.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["not_measured"] == {name: f"{name} is not installed" for name in ("spams", "torchao")}
    assert set(report["results"][0]["candidates"]).isdisjoint({"spams", "torchao"})
    assert "Not measured: spams: spams is not installed; torchao:" in tables.section("ring_prox", tmp_path)


def test_report_has_every_field(report_path: Path) -> None:
    report = json.loads(report_path.read_text())
    fields = {"benchmark", "machine", "settings", "bandwidth", "not_measured", "results", "steps", "targets"}
    assert set(report) == fields
    assert {"cpu", "torch", "commit", "spams-bin", "torchao"} <= set(report["machine"])
    assert [(r["case"], r["threads"]) for r in report["results"]] == [*itertools.product(CASES, (1, 2))]
    for record in report["results"]:
        expected = {*CASES[record["case"]].peers, "ours", "copy"} - set(report["not_measured"])
        assert set(record["candidates"]) == expected
        measured = {name for name, pair in bench_ring_prox.RATIOS.items() if set(pair) <= expected}
        assert set(record["ratios"]) == measured
    assert [(r["rule"], r["threads"]) for r in report["steps"]] == [*itertools.product(RULES, (1, 2))]
    for record in report["steps"]:
        assert list(record["candidates"]) == ["without", "spatial", "all"]
        assert list(record["ratios"]) == ["more than one tap / without", "all / without"]
    assert len(report["targets"]) == 4


def test_penalties_reach_the_convolutions_named() -> None:
    parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.resnet50()]

    def count(name: str) -> int:
        penalties = bench_ring_prox.penalties_of(parameters, bench_ring_prox.STEPS[name])
        return sum(penalty is not None for penalty in penalties or [])

    assert [count(name) for name in ("without", "spatial", "all")] == [0, 17, 53]


@pytest.mark.parametrize("rule", RULES)
def test_a_step_with_the_penalty_ends_with_its_prox(small: None, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(bench_ring_prox, "STRENGTH", 1e3)
    for name, dead in (("without", 0), ("spatial", 1), ("all", 2)):
        parameters = bench_ring_prox.make_parameters("resnet50")
        least = bench_ring_prox.STEPS[name]
        step = bench_ring_prox.penalised_step(RULES[rule], parameters, None, least)
        step()
        assert [not p.any() for p in parameters] == [i < dead for i in range(3)]


def test_targets_are_judged_by_the_worst_case() -> None:
    def prox(case: str, threads: int, value: float) -> dict[str, Any]:
        return {"case": case, "threads": threads, "ratios": {"eager by groups / ours": value}}

    def step(rule: str, value: float) -> dict[str, Any]:
        return {"rule": rule, "threads": 2, "ratios": {"all / without": value, "more than one tap / without": 1.0}}

    results = [prox("half rings", 1, 25.0), prox("half rings", 2, 21.0), prox("kernels", 1, 2.0)]
    rows = bench_ring_prox.targets(results, [step("sgd", 1.1), step("adam", 1.6)])
    assert [(row["measured"], row["wanted"], row["met"], row["where"]) for row in rows] == [
        (21.0, "at least 20", True, "half rings, threads 2"),
        (1.1, "at most 1.15", True, "all / without, threads 2"),
        (1.6, "at most 1.5", False, "all / without, threads 2"),
    ]
    assert bench_ring_prox.targets([], []) == []


def test_only_a_full_run_writes_the_committed_file() -> None:
    assert bench_ring_prox.parse([]).out.parent == harness.RESULTS
    for arguments in (["--quick"], ["--cases", "kernels"], ["--rules", "sgd"]):
        assert bench_ring_prox.parse(arguments).out is None
        assert not bench_ring_prox_gpu.COMMAND.is_full(bench_ring_prox_gpu.COMMAND.parse(arguments))
    assert bench_ring_prox_gpu.COMMAND.is_full(bench_ring_prox_gpu.COMMAND.parse([]))


def test_readme_section_is_rendered(report_path: Path, tmp_path: Path) -> None:
    text = tables.render("<!-- bench:ring_prox -->\nold text\n<!-- /bench -->\n", report_path.parent)
    assert "old text" not in text
    titles = ("Targets", "Milliseconds for the prox alone", "The same as ratios", "Milliseconds for one step")
    assert [title for title in titles if f"\n{title}" not in text] == []
    assert "\n| half rings, linf | 2 |" in text
    assert "\n| resnet50 | AdamW | 1 |" in text
    nothing = tables.render("<!-- bench:ring_prox -->\n<!-- /bench -->", tmp_path)
    assert "Not measured yet" in nothing


# ---- on a GPU


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU's benchmark run on the CPU, where "triton" also stands for the native backend."""
    make_small(monkeypatch)
    run_on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench_ring_prox_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(bench_ring_prox_gpu, "capture", lambda step: step)


def test_gpu_report_and_tables(no_gpu_needed: None, tmp_path: Path) -> None:
    path = tmp_path / "ring_prox_gpu-made-up.json"
    assert bench_ring_prox_gpu.main(["--out", str(path)]) == 0
    report = json.loads(path.read_text())
    fields = {"benchmark", "machine", "settings", "copy_bandwidth", "not_measured", "results", "steps"}
    assert set(report) == fields
    assert report["machine"].items() >= FACTS.items()
    cases = [(record["case"], record["dtype"]) for record in report["results"]]
    assert cases == [*itertools.product(CASES, ("float32", "bfloat16"))]
    assert report["settings"]["cases"] == len(report["results"]) + len(report["steps"]) == 16
    for record in report["results"]:
        peers = {"torch_groups", "torch_rings", "torch_compile"} & set(CASES[record["case"]].peers)
        assert set(record["candidates"]) == {"cuda", "triton"} | (peers if record["dtype"] == "float32" else set())
        gpu = record["candidates"]["cuda"]["gpu"]["median"]
        arrays = 3 if "metric" in record["case"] else 2
        moved = arrays * 9 * 5 * 9 * (4 if record["dtype"] == "float32" else 2)
        assert record["of_copy"]["cuda"] == pytest.approx(moved / gpu / 1e12)
    for record, (rule, mode) in zip(report["steps"], itertools.product(RULES, ("eager", "graph")), strict=True):
        assert (record["rule"], record["mode"]) == (rule, mode)
        assert len(record["candidates"]) == 6
        assert set(record["ratios"]) == {
            f"{backend}, {name}"
            for backend in ("cuda", "triton")
            for name in ("more than one tap / without", "all / without")
        }
    text = tables.section("ring_prox_gpu", tmp_path)
    assert "Made-Up GPU 80GB" in text
    assert "\n| half rings, metric | bfloat16 |" in text
    assert "\n| resnet50 | Adam | graph |" in text
    assert "No GPU has been measured" in tables.section("ring_prox_gpu", tmp_path / "nothing")


def test_gpu_results_are_checked(no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = bench_ring_prox_gpu.expected("rings", "float32")
    monkeypatch.setattr(sparsity.RingPenalty, "prox", lambda self, weight, step, metric=None: weight * (2 - step))
    with pytest.raises(RuntimeError, match="rings float32, cuda: expected the reference's result"):
        bench_ring_prox_gpu.make_calls("rings", "float32", reference, {})


def test_triton_is_left_out_where_it_is_missing(no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"triton": "no triton"}
    monkeypatch.setattr(bench_ring_prox_gpu.backends, "missing", lambda family, name, device: reasons.get(name))
    reference = bench_ring_prox_gpu.expected("kernels", "float32")
    missing = bench_ring_prox_gpu.not_measured()
    assert missing == {"triton": "no triton", "torch_compile": "no triton"}
    assert list(bench_ring_prox_gpu.make_calls("kernels", "float32", reference, missing)) == [
        "cuda",
        "torch_groups",
        "torch_rings",
    ]
    assert all(name.startswith("cuda") for name in bench_ring_prox_gpu.make_steps("adam", "eager", missing))


def test_without_a_gpu_the_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "no_gpu", lambda: "torch finds no NVIDIA GPU")
    assert bench_ring_prox_gpu.main([]) == 2
    assert capsys.readouterr().err == "bench_ring_prox_gpu: torch finds no NVIDIA GPU\n"


def test_loco_ext_is_measured_in_the_backends_it_names(no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = []
    backend = loco_ext.backend
    monkeypatch.setattr(loco_ext, "backend", lambda name: forced.append(name) or backend("native"))
    reference = bench_ring_prox_gpu.expected("rings", "bfloat16")
    calls = bench_ring_prox_gpu.make_calls("rings", "bfloat16", reference, {})
    forced.clear()
    for call in calls.values():
        call()
    assert forced == ["native", "triton"]
