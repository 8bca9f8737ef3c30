"""Resource usage that ptxas reports for kernels (registers, stack, spills, shared memory), compared with budgets."""

import fcntl
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from bench.sass import demangled
from tests.setup_script import run_setup

KEYS = ("registers", "spill_bytes", "stack_bytes", "shared_bytes")


@dataclass(frozen=True)
class Usage:
    """Resource usage of one kernel on one target.

    kernel: its name without namespaces. spill_bytes: stores and loads together.
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """The PTX and cubins that nvcc makes of one source for several targets, and the report of ptxas."""

    folder: Path
    stem: str

    @property
    def report(self) -> str:
        return (self.folder / "report.txt").read_text()

    def ptx(self, target: int) -> str:
        return (self.folder / f"{self.stem}.compute_{target}.ptx").read_text()

    def cubin(self, target: int) -> Path:
        (found,) = self.folder.glob(f"{self.stem}.*_{target}.cubin")
        return found


def compiled(nvcc: str, source: Path, targets: Sequence[str], objects: Path, include: Path) -> Compiled:
    """Compile a source for two or more targets at once, unless a folder of objects has them.

    Args:
        targets: flags of nvcc.
        objects: folder that processes may share; what is in it is known by the text of the sources.
        include: folder whose headers the source may include.
    """
    command = [
        nvcc,
        *run_setup()["NVCC_FLAGS"],
        "-Xptxas",
        "-v",
        "--threads",
        "0",
        *targets,
        "--fatbin",
        "--keep",
        f"-I{include}",
    ]
    texts = [path.read_bytes() for path in (source, *sorted(include.rglob("*.h")))]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    made = objects / f"{source.stem}-{sha256(repr((command, version, texts)).encode()).hexdigest()}"
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "report.txt").exists():
            shutil.rmtree(made, ignore_errors=True)
            part = Path(mkdtemp(dir=objects))
            command += ["--keep-dir", str(part), str(source), "-o", str(part / "all.fatbin")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
            (part / "report.txt").write_text(done.stdout + done.stderr)
            for kept in part.iterdir():
                if kept.suffix not in (".ptx", ".cubin", ".txt"):
                    kept.unlink()
            part.rename(made)
        made.touch()
    return Compiled(made, source.stem)


def parse(report: str) -> list[Usage]:
    """Return the usage of each kernel in the output of ``nvcc -Xptxas -v``."""
    parts = re.split(r"Compiling entry function '([^']+)' for '([^']+)'", report)[1:]
    symbols, targets, texts = parts[0::3], parts[1::3], parts[2::3]
    usages = []
    for name, symbol, target, text in zip(demangled(symbols), symbols, targets, texts, strict=True):
        # The report also has the properties of functions that were not inlined; the kernel's own follow its name.
        own = text.split(f"Function properties for {symbol}", 1)[-1]

        def number(pattern: str, default: int | None = None, own: str = own) -> int:
            found = re.search(pattern, own)
            if found is None and default is None:
                raise ValueError(f"no {pattern!r} in ptxas's report:\n{own}")
            return int(found[1]) if found else default

        usages.append(
            Usage(
                kernel=name,
                target=target,
                registers=number(r"Used (\d+) registers"),
                spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                shared_bytes=number(r"(\d+) bytes smem", default=0),
            )
        )
    return usages


def complaints(usages: Sequence[Usage], budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a message for each excess over budget; a kernel's budget has the longest key that occurs in its name."""
    found = []
    for usage in usages:
        keys = [key for key in budgets if key in usage.kernel]
        if not keys:
            found.append(f"{usage.kernel} ({usage.target}): no budget")
            continue
        budget = budgets[max(keys, key=len)]
        found += [
            f"{usage.kernel} ({usage.target}): {getattr(usage, key)} {key}, budget {budget[key]}"
            for key in KEYS
            if getattr(usage, key) > budget[key]
        ]
    return found
