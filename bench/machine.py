"""The facts that measurements depend on: processor, caches, GPU, versions, commit."""

import contextlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from loco_ext.version import __version__, commit, package_version


def describe() -> dict[str, Any]:
    """Return the facts that measurements depend on: processor, caches, versions, commit, date."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "caches": _caches(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "loco_ext": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the processor's name as reported by the kernel."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU; "CPU" for all others."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _caches() -> dict[str, str]:
    """Return sizes of the first core's data caches, as {"L1": "48K"}; empty where the kernel does not list them."""
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            caches[f"L{level}"] = size
    return caches


def no_gpu() -> str | None:
    """Return why nothing can be measured on an NVIDIA GPU here; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


def gpu() -> dict[str, Any]:
    """Return the facts beyond :func:`describe` that GPU measurements depend on: GPU, driver and versions."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def slug(name: str) -> str:
    """Return a name in a form for file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
