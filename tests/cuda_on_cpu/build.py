"""Compilation of CUDA sources for the CPU, with ``cuda_on_cpu.h``, and runs of the programs."""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Orders of blocks and of the threads of a block, for CUDA_ON_CPU_ORDER; numbers are seeds of a shuffle.
ORDERS = ("forward", "reverse", "eager", "1", "2")

# Objects of programs and of libraries are the same, so that both share them. At -O2, compiling takes longer than all
# that the tests run.
FLAGS = [
    "-std=c++17",
    "-pthread",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # two libraries in one process must not share a kernel's variables
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-unknown-pragmas",  # the sources use #pragma unroll
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-O1",
]
# Left out is what AddressSanitizer sees at the access itself, which took two fifths of the compiler's time.
SANITIZE = [
    *("-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "-fno-sanitize=null,object-size,pointer-overflow,vptr",
]
SHARED = ["-shared", "-Wl,-Bsymbolic"]


@cache
def _packaged_toolkit() -> Path | None:
    """Return the toolkit that the packages nvidia-cuda-* have installed, if any.

    It takes precedence over others because budgets of registers depend on the compiler.
    """
    found = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    toolkits = (toolkit for folder in folders for toolkit in sorted(folder.glob("cu*")))
    return next((toolkit for toolkit in toolkits if (toolkit / "bin" / "nvcc").exists()), None)


@cache
def nvcc() -> str | None:
    """Return the path of CUDA's compiler: from the packages, from CUDA_HOME or CUDA_PATH, or from PATH."""
    if packaged := _packaged_toolkit():
        return str(packaged / "bin" / "nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (home and shutil.which("nvcc", path=os.path.join(home, "bin"))) or shutil.which("nvcc")


def _toolkits() -> Iterable[Path]:
    if packaged := _packaged_toolkit():
        yield packaged
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    if nvcc():
        # The command may be a script or a link outside the toolkit; nvcc itself knows where its toolkit is.
        done = subprocess.run([nvcc(), "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
        if top := re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE):
            yield Path(top[1])
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME:
        yield Path(CUDA_HOME)


@cache
def cuda_includes() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers; empty where there are none."""
    for toolkit in _toolkits():
        for include in (toolkit / "include", *sorted(toolkit.glob("targets/*/include"))):
            if (include / "cuda_runtime.h").exists():
                return tuple(folder for folder in (include, include / "cccl") if folder.exists())
    return ()


def need_cuda_headers() -> None:
    """Skip a test where CUDA's headers are missing."""
    if not cuda_includes():
        pytest.skip("CUDA's headers were not found: no package has them, neither CUDA_HOME nor nvcc leads to them")
    if not shutil.which("g++"):
        pytest.skip("g++ was not found")


def need_nvcc() -> str:
    """Return the path of CUDA's compiler; skip a test where it is missing."""
    found = nvcc()
    if not found:
        pytest.skip("nvcc was not found: not in a package, through CUDA_HOME or on the path")
    return found


def compile_command(
    source: Path, out: Path, *, sanitize: bool = False, include: Sequence[Path] = (), flags: Sequence[str] = ()
) -> list[str]:
    """Return the command line that compiles a source for the CPU; ``out`` is an object unless flags say otherwise."""
    folders = [f"-I{folder}" for folder in (CSRC, *include)]
    cuda = [word for folder in cuda_includes() for word in ("-isystem", str(folder))]
    forced = ["-include", str(HERE / "cuda_on_cpu.h")]
    return ["g++", *_codegen(sanitize), *folders, *cuda, *forced, *flags, "-x", "c++", str(source), "-o", str(out)]


def _codegen(sanitize: bool) -> list[str]:
    return [*FLAGS, *(SANITIZE if sanitize else [])]


def compile_program(
    sources: Sequence[Path],
    out: Path,
    *,
    sanitize: bool = False,
    shared: bool = False,
    include: Sequence[Path] = (),
    defines: Sequence[str] = (),
    link: Sequence[str] = (),
) -> Path:
    """Compile .cu and .cpp files into an executable or a shared library; return its path. Warnings are errors.

    Objects are compiled on all cores and cached by the sources' preprocessed text. Processes and programs that share a
    folder of objects share the work.

    sanitize: compile with AddressSanitizer and UndefinedBehaviorSanitizer; the first finding ends the program.
    include: folders of headers besides csrc. defines, link: further arguments of the preprocessor and of the linker.
    """
    need_cuda_headers()

    def find(source: Path) -> tuple[Path, list[str]]:
        """Return the path of the source's object and the command that makes it."""
        command = partial(compile_command, source, sanitize=sanitize, include=include)
        text = _run(command(Path("-"), flags=[*defines, "-E", "-P"]))
        made = objects_folder() / f"{sha256(repr((text, _codegen(sanitize), _compiler())).encode()).hexdigest()}.o"
        return made, command(_part(made), flags=["-Werror", *defines, "-c"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(pool.map(find, sources))
        # The first pass compiles what no other process is compiling; the second waits for what others compile.
        for wait in (False, True):
            list(pool.map(_make, objects, objects.values(), repeat(wait)))
    kind = SHARED if shared else []
    _run(["g++", "-pthread", *(SANITIZE if sanitize else []), *kind, *map(str, objects), *link, "-o", str(out)])
    return out


@cache
def _compiler() -> str:
    return _run(["g++", "--version"])


def objects_folder() -> Path:
    """Return the folder of objects: one that test runs share, or a temporary one of this process."""
    return Path(os.environ.get("CUDA_ON_CPU_OBJECTS") or _own_folder().name)


@cache
def _own_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _make(made: Path, making: Sequence[str], wait: bool) -> None:
    """Make an object; with ``wait`` false, return at once if another process is making it."""
    with made.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return
        if not made.exists():
            _run(making)
            _part(made).rename(made)
        made.touch()


def _part(made: Path) -> Path:
    """Return the path at which this process makes an object.

    It is the process's own, so that a compiler that outlives its killed process cannot overwrite the finished object.
    """
    return made.with_suffix(f".{os.getpid()}")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


def run_program(
    program: Path | str,
    *arguments: object,
    order: str = "forward",
    mistake: str = "",
    preload: str = "",
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program, its threads and blocks in the given order.

    mistake: the one to make, see csrc/common/mistake.h. preload: see ``sanitizer_to_preload``.
    """
    environment = {
        **os.environ,
        **({"LD_PRELOAD": preload} if preload else {}),
        "CUDA_ON_CPU_ORDER": order,
        "CUDA_ON_CPU_MISTAKE": mistake,
        # The search for leaks needs rights that containers lack.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [str(program), *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout
    )


def check_orders(program: Path, first: int, count: int) -> None:
    """Assert that random calls, numbered from ``first`` on, pass and give the same bits in every order."""
    runs = [run_program(program, first, count, order=order) for order in ORDERS]
    assert not any(done.returncode for done in runs), runs
    (output,) = {done.stdout for done in runs}
    assert output.startswith(f"{count} calls, ")


def check_many(program: Path, count: int) -> None:
    """Assert that other random calls pass in one order."""
    done = run_program(program, 100_000, count, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


def is_found(program: Path, mistake: str, count: int, orders: Iterable[str]) -> bool:
    """Return whether random calls with a mistake fail in one of the orders, or differ in their output between two."""
    outputs = set()
    for order in orders:
        done = run_program(program, 0, count, order=order, mistake=mistake)
        if done.returncode:
            return True
        outputs.add(done.stdout)
    return len(outputs) > 1


def sanitizer_to_preload() -> str:
    """Return the LD_PRELOAD value for a program (Python, say) that loads a library compiled with ``sanitize``."""
    done = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())
