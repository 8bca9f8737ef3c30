"""Penalties that choose kernel sizes and layer widths, as loss terms and through their exact prox.

They are those of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": section 3.3,
eqs. 12-13 (kernels) and 21-22 (rings); its variants, eqs. 25 and 29 (weightings), 32 and 33 (squares) and the largest
weight instead of the Euclidean norm; and the worry of its eqs. 30-31, batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext import ops
from loco_ext.geometry.marks import pattern_of
from loco_ext.ops.penalties import OfStep, Prepare
from loco_ext.ops.ring_prox import group_norms
from loco_ext.sparsity.prox import check_convolution, check_metric, check_norm, check_number, rings_of
from loco_ext.sparsity.weightings import WEIGHTINGS, as_thresholds, group_weights

if TYPE_CHECKING:
    from loco_ext.sparsity.block_penalties import BlockPenalty


class _Penalty:
    """What both penalties share: checks of their settings, and the norms of nested groups."""

    strength: float
    weighting: str
    norm: str
    power: int
    _coupled: ClassVar[bool]  # what power 2 squares is the sum over a layer's kernels

    def __post_init__(self) -> None:
        check_number("strength", self.strength)
        if self.weighting not in tuple(WEIGHTINGS):
            raise ValueError(f"weighting: expected 'plain', 'normalized' or 'scaled', got {self.weighting!r}")
        check_norm(self.norm)
        if isinstance(self.power, bool) or self.power not in (1, 2):
            raise ValueError(f"power: expected 1 or 2, got {self.power!r}")

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        """The ring of each tap, in the order of a contiguous kernel, and their number."""
        raise NotImplementedError

    def group_weights(self, weight: Tensor) -> Tensor:
        """``w_n`` of each group, float64: 1, or the group's number of weights to the power -1/2 or 1/2."""
        weights = group_weights(*self.rings(weight), weight.shape[1], self.weighting)
        return torch.tensor(weights, dtype=torch.float64, device="cpu")

    def _group_norms(self, weight: Tensor) -> Tensor:
        """``||k(G_n)||`` of each group of each kernel: float64, differentiable, ``(C_out, groups)``."""
        return group_norms(weight, *self.rings(weight), self.norm == "linf")

    def _kernel_values(self, weight: Tensor) -> Tensor:
        """``sum_n w_n ||k(G_n)||`` of each kernel, without the strength: float64, differentiable, ``(C_out,)``."""
        return (self._group_norms(weight) * self.group_weights(weight).to(weight.device)).sum(1)

    def for_step(self, weight: Tensor) -> OfStep:
        """What the operators of the optimizer step take for this weight.

        Raises:
            TypeError, ValueError: as for :meth:`prox`.
        """
        blocks = self._for_blocks(weight)
        return self._for_kernels(weight) if blocks is None else ops.LayerPenalty(blocks.shrink)

    def _for_kernels(self, weight: Tensor, scales: Tensor | None = None, prepare: Prepare = bool) -> OfStep:
        """The same for a convolution's weight, with factors of the kernels' norms that ``prepare`` refreshes."""
        (rings, _), weights, linf = self.rings(weight), self.group_weights(weight), self.norm == "linf"
        if self.power == 1:
            return ops.StepPenalty(rings, self.strength * weights, None, linf, scales, prepare)
        squared = math.sqrt(self.strength) * weights
        return ops.StepPenalty(rings, 0 * weights, squared, linf, scales, prepare, self._coupled)

    def value(self, weight: Tensor) -> Tensor:
        """The penalty of one layer's weight: float64 scalar, differentiable; where a norm is 0, its gradient is 0."""
        blocks = self._for_blocks(weight)
        return self._value(weight, None) if blocks is None else blocks.value(weight)

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d = metric, or ones.

        Args:
            weight: of a convolution; left alone.
            step: finite and at least 0: how far a gradient step would go.
        """
        blocks = self._for_blocks(weight)
        return self._checked_prox(weight, step, metric, None) if blocks is None else blocks.prox(weight, step, metric)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """The weight with every group of norm at most ``tau`` set to zero, as the draft's eqs. 15 and 23 end a training
        with :meth:`value` as a loss term, which leaves groups small but not zero. (What :meth:`prox` has trained needs
        no such choice.) As groups are nested, each kernel loses the largest such group; its other weights stay.

        Args:
            weight: of a convolution; left alone.
            tau: finite and at least 0, compared with the groups' norms as they are, without weighting and strength.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.

        Example:
            >>> import torch
            >>> from loco_ext import sparsity
            >>> conv = torch.nn.Conv2d(8, 16, 5)
            >>> with torch.no_grad():
            ...     weight = conv.weight.copy_(sparsity.RingPenalty(1e-3).threshold(conv.weight, tau=1e-3))
        """
        blocks = self._for_blocks(weight)
        return self._threshold(weight, tau, None) if blocks is None else blocks.threshold(weight, tau)

    def _for_blocks(self, weight: Tensor) -> BlockPenalty | None:
        """What stands for this penalty if these are the blocks of a locally connected layer."""
        if (pattern := pattern_of(weight)) is None:
            return None
        from loco_ext.sparsity.block_penalties import BlockPenalty

        return BlockPenalty(self, pattern, weight.shape)  # type: ignore[arg-type]

    # What follows takes factors of the kernels' norms, float64 (C_out,) on the weight's device; None: ones.

    def _value(self, weight: Tensor, scales: Tensor | None) -> Tensor:
        values = self._kernel_values(weight)
        return self.strength * self._total(values if scales is None else scales * values)

    def _total(self, values: Tensor) -> Tensor:
        """The penalty of a layer from its kernels'."""
        raise NotImplementedError

    def _threshold(self, weight: Tensor, tau: float, scales: Tensor | None) -> Tensor:
        limit = check_number("tau", tau)
        norms = self._group_norms(weight.detach())
        small = (norms if scales is None else scales[:, None] * norms) <= limit  # [C_out, groups]
        dead = small.flip(1).cumsum(1).flip(1) > 0  # ring r is in all groups from r on
        by_tap = dead[:, self.rings(weight)[0]].view(len(weight), 1, *weight.shape[2:])
        return weight.detach().masked_fill(by_tap, 0.0)

    def _checked_prox(self, weight: Tensor, step: float, metric: Tensor | None, scales: Tensor | None) -> Tensor:
        size = check_number("step", step)
        self.rings(weight)
        if metric is not None:
            check_metric(metric, weight)
        return self._shrink(weight, size, metric, scales)

    def _shrink(self, weight: Tensor, step: float, metric: Tensor | None, scales: Tensor | None) -> Tensor:
        """The prox, without checks."""
        size = step * self.strength
        if self.power == 1 and scales is None:
            return self._prox(weight, self._thresholds(weight, size), None, metric)
        weights = self._rows(weight, scales)
        if self.power == 1:
            return self._prox(weight, size * weights, None, metric)
        return self._prox(weight, torch.zeros_like(weights), math.sqrt(size) * weights, metric)

    def _thresholds(self, weight: Tensor, size: float) -> Tensor:
        if type(self).group_weights is not _Penalty.group_weights:
            return size * self.group_weights(weight)
        numbers = group_weights(*self.rings(weight), weight.shape[1], self.weighting)
        return as_thresholds([size * number for number in numbers], weight)

    def _rows(self, weight: Tensor, scales: Tensor | None) -> Tensor:
        """What each group's norm is multiplied by, on the CPU: ``(groups,)``, with factors ``(C_out, groups)``."""
        weights = self.group_weights(weight)
        return weights if scales is None else scales.cpu()[:, None] * weights

    def _prox(self, weight: Tensor, thresholds: Tensor, squared: Tensor | None, metric: Tensor | None) -> Tensor:
        options = {"linf": self.norm == "linf", "coupled": self._coupled}
        return ops.ring_prox(weight, self.rings(weight)[0], thresholds, squared, metric, **options)


@dataclass(frozen=True)
class RingPenalty(_Penalty):
    """``strength * sum_n w_n ||k(G_n)||``, summed over kernels: rings vanish one by one, from the outside in.

    Of the ``values`` of a locally connected layer, the parameter itself, a kernel is what one output unit has, and its
    rings are those of :func:`loco_ext.geometry.block_rings`, at most 64.

    Args:
        strength: the draft's alpha, finite and at least 0.
        kind: ``"half"`` rings leave every size, ``"full"`` rings odd sizes and 0 (odd kernels only).
        weighting: ``w_n``: ``"plain"`` is 1, ``"normalized"`` the group's number of weights to the power -1/2 (eq. 25,
            the root mean square), ``"scaled"`` to the power 1/2 (eq. 29).
        norm: of a group: ``"l2"``, or ``"linf"``, its largest weight.
        power: 2 squares each kernel's sum (eq. 33). Its prox takes outer rings to exactly zero, never a whole kernel.
        first: the end that the outermost half ring takes, as for :func:`loco_ext.geometry.ring_index`.

    Raises:
        TypeError, ValueError: naming the argument; in use also for what is no convolution's weight, for kernels without
            a weight, and for even sizes with ``kind="full"``.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> conv = torch.nn.Conv2d(8, 16, 5)
        >>> penalty = sparsity.RingPenalty(1e-3)
        >>> loss = conv(torch.randn(1, 8, 9, 9)).square().mean() + penalty.value(conv.weight)
        >>> shrunk = penalty.prox(conv.weight, step=0.1)
    """

    strength: float
    kind: str = "half"
    weighting: str = "plain"
    norm: str = "l2"
    power: int = 1
    first: str = field(default="auto", kw_only=True)
    _coupled = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("half", "full"):
            raise ValueError(f"kind: expected 'half' or 'full', got {self.kind!r}")
        if self.first not in ("auto", "top_left", "bottom_right"):
            raise ValueError(f"first: expected 'auto', 'top_left' or 'bottom_right', got {self.first!r}")

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        return rings_of(weight, self.kind, self.first)

    def _total(self, values: Tensor) -> Tensor:
        return (values if self.power == 1 else values.square()).sum()


@dataclass(frozen=True)
class KernelPenalty(_Penalty):
    """``strength * sum_j w ||k_j||`` over the kernels of a layer: whole kernels vanish (eqs. 12-13).

    Args:
        strength, weighting, norm: as for :class:`RingPenalty`, the whole kernel being the one group.
        power: 2 squares the layer's sum (eq. 32). Its prox takes weak kernels to exactly zero, never a whole layer.

    Raises:
        TypeError, ValueError: as :class:`RingPenalty`.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> weight = torch.stack([torch.full((1, 2, 2), 0.5), torch.full((1, 2, 2), 2.0)])
        >>> sparsity.KernelPenalty(1.0).prox(weight, step=2.0).flatten(1).norm(dim=1)
        tensor([0., 2.])
    """

    strength: float
    weighting: str = "plain"
    norm: str = "l2"
    power: int = 1
    _coupled = True

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        check_convolution("weight", weight)
        return [0] * weight.shape[2:].numel(), 1

    def _total(self, values: Tensor) -> Tensor:
        return values.sum() if self.power == 1 else values.sum().square()


@dataclass(frozen=True)
class FoldedPenalty:
    """A penalty of the kernels that a convolution has once the batch norm after it is folded into it.

    The convolution's own kernels can shrink without any change to what the network computes, as batch norm divides by
    their size again (the draft's eqs. 30-31). Kernel ``j`` therefore counts ``|gamma_j| / sqrt(var_j + eps)`` times,
    with the scale and running variance that the norm has at the moment; both are constants to the penalty. In an
    optimizer they are read ahead of every step: a norm that the same optimizer steps counts as it was before.

    Args:
        penalty: a :class:`RingPenalty` or a :class:`KernelPenalty`.
        batch_norm: what the convolution's output goes to; it must track running statistics. See
            :func:`folded_penalties`. A checkpoint of an optimizer does not hold it: it is loaded into an optimizer that
            has a FoldedPenalty at the same place.

    Raises:
        TypeError, ValueError: naming the argument; in use also for another number of channels than the norm has.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> conv, norm = torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4, eps=0.0)
        >>> norm.weight.data[0] = 0.0
        >>> shrunk = sparsity.FoldedPenalty(sparsity.KernelPenalty(1.0), norm).prox(conv.weight, step=100.0)
        >>> shrunk.flatten(1).any(dim=1)
        tensor([ True, False, False, False])
    """

    penalty: RingPenalty | KernelPenalty
    batch_norm: _BatchNorm

    def __post_init__(self) -> None:
        if not isinstance(self.penalty, RingPenalty | KernelPenalty):
            raise TypeError(f"penalty: expected a RingPenalty or a KernelPenalty, got {self.penalty!r}")
        if not isinstance(self.batch_norm, _BatchNorm):
            raise TypeError(f"batch_norm: expected a batch norm, got {type(self.batch_norm).__name__}")
        if self.batch_norm.running_var is None:
            raise ValueError("batch_norm: expected one with track_running_stats=True, got False")

    def scales(self, weight: Tensor) -> Tensor:
        """What each kernel's norms are multiplied by, 0 where that is no number: float64 ``(C_out,)``."""
        norm = self.batch_norm
        assert norm.running_var is not None
        if len(weight) != norm.num_features:
            raise ValueError(f"weight: expected {norm.num_features} kernels as batch_norm, got {len(weight)}")
        scales = (norm.running_var.detach().double() + norm.eps).rsqrt()
        if norm.weight is not None:
            scales = scales * norm.weight.detach().double().abs()
        return torch.where(scales.isfinite(), scales, 0.0).to(weight.device)

    def value(self, weight: Tensor) -> Tensor:
        """As :meth:`RingPenalty.value`; no gradient goes to the norm."""
        return self.penalty._value(weight, self.scales(weight))

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """As :meth:`RingPenalty.prox`."""
        return self.penalty._checked_prox(weight, step, metric, self.scales(weight))

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """As :meth:`RingPenalty.threshold`, ``tau`` being compared with the folded kernels' groups."""
        return self.penalty._threshold(weight, tau, self.scales(weight))

    def for_step(self, weight: Tensor) -> OfStep:
        """What the operators of the optimizer step take for this weight."""
        self.penalty.rings(weight)
        scales = self.scales(weight)
        return self.penalty._for_kernels(weight, scales, lambda: scales.copy_(self.scales(weight)))


GroupPenalty = RingPenalty | KernelPenalty
Penalty = GroupPenalty | FoldedPenalty
