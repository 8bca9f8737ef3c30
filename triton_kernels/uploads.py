"""Small arrays in device memory that kernels read: copied there without waiting, and cached.

What was uploaded is never modified. For eager calls the most recent uploads are kept; device and stream belong to the
key, so that freed memory is reused only by later work of the same stream. Whatever a CUDA graph reads is kept for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_ext.ops.streams import current_stream as _stream
from loco_ext.ops.streams import is_capturing


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Copy arrays to the device in one piece, each padded to a multiple of 16 bytes, without waiting for the device.

    A CUDA graph repeats the copy: the host memory has to stay as it is.

    Returns:
        The arrays' tensors on the device, and the host memory that they are copied from.
    """
    ends = list(accumulate(-(-array.nbytes // 16) * 16 for array in arrays))
    host = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
    begins = [0, *ends[:-1]]
    for begin, array in zip(begins, arrays, strict=True):
        host.numpy()[begin : begin + array.nbytes] = array.view(np.uint8)
    host = host if device.type == "cpu" else host.pin_memory()
    there = host.to(device, non_blocking=True)
    tensors = [
        there[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for begin, array in zip(begins, arrays, strict=True)
    ]
    return tensors, host


class Uploads:
    """Cache that creates an entry if no equal key has one.

    Args:
        size: how many entries of each sort are kept for eager calls.
    """

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self._recent: dict[str, list[tuple[object, Any]]] = {}  # the most recent first
        self._captured: list[Any] = []
        self._lock = threading.Lock()

    def find(self, sort: str, device: torch.device, key: Callable[[], object], make: Callable[[], Any]) -> Any:
        """Return the entry of an equal key, or what ``make`` returns; ``sort`` tells the kinds of entries apart."""
        if is_capturing(device):
            made = make()
            self._captured.append(made)
            return made
        whole_key = (device, _stream(device), key())
        recent = self._recent.setdefault(sort, [])
        with self._lock:
            # Keys are long: comparing them ends at the first difference, hashing them would not.
            place = next((i for i, (known, _made) in enumerate(recent) if known == whole_key), None)
            entry = (whole_key, make()) if place is None else recent.pop(place)
            recent.insert(0, entry)
            del recent[self.size :]
            return entry[1]
