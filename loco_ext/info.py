"""Report of what is installed and which backend runs where: ``python -m loco_ext.info``."""

import platform
import sys
from types import ModuleType
from typing import Any

import torch

from loco_ext.ops import backends
from loco_ext.version import __version__, package_version

_PACKAGES = ("numpy", "triton")


def collect() -> dict[str, Any]:
    """Return versions, the compiled libraries, CPU capability and each operator family's backend, as plain values.

    Example:
        >>> from loco_ext import info
        >>> sorted(info.collect()["backends"]["optim_step"])
        ['cpu', 'cuda']
    """
    return {
        "loco_ext": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in _PACKAGES},
        "library": _library(backends.library, backends.library_error),
        "cuda_library": _library(backends.cuda_library, backends.cuda_library_error),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": {
            family: {device: _backend(family, device) for device in ("cpu", "cuda")} for family in backends.KERNELS
        },
    }


def _library(module: ModuleType | None, error: str | None) -> dict[str, Any]:
    return {"loaded": False, "error": error} if module is None else {"loaded": True, **module.build_info()}


def _backend(family: str, device_type: str) -> str:
    reason = backends.missing(family, "native", device_type)
    if reason is None:
        return "native"
    runs = "triton" if backends.missing(family, "triton", device_type) is None else "reference"
    return f"{runs} ({reason})"


def show() -> None:
    """Print the report as text."""
    facts = collect()
    families = facts.pop("backends")
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{name:22}{value if value not in (None, '') else 'none'}")
    for family, devices in families.items():
        for device, backend in devices.items():
            print(f"{family + ' on ' + device:22}{backend}")


if __name__ == "__main__":
    from loco_ext.commands import run

    sys.exit(run(["info", *sys.argv[1:]]))
