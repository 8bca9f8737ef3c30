"""Where channels lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of each pixel lie next to each other, and pixels do not.

    Where sizes of 1 leave that open, strides tell, as they do for torch's convolutions: images of a single channel, or
    of a single pixel, are channels_last where ``x.to(memory_format=torch.channels_last)`` has made them so.
    """
    if x.dim() not in FORMATS or not x.is_contiguous(memory_format=FORMATS[x.dim()]):
        return False
    if not x.is_contiguous():
        return True
    return x.stride(1) == 1 and x.stride(-1) == x.shape[1] and x.shape[1:].numel() > 1


def suggests_channels_last(x: Tensor) -> bool:
    """Whether torch's convolutions make their output of x channels_last: by strides alone, of slices as of wholes."""
    sizes, strides = x.shape, x.stride()
    if len(sizes) not in FORMATS or strides[1] == 0:
        return False
    smallest = 0
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * sizes[dim]
    return True
