"""``make device-check``: its parts, their limits and reports, without a GPU."""

import json
import re
from importlib.util import find_spec
from itertools import chain

import pytest

from bench import device_check, harness, machine
from loco_ext.ops import backends
from tests.bench.tiny import GPU

pytest_plugins = ["pytester"]

SUITE = '<testsuites><testsuite tests="3" failures="{}" errors="0" skipped="{}"/></testsuites>'
BENCHMARK = {"results": [1], "settings": {"cases": 3}, "targets": []}
PARTS = {
    "build": ("echo $CAPABILITY", "passed"),
    "fails": ("cd / && python -c 'import bench, tqdm' && exit 3", "failed"),
    "hangs": ("sleep 60 & wait", "failed"),
    "absent": (f"exit {device_check.SKIPPED}", "skipped"),
    "none_ran": (f"echo '{SUITE.format(0, 3)}' > $SCRATCH/tests.xml", "failed"),
    "tests": (f"echo '{SUITE.format(0, 2)}' > $SCRATCH/tests.xml", "passed"),
    "bench": (f"echo '{json.dumps(BENCHMARK)}' > $SCRATCH/a$QUICK-$GPU.json", "passed"),
}


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Return a function that runs the check on made-up parts, which returns the entry of each in the report."""
    monkeypatch.setattr(device_check, "fingerprint", lambda: "abc")
    for name, value in {"no_gpu": None, "describe": {"commit": "unknown"}, "gpu": GPU}.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)

    def run(parts, *options, code):
        monkeypatch.setattr(device_check, "PARTS", parts)
        assert device_check.main(["--out", str(tmp_path), "--limit", "3", *options]) == code
        return json.loads((tmp_path / "device_check-made-up-gpu-80gb.json").read_text())["parts"]

    return run


def test_each_part_has_its_result_and_log(check, tmp_path):
    parts = check({name: script for name, (script, _) in PARTS.items()}, "--quick", code=1)
    assert {name: part["result"] for name, part in parts.items()} == {
        name: result for name, (_, result) in PARTS.items()
    }
    assert (parts["tests"]["ran"], parts["bench"]["cases"]) == (1, "1 of 3")
    assert parts["hangs"]["seconds"] < 30
    assert (tmp_path / "device_check-made-up-gpu-80gb-build.log").read_text() == "9.0\n"
    assert json.loads((tmp_path / "a_quick-made-up-gpu-80gb.json").read_text()) == BENCHMARK


def test_a_check_goes_on_with_what_has_not_passed_until_a_source_changes(check, monkeypatch, tmp_path):
    """Parts that were cut off run before those that failed, and the build runs each time."""
    parts = {name: f"echo {name} >> {tmp_path}/ran" for name in ("build", "one", "two", "three")}
    check(parts | {"one": "exit 1"}, "--only", "build", "two", "one", code=1)
    assert {part["result"] for part in check(parts, code=0).values()} == {"passed"}
    assert (tmp_path / "ran").read_text().split() == ["build", "two", "build", "three", "one"]
    monkeypatch.setattr(device_check, "fingerprint", lambda: "def")
    assert list(check(parts, "--only", "two", code=0)) == ["two"]


def test_parts_run_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(machine, "no_gpu", lambda: "no GPU here")
    assert device_check.main([]) == 2
    assert capsys.readouterr().err == "device-check: no GPU here\n"
    assert all((harness.ROOT / module).exists() for module in device_check.GPU_MODULES.split())
    on_gpus = {family for family, kernels in backends.KERNELS.items() if "cuda" in chain(*kernels.values())}
    assert on_gpus <= {*device_check.GPU_TESTS}
    assert all(map(find_spec, re.findall(r"-m (bench\.bench_\w+)", " ".join(device_check.PARTS.values()))))
    with pytest.raises(SystemExit) as left:
        exec(device_check.LIBRARIES, {})
    assert left.value.code == (backends.library_error or backends.cuda_library_error)


def test_modules_that_need_a_missing_package_are_skipped_by_name(pytester):
    pytester.makepyfile(
        test_a="def test_a(): pass",
        test_b="import nobody_has_it.part",
        test_c="import loco_ext.none",
        test_d="from loco_ext.extras import need; need('a part', {'nobody_has_this': 'its package'})",
    )
    result = pytester.runpytest_inprocess("-p", "bench.missing_packages", "-rsE", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, skipped=2, errors=1)
    result.stdout.fnmatch_lines(["*needs nobody_has_it", "*needs nobody_has_this", "ERROR test_c.py*"])
