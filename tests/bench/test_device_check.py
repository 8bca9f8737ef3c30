"""``make device-check``: its parts, their limits and reports, without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import device_check, harness, machine
from loco_ext.ops import backends
from tests.bench.tiny import GPU

pytest_plugins = ["pytester"]

ALLOWED = {*sys.stdlib_module_names, *device_check.NEEDED, "_pytest", "bench", "loco_ext", "tests", "triton"}
# Start of an interpreter in which tests import only what the check needs, as where a GPU is lent.
LIMITED = f"""
import builtins
def limited(name, globals=None, *rest, found=builtins.__import__, **options):
    package = name.partition(".")[0]
    if str((globals or {{}}).get("__name__")).startswith("tests") and package not in {ALLOWED}:
        raise ModuleNotFoundError(name)
    return found(name, globals, *rest, **options)
builtins.__import__ = limited
"""


@pytest.mark.slow
def test_make_tells_that_there_is_no_gpu():
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "-s", "device-check", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=harness.ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.match(r"device-check: torch .*(without CUDA|no NVIDIA GPU)\nmake", done.stderr)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(device_check, "find_spec", lambda name: None if name in ("torch", "tqdm") else object())
    assert "has no torch, tqdm; name another interpreter" in str(device_check.reason_against())


SUITE = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="{}"/></testsuites>'
FAILING = (
    '<testsuite tests="1" failures="1"><testcase classname="a.b" name="test_c[1]"><failure/></testcase></testsuite>'
)
TARGETS = [{"name": "share", "wanted": "at least 0.85", "measured": 0.5, "met": False, "where": "resnet50"}]
BENCHMARK = {"results": [1], "steps": [2], "settings": {"cases": 3}, "targets": TARGETS}
PARTS = {
    "build": "echo $CAPABILITY",
    "fails": f"cd / && python -c 'import bench, tqdm' && echo '{FAILING}' > $SCRATCH/tests.xml && exit 3",
    "hangs": "sleep 60 & echo $!; wait",
    "absent": f"exit {device_check.SKIPPED}",
    "none_ran": f"echo '{SUITE.format(3)}' > $SCRATCH/tests.xml",
    "tests": f"echo '{SUITE.format(2)}' > $SCRATCH/tests.xml",
    "bench": f"echo '{json.dumps(BENCHMARK)}' > $SCRATCH/a$QUICK-$GPU.json",
}


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Return a function that runs the check on made-up parts, which returns the result of each in the report."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(device_check, "reason_against", lambda: None)
    monkeypatch.setattr(device_check, "PARTS", {**PARTS})
    monkeypatch.setattr(device_check, "fingerprint", lambda: "abc")
    monkeypatch.setattr(machine, "describe", lambda: {"commit": "unknown"})
    monkeypatch.setattr(machine, "gpu", lambda: GPU)

    def run(*options, code):
        assert device_check.main(["--out", str(tmp_path), "--limit", "3", *options]) == code
        parts = json.loads((tmp_path / "device_check-made-up-gpu-80gb.json").read_text())["parts"]
        return {name: part["result"] for name, part in parts.items()}

    return run


def test_each_part_has_its_result_and_log(check, tmp_path, capsys):
    results = check("--quick", code=1)
    failing = dict.fromkeys(("fails", "hangs", "none_ran"), "failed")
    assert results == dict.fromkeys(PARTS, "passed") | failing | {"absent": "skipped"}
    lines = [line.split(" s  ")[-1] for line in capsys.readouterr().out.splitlines()[-len(PARTS) - 1 :]]
    failing = "failures 1, errors 0, skipped 0, failing ['a.b::test_c[1]']"
    assert lines[1:3] == [f"status 3, ran 1, tests 1, {failing}", "status out of time"]
    assert lines[5:7] == ["status 0, ran 1, tests 3, failures 0, errors 0, skipped 2", "status 0, cases 2 of 3"]
    assert lines[7].endswith("0.5, wanted at least 0.85: NOT MET (resnet50)")
    assert (tmp_path / "device_check-made-up-gpu-80gb-build.log").read_text() == "9.0\n"
    left = Path("/proc", (tmp_path / "device_check-made-up-gpu-80gb-hangs.log").read_text().strip(), "cmdline")
    assert not left.exists() or not left.read_bytes()
    assert json.loads((tmp_path / "a_quick-made-up-gpu-80gb.json").read_text()) == BENCHMARK


def test_a_check_goes_on_with_what_has_not_passed_until_a_source_changes(check, monkeypatch, tmp_path):
    """Git is not needed. What was cut off comes before what failed; the build is always made again."""
    parts = {name: f"echo {name} >> {tmp_path}/ran" for name in ("build", "one", "two", "three")}
    monkeypatch.setattr(device_check, "PARTS", parts | {"one": "exit 1"})
    assert check("--only", "build", "two", "one", code=1) == {"build": "passed", "one": "failed", "two": "passed"}
    monkeypatch.setattr(device_check, "PARTS", parts)
    assert check(code=0) == dict.fromkeys(parts, "passed")
    assert (tmp_path / "ran").read_text().split() == ["build", "two", "build", "three", "one"]
    monkeypatch.setattr(device_check, "fingerprint", lambda: "def")
    assert check("--only", "two", code=0) == {"two": "passed"}


def test_the_fingerprint_is_of_sources_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    found = set()
    for name, text in (("a.cpp", "text"), ("b.cu", "text"), ("report.json", "text"), ("a.cpp", "other")):
        (tmp_path / "csrc" / name).write_text(text)
        found.add(device_check.fingerprint())
    assert len(found) == 3


def test_parts_do_what_their_names_say(monkeypatch):
    scripts = device_check.PARTS
    assert "LOCO_CUDA=1 TORCH_CUDA_ARCH_LIST=$CAPABILITY" in scripts["build"]
    for tool, backend in device_check.SANITIZERS:
        script = scripts[f"{tool}_{backend}"]
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in script
        assert f"--tool {tool} " in script
        assert f"-k 'kernels and {backend}'" in script
    tests = [script for name, script in scripts.items() if name.startswith("test_")]
    assert all("-m 'not slow'" in script and "$WORKERS" in script for script in tests)
    modules = device_check.GPU_MODULES.split()
    assert all((harness.ROOT / module).exists() for module in modules)
    assert all(f"--ignore={module}" in scripts["test_rest"] for module in modules)
    for xdist, workers in ((object(), "-n 3 --dist load"), (None, "")):
        monkeypatch.setattr(device_check, "find_spec", lambda _name, found=xdist: found)
        found = device_check.environment({"capability": "9.0"}, "gpu", 3, False)
        assert (found["CAPABILITY"], found["WORKERS"]) == ("9.0", workers)


def test_libraries_are_loaded_and_benchmarks_exist():
    with pytest.raises(SystemExit) as left:
        exec(device_check.LIBRARIES, {})
    assert left.value.code == (backends.library_error or backends.cuda_library_error)
    names = re.findall(r"-m (bench\.bench_\w+)", " ".join(device_check.PARTS.values()))
    assert len(names) == 3
    assert all(map(find_spec, names))


@pytest.mark.slow
def test_the_sanitizer_runs_tests_that_exist_and_need_no_package_of_other_tests(tmp_path):
    def run(path, script=device_check.PARTS["memcheck_native"]):
        variables = {"PYTHONPATH": str(tmp_path), "SCRATCH": str(tmp_path), "WORKERS": "--collect-only"}
        variables |= {"PATH": path}
        command = [str(shutil.which("bash")), "-c", script]
        options = {"cwd": harness.ROOT, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(command, env=os.environ | variables, **options)

    assert run("").returncode == device_check.SKIPPED
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    (tool := tmp_path / "compute-sanitizer").write_text('#!/bin/bash\nshift 6; exec "$@" --collect-only')
    tool.chmod(0o700)
    done = run(f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout
    names = set(re.findall(r"::(test_\w+)\[(.*native.*)\]", done.stdout))
    assert len({name for name, _ in names}) == 7
    assert not any("triton" in case for _, case in names)
    script = device_check.PARTS["test_ring_prox"].partition("&& ")[2] + f" {device_check.GPU_MODULES}"
    assert "(1 deselected)" in run(os.environ["PATH"], script).stdout  # all but one of these tests need a GPU


MODULES = {
    "test_fine": "def test_fine(): pass",
    "test_missing": "import package_that_nobody_has.part",
    "test_indirect": "import helper_of_tests",
    "test_ours": "import loco_ext.module_that_is_not_there",
    "helper_of_tests": "import another_package_that_nobody_has",
}


def test_modules_that_need_a_missing_package_are_skipped_by_name(pytester):
    pytester.makepyfile(**MODULES)
    options = ("-p", "bench.missing_packages", "-rsE", "--continue-on-collection-errors")
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(passed=1, skipped=2, errors=1)
    wanted = ("*needs another_package_that_nobody_has", "*needs package_that_nobody_has", "ERROR test_ours.py*")
    result.stdout.fnmatch_lines(wanted)
