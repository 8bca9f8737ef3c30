"""Arithmetic for certificates: IEEE float32 or float64, whatever the caller has allowed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Ieee:
    """IEEE arithmetic inside of float32 products of all backends, as long as a thread wants it."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.before: tuple[str, ...] = ()
        self.backends: list[Any] = [
            torch.backends.cuda.matmul,
            torch.backends.cudnn.conv,  # type: ignore[attr-defined]
            torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
            torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
        ]

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = tuple(backend.fp32_precision for backend in self.backends)
                for backend in self.backends:
                    backend.fp32_precision = "ieee"
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for backend, precision in zip(self.backends, self.before, strict=True):
                    backend.fp32_precision = precision


_IEEE = _Ieee()


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off autocast on the device, and the use of TF32 and bfloat16 inside of float32 products.

    The latter are switches of the process, which the last of several threads restores.
    """
    _IEEE.enter()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _IEEE.leave()
