"""Distances of a pattern's blocks from the middle of their output pixel's receptive field, and decay maps from them.

The taps of a convolution keep the distances that :func:`tap_distances` gives them, whatever the stride and the
dilation; blocks farther away, and between the taps of a dilated kernel, continue them.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loco_ext.geometry.block_pattern import BlockPattern
from loco_ext.geometry.conv import ConvGeometry
from loco_ext.geometry.taps import check_center, relative_decay, ring_index


def block_offsets(pattern: BlockPattern) -> Tensor:
    """Return the offset of each block's input pixel from the middle of its output pixel's receptive field.

    Args:
        pattern: one with a ``conv``.

    Returns:
        int64 ``[nnz, axes]``, in *half* pixels, because the middle of an even kernel is between two pixels. If opposite
        ends of the image touch, it is the shorter of the two ways, and the negative one if both are equally long. If a
        tap reads reflect or replicate padding, the offset is that of the pixel that is read.

    Raises:
        ValueError: the pattern has no ``conv``.

    Example:
        >>> pattern = BlockPattern.from_conv(4, kernel_size=3, padding=1)
        >>> block_offsets(pattern).flatten().tolist()
        [0, 2, -2, 0, 2, -2, 0, 2, -2, 0]
    """
    conv = _conv_of(pattern)
    rows, pixels = pattern.row_indices.cpu().numpy(), pattern.col_indices.cpu().numpy()
    outputs, inputs = np.unravel_index(rows, conv.output_size), np.unravel_index(pixels, conv.input_size)
    offsets = np.empty((pattern.nnz, len(inputs)), np.int64)
    for axis, (output, pixel) in enumerate(zip(outputs, inputs, strict=True)):
        offset = 2 * pixel - conv.doubled_centers(axis)[output]
        size = conv.input_size[axis]
        offsets[:, axis] = (offset + size) % (2 * size) - size if conv.wraps else offset
    return torch.from_numpy(offsets)


def block_distance_classes(pattern: BlockPattern, center: str | None = None) -> tuple[Tensor, tuple[float, ...]]:
    """Group blocks by their Euclidean distance from the middle, compared exactly, in integers.

    The unit is one tap: as many input pixels as the dilation along an axis, or one if the kernel has a single tap.

    Args:
        pattern: one with a ``conv``.
        center: None for odd kernels only, which have a centre tap; "midpoint" for every kernel.

    Returns:
        ``(index, distances)``: the class of each block, int64 ``[nnz]``, and the distance of each class, ascending.

    Raises:
        ValueError: the pattern has no ``conv``, an unknown ``center``, or an even kernel without a midpoint.

    Example:
        >>> grown, _ = BlockPattern.from_conv(4, kernel_size=3, padding=1).grow(1)
        >>> index, distances = block_distance_classes(grown)
        >>> index.tolist(), distances
        ([0, 1, 2, 1, 0, 1, 2, 2, 1, 0, 1, 2, 1, 0], (0.0, 1.0, 2.0))
    """
    conv = _conv_of(pattern)
    check_center(center, conv.kernel_size)
    units = [step if taps > 1 else 1 for step, taps in zip(conv.dilation, conv.kernel_size, strict=True)]
    common = math.lcm(*units)
    offsets = block_offsets(pattern) * torch.tensor([common // unit for unit in units], device="cpu")
    squares, index = torch.unique(offsets.square().sum(1), sorted=True, return_inverse=True)
    return index, tuple(math.sqrt(square) / (2 * common) for square in squares.tolist())


def block_decay_map(pattern: BlockPattern, factors: Sequence[float], center: str | None = None) -> Tensor:
    """Return the relative weight decay of every block: :func:`decay_map` continued up to full connection.

    Blocks have the same decay relative to each other as the convolution's taps. Only ``Z`` differs. It is the mean over
    all blocks, of which there are fewer at the border and more in a grown layer.

    Args:
        pattern: one with a ``conv``.
        factors: ``(gamma, eta)``, or one factor for each of :func:`block_distance_classes`, nearest first.
        center: as for :func:`block_distance_classes`.

    Returns:
        float64 ``[nnz]``, of mean 1.

    Raises:
        TypeError, ValueError: as :func:`decay_map` and :func:`block_distance_classes`.

    Example:
        >>> pattern = BlockPattern.from_conv(4, kernel_size=3, padding=1)
        >>> block_decay_map(pattern, (0.5, 2.0)).mul(8).tolist()
        [5.0, 10.0, 10.0, 5.0, 10.0, 10.0, 5.0, 10.0, 10.0, 5.0]
    """
    index, distances = block_distance_classes(pattern, center)
    return relative_decay(index, distances, factors, f"the blocks of {pattern}")


def block_rings(pattern: BlockPattern, kind: str = "half", first: str = "auto") -> Tensor:
    """Return the ring of every block, from the outside in: the rings of the kernel that a grown layer has.

    That kernel is the convolution's, including the gaps of its dilation, extended on every side as far as the blocks
    reach beyond it. Blocks inside the convolution's kernel thus have the rings of their taps. Blocks that
    :meth:`BlockPattern.grow` has added have the rings outside of these. Rings without a block are not counted. Rings
    are counted in pixels. They differ from the rings of the taps if a kernel is dilated and either its dilation differs
    between axes or it is rectangular with an even size.

    Args:
        pattern: one with a ``conv``.
        kind, first: as for :func:`ring_index`, with the sizes of the convolution's kernel.

    Returns:
        int64 ``[nnz]``: 0 for the outermost ring.

    Raises:
        ValueError: the pattern has no ``conv``, or as :func:`ring_index`.

    Example:
        >>> grown, _ = BlockPattern.from_conv(5, kernel_size=3, padding=1).grow(1)
        >>> block_rings(grown, kind="full").view(-1)[:7].tolist()  # of output pixels 0 and 1
        [2, 1, 0, 1, 2, 1, 0]
    """
    conv = _conv_of(pattern)
    ring_index(conv.kernel_size, kind, first)
    if first == "auto":
        first = "bottom_right" if any(size % 2 == 0 for size in conv.kernel_size) else "top_left"
    steps = zip(conv.kernel_size, conv.dilation, strict=True)
    extents = torch.tensor([step * (taps - 1) + 1 for taps, step in steps], device="cpu")
    taps = (block_offsets(pattern) + extents - 1) // 2  # counted from 0 within the convolution's kernel
    reach = int(torch.maximum(-taps, taps - extents + 1).amax()) if pattern.nnz else 0
    reach = max(reach, 0)
    rings = ring_index((extents + 2 * reach).tolist(), kind, first)[tuple((taps + reach).T)]
    return torch.unique(rings, return_inverse=True)[1]


def _conv_of(pattern: BlockPattern) -> ConvGeometry:
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern: expected a BlockPattern, got {type(pattern).__name__}")
    if pattern.conv is None:
        raise ValueError(f"pattern: expected one with a convolution, as from_conv makes it, got {pattern}")
    return pattern.conv
