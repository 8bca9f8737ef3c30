"""Detection of the channels_last memory format."""

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Return whether the channels of each pixel are adjacent in memory, and pixels are not.

    If sizes of 1 leave that open, strides decide, as for torch's convolutions: images of a single channel or a single
    pixel are channels_last if ``x.to(memory_format=torch.channels_last)`` has made them so.
    """
    if x.dim() not in FORMATS or not x.is_contiguous(memory_format=FORMATS[x.dim()]):
        return False
    if not x.is_contiguous():
        return True
    return x.stride(1) == 1 and x.stride(-1) == x.shape[1] and x.shape[1:].numel() > 1


def suggests_channels_last(x: Tensor) -> bool:
    """Return whether torch's convolutions give a channels_last output for x, which they decide only by strides."""
    sizes, strides = x.shape, x.stride()
    if len(sizes) not in FORMATS or strides[1] == 0:
        return False
    smallest = 0
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * sizes[dim]
    return True
