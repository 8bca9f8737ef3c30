"""The GPU benchmark and ``make device-check`` without a GPU: made-up timings, fake parts, and refusing to begin."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_bench_on_cpu import FACTS, run_on_the_cpu

from bench import bench_optim_step_gpu, device_check, harness, shapes, tables
from bench.bench_optim_step_gpu import Case
from bench.device_check import Command, Part
from loco_ext.ops import backends


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
    """A record of made-up microseconds."""
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
    """Every network in both modes; ``changes`` replace microseconds of ours, on the large networks' eager SGD step."""
    found = []
    for network, mode in itertools.product(shapes.GPU_NETWORKS, ("eager", "graph")):
        gpu = {"torch_fused": 280.0, "torch_foreach": 900.0, "cuda_uniform": 200.0, "triton_uniform": 500.0}
        gpu |= {"cuda_loco": 204.0} if network.startswith("resnet") else {}
        host = dict.fromkeys(gpu, 90.0)
        if (network, mode) == ("resnet50", "eager"):
            gpu |= {name: value for name, value in changes.items() if name != "host"}
            host["cuda_loco"] = changes.get("host", 90.0)
        elements = sum(map(math.prod, shapes.GPU_NETWORKS[network]()))
        copy = 20 * elements / 200e-6 / 0.9  # the bandwidth of cuda_uniform is 0.9 of it
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
    monkeypatch.setattr(harness, "no_gpu", lambda: "torch finds no NVIDIA GPU")
    assert bench_optim_step_gpu.main([]) == 2
    assert capsys.readouterr().err == "bench_optim_step_gpu: torch finds no NVIDIA GPU\n"


@pytest.mark.parametrize(
    ("cuda", "available", "reason"),
    [(None, False, "built without CUDA"), ("13.0", False, "finds no NVIDIA GPU"), ("13.0", True, None)],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, reason: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert (reason is None and harness.no_gpu() is None) or reason in str(harness.no_gpu())


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


# ---- make device-check


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "bench.device_check"], ["make", "-s", "device-check", f"PYTHON={sys.executable}"]],
)
def test_without_a_gpu_the_check_says_so_and_does_nothing(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    if command[0] != "make":
        command = [*command, "--out", str(out)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=harness.ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line, *after) = done.stderr.splitlines()
    assert re.fullmatch(r"device-check: torch .*(without CUDA|no NVIDIA GPU)", line)
    assert all(text.startswith("make") for text in after)
    assert not out.exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "find_spec", lambda name: None if name in ("torch", "tqdm") else object())
    assert "has no torch, tqdm; name another interpreter" in str(device_check.reason_against())


def settings(folder: Path, **changes: Any) -> device_check.Settings:
    (folder / "scratch").mkdir(exist_ok=True)
    made = device_check.Settings(folder, "made-up", "9.0", 60.0, workers=0, quick=False, scratch=folder / "scratch")
    return dataclasses.replace(made, **changes)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_part(monkeypatch: pytest.MonkeyPatch, part: Part, folder: Path, **changes: Any) -> dict[str, Any]:
    monkeypatch.setitem(device_check.PARTS, "fake", lambda _: part)
    return device_check.run_part("fake", settings(folder, **changes))


def test_steps_run_until_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [
        Command("first", python("import os; print('hello', os.environ['WORD'])"), {"WORD": "world"}),
        Command("second", python("raise SystemExit(3)")),
        Command("third", python("")),
    ]
    report = run_part(monkeypatch, Part(steps), tmp_path)
    assert report["result"] == "failed"
    assert [(step["name"], step["exit_status"]) for step in report["steps"]] == [("first", 0), ("second", 3)]
    assert "hello world" in (tmp_path / "device_check-made-up-fake.log").read_text()
    assert device_check.details(report) == "second ended with 3"


def test_a_part_that_leaves_an_error_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed = run_part(monkeypatch, Part([Command("a", python(""))], lambda: {"on_gpu": 7}), tmp_path)
    assert (passed["result"], device_check.details(passed)) == ("passed", "7 on the GPU")
    failed = run_part(monkeypatch, Part([Command("a", python(""))], lambda: {"error": "no test"}), tmp_path)
    assert (failed["result"], device_check.details(failed)) == ("failed", "no test")
    skipped = run_part(monkeypatch, Part([], skipped="not installed"), tmp_path)
    assert (skipped["result"], device_check.details(skipped)) == ("skipped", "not installed")


def test_a_part_ends_at_its_limit_with_all_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1); time.sleep(60)'])"
    report = run_part(monkeypatch, Part([Command("slow", python(child))]), tmp_path, limit=2.0)
    assert report["result"] == "failed"
    assert report["seconds"] < 20
    assert device_check.details(report) == "slow ran out of time"


def fake_check(monkeypatch: pytest.MonkeyPatch, folder: Path, *only: str, **codes: int) -> int:
    """Runs the check with parts that end as given."""

    def make(code: int) -> Callable[[device_check.Settings], Part]:
        return lambda _: Part([Command("step", python(f"raise SystemExit({code})"))])

    monkeypatch.setattr(device_check, "reason_against", lambda: None)
    monkeypatch.setattr(device_check, "triton_kernels_importable", nullcontext)
    monkeypatch.setattr(device_check, "PARTS", {name: make(code) for name, code in codes.items()})
    monkeypatch.setattr(harness, "gpu", lambda: FACTS)
    return device_check.main(["--out", str(folder), *(["--only", *only] if only else [])])


def test_a_failing_part_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_check(monkeypatch, tmp_path / "out", build=0, tests=1, benchmarks=0) == 1
    report = json.loads((tmp_path / "out" / "device_check-made-up-gpu-80gb.json").read_text())
    assert report["machine"].items() >= FACTS.items()
    assert {name: part["result"] for name, part in report["parts"].items()} == {
        "build": "passed",
        "tests": "failed",
        "benchmarks": "passed",
    }
    *_, build, tests, benchmarks = capsys.readouterr().out.splitlines()
    assert build.split()[:2] == ["build", "passed"]
    assert tests.split()[:2] == ["tests", "failed"]
    assert tests.endswith("step ended with 1")
    assert benchmarks.split()[:2] == ["benchmarks", "passed"]


def test_parts_run_apart_come_together_in_one_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "machine", lambda: {"commit": "abc"})
    path = tmp_path / "device_check-made-up-gpu-80gb.json"

    def results() -> dict[str, str]:
        return {name: part["result"] for name, part in json.loads(path.read_text())["parts"].items()}

    assert fake_check(monkeypatch, tmp_path, "tests", build=0, tests=1) == 1
    assert fake_check(monkeypatch, tmp_path, "build", build=0, tests=1) == 0
    assert list(results().items()) == [("build", "passed"), ("tests", "failed")]
    monkeypatch.setattr(harness, "machine", lambda: {"commit": "def"})
    assert fake_check(monkeypatch, tmp_path, "tests", build=0, tests=0) == 0
    assert results() == {"tests": "passed"}


def test_summary_lists_what_was_left_out_and_the_targets() -> None:
    tests = {"result": "passed", "seconds": 9.0, "steps": [], "passed": 5, "failed": 0, "skipped": 1, "on_gpu": 4}
    targets = [{"name": "share", "wanted": "at least 0.85", "measured": 0.5, "met": False, "where": "resnet50"}]
    benchmarks = {"result": "passed", "seconds": 9.0, "steps": [], "cases": "3 of 32", "targets": targets}
    parts = {"tests": tests | {"left_out": {"test_a": "expecttest"}}, "benchmarks": benchmarks}
    lines = device_check.summary({"parts": parts}).splitlines()
    assert lines[0].endswith("5 passed, 0 failed, 1 skipped, 4 on the GPU, test_a left out, needs expecttest")
    assert lines[1].endswith("3 of 32 cases")
    assert lines[2] == "  share: 0.5, wanted at least 0.85: NOT MET (resnet50)"


JUNIT = """<?xml version="1.0"?><testsuites><testsuite tests="6">
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two[1]"><failure message="m">text</failure></testcase>
<testcase classname="tests.test_optim_cuda" name="test_three[SGD-native]"/>
<testcase classname="tests.test_optim_cuda" name="test_without_gpu[SGD]"/>
<testcase classname="tests.test_optim_cuda" name="test_four[native]"><skipped message="needs an NVIDIA GPU"/></testcase>
<testcase classname="tests.test_optim_cuda" name="test_five[triton]"><error message="m">text</error></testcase>
</testsuite></testsuites>"""


def test_results_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(JUNIT)
    assert device_check.read_results(path) == {
        "passed": 3,
        "failed": 2,
        "skipped": 1,
        "on_gpu": 2,
        "failures": ["tests.test_a::test_two[1]", "tests.test_optim_cuda::test_five[triton]"],
    }


MODULES = {
    "test_made_up_fine": "import json",
    "test_made_up_missing": "import package_that_nobody_has.part",
    "test_made_up_helper": "import made_up_helper",
    "test_made_up_ours": "import loco_ext.module_that_is_not_there",
    "test_made_up_skips": "import pytest; pytest.skip('not here', allow_module_level=True)",
    "test_made_up_broken": "1 / 0",
    "made_up_helper": "import another_package_that_nobody_has",
}


def test_modules_that_need_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert device_check.import_tests(tmp_path) == {
        "test_made_up_missing": "package_that_nobody_has",
        "test_made_up_helper": "another_package_that_nobody_has",
    }


def test_every_test_module_can_be_imported_here() -> None:
    """Unless one of the real suite needs a package that is missing indeed."""
    assert [package for package in device_check.missing_packages().values() if find_spec(package) is not None] == []


def test_tests_run_in_several_processes_where_they_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_check, "missing_packages", lambda: {"test_a": "expecttest"})
    monkeypatch.setattr(device_check, "find_spec", lambda name: object())
    command = device_check.tests(settings(tmp_path, workers=4)).commands[-1]
    assert command.arguments[-5:] == ["--ignore=tests/test_a.py", "-n", "4", "--dist", "loadfile"]
    assert set(command.environment) == {"PYTHONHASHSEED", "OMP_NUM_THREADS"}
    monkeypatch.setattr(device_check, "find_spec", lambda name: None if name == "xdist" else object())
    part = device_check.tests(settings(tmp_path, workers=4))
    assert part.commands[-1].arguments[-1] == "--ignore=tests/test_a.py"
    assert part.after() == {"left_out": {"test_a": "expecttest"}, "error": "no test ran on the GPU"}
    monkeypatch.setattr(device_check, "find_spec", lambda name: None)
    assert device_check.tests(settings(tmp_path)).skipped == "pytest is not installed"


def test_the_sanitizer_runs_tests_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_check, "find_sanitizer", lambda: None)
    assert device_check.sanitizer(settings(tmp_path)).skipped == "compute-sanitizer is not installed"
    monkeypatch.setattr(device_check, "find_sanitizer", lambda: "compute-sanitizer")
    commands = device_check.sanitizer(settings(tmp_path)).commands
    assert [command.name.split()[0] for command in commands] == [tool for tool, _ in device_check.SANITIZERS]
    for command in commands:
        assert command.arguments[:3] == ["compute-sanitizer", "--tool", command.name.split()[0]]
        assert command.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    collected = subprocess.run(
        [*commands[0].arguments[commands[0].arguments.index(sys.executable) :], "--collect-only"],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert collected.returncode == 0, collected.stdout
    names = set(re.findall(r"::(test_\w+)\[(.*native.*)\]", collected.stdout))
    assert len({name for name, _ in names}) == 7
    assert not any("triton" in case for _, case in names)


def test_benchmarks_leave_their_reports_and_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = {"results": [1, 2], "settings": {"cases": 4}, "targets": ["a"]}
    prox = {"results": [1], "steps": [2], "settings": {"cases": 3}}
    layers = {"results": [1], "settings": {"cases": 2}, "targets": ["b"]}
    for quick, infix in ((False, ""), (True, "_quick")):
        part = device_check.benchmarks(settings(tmp_path, quick=quick))
        assert part.after() == {}
        outs = [Path(a) for command in part.commands for a in command.arguments if a.endswith(".json")]
        outs[0].write_text(json.dumps(step))
        assert part.after() == {"cases": "2 of 4", "targets": ["a"]}
        outs[1].write_text(json.dumps(prox))
        assert part.after() == {"cases": "4 of 7", "targets": ["a"]}
        outs[2].write_text(json.dumps(layers))
        assert part.after() == {"cases": "5 of 9", "targets": ["a", "b"]}
        for name, report in (("optim_step_gpu", step), ("ring_prox_gpu", prox), ("block_sparse_gpu", layers)):
            assert json.loads((tmp_path / f"{name}{infix}-made-up.json").read_text()) == report
        for out in outs:
            out.unlink()
    assert [path.name for path in tmp_path.glob("optim_step_gpu-*.json")] == ["optim_step_gpu-made-up.json"]


def test_the_build_is_for_this_gpu(tmp_path: Path) -> None:
    first, second = device_check.build(settings(tmp_path)).commands
    assert first.arguments == [sys.executable, "setup.py", "build_ext", "--inplace"]
    assert first.environment == {"LOCO_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    done = subprocess.run(second.arguments, cwd=harness.ROOT, capture_output=True, text=True, timeout=120)
    reason = backends.library_error or backends.cuda_library_error
    assert done.returncode == (0 if reason is None else 1)
    assert (reason or "") in done.stderr


@pytest.mark.parametrize("importable", [True, False])
def test_triton_kernels_are_linked_while_the_check_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, importable: bool
) -> None:
    for name in ("loco_ext", "triton_kernels"):
        (tmp_path / name).mkdir()
    link = tmp_path / "loco_ext" / "triton_kernels"
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    done = SimpleNamespace(returncode=0 if importable else 1)
    monkeypatch.setattr(device_check.subprocess, "run", lambda *arguments, **options: done)
    with device_check.triton_kernels_importable():
        assert link.exists() != importable
        assert importable or link.samefile(tmp_path / "triton_kernels")
    assert not link.is_symlink()


def test_programs_of_the_check_find_our_package_from_any_folder(tmp_path: Path) -> None:
    environment = device_check.environment_with(WORD="a")
    assert environment["WORD"] == "a"
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    where = "import loco_ext; print(loco_ext.__file__)"
    done = subprocess.run(python(where), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(harness.ROOT / "loco_ext" / "__init__.py")
