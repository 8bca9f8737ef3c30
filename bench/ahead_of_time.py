"""Triton kernels compiled ahead of time, for GPUs that this machine need not have.

A launcher is called as usual; instead of a launch, the kernel is compiled for the arguments that it received.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import sass


@dataclass
class Warmed:
    """Stand-in for a kernel that compiles it instead of running it, or only records its launches."""

    kernel: Any
    compiles: bool = True
    launches: list[tuple[tuple[int, ...], dict[str, Any], Any]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*arguments, grid=grid, **options) if self.compiles else None
            self.launches.append((grid, options, compiled))

        return launch


def launches(
    call: Callable[[], object],
    module: Any,
    kernels: Iterable[str],
    target: tuple[str, int | str],
    compiles: bool = True,
    **replaced: Any,
) -> list[tuple[str, tuple[int, ...], dict[str, Any], Any]]:
    """Return name, grid, options and compiled code of each launch of the module's kernels in a call.

    Args:
        target: "cuda" or "hip", and the architecture.
        replaced: further attributes of the module to replace meanwhile, by name.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    hip = target[0] == "hip"
    gpu = GPUTarget(*target, 64 if hip else 32)
    driver = SimpleNamespace(
        get_current_target=lambda: gpu, get_current_device=lambda: str(gpu), get_current_stream=lambda _device: 0
    )
    warmed: dict[str, Any] = {name: Warmed(getattr(module, name), compiles) for name in kernels}
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(torch.version, "hip", "7.0" if hip else None),
        mock.patch.multiple(module, **warmed, **replaced),
    ):
        call()
    return [(name, *launch) for name, kernel in warmed.items() for launch in kernel.launches]


def resources(cubin: bytes) -> dict[str, int]:
    """Return the number of registers and the bytes of stack, which holds spilled registers."""
    said = _output("cuobjdump", cubin, "-res-usage")
    return {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK")}  # type: ignore[index]


def disassembled(cubin: bytes) -> dict[str, sass.Kernel]:
    """Return the machine instructions of each kernel."""
    return sass.parse(_output("nvdisasm", cubin, "-c"))


def _output(tool: str, cubin: bytes, option: str) -> str:
    """Return what one of the tools that Triton comes with prints about compiled code."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [getattr(triton.knobs.nvidia, tool).path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
