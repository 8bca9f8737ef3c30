"""Resource usage that ptxas reports for kernels (registers, stack, spills, shared memory), compared with budgets."""

import ast
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEYS = ("registers", "spill_bytes", "stack_bytes", "shared_bytes")
_SETUP = (Path(__file__).parents[2] / "setup.py").read_text()
# The flags that setup.py builds kernels with.
FLAGS = ast.literal_eval(re.search(r"^NVCC_FLAGS = (\[.*?\])", _SETUP, re.MULTILINE | re.DOTALL)[1])


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


def compile_code(
    nvcc: str, source: Path, targets: Sequence[str], out: Path, include: Sequence[Path], kind: str = "--fatbin"
) -> str:
    """Compile a source for all targets (``"80"``, ``"90"``, ...) at once, to one ``--cubin`` or a ``--fatbin`` of all.

    Return ptxas's report.
    """
    codes = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
    return _compile([nvcc, *FLAGS, "-Xptxas", "-v", "--threads", "0", *codes, kind], source, out, include)


def compile_ptx(nvcc: str, source: Path, target: str, out: Path, include: Sequence[Path]) -> str:
    """Compile a source for one target to PTX, and return its text."""
    _compile([nvcc, *FLAGS, f"-arch=compute_{target}", "--ptx"], source, out, include)
    return out.read_text()


def _compile(command: Sequence[str], source: Path, out: Path, include: Sequence[Path]) -> str:
    command = [*command, *(f"-I{folder}" for folder in include), str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def demangled(names: Sequence[str]) -> list[str]:
    """Return the C++ names of symbols without (lower-case) namespaces; mangled ones if no demangler is installed."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return list(names)
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return [
        re.sub(r"(\b[a-z_]\w*|\(anonymous namespace\))::", "", name).removeprefix("void ")
        for name in done.stdout.splitlines()
    ]


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
