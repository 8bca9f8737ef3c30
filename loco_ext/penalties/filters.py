"""The filters of a weight, and the nested groups of each filter's weights.

Groups are nested: group ``G_(n+1)`` has the rings 0 to n, and the last is the whole filter. The weight of a
convolution has its filters in the layout that the operators of :mod:`loco_ext.ops` take. That of a locally connected
layer does not: there, a filter belongs to one unit, an output channel at one output pixel, and consists of its weights
in all blocks of that pixel. Its rings are those of :func:`loco_ext.geometry.block_rings`: first the blocks that growth
has added, the latest first, then the convolution's own.
"""

import itertools
import math
from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from loco_ext import geometry
from loco_ext.geometry import BlockPattern
from loco_ext.geometry.attached_pattern import pattern_of
from loco_ext.ops import transforms
from loco_ext.ops.device_copies import DeviceCopies
from loco_ext.ops.penalties import MOST_RINGS
from loco_ext.ops.ring_prox import group_norms
from loco_ext.penalties.penalty_checks import check_convolution

WEIGHTINGS = {"plain": 0.0, "normalized": -0.5, "scaled": 0.5}  # exponents of a group's number of weights


def filters_of(weight: Tensor, kind: str | None, first: str = "auto") -> "Filters":
    """Return the filters of a convolution's weight or of a locally connected layer's blocks.

    Args:
        weight: a convolution's weight, or blocks that their layer has marked with their pattern.
        kind, first: as for :func:`loco_ext.geometry.ring_index`; None for the whole filter as its only ring.

    Raises:
        TypeError, ValueError: the weight is neither, or its filters have no such rings.
    """
    if (pattern := pattern_of(weight)) is None:
        return conv_filters(weight, kind, first)
    with transforms.suspended():  # transforms must not see tensors that depend only on the pattern
        return BlockFilters(weight.shape, pattern, kind, first)


def conv_filters(weight: Tensor, kind: str | None, first: str) -> "ConvFilters":
    """Return the filters of a convolution's weight, see :func:`filters_of`; weights of one shape share the object."""
    check_convolution("weight", weight)
    make = ConvFilters if torch.compiler.is_compiling() else _cached  # torch.compile warns about lru_cache
    return make(weight.shape[1:], kind, first)


class Filters(ABC):
    """The filters of a weight, for operators that take them as ``(filters, channels, *taps)``.

    Attributes:
        rings: ring of each tap, in the order of a contiguous filter.
        count: number of rings, and of groups.
    """

    rings: list[int]
    count: int

    @abstractmethod
    def factors(self, weighting: str, scale: float = 1.0) -> Tensor:
        """Return ``scale * w_n`` of each group, float64 on the CPU: ``(groups,)`` or ``(filters, groups)``.

        ``w_n`` is the number of weights in the group to the power in :data:`WEIGHTINGS`.
        """

    def factors_on(self, device: torch.device, weighting: str) -> Tensor:
        """Return :meth:`factors` on a device; those of convolutions without waiting for it."""
        return self.factors(weighting).to(device)

    @abstractmethod
    def split(self, weight: Tensor, fill: float = 0.0) -> Tensor:
        """Return the filters, differentiable; where some have fewer weights than others, padded with ``fill``."""

    @abstractmethod
    def join(self, filters: Tensor) -> Tensor:
        """Return the weight with these filters; the inverse of :meth:`split`."""

    def norms(self, weight: Tensor, linf: bool) -> Tensor:
        """Return ``||k(G_n)||`` of each group of each filter: float64, differentiable, ``(filters, groups)``."""
        return group_norms(self.split(weight), self.rings, self.count, linf)


class ConvFilters(Filters):
    """The filters of a convolution's weight, its slices along the first axis, of shape ``(channels, *kernel_size)``."""

    def __init__(self, shape: torch.Size, kind: str | None, first: str) -> None:
        channels, kernel_size = shape[0], tuple(shape[1:])
        self.rings = [0] * math.prod(kernel_size) if kind is None else geometry.ring_list(kernel_size, kind, first)
        self.count = max(self.rings) + 1
        taps = itertools.accumulate(map(self.rings.count, range(self.count)))  # number of taps of each group
        self._roots = [math.sqrt(channels * number) for number in taps]
        self._copies: dict[str, DeviceCopies] = {}  # of the factors, by weighting

    def factors(self, weighting: str, scale: float = 1.0) -> Tensor:
        exponent = 2 * WEIGHTINGS[weighting]
        return torch.tensor([scale * root**exponent for root in self._roots], dtype=torch.float64, device="cpu")

    def factors_on(self, device: torch.device, weighting: str) -> Tensor:
        # A tensor that is made under a compiler or a dispatch mode belongs to it; later calls must not get it.
        if device.type != "cuda" or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return self.factors(weighting).to(device)
        with torch.inference_mode(False):
            if weighting not in self._copies:
                self._copies[weighting] = DeviceCopies(self.factors(weighting))
            return self._copies[weighting].on(device)

    def split(self, weight: Tensor, fill: float = 0.0) -> Tensor:
        return weight

    def join(self, filters: Tensor) -> Tensor:
        return filters


_cached = lru_cache(maxsize=256)(ConvFilters)


class BlockFilters(Filters):
    """The filters of a locally connected layer's blocks, one for each output unit.

    :meth:`split` reorders blocks to ``(n_out * C_out, C_in / groups, taps)`` with the blocks of a ring side by side. A
    pixel with fewer blocks than others is padded with zeros, which change neither norms nor prox.

    Args:
        shape: ``[nnz, groups, C_in / groups, C_out / groups]`` of the blocks.
        pattern: their pattern.
        kind, first: as for :func:`filters_of`.

    Raises:
        ValueError: there are more rings than the operators support.
    """

    def __init__(self, shape: torch.Size, pattern: BlockPattern, kind: str | None, first: str) -> None:
        rings = torch.zeros(pattern.nnz, dtype=torch.int64, device="cpu")  # the ring of each block
        if kind is not None:
            rings = geometry.block_rings(pattern, kind, first)
        self.count = int(rings.max()) + 1 if len(rings) else 1
        if self.count > MOST_RINGS:
            raise ValueError(f"rings: expected 1 to {MOST_RINGS} of them, got {self.count}")
        rows = pattern.to("cpu").row_indices
        self.shape, self.n_out = shape, pattern.n_out
        self._cells = cells = rows * self.count + rings  # cell of each block in a table [pixel, ring]
        blocks = cells.bincount(minlength=self.n_out * self.count).view(self.n_out, self.count)
        columns = blocks.amax(0)  # most blocks that any pixel has in each ring
        self.rings = torch.arange(self.count, device="cpu").repeat_interleave(columns).tolist()
        order, starts = cells.argsort(stable=True), blocks.flatten().cumsum(0) - blocks.flatten()
        numbers = torch.arange(len(order), device="cpu")
        nth = torch.empty_like(order).index_copy_(0, order, numbers - starts[cells[order]])
        self._place = rows * len(self.rings) + (columns.cumsum(0) - columns)[rings] + nth
        sizes = blocks.cumsum(1).double() * shape[2]
        self._sizes = sizes.repeat_interleave(shape[1] * shape[3], 0)  # [filters, groups]

    def factors(self, weighting: str, scale: float = 1.0) -> Tensor:
        return scale * self._sizes.clamp(min=1) ** WEIGHTINGS[weighting]  # groups without a weight have norm 0

    def split(self, values: Tensor, fill: float = 0.0) -> Tensor:
        _, groups, depth, width = self.shape
        table = values.new_full((self.n_out * len(self.rings), groups, depth, width), fill)
        table = table.index_copy(0, self._place.to(values.device), values)
        table = table.view(self.n_out, len(self.rings), groups, depth, width)
        return table.permute(0, 2, 4, 3, 1).reshape(self.n_out * groups * width, depth, len(self.rings))

    def join(self, filters: Tensor) -> Tensor:
        _, groups, depth, width = self.shape
        table = filters.view(self.n_out, groups, width, depth, len(self.rings)).permute(0, 4, 1, 3, 2)
        return table.reshape(-1, groups, depth, width)[self._place.to(filters.device)]

    def ring_norms(self, values: Tensor) -> Tensor:
        """Return the Euclidean norm of each ring (not group) of each filter: float64 ``(n_out * C_out, 1, rings)``."""
        _, groups, _, width = self.shape
        squares = values.square().sum(2).double()  # a norm along this axis would take several times as long
        table = squares.new_zeros(self.n_out * self.count, groups, width)
        table.index_add_(0, self._cells.to(values.device), squares)
        return table.sqrt_().view(self.n_out, self.count, -1).transpose(1, 2).reshape(-1, 1, self.count)

    def by_ring(self, factors: Tensor) -> Tensor:
        """Expand numbers by ring, ``(n_out * C_out, 1, rings)``, to numbers for each block and output channel."""
        _, groups, _, width = self.shape
        table = factors.view(self.n_out, -1, self.count).transpose(1, 2).reshape(-1, groups, 1, width)
        return table[self._cells.to(factors.device)]
