"""The pairs of an output and an input pixel for which a layer between convolution and full connection has blocks.

Patterns are built on the host; they consist of index tensors, without values.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loco_ext.argument_checks import check_count
from loco_ext.geometry import pattern_indices
from loco_ext.geometry.conv import LARGEST_COUNT, ConvGeometry, Ints, Padding
from loco_ext.geometry.pattern_checks import check_indices, check_rows


class Transposed(NamedTuple):
    """A pattern ordered by input pixel, as :meth:`BlockPattern.transpose` returns it.

    Attributes:
        crow_indices: int64 ``[n_in + 1]``: where each input pixel's entries begin.
        rows: int64 ``[nnz]``: the output pixel of each entry, ascending for each input pixel.
        blocks: int64 ``[nnz]``: the index in ``values`` of each entry's block.

    Example:
        >>> pattern = BlockPattern.from_conv(3, kernel_size=2)
        >>> [indices.tolist() for indices in pattern.transpose()]
        [[0, 1, 3, 4], [0, 0, 1, 1], [0, 1, 2, 3]]
    """

    crow_indices: Tensor
    rows: Tensor
    blocks: Tensor


class ConvTaps(NamedTuple):
    """The taps of a convolution in a pattern: an entry for each tap that reads a pixel, by output pixel, then tap.

    Taps in zero padding and taps whose block was pruned have no entry. If the image wraps, reflects or is replicated,
    several taps of an output pixel can read one input pixel; their weights then *add up* in its block.

    Let ``E`` be the matrix of zeros and ones with ``E[block, tap] = 1`` for every entry. A convolution's weights ``w``
    by tap become blocks ``E w``, exactly. The way back is the orthogonal projection onto all ``E w``: the least squares
    solution ``w = (E^T E)^-1 E^T values``, where :meth:`ConvGeometry.tap_pairs` counts ``E^T E`` on the pattern before
    any pruning, because a pruned block counts as zeros. If no taps share a block, ``E^T E`` is diagonal, and ``w`` is
    the mean of each tap's blocks over positions. ``E^T E`` is singular if different weights give the same layer: a tap
    is always in the padding, or taps always add up on an image smaller than the kernel. The pseudo-inverse then gives
    the smallest of these weights.

    Attributes:
        block: int64: the index in ``values``.
        tap: int64: the index in the flattened kernel.
        output: int64: the output pixel.

    Example: one channel; on a ring of 5 pixels, taps 0 and 5 of a kernel of 6 read the same.

        >>> pattern = BlockPattern.from_conv(5, kernel_size=6, padding=3, padding_mode="circular")
        >>> block, tap, output = pattern.taps
        >>> weight = torch.arange(6.0, dtype=torch.float64)
        >>> values = torch.zeros(pattern.nnz, dtype=torch.float64).index_add(0, block, weight[tap])
        >>> values[:5].tolist()  # the output pixel 0 reads pixels 2, 3, 4, 0, 1 and 2
        [3.0, 4.0, 5.0, 1.0, 2.0]
        >>> inverse = torch.linalg.pinv(pattern.conv.tap_pairs().double(), hermitian=True)
        >>> back = inverse @ torch.zeros_like(weight).index_add(0, tap, values[block])
        >>> [round(w, 9) for w in back.tolist()]  # 0 and 5 cannot be told apart: the smallest weights of that sum
        [2.5, 1.0, 2.0, 3.0, 4.0, 2.5]
    """

    block: Tensor
    tap: Tensor
    output: Tensor


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """The live (output pixel, input pixel) pairs of a layer, with one dense block of values for each (eFCN, section 3).

    Rows are output pixels and columns input pixels, both flattened in row-major order; the blocks are numbered row by
    row. Patterns are immutable: every operation returns a new one, and the mapping of blocks from one to the other, by
    which values and optimizer states can follow. Patterns are equal only if they are the same object.

    Args:
        crow_indices: integers ``[n_out + 1]``: where each output pixel's blocks begin, and their total.
        col_indices: integers ``[nnz]``: the input pixel of each block, strictly ascending in each row.
        n_in: the number of input pixels.
        conv: the convolution that the pattern extends. Patterns from :meth:`from_conv`, and all made from these,
            have one; growth, taps and distances need it.

    Attributes:
        crow_indices: int64 copy on the CPU, or on the device given to :meth:`to`.
        col_indices: likewise.
        n_in: the number of input pixels.
        conv: the convolution, or None.
        n_out: the number of output pixels.
        nnz: the number of blocks.

    Raises:
        TypeError: indices are not tensors of integers, or ``n_in`` is not an int.
        ValueError: indices are not 1-d, do not begin with 0, descend or do not end at ``nnz``; an input pixel is out of
            range; a row does not ascend strictly; sizes differ from those of ``conv``.

    Example:
        >>> import torch
        >>> pattern = BlockPattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), n_in=3)
        >>> pattern
        BlockPattern(n_out=2, n_in=3, nnz=3)
        >>> BlockPattern.from_conv((32, 32), kernel_size=3, padding=1)
        BlockPattern(n_out=1024, n_in=1024, nnz=8836)
    """

    crow_indices: Tensor
    col_indices: Tensor
    n_in: int
    conv: ConvGeometry | None = None

    @torch.inference_mode(False)  # here and below: tensors of inference mode, once kept, would end later trainings
    def __post_init__(self) -> None:
        crow, col = check_indices(self.crow_indices, self.col_indices, check_count("n_in", self.n_in))
        if self.conv is not None and (self.conv.n_in, self.conv.n_out) != (self.n_in, len(crow) - 1):
            raise ValueError(
                f"conv: expected {len(crow) - 1} output and {self.n_in} input pixels, as the pattern has, got "
                f"{self.conv.n_out} and {self.conv.n_in}"
            )
        vars(self).update(crow_indices=crow, col_indices=col, n_in=int(self.n_in))

    @classmethod
    def from_conv(
        cls,
        input_size: Ints,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        padding_mode: str = "zeros",
    ) -> "BlockPattern":
        """Return the pattern of the pairs that a convolution computes with; zero padding has no pairs.

        Args, Raises:
            As :class:`ConvGeometry`.

        Example:
            >>> pattern = BlockPattern.from_conv(4, kernel_size=3, padding=1)
            >>> pattern.crow_indices.tolist(), pattern.col_indices.tolist()
            ([0, 2, 5, 8, 10], [0, 1, 0, 1, 2, 1, 2, 3, 2, 3])
        """
        return cls.of_geometry(ConvGeometry(input_size, kernel_size, stride, padding, dilation, padding_mode))

    @classmethod
    def of_geometry(cls, conv: ConvGeometry) -> "BlockPattern":
        """Return the pattern of :meth:`from_conv` for arguments that have been checked."""
        return cls._of(pattern_indices.conv_pattern(*_three_axes(conv)), conv.n_in, conv)

    @classmethod
    def full(cls, n_out: int, n_in: int, conv: ConvGeometry | None = None) -> "BlockPattern":
        """Return the pattern of all pairs.

        Raises:
            TypeError: a count is not an int.
            ValueError: it is negative, or there are more pairs than int64 can count.

        Example:
            >>> BlockPattern.full(2, 3).col_indices.tolist()
            [0, 1, 2, 0, 1, 2]
        """
        check_count("n_out", n_out)
        if n_out * check_count("n_in", n_in) > LARGEST_COUNT:
            raise ValueError(f"n_out: expected pairs that int64 can count, got {n_out} times {n_in}")
        crow = torch.arange(n_out + 1, dtype=torch.int64, device="cpu") * n_in
        return cls(crow, torch.arange(n_in, dtype=torch.int64, device="cpu").repeat(n_out), n_in, conv)

    @property
    def n_out(self) -> int:
        return self.crow_indices.shape[0] - 1

    @property
    def nnz(self) -> int:
        return self.col_indices.shape[0]

    @cached_property
    @torch.inference_mode(False)
    def row_indices(self) -> Tensor:
        """Output pixel of each block, int64 ``[nnz]``, on the pattern's device."""
        counts = self.crow_indices.diff()
        rows = torch.arange(self.n_out, dtype=torch.int64, device=counts.device)
        return rows.repeat_interleave(counts, output_size=self.nnz)

    def transpose(self) -> Transposed:
        """Return the pattern ordered by input pixel, as the gradient of the input needs it.

        Both this and :attr:`taps` are computed at first use, which must come before torch.compile traces a call.
        """
        return self._transposed

    def to(self, device: torch.device | str | int) -> "BlockPattern":
        """Return the pattern with its index tensors on a device; each device gets one copy, which is cached.

        Example:
            >>> pattern = BlockPattern.full(2, 3)
            >>> pattern.to("cpu") is pattern
            True
        """
        target = torch.empty(0, device=device).device
        if target == self.crow_indices.device:
            return self
        home = self._home
        if target not in home._copies and target.type != "cpu":
            copy = object.__new__(BlockPattern)
            with torch.inference_mode(False):
                indices = {"crow_indices": self.crow_indices.to(target), "col_indices": self.col_indices.to(target)}
            vars(copy).update(indices, n_in=self.n_in, conv=self.conv, _home=home)
            home._copies[target] = copy
        return home._copies.get(target, home)

    def union(self, other: "BlockPattern") -> "tuple[BlockPattern, Tensor, Tensor]":
        """Return the pattern of the blocks that either pattern has.

        Returns:
            ``(pattern, places, other_places)``: the union, with this pattern's ``conv``, and for each block of this
            pattern and of the other its index in the union, int64: ``new_values[places] = values``.

        Raises:
            TypeError: ``other`` is not a BlockPattern.
            ValueError: it has other numbers of pixels.

        Example:
            >>> diagonal = BlockPattern(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), n_in=2)
            >>> column = BlockPattern(torch.tensor([0, 1, 2]), torch.tensor([0, 0]), n_in=2)
            >>> both, places, column_places = diagonal.union(column)
            >>> both.col_indices.tolist(), places.tolist(), column_places.tolist()
            ([0, 0, 1], [0, 2], [0, 1])
        """
        if not isinstance(other, BlockPattern):
            raise TypeError(f"other: expected a BlockPattern, got {type(other).__name__}")
        if (other.n_out, other.n_in) != (self.n_out, self.n_in):
            raise ValueError(f"other: expected n_out={self.n_out} and n_in={self.n_in}, as this pattern, got {other}")
        united = self._of(pattern_indices.unite(*self._arrays, *other._arrays), self.n_in, self.conv)
        return united, self._places_in(united), other._places_in(united)

    def grow(self, radius: int) -> "tuple[BlockPattern, Tensor]":
        """Return a less local pattern: each output pixel gains the neighbours of its input pixels.

        Neighbours are at most ``radius`` away on every axis. Around a convolution without dilation the result is the
        pattern of a kernel with ``radius`` more taps, and as much more padding, on every side. ``grow(a)`` and then
        ``grow(b)`` is ``grow(a + b)``; a ``radius`` as large as the image gives the full pattern. Opposite ends of the
        image touch if ``padding_mode`` is circular. An output pixel without blocks, such as one that reads only
        padding, grows from the input pixel nearest to the middle of its receptive field.

        Args:
            radius: number of input pixels, at least 0.

        Returns:
            ``(pattern, places)``: the grown pattern, and for each block of this one its index in it, int64. With
            ``new_values[places] = values`` and zeros elsewhere it is the same layer.

        Raises:
            TypeError: ``radius`` is not an int.
            ValueError: it is negative, or the pattern has no ``conv``.

        Example:
            >>> pattern = BlockPattern.from_conv((32, 32), kernel_size=3, padding=1)
            >>> grown, places = pattern.grow(1)
            >>> grown, places[:4].tolist()
            (BlockPattern(n_out=1024, n_in=1024, nnz=23716), [0, 1, 3, 4])
        """
        conv, radius = self._need_conv("grow"), check_count("radius", radius)
        if radius == 0:
            return self._home, torch.arange(self.nnz, dtype=torch.int64, device="cpu")
        seeds = np.zeros(1, np.int64)
        for axis, size in enumerate(conv.input_size):
            seeds = (seeds[:, None] * size + conv.nearest_pixels(axis)).reshape(-1)
        _, image = _three_axes(conv)
        grown = pattern_indices.grow(*self._arrays, image, min(radius, max(image)), conv.wraps, seeds)
        pattern = self._of(grown, self.n_in, conv)
        return pattern, self._places_in(pattern)

    def prune(self, keep: Tensor) -> "tuple[BlockPattern, Tensor]":
        """Return the pattern without some of its blocks.

        Args:
            keep: bool ``[nnz]``: which blocks stay.

        Returns:
            ``(pattern, kept)``: the remaining pattern, and for each of its blocks the index in this one, int64:
            ``new_values = values[kept]``.

        Raises:
            TypeError: ``keep`` is not a bool tensor.
            ValueError: its shape is not ``[nnz]``.

        Example:
            >>> pruned, kept = BlockPattern.full(2, 2).prune(torch.tensor([True, False, False, True]))
            >>> pruned.crow_indices.tolist(), pruned.col_indices.tolist(), kept.tolist()
            ([0, 1, 2], [0, 1], [0, 3])
        """
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise TypeError(f"keep: expected a bool tensor, got {getattr(keep, 'dtype', type(keep).__name__)}")
        if keep.shape != (self.nnz,):
            raise ValueError(f"keep: expected shape ({self.nnz},), one for each block, got {tuple(keep.shape)}")
        crow, col = self._arrays
        kept = keep.cpu().numpy().nonzero()[0]
        pruned = self._of((np.searchsorted(kept, crow), col[kept]), self.n_in, self.conv)
        return pruned, torch.from_numpy(kept)

    @cached_property
    @torch.inference_mode(False)
    def taps(self) -> ConvTaps:
        """The taps of ``conv`` in this pattern, which may have been grown or pruned since.

        Raises:
            ValueError: the pattern has no ``conv``.

        Example:
            >>> pattern = BlockPattern.from_conv(3, kernel_size=3, padding=1)
            >>> [indices.tolist() for indices in pattern.taps]
            [[0, 1, 2, 3, 4, 5, 6], [1, 2, 0, 1, 2, 0, 1], [0, 0, 1, 1, 1, 2, 2]]
        """
        tables = _three_axes(self._need_conv("taps"))
        return ConvTaps(*map(torch.from_numpy, pattern_indices.conv_taps(*tables, *self._arrays)))

    def local_mask(self) -> Tensor:
        """Return whether each block is in the receptive field of ``conv``: bool ``[nnz]``.

        Raises:
            ValueError: the pattern has no ``conv``.

        Example:
            >>> grown, _ = BlockPattern.from_conv(4, kernel_size=2, stride=2).grow(1)
            >>> grown.col_indices.tolist(), grown.local_mask().int().tolist()
            ([0, 1, 2, 1, 2, 3], [1, 1, 0, 0, 1, 1])
        """
        return torch.zeros(self.nnz, dtype=torch.bool, device="cpu").index_fill_(0, self.taps.block, True)

    def __repr__(self) -> str:
        return f"BlockPattern(n_out={self.n_out}, n_in={self.n_in}, nnz={self.nnz})"

    def __deepcopy__(self, memo: object) -> "BlockPattern":
        return self

    def __reduce__(self) -> tuple:
        home = self._home
        return BlockPattern, (home.crow_indices, home.col_indices, home.n_in, home.conv)

    @classmethod
    @torch.inference_mode(False)
    def _of(cls, indices: tuple[np.ndarray, np.ndarray], n_in: int, conv: ConvGeometry | None) -> "BlockPattern":
        """Return a pattern of indices that need no check."""
        pattern = object.__new__(cls)
        crow, col = map(torch.from_numpy, indices)
        vars(pattern).update(crow_indices=crow, col_indices=col, n_in=n_in, conv=conv)
        return pattern

    @cached_property
    def _home(self) -> "BlockPattern":
        """The pattern on the CPU of which this one is a copy, or itself."""
        return self

    @cached_property
    def _copies(self) -> "dict[torch.device, BlockPattern]":
        return {}

    @cached_property
    @torch.inference_mode(False)
    def _transposed(self) -> Transposed:
        if self._home is not self:
            return Transposed(*(indices.to(self.crow_indices.device) for indices in self._home._transposed))
        return Transposed(*map(torch.from_numpy, pattern_indices.transpose(*self._arrays, self.n_in)))

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        # Checked again, as anyone who has the tensors can write to them.
        crow, col = self._home.crow_indices, self._home.col_indices
        check_rows(crow, col, self.n_in)
        return crow.numpy(), col.numpy()

    def _places_in(self, whole: "BlockPattern") -> Tensor:
        return torch.from_numpy(pattern_indices.locate(*self._arrays, *whole._arrays))

    def _need_conv(self, name: str) -> ConvGeometry:
        if self.conv is None:
            raise ValueError(f"{name}: expected a pattern with a convolution, as from_conv makes it, got {self}")
        return self.conv


def _three_axes(conv: ConvGeometry) -> tuple[tuple, tuple]:
    """Return the pixels that taps read along each axis, and the image size, padded to three axes by leading 1s."""
    missing = 3 - len(conv.input_size)
    tables = [np.zeros((1, 1), np.int64)] * missing + [conv.axis_pixels(axis) for axis in range(len(conv.input_size))]
    return tuple(map(np.ascontiguousarray, tables)), (1,) * missing + conv.input_size
