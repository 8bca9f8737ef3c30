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
