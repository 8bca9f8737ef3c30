"""The geometry of a convolution on an image of one size: which input pixel each tap of each output pixel reads.

Everything here is a product of the geometries along each axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from loco_ext.argument_checks import check_choice, check_count, check_ints, is_int

Ints = int | Sequence[int]
Padding = str | int | Sequence[int | Sequence[int]]

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")
LARGEST_COUNT = 2**63 - 1


@dataclass(frozen=True, init=False)
class ConvGeometry:
    """A convolution's arguments, checked and expanded to all axes, on an input of one size.

    Args:
        input_size: pixels along each axis: an int or one to three ints.
        kernel_size, stride, dilation: an int for all axes, or one for each.
        padding: an int, one for each axis, a pair ``(before, after)`` for an axis in place of an int, ``"valid"``, or
            ``"same"`` (stride 1 only), which pads as torch does: one more after than before if the sum is odd.
        padding_mode: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.

    Attributes, other than the arguments:
        output_size: pixels along each axis.
        n_in, n_out, n_taps: the number of pixels of the input and the output, and of taps of the kernel.

    Raises:
        TypeError: an argument is not made of ints; ``padding`` is neither that nor a string.
        ValueError: torch's convolutions refuse the arguments: sizes, strides and dilations below 1, negative padding, a
            kernel larger than the padded input, reflect padding not smaller than the input, circular padding larger
            than it, ``"same"`` with a stride; also if sizes or counts overflow their integers.

    Example:
        >>> conv = ConvGeometry((32, 32), 4, stride=2, padding=((2, 1), 1))
        >>> conv.output_size, conv.kernel_size, conv.padding
        ((16, 16), (4, 4), ((2, 1), (1, 1)))
        >>> conv.count_blocks(), conv.count_blocks(radius=1), conv.count_blocks(radius=32)
        (3844, 8372, 262144)
    """

    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    padding_mode: str
    output_size: tuple[int, ...]

    def __init__(
        self,
        input_size: Ints,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        padding_mode: str = "zeros",
    ) -> None:
        sizes = check_ints("input_size", input_size)
        axes = len(sizes)
        kernel = check_ints("kernel_size", kernel_size, axes)
        strides = check_ints("stride", stride, axes)
        dilations = check_ints("dilation", dilation, axes)
        check_choice("padding_mode", padding_mode, PADDING_MODES)
        extents = [step * (taps - 1) + 1 for step, taps in zip(dilations, kernel, strict=True)]
        pads = _check_padding(padding, extents, strides)
        _check_padding_fits(padding_mode, pads, sizes)

        padded = tuple(size + sum(pad) for size, pad in zip(sizes, pads, strict=True))
        if any(extent > size for extent, size in zip(extents, padded, strict=True)):
            raise ValueError(
                f"kernel_size: expected at most the padded input, {padded}, got {kernel} with dilation {dilations}"
            )
        output = tuple((size - extent) // step + 1 for size, extent, step in zip(padded, extents, strides, strict=True))
        if max(math.prod(sizes), math.prod(output) * math.prod(kernel)) > LARGEST_COUNT:
            raise ValueError(f"input_size: expected pixels and pairs that int64 can count, got {sizes}")

        vars(self).update(input_size=sizes, output_size=output, kernel_size=kernel)
        vars(self).update(stride=strides, padding=pads, dilation=dilations, padding_mode=padding_mode)

    @property
    def n_in(self) -> int:
        return math.prod(self.input_size)

    @property
    def n_out(self) -> int:
        return math.prod(self.output_size)

    @property
    def n_taps(self) -> int:
        return math.prod(self.kernel_size)

    @property
    def wraps(self) -> bool:
        """Return whether padding is circular, so that opposite edges of the image touch."""
        return self.padding_mode == "circular"

    def axis_pixels(self, axis: int) -> np.ndarray:
        """Return the input pixel along an axis that each tap of each output pixel reads, -1 in padding: [out, taps]."""
        size = self.input_size[axis]
        starts = np.arange(self.output_size[axis], dtype=np.int64) * self.stride[axis] - self.padding[axis][0]
        pixels = starts[:, None] + np.arange(self.kernel_size[axis], dtype=np.int64) * self.dilation[axis]
        if self.padding_mode == "circular":
            return pixels % size
        if self.padding_mode == "reflect":
            return size - 1 - np.abs(size - 1 - np.abs(pixels))
        if self.padding_mode == "replicate":
            return pixels.clip(0, size - 1)
        return np.where((pixels >= 0) & (pixels < size), pixels, -1)

    def doubled_centers(self, axis: int) -> np.ndarray:
        """Return twice the position along an axis of the middle of each output pixel's receptive field in the input."""
        starts = np.arange(self.output_size[axis], dtype=np.int64) * self.stride[axis] - self.padding[axis][0]
        return 2 * starts + self.dilation[axis] * (self.kernel_size[axis] - 1)

    def nearest_pixels(self, axis: int) -> np.ndarray:
        """Return the input pixel along an axis nearest to the middle of each receptive field, the lower of two."""
        size, centers = self.input_size[axis], self.doubled_centers(axis) // 2
        return centers % size if self.wraps else centers.clip(0, size - 1)

    def count_blocks(self, radius: int = 0) -> int:
        """Return the number of blocks of this convolution's pattern grown by ``radius``, without building it.

        Raises:
            TypeError, ValueError: as :meth:`BlockPattern.grow`.
        """
        radius = min(check_count("radius", radius), max(self.input_size))
        live, seeds, live_seeds = 1, 1, 1
        for axis in range(len(self.input_size)):
            pixels = self.axis_pixels(axis)
            reads = pixels.max(axis=1) >= 0
            # A tap in the padding counts as a repetition of the last pixel that is read, which adds no block.
            marks = np.sort(np.where(pixels >= 0, pixels, pixels.max(axis=1, keepdims=True)), axis=1)
            live *= int(self._grown(axis, marks, radius)[reads].sum())
            grown = self._grown(axis, self.nearest_pixels(axis)[:, None], radius)
            seeds, live_seeds = seeds * int(grown.sum()), live_seeds * int(grown[reads].sum())
        # Output pixels that read nothing along one axis have no block, and grow from a seed.
        return live + (seeds - live_seeds if radius else 0)

    def tap_pairs(self) -> Tensor:
        """Return, for each two taps, how many (output pixel, input pixel) pairs both read: int64, [n_taps, n_taps].

        The diagonal counts the positions of each tap. If nothing wraps, reflects or is replicated, two taps of one
        output pixel never read the same input pixel, and all other entries are 0. If ``E`` is the matrix that puts a
        convolution's weights into blocks, this is ``E^T E``; see :class:`ConvTaps`.
        """
        axes = []
        for axis in range(len(self.input_size)):
            pixels = self.axis_pixels(axis)
            axes.append(np.stack([((pixels == tap[:, None]) & (tap >= 0)[:, None]).sum(axis=0) for tap in pixels.T]))
        return torch.from_numpy(reduce(np.kron, axes))

    def _grown(self, axis: int, marks: np.ndarray, radius: int) -> np.ndarray:
        """Return how many pixels of the axis are at most ``radius`` away from any of the ascending marks of a row."""
        size, first, last = self.input_size[axis], marks[:, 0], marks[:, -1]
        between = np.minimum(np.diff(marks, axis=1), 2 * radius + 1).sum(axis=1)
        if self.wraps:
            return between + np.minimum(first + size - last, 2 * radius + 1)
        return between + 1 + np.minimum(first, radius) + np.minimum(size - 1 - last, radius)


def values_bytes(
    blocks: int, in_channels: int, out_channels: int, groups: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes of a layer's ``values``, with ``groups x in_channels/groups x out_channels/groups`` per block.

    Args:
        blocks: ``nnz`` of a pattern, or :meth:`ConvGeometry.count_blocks` before there is one.
        in_channels, out_channels, groups: those of the convolution.
        dtype: the dtype of ``values``.

    Raises:
        TypeError: a count is not an int, or ``dtype`` not a torch.dtype.
        ValueError: a count is negative, ``groups`` is 0, or the channels cannot be divided into groups.

    Example: 64 to 64 channels, 3x3, on 32x32 pixels, in MB: local, and fully connected.

        >>> conv = ConvGeometry((32, 32), 3, padding=1)
        >>> values_bytes(conv.count_blocks(), 64, 64) / 1e6, values_bytes(conv.n_out * conv.n_in, 64, 64) / 1e6
        (144.769024, 17179.869184)
    """
    check_count("blocks", blocks)
    check_count("groups", groups, smallest=1)
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if check_count(name, channels) % groups:
            raise ValueError(f"{name}: expected a multiple of groups, {groups}, got {channels}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    return int(blocks) * (int(in_channels) // int(groups)) * int(out_channels) * dtype.itemsize


def _check_padding(value: object, extents: list[int], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after along each axis; raise if ``value`` is unusable."""
    axes = len(extents)
    if isinstance(value, str):
        if value not in ("valid", "same"):
            raise ValueError(f"padding: expected ints, pairs of them, 'valid' or 'same', got {value!r}")
        if value == "same" and any(step != 1 for step in strides):
            raise ValueError(f"padding: 'same' is for stride 1 alone, got stride {strides}")
        sums = [extent - 1 if value == "same" else 0 for extent in extents]
        return tuple((total // 2, total - total // 2) for total in sums)
    entries = (value,) * axes if is_int(value) else value
    if not isinstance(entries, Sequence):
        raise TypeError(f"padding: expected ints, pairs of them, 'valid' or 'same', got {value!r}")
    if len(entries) != axes:
        raise ValueError(f"padding: expected an int, or an int or a pair for each of {axes} axes, got {value!r}")
    pairs = []
    for entry in entries:
        before, after = check_ints("padding", entry, 2, smallest=0)
        pairs.append((before, after))
    return tuple(pairs)


def _check_padding_fits(mode: str, pads: tuple[tuple[int, int], ...], sizes: tuple[int, ...]) -> None:
    if mode not in ("reflect", "circular"):
        return
    largest = [size - (mode == "reflect") for size in sizes]
    if any(max(pad) > most for pad, most in zip(pads, largest, strict=True)):
        raise ValueError(f"padding: expected at most {tuple(largest)} for {mode} padding of {sizes}, got {pads}")
