"""Everything that only a GPU can show: build, tests, compute-sanitizer and benchmarks on an NVIDIA GPU.

    make device-check                                            runs the parts that have not passed yet
    python -m bench.device_check --only build test_optim_step    runs these, whether or not they have passed

Each part ends within --limit seconds, and the report is written after each, so a check that is cut off goes on where it
was. Nothing is downloaded or installed: the parts run in this interpreter's environment, on libraries built in place
for the GPU at hand. A part that fails does not stop the others; a part of tests of which none ran has failed. Test
modules of the part test_rest that need a missing package are left out by name.

The report, one JSON file for each GPU, and the logs of the parts go to the folder after --out; parts keep their entry
until they run again or a source changes. Exit status: 0, 1 if a part failed, 2 where there is no GPU to check.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
# Modules of tests on the GPU, by part; some also have tests that need none.
GPU_TESTS = {
    "optim_step": ("optim/test_cuda", "optim/test_cuda_graphs"),
    "penalty": ("optim/test_cuda_penalty",),
    "ring_prox": ("ring_prox/test_gpu",),
    "block_sparse": ("block_sparse/test_triton_gpu",),
}
GPU_MODULES = tuple(module for modules in GPU_TESTS.values() for module in modules)
ON_GPU = re.compile(r"(optim\.test_cuda\w*|ring_prox\.test_gpu)::.*\[.*(native|triton)|\.test_triton_gpu::")
# The report cannot be written without these packages.
NEEDED = ("torch", "numpy", "scipy", "tqdm", "safetensors", "filelock", "typer", "pytest")

LIBRARIES = "import sys; from loco_ext.ops import backends as b; sys.exit(b.library_error or b.cuda_library_error)"
# Tools and the kernels that each checks; Triton's have no shared memory of their own that could have races.
SANITIZERS = (
    ("memcheck", "native"),
    ("racecheck", "native"),
    ("synccheck", "native"),
    ("memcheck", "triton"),
    ("initcheck", "native"),
)
SOURCES = (".py", ".cpp", ".cu", ".h")
FOUND_BY_SANITIZER = 86  # exit status of compute-sanitizer after a finding
# This setting gives every tensor its own allocation, whose bounds memcheck knows.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
BENCHMARKS = ("optim_step", "ring_prox", "block_sparse")  # bench_NAME_gpu


@dataclass(frozen=True)
class Settings:
    """Settings from the command line, and paths."""

    out: Path
    gpu: str  # name of the GPU in a form for file names
    architecture: str
    limit: float
    workers: int
    quick: bool
    scratch: Path


@dataclass(frozen=True)
class Command:
    """One step of a part."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Part:
    """The steps of a part; ``after`` reads their output files and returns entries of the part's report."""

    commands: list[Command]
    after: Callable[[], dict[str, Any]] = dict
    skipped: str | None = None  # reason why there is nothing to run


def python(*arguments: str) -> list[str]:
    """Return a command line of this interpreter."""
    return [sys.executable, *arguments]


def environment_with(**variables: str) -> dict[str, str]:
    """Return this process's environment, with our package and this interpreter's programs found from any folder."""

    def extended(name: str, folder: Path) -> str:
        return os.pathsep.join(filter(None, [str(folder), os.environ.get(name)]))

    paths = {"PYTHONPATH": extended("PYTHONPATH", ROOT), "PATH": extended("PATH", Path(sys.executable).parent)}
    return {**os.environ, **paths, **variables}


def build(settings: Settings) -> Part:
    """Return the part that builds both libraries in place, only for this GPU, and loads them."""
    environment = {"LOCO_CUDA": "1", "TORCH_CUDA_ARCH_LIST": settings.architecture}
    return Part(
        [
            Command("build", python("setup.py", "build_ext", "--inplace"), environment),
            Command("load", python("-c", LIBRARIES)),
        ]
    )


def gpu_tests(family: str, settings: Settings) -> Part:
    """Return the part of a family's tests on the GPU."""
    return pytest_part([f"tests/{module}.py" for module in GPU_TESTS[family]], settings, "on_gpu")


def other_tests(settings: Settings) -> Part:
    """Return the part of all other tests except slow ones; those of operators also run on the GPU."""
    missing = missing_packages()
    left_out = [f"--ignore=tests/{module}.py" for module in (*GPU_MODULES, *missing)]
    part = pytest_part(left_out, settings, "passed")
    return Part(part.commands, lambda: {"left_out": missing} | part.after())


def pytest_part(chosen: Sequence[str], settings: Settings, needed: str) -> Part:
    """Return the part that runs the chosen tests, in several processes where pytest-xdist is installed.

    It fails unless its report has at least one test under ``needed``.
    """
    results = settings.scratch / "tests.xml"
    command = python("-m", "pytest", *PYTEST_OPTIONS, "-m", "not slow", "-rfE", f"--junitxml={results}", *chosen)
    environment = {}
    if settings.workers > 1 and find_spec("xdist") is not None:
        command += ["-n", str(settings.workers), "--dist", "load"]
        # All processes must collect the same tests, and they share the cores.
        threads = max(1, (os.cpu_count() or 1) // settings.workers)
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(threads)}
    commands = [Command("load", python("-c", LIBRARIES)), Command("tests", command, environment)]
    return Part(commands, lambda: counted(results, needed))


def counted(results: Path, needed: str) -> dict[str, Any]:
    """Return pytest's results, with an error if none has run of the tests that are needed."""
    found = read_results(results) if results.exists() else {}
    ran = {"on_gpu": "on the GPU", "passed": "and passed"}[needed]
    return found | ({} if found.get(needed) else {"error": f"no test ran {ran}"})


# The options in pyproject.toml need plugins that may be missing.
PYTEST_OPTIONS = ("-o", "addopts=-q --strict-markers")


def missing_packages() -> dict[str, str]:
    """Return test modules that cannot be imported and the package that each lacks; other errors are left to pytest."""
    command = python("-m", "bench.device_check", "--import-tests")
    done = subprocess.run(command, cwd=ROOT, env=environment_with(), stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def import_tests(folder: Path) -> dict[str, str]:
    """Import every test module of the folder; see :func:`missing_packages`."""
    sys.path[:0] = [str(ROOT), str(folder.parent)]
    own = {path.stem for path in (*folder.parent.iterdir(), *ROOT.iterdir())}
    missing = {}
    for path in sorted(folder.rglob("test_*.py")):
        module = path.relative_to(folder).with_suffix("")
        try:
            importlib.import_module(".".join((folder.name, *module.parts)))
        except ModuleNotFoundError as error:
            if (package := (error.name or "").partition(".")[0]) not in own:
                missing[module.as_posix()] = package
        except KeyboardInterrupt:
            raise
        except BaseException:  # a module that skips itself raises no Exception but a BaseException
            continue
    return missing


def read_results(path: Path) -> dict[str, Any]:
    """Return counts of pytest's results, how many of them were GPU tests, and the names of those that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed, on_gpu = [], 0
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        on_gpu += outcome != "skipped" and ON_GPU.search(name) is not None
        if outcome == "failed":
            failed.append(name)
    return {**counts, "on_gpu": on_gpu, "failures": failed}


def sanitized(tool: str, backend: str, settings: Settings) -> Part:
    """Return the part that runs the tests of single kernels of a backend under one of compute-sanitizer's tools."""
    program = find_sanitizer()
    if program is None:
        return Part([], skipped="compute-sanitizer is not installed")
    results = settings.scratch / "tests.xml"
    options = ["--tool", tool, "--error-exitcode", str(FOUND_BY_SANITIZER), "--target-processes", "all"]
    chosen = [*(f"tests/{name}.py" for name in GPU_MODULES), "-k", f"kernels and {backend}", "-x"]
    command = python("-m", "pytest", *PYTEST_OPTIONS, f"--junitxml={results}", *chosen)
    steps = [Command(f"{tool} {backend}", [program, *options, *command], UNCACHED)]
    return Part(steps, lambda: counted(results, "on_gpu"))


def find_sanitizer() -> str | None:
    """Find compute-sanitizer on the path, or beside the CUDA compiler that torch's extensions are built with."""
    if found := shutil.which("compute-sanitizer"):
        return found
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("compute-sanitizer", path=f"{CUDA_HOME}/bin") if CUDA_HOME else None


def benchmark(family: str, settings: Settings) -> Part:
    """Return the part of a family's benchmark; missed targets are reported but fail nothing."""
    name = f"{family}_gpu"
    results = settings.scratch / f"{name}.json"

    def after() -> dict[str, Any]:
        if not results.exists():
            return {}
        shutil.copyfile(results, settings.out / f"{name}{'_quick' * settings.quick}-{settings.gpu}.json")
        report = json.loads(results.read_text())
        done = len(report["results"]) + len(report.get("steps", []))
        return {"cases": f"{done} of {report['settings']['cases']}", "targets": report.get("targets", [])}

    quick = ["--quick"] if settings.quick else []
    return Part([Command(name, python("-m", f"bench.bench_{name}", "--out", str(results), *quick))], after)


PARTS: dict[str, Callable[[Settings], Part]] = {
    "build": build,
    **{f"test_{family}": partial(gpu_tests, family) for family in GPU_TESTS},
    "test_rest": other_tests,
    **{f"{tool}_{backend}": partial(sanitized, tool, backend) for tool, backend in SANITIZERS},
    **{f"bench_{family}": partial(benchmark, family) for family in BENCHMARKS},
}


def run_part(name: str, settings: Settings) -> dict[str, Any]:
    """Run the steps of a part one after another, as long as each succeeds; return the part's report."""
    start = time.monotonic()
    part = PARTS[name](settings)
    if part.skipped is not None:
        return {"result": "skipped", "seconds": 0.0, "reason": part.skipped, "steps": []}
    steps: list[dict[str, Any]] = []
    with (settings.out / f"device_check-{settings.gpu}-{name}.log").open("w") as log:
        for command in part.commands:
            steps.append(run_command(command, settings.limit - (time.monotonic() - start), log))
            if steps[-1]["exit_status"] != 0:
                break
    extra = part.after()
    passed = all(step["exit_status"] == 0 for step in steps) and "error" not in extra
    seconds = round(time.monotonic() - start, 1)
    return {"result": "passed" if passed else "failed", "seconds": seconds, "steps": steps} | extra


def run_command(command: Command, limit: float, log: Any) -> dict[str, Any]:
    """Run a command, pass its output on and write it to ``log``; kill it and its children after the limit."""
    start = time.monotonic()
    print(f"\n== {command.name}: {' '.join(command.arguments)}", file=log, flush=True)
    process = subprocess.Popen(
        command.arguments,
        cwd=ROOT,
        env=environment_with(PYTHONUNBUFFERED="1", **command.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(limit, 0.0), stop)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            log.write(line)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
    seconds = round(time.monotonic() - start, 1)
    status = {"name": command.name, "exit_status": process.returncode, "seconds": seconds}
    return status | ({"timed_out": True} if timed_out.is_set() else {})


@contextlib.contextmanager
def triton_kernels_importable() -> Iterator[None]:
    """Make ``loco_ext.triton_kernels`` importable where loco_ext is not installed: by a link, removed on exit."""
    link = ROOT / "loco_ext" / "triton_kernels"
    command = python("-c", "import loco_ext.triton_kernels")
    probe = subprocess.run(command, cwd=ROOT, env=environment_with(), capture_output=True)
    if probe.returncode != 0 and not link.exists():
        link.symlink_to(Path("..") / "triton_kernels")
    try:
        yield
    finally:
        if link.is_symlink():
            link.unlink()


def fingerprint() -> str:
    """Return a hash of the sources that are checked, which tells reports apart where there is no git."""
    digest = hashlib.sha256()
    for folder in ("csrc", "loco_ext", "triton_kernels", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCES and not path.is_symlink():
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def earlier_parts(path: Path, sources: str) -> dict[str, Any]:
    """Return the parts of an earlier report of the same sources."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier = json.loads(path.read_text())
        return earlier["parts"] if earlier["sources"] == sources else {}
    return {}


def summary(report: dict[str, Any]) -> str:
    """Return a line for each part, and one for each target."""
    lines = []
    for name, part in report["parts"].items():
        lines.append(f"{name:18}{part['result']:10}{part['seconds']:7.1f} s  {details(part)}".rstrip())
    for target in (target for part in report["parts"].values() for target in part.get("targets", [])):
        verdict = "met" if target["met"] else "NOT MET"
        measured = f"{target['measured']:.3g}, wanted {target['wanted']}"
        lines.append(f"  {target['name']}: {measured}: {verdict} ({target['where']})")
    return "\n".join(lines)


def details(part: dict[str, Any]) -> str:
    """Return the remarks on a part for its line."""
    words = [part["reason"]] if "reason" in part else []
    for step in part["steps"]:
        if step.get("timed_out"):
            words.append(f"{step['name']} ran out of time")
        elif step["exit_status"] != 0:
            words.append(f"{step['name']} ended with {step['exit_status']}")
    words += [f"{part[key]} {key}" for key in ("passed", "failed", "skipped") if key in part]
    words += [f"{part['on_gpu']} on the GPU"] if "on_gpu" in part else []
    words += [f"{part['cases']} cases"] if "cases" in part else []
    words += [f"{module} left out, needs {package}" for module, package in part.get("left_out", {}).items()]
    return ", ".join(words + ([part["error"]] if "error" in part else []))


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
    parser.add_argument("--import-tests", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write the report, print the summary."""
    arguments = parse(argv)
    if arguments.import_tests:
        print(json.dumps(import_tests(TESTS)))
        return 0
    if (reason := reason_against()) is not None:
        print(f"device-check: {reason}", file=sys.stderr)
        return 2
    from bench import harness, machine

    gpu = machine.gpu()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name_of_gpu = machine.slug(gpu["gpu"])
    path = arguments.out / f"device_check-{name_of_gpu}.json"
    sources = fingerprint()
    done = earlier_parts(path, sources)
    # Parts that were cut off come before those that failed. The build is made again: this machine may be another one.
    open_parts = [name for name in PARTS if name == "build" or done.get(name, {}).get("result") != "passed"]
    chosen = arguments.only or sorted(open_parts, key=lambda name: name != "build" and name in done)
    report = {"benchmark": "device_check", "machine": machine.describe() | gpu, "sources": sources, "parts": done}
    with tempfile.TemporaryDirectory() as scratch, triton_kernels_importable():
        for name in chosen:
            (folder := Path(scratch, name)).mkdir()
            settings = Settings(
                arguments.out.resolve(),
                name_of_gpu,
                gpu["capability"],
                arguments.limit,
                arguments.workers,
                arguments.quick,
                folder,
            )
            done[name] = run_part(name, settings)
            report["parts"] = {name: done[name] for name in PARTS if name in done}
            harness.write_json(path, report)
    print(f"\n{gpu['gpu']}, driver {gpu['driver']}: {path}\n{summary(report)}")
    return int(any(part["result"] == "failed" for part in done.values()))


if __name__ == "__main__":
    sys.exit(main())
