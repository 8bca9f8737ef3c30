"""The GPU benchmark without a GPU: made-up timings, a whole run on the CPU, and refusals to start."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_optim_step_gpu, harness, machine, shapes, tables
from bench.bench_optim_step_gpu import Case
from tests.bench.gpu_on_cpu import FACTS, run_on_the_cpu

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("network", "tensors", "elements"), [("vit_b", 152, 86_567_656), ("thousand_small", 1000, 64_000)]
)
def test_network_has_known_number_of_parameters(network: str, tensors: int, elements: int) -> None:
    found = list(shapes.GPU_NETWORKS[network]())
    assert (len(found), sum(map(math.prod, found))) == (tensors, elements)


# ---- figures


def timing(seconds: float) -> harness.Timing:
    return harness.Timing(median=seconds, p20=seconds, p80=seconds, best=seconds, rounds=1)


def made_up(case: Case, gpu: dict[str, float], host: dict[str, float], copy: float = 1e12) -> dict[str, Any]:
    """Return a record of made-up times of GPU and host, in microseconds, and a copy bandwidth in bytes/s."""
    both = ({name: timing(1e-6 * value) for name, value in values.items()} for values in (gpu, host))
    return bench_optim_step_gpu.record(case, *both, copy)


def test_an_eager_step_takes_the_longer_of_gpu_and_host_and_a_replayed_one_the_gpus_time() -> None:
    gpu = {"torch_fused": 300.0, "cuda_uniform": 200.0, "cuda_loco": 202.0}
    host = {"torch_fused": 500.0, "cuda_uniform": 50.0, "cuda_loco": 50.0}
    eager = made_up(Case("resnet50", "sgd", "float32", "eager"), gpu, host)
    graph = made_up(Case("resnet50", "sgd", "float32", "graph"), gpu, host)
    assert eager["candidates"]["torch_fused"]["seconds"] == pytest.approx(500e-6)
    assert eager["ratios"]["step"]["cuda / torch fused"] == pytest.approx(200 / 500)
    assert graph["ratios"]["step"]["cuda / torch fused"] == pytest.approx(200 / 300)
    for record in (eager, graph):
        assert record["ratios"]["gpu"] == pytest.approx({"cuda / torch fused": 200 / 300, "loco / uniform": 1.01})


@pytest.mark.parametrize(("rule", "dtype", "size"), [("sgd", "float32", 20), ("adamw", "bfloat16", 14)])
def test_bandwidth_counts_the_arrays_of_a_step(rule: str, dtype: str, size: int) -> None:
    record = made_up(Case("resnet50", rule, dtype, "graph"), {"cuda_uniform": 100.0}, {"cuda_uniform": 1.0}, copy=1e13)
    moved = 25_557_032 * size
    assert record["bytes"] == moved
    rate = record["bandwidth"]["cuda_uniform"]
    assert rate == pytest.approx({"bytes_per_second": moved / 1e-4, "of_copy": moved / 1e-4 / 1e13})


def records(**changes: float) -> list[dict[str, Any]]:
    """Return records of every network in both modes; ``changes`` replace microseconds of ResNet-50's eager SGD step."""
    found = []
    for network, mode in itertools.product(shapes.GPU_NETWORKS, ("eager", "graph")):
        gpu = {"torch_fused": 280.0, "torch_foreach": 900.0, "cuda_uniform": 200.0, "triton_uniform": 500.0}
        gpu |= {"cuda_loco": 204.0} if network.startswith("resnet") else {}
        host = dict.fromkeys(gpu, 90.0)
        if (network, mode) == ("resnet50", "eager"):
            gpu |= {name: value for name, value in changes.items() if name != "host"}
            host["cuda_loco"] = changes.get("host", 90.0)
        elements = sum(map(math.prod, shapes.GPU_NETWORKS[network]()))
        copy = 20 * elements / 200e-6 / 0.9  # such that cuda_uniform reaches 0.9 of it
        found.append(made_up(Case(network, "sgd", "float32", mode), gpu, host, copy))
    return found


NO_SYNCS = {"cuda sgd": 0, "triton sgd": 3}


def test_targets_are_met() -> None:
    rows = bench_optim_step_gpu.targets(records(), NO_SYNCS)
    assert [set(row) for row in rows] == [{"name", "wanted", "measured", "met", "where"}] * 6
    assert all(row["met"] for row in rows)
    measured = [row["measured"] for row in rows]
    assert measured == pytest.approx([0.9 * 200 / 204, 1.4, 1.4, 1.02, 90.0, 0.0])
    wanted = ["at least 0.85", "at least 1.3", "at least 1.3", "at most 1.03", "at most 100", "at most 0"]
    assert [row["wanted"] for row in rows] == wanted


@pytest.mark.parametrize(
    ("changes", "syncs", "missed", "where"),
    [
        ({"cuda_loco": 250.0}, NO_SYNCS, [0, 3], "resnet50 sgd float32 eager, cuda_loco"),
        ({"torch_fused": 220.0}, NO_SYNCS, [1], "resnet50 sgd float32 eager"),
        ({"host": 130.0}, NO_SYNCS, [4], "resnet50 sgd float32 eager, cuda_loco"),
        ({}, {"cuda sgd": 0, "cuda adamw": 1}, [5], "cuda adamw"),
    ],
)
def test_targets_are_judged_by_the_worst_case(
    changes: dict[str, float], syncs: dict[str, int], missed: list[int], where: str
) -> None:
    rows = bench_optim_step_gpu.targets(records(**changes), syncs)
    assert [i for i, row in enumerate(rows) if not row["met"]] == missed
    assert rows[missed[0]]["where"] == where


def test_targets_of_what_was_not_measured_are_left_out() -> None:
    small = [record for record in records() if record["network"] == "thousand_small"]
    names = [row["name"] for row in bench_optim_step_gpu.targets(small, {})]
    assert names == ["times faster than torch fused, 1,000 small tensors", "host time of a step in microseconds"]


def test_candidates_with_a_map_run_where_it_reaches_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_optim_step_gpu, "not_measured", dict)

    def left_out(network: str, dtype: str) -> set[str]:
        found = bench_optim_step_gpu.candidates_of(Case(network, "sgd", dtype, "eager"))
        return set(bench_optim_step_gpu.CANDIDATES) - set(found)

    assert left_out("resnet18", "float32") == set()
    assert left_out("resnet50", "bfloat16") == {"apex"}
    for network in ("vit_b", "thousand_small"):
        assert left_out(network, "float32") == {"cuda_loco", "triton_loco"}


def test_the_host_is_ahead_of_the_gpu_by_more_than_a_step() -> None:
    flush = bench_optim_step_gpu.Flush(lambda: None, 100e-6)
    assert [flush.times(seconds) for seconds in (0.0, 50e-6, 100e-6, 1e-3)] == [1, 2, 3, 16]


# ---- a whole run, on the CPU

REPORTED = ("resnet50", "thousand_small")


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_the_cpu(monkeypatch)


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "optim_step_gpu-made-up.json"
    with pytest.MonkeyPatch.context() as patch:
        run_on_the_cpu(patch)
        assert bench_optim_step_gpu.main(["--networks", *REPORTED, "--out", str(path)]) == 0
    return path


def test_report_has_every_field(report_path: Path) -> None:
    report = json.loads(report_path.read_text())
    fields = {"benchmark", "machine", "settings", "copy_bandwidth", "not_measured", "results", "syncs", "targets"}
    assert set(report) == fields
    assert report["machine"].items() >= FACTS.items()
    cases = [tuple(record[key] for key in ("network", "rule", "dtype", "mode")) for record in report["results"]]
    assert cases == [*itertools.product(REPORTED, ("sgd", "adamw"), ("float32", "bfloat16"), ("eager", "graph"))]
    assert report["settings"]["cases"] == len(cases)
    for record in report["results"]:
        found = set(record["candidates"])
        assert found >= {"torch_foreach", "torch_fused", "cuda_uniform", "triton_uniform"}
        assert ("cuda_loco" in found) == (record["network"] != "thousand_small")
        assert set(record["bandwidth"]) == found
        for entry in record["candidates"].values():
            assert entry["gpu"]["median"] > 0
            assert entry["host"]["median"] > 0
    assert report["syncs"] == dict.fromkeys(["cuda sgd", "cuda adamw", "triton sgd", "triton adamw"], 0)
    assert len(report["targets"]) == 6


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_candidates_compute_the_same_step(no_gpu_needed: None, rule: str) -> None:
    case = Case("resnet50", rule, "float32", "eager")
    results = {}
    for name in bench_optim_step_gpu.candidates_of(case):
        parameters = bench_optim_step_gpu.make_parameters(case.network, torch.float32)
        moments = {p: {key: torch.full_like(p, 0.5) for key in bench_optim_step_gpu.MOMENTS[rule]} for p in parameters}
        state = bench_optim_step_gpu.make_state(case, name, moments)
        bench_optim_step_gpu.CANDIDATES[name](bench_optim_step_gpu.RULES[rule], parameters, state)()
        results[name] = [*parameters, *(state[p][key] for p in parameters for key in moments[p])]
    assert len(results) >= 6
    for name, values in results.items():
        torch.testing.assert_close(values, results["cuda_loco" if name.endswith("_loco") else "torch_fused"])


def test_syncs_are_counted(no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Waits(torch.optim.SGD):
        message = "called a synchronizing CUDA operation"

        def __init__(self, *arguments: Any, locality: object, **options: Any) -> None:
            super().__init__(*arguments, **options)

        def step(self, closure: Any = None) -> None:
            if modes and modes[-1] == "error":
                raise RuntimeError(self.message)

    monkeypatch.setattr(shapes, "GPU_NETWORKS", {"resnet18": lambda: iter([(3,)])})
    rule = dataclasses.replace(bench_optim_step_gpu.RULES["sgd"], our_class=Waits)
    assert bench_optim_step_gpu.count_syncs(rule, "native", steps=3) == 3
    assert modes == ["error", "default"] * 3
    Waits.message = "another error"
    with pytest.raises(RuntimeError, match="another error"):
        bench_optim_step_gpu.count_syncs(rule, "native")
    assert modes[-1] == "default"


def test_only_a_full_run_writes_the_committed_file() -> None:
    def full(*argv: str) -> bool:
        return bench_optim_step_gpu.COMMAND.is_full(bench_optim_step_gpu.COMMAND.parse(argv))

    assert full()
    for option in (
        ["--quick"],
        ["--networks", "vit_b"],
        ["--rules", "sgd"],
        ["--dtypes", "float32"],
        ["--modes", "graph"],
    ):
        assert not full(*option)


def test_without_a_gpu_the_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "no_gpu", lambda: "torch finds no NVIDIA GPU")
    assert bench_optim_step_gpu.main([]) == 2
    assert capsys.readouterr().err == "bench_optim_step_gpu: torch finds no NVIDIA GPU\n"


@pytest.mark.parametrize(
    ("cuda", "available", "reason"),
    [(None, False, "built without CUDA"), ("13.0", False, "finds no NVIDIA GPU"), ("13.0", True, None)],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, reason: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert (reason is None and machine.no_gpu() is None) or reason in str(machine.no_gpu())


def test_the_clock_of_the_gpu_is_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("synchronize")

        def elapsed_time(self, end: object) -> float:
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert harness.gpu_seconds("a", lambda: order.append("call"), lambda name: order.append(f"before {name}")) == 0.0025
    assert order == ["before a", "record", "call", "record", "synchronize"]


# ---- tables


def test_readme_section_is_rendered(report_path: Path) -> None:
    text = tables.render("<!-- bench:optim_step_gpu -->\nbefore\n<!-- /bench -->\n", report_path.parent)
    assert "before" not in text
    assert "Made-Up GPU 80GB (100 multiprocessors, L2 50 MB), device copy 1,000 GB/s" in text
    assert "Driver 1.2.3, CUDA 13.0" in text
    titles = ("Targets of the CUDA step", "Microseconds for one step", "Bandwidth beside", "Ratios of times of a step")
    assert [title for title in titles if f"\n{title}" not in text] == []
    rows = [line for line in text.splitlines() if line.startswith("| resnet50 | AdamW | bfloat16 | graph |")]
    assert len(rows) == 3
    assert re.search(r"\| [\d.]+ / [\d.]+ \|", rows[0])
    assert all(tables.MISSING in line for line in text.splitlines() if line.startswith("| thousand_small"))


def test_a_section_without_results_says_so(tmp_path: Path) -> None:
    text = tables.render("<!-- bench:optim_step_gpu -->\n<!-- /bench -->", tmp_path)
    assert text.splitlines()[2].startswith("No GPU has been measured yet")
    assert len(text.split("\n\n")) == 3
    # Other sections stay empty.
    assert "No GPU" not in tables.render("<!-- bench:train -->\n<!-- /bench -->", tmp_path)
