"""The choice of an operator's implementation: by device, or forced by :func:`backend`."""

import importlib
import importlib.util
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from loco_ext.compiler import assume_constant_result
from loco_ext.extras import install_command


def _load(name: str) -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        return None, str(error)


# Each compiled library, or the reason for its absence. The first defines all operators, for CPU tensors.
library, library_error = _load("loco_ext._C")
cuda_library, cuda_library_error = _load("loco_ext._C_cuda") if library else (None, library_error)

NAMES = ("reference", "native", "triton")
# The device types that each family's kernels support; the reference supports all.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "optim_step": {"native": ("cpu", "cuda"), "triton": ("cuda",)},
    "ring_prox": {"native": ("cpu", "cuda"), "triton": ("cuda",)},
    "block_sparse": {"native": ("cpu",), "triton": ("cuda",)},
    "mixed_conv": {"native": ("cpu",), "triton": ()},
    "landscape": {"native": (), "triton": ("cuda",)},
}


class _Choice(threading.local):
    """The forced backend of each thread; torch.compile guards on it."""

    def __init__(self) -> None:
        self.forced: str | None = None


_choice = _Choice()


def check_one_device(**tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors are on one device; for fake implementations, which run once any operand has no memory.

    Raises:
        TypeError: the tensors, given by the names of an operator's arguments, are not all on one device.
    """
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first, device), *others = given.items()
    for name, other in others:
        if other != device:
            raise TypeError(f"{name}: expected device {device} as {first}, got {other}")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend for every operator that this thread calls inside the context.

    Args:
        name: ``"reference"`` (plain PyTorch), ``"native"`` (the compiled libraries) or ``"triton"``.

    Raises:
        ValueError: for any other name.
        RuntimeError: when an operator is called that the backend cannot run; the message says why.

    Example:
        >>> import torch, loco_ext
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> p.grad = torch.ones(3)
        >>> with loco_ext.backend("reference"):
        ...     loco_ext.optim.SGD([p], lr=0.5).step()
        >>> p.tolist()
        [0.5, 0.5, 0.5]
    """
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")
    before, _choice.forced = _choice.forced, name
    try:
        yield
    finally:
        _choice.forced = before


def operators() -> Any:
    """Return the namespace of the compiled operators."""
    return torch.ops.loco_ext


def runs_gpu_kernels(device: torch.device) -> bool:
    """Return whether compiled operators on this device are those for GPUs."""
    return device.type == "cuda"


def missing(family: str, name: str, device: torch.device | str) -> str | None:
    """Return why backend ``name`` cannot run ``family`` on a device, or None if it can."""
    device = torch.device(device)
    device_type = device.type
    if name == "reference":
        return None
    if device_type not in KERNELS[family][name]:
        return f"{family} has no {name} kernel for {device_type} tensors"
    if name == "triton":
        if _has_triton():
            return None
        return f"triton is not installed: `{install_command('triton')}` in the folder of loco_ext's sources"
    if device_type == "cuda" and cuda_library_error is not None:
        return (
            f"the compiled CUDA library could not be loaded ({cuda_library_error}); build loco_ext where torch has "
            "CUDA and the CUDA toolkit is installed"
        )
    if device_type == "cuda" and (lacking := _lacks_code(device)) is not None:
        return lacking
    if library_error is not None:
        command = "pip install --no-build-isolation ."
        return f"the compiled library could not be loaded ({library_error}); build it with `{command}`"
    return None


@assume_constant_result
@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def forced() -> str | None:
    """Return the backend that this thread has forced, or None."""
    return _choice.forced


@assume_constant_result
@cache
def _lacks_code(device: torch.device) -> str | None:
    """Return a text if the compiled CUDA library has no code for a CUDA device, by default the current one."""
    if cuda_library is None or (device.index is None and not torch.cuda.is_available()):
        return None
    built_for, capability = cuda_library.build_info()["architectures"], torch.cuda.get_device_capability(device)
    if has_code(built_for, capability):
        return None
    return (
        f"the compiled CUDA library has code for {built_for}, not for {'.'.join(map(str, capability))} as {device} "
        "needs; build loco_ext with TORCH_CUDA_ARCH_LIST set to that"
    )


def has_code(architectures: str, capability: tuple[int, int]) -> bool:
    """Return whether a library built for ``architectures``, a TORCH_CUDA_ARCH_LIST, has code for a compute capability.

    Code for one capability also runs on those with the same first number and a larger second one, and ``+PTX`` is
    compiled for all that are larger. Any other name than a number, such as "Hopper", counts as code for every GPU.
    """
    for name in architectures.replace(" ", ";").split(";"):
        major, _, minor = name.removesuffix("+PTX").partition(".")
        if not (major.isdigit() and minor.isdigit()):
            return True
        built = int(major), int(minor)
        if built <= capability and (built[0] == capability[0] or name.endswith("+PTX")):
            return True
    return False


def choose(family: str, device: torch.device) -> str:
    """Return the backend that runs ``family`` on ``device``: the forced one, else the first that can."""
    forced = _choice.forced
    if forced is not None:
        if reason := missing(family, forced, device):
            raise RuntimeError(f"backend {forced!r}: {reason}")
        return forced
    reason = missing(family, "native", device)
    if reason is None:
        return "native"
    without_triton = missing(family, "triton", device)
    if without_triton is None:
        if device.type in KERNELS[family]["native"] and cuda_library_error is None:
            _warn_once("Triton kernels", reason)
        return "triton"
    if device.type in KERNELS[family]["native"]:
        _warn_once("slower PyTorch reference", reason)
    elif device.type in KERNELS[family]["triton"]:
        _warn_once("slower PyTorch reference", without_triton)
    return "reference"


@cache
def _warn_once(runs: str, reason: str) -> None:
    warnings.warn(f"loco_ext runs its {runs}: {reason}", RuntimeWarning, stacklevel=4)
