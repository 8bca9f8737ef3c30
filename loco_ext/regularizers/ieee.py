"""Arithmetic for certificates: IEEE float32 or float64, whatever the caller has allowed elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: list[Any] = [
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
]
_LOCK = threading.Lock()
_BEFORE: list[list[str]] = []  # the precisions that each thread inside has found


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off autocast on the device, and the use of TF32 and bfloat16 inside of float32 products.

    The latter are switches of the process, which the last of several threads restores.
    """
    with _LOCK:
        _BEFORE.append([backend.fp32_precision for backend in _BACKENDS])
        for backend in _BACKENDS:
            backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _LOCK:
            # Whoever leaves takes the newest entry, so that the oldest, from before all of them, is left to the last.
            for backend, precision in zip(_BACKENDS, _BEFORE.pop(), strict=True):
                if backend is not torch.backends.cudnn.conv:  # type: ignore[attr-defined]  # has a default of its own
                    backend.fp32_precision = "none"  # that of its library or of all torch, which may change later
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision
