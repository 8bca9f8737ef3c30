"""Arithmetic on sizes for launches, and their device.

Triton's functions of these names take the host ten times as long.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch


def cdiv(size: int, part: int) -> int:
    """Return the number of parts of at most ``part`` that ``size`` divides into.

    Example:
        >>> cdiv(10, 4)
        3
    """
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size``, which is at least 1.

    Example:
        >>> [next_power_of_2(size) for size in (1, 5, 8)]
        [1, 8, 8]
    """
    return 1 << (size - 1).bit_length()


def on_device(device: torch.device) -> torch.cuda.device | nullcontext[None]:
    """Return a context in which a GPU is the current device; for a device of another type, it does nothing.

    Example:
        >>> import torch
        >>> with on_device(torch.device("cpu")):
        ...     x = torch.ones(3)
    """
    # torch.cuda takes ten times as long with a torch.device.
    return torch.cuda.device(device.index) if device.type == "cuda" else nullcontext()
