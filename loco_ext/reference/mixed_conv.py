"""Reference of the convolution by kernels of different sizes: one convolution for each size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def mixed_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    pads: Sequence[int],
    order: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    relu: bool,
) -> Tensor:
    parts = []
    for i, weight in enumerate(weights):
        top, bottom, left, right = pads[4 * i : 4 * i + 4]
        bias = biases[i] if biases else None
        if top == bottom >= 0 and left == right >= 0:
            parts.append(F.conv2d(x, weight, bias, tuple(stride), (top, left), tuple(dilation)))
        else:
            padded = F.pad(x, (left, right, top, bottom))
            parts.append(F.conv2d(padded, weight, bias, tuple(stride), 0, tuple(dilation)))
    result = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if order is not None:
        result = result.index_select(1, order)
    return result.relu() if relu else result
