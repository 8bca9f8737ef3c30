"""Reference of the convolution with filters of different sizes: one convolution for each size."""

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
    add: Tensor | None,
    relu: bool,
) -> Tensor:
    """Return a convolution in parts, all parts' ``pads`` in one list; see :func:`loco_ext.ops.mixed_conv2d`."""
    parts = []
    for i, weight in enumerate(weights):
        top, bottom, left, right = pads[4 * i : 4 * i + 4]
        bias = biases[i] if biases else None
        if weight.shape[2:] == (1, 1):
            # No strided convolution: oneDNN's backward of it writes out of bounds (uxlfoundation/oneDNN#6035).
            every = _padded(x, top, bottom, left, right)[..., :: stride[0], :: stride[1]]
            parts.append(F.conv2d(every, weight, bias))
        elif top == bottom >= 0 and left == right >= 0:
            parts.append(F.conv2d(x, weight, bias, tuple(stride), (top, left), tuple(dilation)))
        else:
            padded = _padded(x, top, bottom, left, right)
            parts.append(F.conv2d(padded, weight, bias, tuple(stride), 0, tuple(dilation)))
    result = parts[0] if len(parts) == 1 else torch.cat(parts, -3)
    if order is not None:
        result = result.index_select(-3, order)
    return add_and_rectify(result, add, relu)


def add_and_rectify(result: Tensor, add: Tensor | None, relu: bool) -> Tensor:
    """Return a convolution's result plus ``add``, if that is given, and apply a ReLU to it if ``relu``."""
    if add is not None:
        result = result + add
    return result.relu() if relu else result


def _padded(x: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
    """Return x padded with zeros, then cropped: in this order, one side may crop more than the image has."""
    padded = F.pad(x, [max(pad, 0) for pad in (left, right, top, bottom)])
    return padded[..., max(-top, 0) : min(bottom, 0) or None, max(-left, 0) : min(right, 0) or None]
