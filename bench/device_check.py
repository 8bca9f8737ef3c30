"""Everything that only a GPU can show: build, tests, compute-sanitizer and benchmarks on an NVIDIA GPU.

    make device-check                                            runs the parts that have not passed yet
    python -m bench.device_check --only build test_optim_step    runs these, whether or not they have passed

Each part ends within --limit seconds, and the report is written after each, so a check that is cut off goes on where it
was. Nothing is downloaded or installed: the parts run in this interpreter's environment, on libraries built in place
for the GPU at hand. A part that fails does not stop the others; a part of tests of which none ran has failed. Test
modules that need a missing package are skipped, and its log names them.

The report, one JSON file for each GPU, and the logs of the parts go to the folder after --out; parts keep their entry
until they run again or a source changes. Exit status: 0, 1 if a part failed, 2 where there is no GPU to check.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PYTHON = shlex.quote(sys.executable)
# The report cannot be written without these packages.
NEEDED = ("torch", "numpy", "scipy", "tqdm", "safetensors", "filelock", "typer", "pytest")
# Modules of tests on the GPU, by part, and the end of the name of the one test there that needs no GPU.
GPU_TESTS = {
    "optim_step": "tests/optim/test_cuda.py tests/optim/test_cuda_graphs.py",
    "penalty": "tests/optim/test_cuda_penalty.py",
    "ring_prox": "tests/ring_prox/test_gpu.py",
    "block_sparse": "tests/block_sparse/test_triton_gpu.py",
    "landscape": "tests/landscape/test_gpu.py tests/regularizers/test_gpu.py",
}
ON_THE_CPU = "cuda_kernels_on_the_cpu"
GPU_MODULES = " ".join(GPU_TESTS.values())
# Tools and the kernels that each checks; Triton's have no shared memory of their own that could have races.
SANITIZERS = (
    ("memcheck", "native"),
    ("racecheck", "native"),
    ("synccheck", "native"),
    ("memcheck", "triton"),
    ("initcheck", "native"),
)
SKIPPED = 77  # exit status of a part that cannot run here
LIBRARIES = "import sys; from loco_ext.ops import backends as b; sys.exit(b.library_error or b.cuda_library_error)"
LOAD = f"{PYTHON} -c {shlex.quote(LIBRARIES)}"
# The options in pyproject.toml need plugins that may be missing.
PYTEST = f"{PYTHON} -m pytest -o addopts='-q --strict-markers' --junitxml=$SCRATCH/tests.xml -rfEs"
PYTEST += " -p bench.missing_packages"
IGNORED = " ".join(f"--ignore={module}" for module in GPU_MODULES.split())
# Without the cache every tensor has its own allocation, whose bounds memcheck knows.
SANITIZER = (
    f"command -v compute-sanitizer || {{ echo compute-sanitizer is not installed; exit {SKIPPED}; }}; "
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 86 --target-processes all --tool"
)
# The script of each part, for bash; ``environment`` has its variables.
PARTS = {
    "build": f"LOCO_CUDA=1 TORCH_CUDA_ARCH_LIST=$CAPABILITY {PYTHON} setup.py build_ext --inplace && {LOAD}",
    **{
        f"test_{family}": f"{LOAD} && {PYTEST} -m 'not slow' -k 'not {ON_THE_CPU}' $WORKERS {modules}"
        for family, modules in GPU_TESTS.items()
    },
    "test_rest": f"{LOAD} && {PYTEST} -m 'not slow' $WORKERS {IGNORED}",
    **{
        f"{tool}_{backend}": f"{SANITIZER} {tool} {PYTEST} -x -k 'kernels and {backend}' {GPU_MODULES}"
        for tool, backend in SANITIZERS
    },
    **{
        f"bench_{family}": f"{PYTHON} -m bench.bench_{family}_gpu --out $SCRATCH/{family}_gpu$QUICK-$GPU.json "
        "${QUICK:+--quick}"
        for family in ("optim_step", "ring_prox", "block_sparse")
    },
}


def environment(gpu: dict[str, Any], slug: str, workers: int, quick: bool) -> dict[str, str]:
    """Return the environment of all parts: every folder finds our package and the programs beside this interpreter."""
    from torch.utils.cpp_extension import CUDA_HOME

    found = {**os.environ, "PYTHONUNBUFFERED": "1", "CAPABILITY": gpu["capability"], "GPU": slug}
    found |= {"QUICK": "_quick" if quick else "", "WORKERS": ""}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], f"{CUDA_HOME}/bin"])
    if workers > 1 and find_spec("xdist") is not None:
        # All processes must collect the same tests, and they share the cores.
        threads = str(max(1, (os.cpu_count() or 1) // workers))
        found |= {"WORKERS": f"-n {workers} --dist load", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": threads}
    return found


def run_part(name: str, out: Path, log: Path, limit: float, variables: dict[str, str]) -> dict[str, Any]:
    """Run a part and end all that it started; return its entry of the report. Its output is shown and logged."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        command = ["bash", "-o", "pipefail", "-c", f"{{ {PARTS[name]}; }} 2>&1 | tee {shlex.quote(str(log))}"]
        environment = variables | {"SCRATCH": scratch}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        status: int | str = "out of time"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        details = {"status": status} | tests_of(Path(scratch)) | benchmark_of(Path(scratch), out)
    results: dict[int | str, str] = {0: "passed", SKIPPED: "skipped"}
    result = results.get(status, "failed")
    if result == "passed" and "tests.xml" in PARTS[name] and not details.get("ran"):
        result = "failed"
    return {"result": result, "seconds": round(time.monotonic() - start, 1)} | details


def tests_of(scratch: Path) -> dict[str, Any]:
    """Return the counts of a part's tests and the names of those that failed; nothing without a report of pytest."""
    if not (path := scratch / "tests.xml").exists():
        return {}
    report = ElementTree.parse(path)
    counts = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
    for suite in report.iter("testsuite"):
        counts = {key: count + int(suite.get(key, 0)) for key, count in counts.items()}
    failing = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in report.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"ran": counts["tests"] - counts["skipped"], **counts} | ({"failing": failing} if failing else {})


def benchmark_of(scratch: Path, out: Path) -> dict[str, Any]:
    """Copy the report of a part's benchmark to ``out``; return how much was measured, and its targets."""
    for path in scratch.glob("*.json"):
        shutil.copy(path, out)
        report = json.loads(path.read_text())
        done = len(report["results"]) + len(report.get("steps", []))
        return {"cases": f"{done} of {report['settings']['cases']}", "targets": report.get("targets", [])}
    return {}


def fingerprint() -> str:
    """Return a hash of the sources that are checked, which tells reports apart where there is no git."""
    digest = hashlib.sha256()
    for folder in ("csrc", "loco_ext", "triton_kernels", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".cu", ".h") and not path.is_symlink():
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def earlier_parts(path: Path, sources: str) -> dict[str, Any]:
    """Return the parts of an earlier report of the same sources."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier = json.loads(path.read_text())
        return earlier["parts"] if earlier["sources"] == sources else {}
    return {}


def summary(parts: dict[str, Any]) -> str:
    """Return a line for each part, and one for each target."""
    lines, targets = [], []
    for name, part in parts.items():
        details = ", ".join(
            f"{key} {value}" for key, value in part.items() if key not in ("result", "seconds", "targets")
        )
        lines.append(f"{name:18}{part['result']:10}{part['seconds']:7.1f} s  {details}")
        targets += part.get("targets", [])
    for target in targets:
        verdict = "met" if target["met"] else "NOT MET"
        measured = f"{target['measured']:.3g}, wanted {target['wanted']}"
        lines.append(f"  {target['name']}: {measured}: {verdict} ({target['where']})")
    return "\n".join(lines)


def reason_against() -> str | None:
    """Return why nothing can be checked here; None if it can."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}; name another interpreter: make device-check PYTHON=..."
    from bench import machine

    return machine.no_gpu()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.device_check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run; all that have not passed by default")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of report and logs")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds that a part may take")
    workers = min(8, (os.cpu_count() or 1) // 2)
    parser.add_argument("--workers", type=int, default=workers, help="processes of the tests")
    parser.add_argument("--quick", action="store_true", help="benchmarks of few rounds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write the report, print the summary."""
    arguments = parse(argv)
    if (reason := reason_against()) is not None:
        print(f"device-check: {reason}", file=sys.stderr)
        return 2
    from bench import harness, machine

    gpu, out, sources = machine.gpu(), arguments.out.resolve(), fingerprint()
    out.mkdir(parents=True, exist_ok=True)
    slug = machine.slug(gpu["gpu"])
    path = out / f"device_check-{slug}.json"
    done = earlier_parts(path, sources)
    # Parts that were cut off come before those that failed. The build is made again: this machine may be another one.
    open_parts = [name for name in PARTS if name == "build" or done.get(name, {}).get("result") != "passed"]
    chosen = arguments.only or sorted(open_parts, key=lambda name: name != "build" and name in done)
    report = {"benchmark": "device_check", "machine": machine.describe() | gpu, "sources": sources}
    variables = environment(gpu, slug, arguments.workers, arguments.quick)
    link = ROOT / "loco_ext" / "triton_kernels"  # makes the kernels importable where loco_ext is not installed
    if made := not link.exists():
        link.symlink_to("../triton_kernels")
    try:
        for name in chosen:
            done[name] = run_part(name, out, path.with_name(f"{path.stem}-{name}.log"), arguments.limit, variables)
            done = {name: done[name] for name in PARTS if name in done}
            harness.write_json(path, report | {"parts": done})
    finally:
        if made:
            link.unlink()
    print(f"\n{gpu['gpu']}, driver {gpu['driver']}: {path}\n{summary(done)}")
    return int(any(part["result"] == "failed" for part in done.values()))


if __name__ == "__main__":
    sys.exit(main())
