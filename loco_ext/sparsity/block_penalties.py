"""Penalties on the blocks of locally connected layers.

A *kernel* here belongs to one unit, an output channel at one output pixel: its weights in all blocks of that pixel. Its
rings are those of :func:`loco_ext.geometry.block_rings`: first the blocks that growth has added, the latest first, then
the convolution's own. For norms and prox the blocks are reordered into the layout that the operators on convolution
weights take, kernel by kernel, with the blocks of a ring side by side. A pixel with fewer blocks than others is padded
with zeros, which change neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loco_ext import geometry
from loco_ext.geometry import BlockPattern
from loco_ext.ops.penalties import MOST_RINGS
from loco_ext.sparsity.penalties import GroupPenalty, KernelPenalty, RingPenalty
from loco_ext.sparsity.prox import check_metric, check_number
from loco_ext.sparsity.weightings import WEIGHTINGS


class UnitKernels:
    """Conversion of blocks to kernels, one for each output unit, and back.

    Args:
        rings: ring of each block, int64 ``[nnz]``.
        pattern, shape: pattern and shape of the blocks, ``[nnz, groups, C_in / groups, C_out / groups]``.

    Attributes:
        rings: ring of each tap of the kernels.
        count: number of rings.
        sizes: number of weights in each group of each kernel, float64 ``(kernels, count)``.
    """

    def __init__(self, rings: Tensor, pattern: BlockPattern, shape: torch.Size) -> None:
        pattern = pattern.to("cpu")
        self.shape, self.n_out = shape, pattern.n_out
        self.count = int(rings.max()) + 1 if len(rings) else 1
        self.cells = cells = pattern.row_indices * self.count + rings  # cell of each block in a table [pixel, ring]
        held = cells.bincount(minlength=self.n_out * self.count).view(self.n_out, self.count)
        columns = held.amax(0)  # most blocks that any pixel has in each ring
        self.rings = torch.arange(self.count, device="cpu").repeat_interleave(columns).tolist()
        self.taps = len(self.rings)
        order, starts = cells.argsort(stable=True), held.flatten().cumsum(0) - held.flatten()
        numbers = torch.arange(len(order), device="cpu")
        nth = torch.empty_like(order).index_copy_(0, order, numbers - starts[cells[order]])
        self.place = pattern.row_indices * self.taps + (columns.cumsum(0) - columns)[rings] + nth
        sizes = held.cumsum(1).double() * shape[2]
        self.sizes = sizes.repeat_interleave(shape[1] * shape[3], 0)

    def kernels(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return the kernels ``(n_out * C_out, C_in / groups, taps)``, differentiable; missing blocks are ``fill``."""
        _, groups, depth, width = self.shape
        table = values.new_full((self.n_out * self.taps, groups, depth, width), fill)
        table = table.index_copy(0, self.place.to(values.device), values)
        table = table.view(self.n_out, self.taps, groups, depth, width)
        return table.permute(0, 2, 4, 3, 1).reshape(self.n_out * groups * width, depth, self.taps)

    def ring_norms(self, values: Tensor) -> Tensor:
        """Return the Euclidean norm of each ring of each kernel: float64 ``(n_out * C_out, 1, count)``."""
        _, groups, _, width = self.shape
        squares = values.square().sum(2).double()  # a norm along this axis would take several times as long
        table = squares.new_zeros(self.n_out * self.count, groups, width)
        table.index_add_(0, self.cells.to(values.device), squares)
        return table.sqrt_().view(self.n_out, self.count, -1).transpose(1, 2).reshape(-1, 1, self.count)

    def by_ring(self, factors: Tensor) -> Tensor:
        """Expand numbers by ring, ``(n_out * C_out, 1, count)``, to numbers for each block and output channel."""
        _, groups, _, width = self.shape
        table = factors.view(self.n_out, -1, self.count).transpose(1, 2).reshape(-1, groups, 1, width)
        return table[self.cells.to(factors.device)]

    def values(self, kernels: Tensor) -> Tensor:
        """Return the blocks ``[nnz, groups, C_in / groups, C_out / groups]``; the inverse of :meth:`kernels`."""
        _, groups, depth, width = self.shape
        table = kernels.view(self.n_out, groups, width, depth, self.taps).permute(0, 4, 1, 3, 2)
        return table.reshape(-1, groups, depth, width)[self.place.to(kernels.device)]


class BlockPenalty:
    """A penalty applied to the blocks of one pattern, which its methods take.

    Args:
        penalty: the penalty, as defined for convolutions.
        pattern, shape: as for :class:`UnitKernels`.

    Raises:
        ValueError: there are more rings than the operators support.
    """

    def __init__(self, penalty: GroupPenalty, pattern: BlockPattern, shape: torch.Size) -> None:
        rings = torch.zeros(pattern.nnz, dtype=torch.int64, device="cpu")
        if isinstance(penalty, RingPenalty):
            rings = geometry.block_rings(pattern, penalty.kind, penalty.first)
        self.units = UnitKernels(rings, pattern, shape)
        if self.units.count > MOST_RINGS:
            raise ValueError(f"rings: expected 1 to {MOST_RINGS} of them, got {self.units.count}")
        self.penalty = _of_units(penalty, self.units, self.units.rings)
        self.of_norms = _of_units(penalty, self.units, list(range(self.units.count)))

    def value(self, values: Tensor) -> Tensor:
        if values.numel() == 0:
            return values.double().sum()
        return self.penalty._value(self.units.kernels(values))

    def prox(self, values: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        if metric is not None:
            check_metric(metric, values)
        return self.shrink(values.detach(), check_number("step", step), metric)

    def threshold(self, values: Tensor, tau: float) -> Tensor:
        if values.numel() == 0:
            return values.detach().clone()
        return self.units.values(self.penalty._threshold(self.units.kernels(values.detach()), tau))

    def shrink(self, values: Tensor, step: float, metric: Tensor | None) -> Tensor:
        """Return the prox, without checking the arguments."""
        if values.numel() == 0:
            return values
        if metric is None and self.penalty.norm == "l2":
            # All weights of a ring shrink by one factor, which depends only on norms.
            dtype = torch.promote_types(values.dtype, torch.float32)
            norms = self.units.ring_norms(values.to(dtype))
            if norms.isfinite().all():
                # Squares of weights below this underflow to zero. Any threshold above it removes them; a threshold of 0
                # does not.
                least = math.sqrt(torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
                norms.masked_fill_(norms == 0, least)
                factors = self.of_norms._shrink(norms, step, None) / norms
                return values * self.units.by_ring(factors.to(values.dtype))
        by_unit = None if metric is None else self.units.kernels(metric, 1.0)
        return self.units.values(self.penalty._shrink(self.units.kernels(values), step, by_unit))


class _OfUnits:
    """Mixin in front of a penalty's class: rings and groups are those of units, whose kernels its methods take."""

    units: UnitKernels
    by_tap: list[int]
    weighting: str

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        return self.by_tap, self.units.count

    def group_weights(self, weight: Tensor) -> Tensor:
        return self.units.sizes.clamp(min=1) ** WEIGHTINGS[self.weighting]  # groups without a weight have norm 0


class _UnitRings(_OfUnits, RingPenalty):
    pass


class _WholeUnits(_OfUnits, KernelPenalty):
    pass


def _of_units(penalty: GroupPenalty, units: UnitKernels, rings: list[int]) -> GroupPenalty:
    """Return the penalty for the kernels of ``units``; ``rings`` is the ring of each tap that its methods are given."""
    chosen = object.__new__(_UnitRings) if isinstance(penalty, RingPenalty) else object.__new__(_WholeUnits)
    vars(chosen).update(vars(penalty), units=units, by_tap=rings)
    return chosen
