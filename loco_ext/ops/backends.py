"""Which implementation of an operator runs: chosen by device, or forced by :func:`backend`."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

library: ModuleType | None = None
library_error: str | None = None
try:
    library = importlib.import_module("loco_ext._C")
except ImportError as error:
    library_error = str(error)

NAMES = ("reference", "native", "triton")
# Device types that each family's kernels serve; the reference serves all.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {"optim_step": {"native": ("cpu",), "triton": ()}}


class _Choice(threading.local):
    """The forced backend of each thread; torch.compile guards on it."""

    def __init__(self) -> None:
        self.forced: str | None = None


_choice = _Choice()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces one backend for every operator that this thread calls inside.

    Args:
        name: ``"reference"`` (plain PyTorch), ``"native"`` (the compiled library) or ``"triton"``.

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


def missing(family: str, name: str, device_type: str) -> str | None:
    """Why backend ``name`` cannot run ``family`` on a device type, or None if it can."""
    if name == "reference":
        return None
    if device_type not in KERNELS[family][name]:
        return f"{family} has no {name} kernel for {device_type} tensors"
    if name == "native" and library_error is not None:
        return f"the compiled library could not be loaded ({library_error}); build it with `pip install .`"
    return None


def choose(family: str, device: torch.device) -> str:
    """The backend that runs ``family`` on ``device``: the forced one, else the first that can."""
    forced = _choice.forced
    if forced is not None:
        if reason := missing(family, forced, device.type):
            raise RuntimeError(f"backend {forced!r}: {reason}")
        return forced
    reason = missing(family, "native", device.type)
    if reason is None:
        return "native"
    if device.type in KERNELS[family]["native"]:
        _warn_once(reason)
    return "reference"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"loco_ext runs its slower PyTorch reference: {reason}", RuntimeWarning, stacklevel=4)
