"""Choice of the blocks that remain when a layer is pruned."""

import math
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from loco_ext.argument_checks import check_count
from loco_ext.geometry import BlockPattern
from loco_ext.nn.block_norms import block_norms


def blocks_to_keep(
    weight: Tensor, pattern: BlockPattern, keep: Tensor | None, threshold: float | None, radius: int | None
) -> Tensor:
    """Return which blocks to keep, bool ``[nnz]``, according to the one of the three arguments that is not None.

    Raises:
        TypeError: not exactly one of them is given, or it has a wrong type.
        ValueError: the number is negative or NaN.
    """
    given = [
        name for name, value in (("keep", keep), ("threshold", threshold), ("radius", radius)) if value is not None
    ]
    if len(given) != 1:
        raise TypeError(f"prune: expected exactly one of keep, threshold and radius, got {', '.join(given) or 'none'}")
    if keep is not None:
        return keep
    if threshold is not None:
        return _above(weight, threshold)
    return _within(pattern, check_count("radius", radius))


def _above(weight: Tensor, threshold: float) -> Tensor:
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold: expected a number, got {threshold!r}")
    if math.isnan(threshold) or threshold < 0:
        raise ValueError(f"threshold: expected at least 0, got {threshold}")
    return ~(block_norms(weight.detach()) <= threshold)  # a block with NaN is kept


def _within(pattern: BlockPattern, radius: int) -> Tensor:
    """Return whether each block's input pixel is at most ``radius`` from those that its output pixel reads.

    An output pixel that reads none grows from the nearest one. A pattern of all pixels within the radius would answer
    the same, but it may have many times as many blocks as this one.
    """
    conv = pattern.conv
    assert conv is not None
    outputs = np.unravel_index(pattern.row_indices.cpu().numpy(), conv.output_size)
    pixels = np.unravel_index(pattern.col_indices.cpu().numpy(), conv.input_size)
    taps = [conv.axis_pixels(axis) for axis in range(len(pixels))]  # [outputs, taps] along each axis, -1 in padding
    reads = np.logical_and.reduce([(read.max(1) >= 0)[output] for read, output in zip(taps, outputs, strict=True)])
    within = reads | (radius > 0)
    for axis, (output, pixel) in enumerate(zip(outputs, pixels, strict=True)):
        size, nearest = conv.input_size[axis], conv.nearest_pixels(axis)[output]
        near = np.zeros_like(within)
        for read in taps[axis].T:
            center = np.where(reads, read[output], nearest)
            distance = np.abs(pixel - center)
            if conv.wraps:
                distance = np.minimum(distance, size - distance)
            near |= (distance <= radius) & (center >= 0)
        within &= near
    return torch.from_numpy(within)
