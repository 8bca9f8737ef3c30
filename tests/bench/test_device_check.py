"""``make device-check``: its parts, their limits and reports, without a GPU."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import device_check, harness, machine
from bench.device_check import Command, Part
from loco_ext.ops import backends
from tests.bench.tiny import GPU


@pytest.mark.slow
def test_make_tells_that_there_is_no_gpu():
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "-s", "device-check", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=harness.ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line, *after) = done.stderr.splitlines()
    assert re.fullmatch(r"device-check: torch .*(without CUDA|no NVIDIA GPU)", line)
    assert all(text.startswith("make") for text in after)


def test_without_a_gpu_the_check_does_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main(["--out", str(tmp_path / "out")]) == 2
    assert re.fullmatch(r"device-check: torch .*(without CUDA|no NVIDIA GPU)\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(device_check, "find_spec", lambda name: None if name in ("torch", "tqdm") else object())
    assert "has no torch, tqdm; name another interpreter" in str(device_check.reason_against())


def settings(folder, **changes):
    (folder / "scratch").mkdir(exist_ok=True)
    made = device_check.Settings(folder, "made-up", "9.0", 60.0, workers=0, quick=False, scratch=folder / "scratch")
    return dataclasses.replace(made, **changes)


def python(code):
    return [sys.executable, "-c", code]


def run_part(monkeypatch, part, folder, **changes):
    monkeypatch.setitem(device_check.PARTS, "fake", lambda _: part)
    return device_check.run_part("fake", settings(folder, **changes))


def test_steps_run_until_one_fails_and_what_follows_can_fail_a_part(monkeypatch, tmp_path):
    steps = [
        Command("first", python("import os; print('hello', os.environ['WORD'])"), {"WORD": "world"}),
        Command("second", python("raise SystemExit(3)")),
        Command("third", python("")),
    ]
    report = run_part(monkeypatch, Part(steps), tmp_path)
    assert [(step["name"], step["exit_status"]) for step in report["steps"]] == [("first", 0), ("second", 3)]
    assert "hello world" in (tmp_path / "device_check-made-up-fake.log").read_text()
    for part, result, details in (
        (Part(steps[1:]), "failed", "second ended with 3"),
        (Part(steps[2:], lambda: {"on_gpu": 7}), "passed", "7 on the GPU"),
        (Part(steps[2:], lambda: {"error": "no test"}), "failed", "no test"),
        (Part([], skipped="not installed"), "skipped", "not installed"),
    ):
        report = run_part(monkeypatch, part, tmp_path)
        assert (report["result"], device_check.details(report)) == (result, details)


@pytest.mark.slow
def test_a_part_ends_at_its_limit_with_all_it_started(monkeypatch, tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1); time.sleep(60)'])"
    report = run_part(monkeypatch, Part([Command("slow", python(child))]), tmp_path, limit=1.0)
    assert report["result"] == "failed"
    assert report["seconds"] < 20
    assert device_check.details(report) == "slow ran out of time"


def fake_check(monkeypatch, folder, *only, **codes):
    """Run the check with parts that end with the given exit codes."""

    def make(code):
        return lambda _: Part([Command("step", python(f"raise SystemExit({code})"))])

    monkeypatch.setattr(device_check, "reason_against", lambda: None)
    monkeypatch.setattr(device_check, "triton_kernels_importable", nullcontext)
    monkeypatch.setattr(device_check, "PARTS", {name: make(code) for name, code in codes.items()})
    monkeypatch.setattr(machine, "gpu", lambda: GPU)
    return device_check.main(["--out", str(folder), *(["--only", *only] if only else [])])


def test_parts_run_one_after_another_and_apart_come_together_in_one_report(monkeypatch, tmp_path, capsys):
    """Git is not needed. A changed source begins a new report; a part that passed runs again only if it is named."""
    monkeypatch.setattr(machine, "describe", lambda: {"commit": "unknown"})
    monkeypatch.setattr(device_check, "fingerprint", lambda: "abc")
    path = tmp_path / "device_check-made-up-gpu-80gb.json"
    ran = []
    run_part = device_check.run_part
    monkeypatch.setattr(device_check, "run_part", lambda name, made: (ran.append(name), run_part(name, made))[1])

    def results():
        return {name: part["result"] for name, part in json.loads(path.read_text())["parts"].items()}

    codes = {"build": 0, "one": 1, "two": 0, "three": 0}
    assert fake_check(monkeypatch, tmp_path, "one", "two", **codes) == 1  # a part that fails does not stop the others
    assert json.loads(path.read_text())["machine"].items() >= GPU.items()
    *_, one, two = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (one[:2], one[-4:], two[:2]) == (["one", "failed"], ["step", "ended", "with", "1"], ["two", "passed"])
    assert fake_check(monkeypatch, tmp_path, "two", **codes) == 1
    assert list(results().items()) == [("one", "failed"), ("two", "passed")]
    ran.clear()
    assert fake_check(monkeypatch, tmp_path, **codes | {"one": 0}) == 0
    assert ran == ["build", "three", "one"]
    assert list(results().items()) == [(name, "passed") for name in codes]
    monkeypatch.setattr(device_check, "fingerprint", lambda: "def")
    assert fake_check(monkeypatch, tmp_path, "two", **codes) == 0
    assert results() == {"two": "passed"}


def test_the_fingerprint_is_of_sources_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    found = set()
    for name in ("a.cpp", "b.cu", "report.json", "a.o"):
        (tmp_path / "csrc" / name).write_text("text")
        found.add(device_check.fingerprint())
    assert len(found) == 2
    (tmp_path / "csrc" / "a.cpp").write_text("other")
    assert device_check.fingerprint() not in found


def test_summary_lists_what_was_left_out_and_the_targets():
    tests = {"result": "passed", "seconds": 9.0, "steps": [], "passed": 5, "failed": 0, "skipped": 1, "on_gpu": 4}
    targets = [{"name": "share", "wanted": "at least 0.85", "measured": 0.5, "met": False, "where": "resnet50"}]
    benchmarks = {"result": "passed", "seconds": 9.0, "steps": [], "cases": "3 of 32", "targets": targets}
    parts = {"test_rest": tests | {"left_out": {"test_a": "expecttest"}}, "bench_optim_step": benchmarks}
    lines = device_check.summary({"parts": parts}).splitlines()
    assert lines[0].endswith("5 passed, 0 failed, 1 skipped, 4 on the GPU, test_a left out, needs expecttest")
    assert lines[1].endswith("3 of 32 cases")
    assert lines[2] == "  share: 0.5, wanted at least 0.85: NOT MET (resnet50)"


JUNIT = """<?xml version="1.0"?><testsuites><testsuite tests="7">
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two[1]"><failure message="m">text</failure></testcase>
<testcase classname="tests.optim.test_cuda" name="test_three[SGD-native]"/>
<testcase classname="tests.optim.test_cuda" name="test_without_gpu[SGD]"/>
<testcase classname="tests.optim.test_cuda" name="test_four[native]"><skipped message="needs an NVIDIA GPU"/></testcase>
<testcase classname="tests.ring_prox.test_gpu" name="test_on_the_cpu"/>
<testcase classname="tests.optim.test_cuda" name="test_five[triton]"><error message="m">text</error></testcase>
</testsuite></testsuites>"""


def test_results_are_read(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(JUNIT)
    assert device_check.read_results(path) == {
        "passed": 4,
        "failed": 2,
        "skipped": 1,
        "on_gpu": 2,
        "failures": ["tests.test_a::test_two[1]", "tests.optim.test_cuda::test_five[triton]"],
    }


MODULES = {
    "test_fine": "import json",
    "test_missing": "import package_that_nobody_has.part",
    "part/test_helper": "import made_up.helper",
    "test_ours": "import loco_ext.module_that_is_not_there",
    "test_skips": "import pytest; pytest.skip('not here', allow_module_level=True)",
    "test_broken": "1 / 0",
    "helper": "import another_package_that_nobody_has",
}


def test_modules_that_need_a_missing_package_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "made_up"
    (folder / "part").mkdir(parents=True)
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert device_check.import_tests(folder) == {
        "test_missing": "package_that_nobody_has",
        "part/test_helper": "another_package_that_nobody_has",
    }


def test_tests_run_in_several_processes_where_they_can(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "missing_packages", lambda: {"test_a": "expecttest"})
    monkeypatch.setattr(device_check, "find_spec", lambda name: object())
    command = device_check.other_tests(settings(tmp_path, workers=4)).commands[-1]
    assert command.arguments[-5:] == ["--ignore=tests/test_a.py", "-n", "4", "--dist", "load"]
    assert "--ignore=tests/optim/test_cuda.py" in command.arguments
    assert set(command.environment) == {"PYTHONHASHSEED", "OMP_NUM_THREADS"}
    monkeypatch.setattr(device_check, "find_spec", lambda name: None if name == "xdist" else object())
    part = device_check.other_tests(settings(tmp_path, workers=4))
    assert part.commands[-1].arguments[-1] == "--ignore=tests/test_a.py"
    assert part.after() == {"left_out": {"test_a": "expecttest"}, "error": "no test ran and passed"}


def test_parts_of_tests_fail_if_no_test_ran_on_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "find_sanitizer", lambda: "compute-sanitizer")
    results = tmp_path / "scratch" / "tests.xml"
    for name in (*(f"test_{family}" for family in device_check.GPU_TESTS), "memcheck_native", "memcheck_triton"):
        part = device_check.PARTS[name](settings(tmp_path))
        assert part.after() == {"error": "no test ran on the GPU"}
        results.write_text(JUNIT)
        assert part.after() == device_check.read_results(results)
        results.write_text(JUNIT.replace("test_three[SGD-native]", "test_three").replace("five[triton]", "five"))
        assert part.after()["error"] == "no test ran on the GPU"
        results.unlink()


def imported(path, found):
    """Collect the packages that a module, and the test modules that it imports, import outside of functions."""
    if path in found:
        return
    found[path] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            found[path] |= {module.partition(".")[0] for module in modules} - {"tests"}
            inside = [f"{module}.{name}" for module in modules for name in names] + modules
            for module in filter(lambda module: module.startswith("tests."), inside):
                if (other := harness.ROOT / f"{module.replace('.', '/')}.py").exists():
                    imported(other, found)


def test_what_runs_on_a_gpu_needs_no_packages_but_those_of_the_check():
    """A machine that is lent for its GPU lacks, for instance, the solvers that other tests compare with."""
    found = {}
    for module in (*device_check.GPU_MODULES, "conftest", "optim/conftest"):
        imported(device_check.TESTS / f"{module}.py", found)
    assert device_check.TESTS / "penalties" / "cases.py" in found
    allowed = {*sys.stdlib_module_names, *device_check.NEEDED, "loco_ext", "bench", "triton"}
    needed = {path.name: packages - allowed for path, packages in found.items()}
    assert {name: packages for name, packages in needed.items() if packages} == {}


@pytest.mark.slow
def test_the_sanitizer_runs_tests_that_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "find_sanitizer", lambda: None)
    assert device_check.PARTS["memcheck_native"](settings(tmp_path)).skipped == "compute-sanitizer is not installed"
    monkeypatch.setattr(device_check, "find_sanitizer", lambda: "compute-sanitizer")
    for tool, backend in device_check.SANITIZERS:
        (command,) = device_check.PARTS[f"{tool}_{backend}"](settings(tmp_path)).commands
        assert command.arguments[:3] == ["compute-sanitizer", "--tool", tool]
        assert command.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    collected = subprocess.run(
        [*command.arguments[command.arguments.index(sys.executable) :], "--collect-only"],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert collected.returncode == 0, collected.stdout
    names = set(re.findall(r"::(test_\w+)\[(.*native.*)\]", collected.stdout))
    assert len({name for name, _ in names}) == 7
    assert not any("triton" in case for _, case in names)


def test_benchmarks_leave_their_reports_and_targets(monkeypatch, tmp_path):
    reports = {
        "optim_step": {"results": [1, 2], "settings": {"cases": 4}, "targets": ["a"]},
        "ring_prox": {"results": [1], "steps": [2], "settings": {"cases": 3}},
    }
    after = {"optim_step": {"cases": "2 of 4", "targets": ["a"]}, "ring_prox": {"cases": "2 of 3", "targets": []}}
    for quick, infix in ((False, ""), (True, "_quick")):
        for family, report in reports.items():
            part = device_check.PARTS[f"bench_{family}"](settings(tmp_path, quick=quick))
            assert part.after() == {}
            (out,) = [Path(a) for command in part.commands for a in command.arguments if a.endswith(".json")]
            out.write_text(json.dumps(report))
            assert part.after() == after[family]
            assert json.loads((tmp_path / f"{family}_gpu{infix}-made-up.json").read_text()) == report
            out.unlink()
    for family in device_check.BENCHMARKS:
        assert find_spec(f"bench.bench_{family}_gpu") is not None


@pytest.mark.slow
def test_the_build_is_for_this_gpu_and_loads_our_package_from_any_folder(tmp_path):
    first, second = device_check.build(settings(tmp_path)).commands
    assert first.arguments == [sys.executable, "setup.py", "build_ext", "--inplace"]
    assert first.environment == {"LOCO_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    environment = device_check.environment_with(WORD="a")
    assert environment["WORD"] == "a"
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    command = [*second.arguments[:-1], f"import loco_ext; print(loco_ext.__file__); {second.arguments[-1]}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(harness.ROOT / "loco_ext" / "__init__.py")
    reason = backends.library_error or backends.cuda_library_error
    assert done.returncode == (0 if reason is None else 1)
    assert (reason or "") in done.stderr


@pytest.mark.parametrize("importable", [True, False])
def test_triton_kernels_are_linked_while_the_check_runs(monkeypatch, tmp_path, importable):
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
