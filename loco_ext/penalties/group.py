"""Penalties that select kernel sizes and layer widths, as loss terms and through their exact prox.

They are those of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": section 3.3,
eqs. 12-13 (filters) and 21-22 (rings); the variants of eqs. 25 and 29 (weightings), eqs. 32 and 33 (squares) and the
largest weight instead of the Euclidean norm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.argument_checks import check_choice, check_number
from loco_ext.geometry.taps import FIRST, KINDS
from loco_ext.penalties.base import Penalty
from loco_ext.penalties.filters import WEIGHTINGS, BlockFilters, Filters, filters_of
from loco_ext.penalties.penalty_checks import NORMS, check_metric


class _GroupPenalty(Penalty):
    """Base class of both penalties on nested groups of each filter's weights.

    What depends on the weight's shape or pattern is handed to the methods as :class:`Filters`.
    """

    strength: float
    weighting: str
    norm: str
    power: int
    _joins_filters: ClassVar[bool]  # whether power 2 squares the sum over a layer's filters

    def __post_init__(self) -> None:
        check_number("strength", self.strength)
        check_choice("weighting", self.weighting, tuple(WEIGHTINGS))
        check_choice("norm", self.norm, NORMS)
        if isinstance(self.power, bool) or not isinstance(self.power, Real) or self.power not in (1, 2):
            raise ValueError(f"power: expected 1 or 2, got {self.power!r}")

    def filters(self, weight: Tensor) -> Filters:
        """Return the filters of a weight or of a layer's blocks, with their groups."""
        raise NotImplementedError

    def total(self, values: Tensor) -> Tensor:
        """Return the penalty of a layer for a strength of 1, given its :meth:`filter_values`."""
        raise NotImplementedError

    def group_weights(self, weight: Tensor) -> Tensor:
        """Return ``w_n`` of each group, float64: 1, or the group's number of weights to the power -1/2 or 1/2."""
        return self.filters(weight).factors(self.weighting)

    def group_norms(self, weight: Tensor) -> Tensor:
        """Return ``||k(G_n)||`` of each group of each filter: float64, differentiable, ``(filters, groups)``."""
        return self.filters(weight).norms(weight, self.norm == "linf")

    def filter_values(self, weight: Tensor, filters: Filters) -> Tensor:
        """Return ``sum_n w_n ||k(G_n)||`` of each filter: float64, differentiable, ``(filters,)``."""
        return (filters.norms(weight, self.norm == "linf") * filters.factors_on(weight.device, self.weighting)).sum(1)

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one layer's weight: float64 scalar, differentiable; a zero norm has gradient 0."""
        filters = self.filters(weight)
        if weight.numel() == 0:
            return weight.double().sum()
        return self.strength * self.total(self.filter_values(weight, filters))

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """Return ``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d is ``metric``, or ones.

        The result has no gradient, also under torch.func.

        Args:
            weight: a convolution's weight; it is not changed.
            step: size of the corresponding gradient step, finite and at least 0.
            metric: positive tensor of weight's shape and device; None: ones.
        """
        size, filters = check_number("step", step), self.filters(weight)
        check_metric(metric, weight)
        return self.shrink(weight, filters, size, metric)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """Return the weight with every group of norm at most ``tau`` set to zero.

        In the draft (eqs. 15 and 23), a training with :meth:`value` as a loss term ends this way, because it leaves
        groups small but not zero. (Weights trained with :meth:`prox` need no threshold.) Groups are nested, so each
        filter loses the largest such group. Its other weights stay.

        Args:
            weight: a convolution's weight; it is not changed.
            tau: finite and at least 0; compared with the norms of the groups without weighting and strength.

        Raises:
            TypeError, ValueError: the message names the argument, what was expected and what it got.

        Example:
            >>> import torch
            >>> from loco_ext import sparsity
            >>> conv = torch.nn.Conv2d(8, 16, 5)
            >>> with torch.no_grad():
            ...     weight = conv.weight.copy_(sparsity.RingPenalty(1e-3).threshold(conv.weight, tau=1e-3))
        """
        filters, limit = self.filters(weight), check_number("tau", tau)
        return self.zero_small_groups(weight.detach(), filters, limit)

    def for_step(self, weight: Tensor) -> ops.StepPenalty | ops.LayerPenalty:
        """Return the argument that the optimizer step's operators take for this weight.

        Raises:
            TypeError, ValueError: as for :meth:`prox`.
        """
        filters = self.filters(weight)
        if isinstance(filters, BlockFilters):
            return ops.LayerPenalty(lambda values, step, metric: self.shrink(values, filters, step, metric))
        linf = self.norm == "linf"
        thresholds, squared = self._thresholds(filters, 1.0)
        return ops.StepPenalty(filters.rings, thresholds, squared, linf, self._joins_filters)

    def zero_small_groups(self, weight: Tensor, filters: Filters, limit: float, scales: float | Tensor = 1.0) -> Tensor:
        """Return the weight without groups whose norm times ``scales``, ``(filters, 1)``, is at most ``limit``."""
        if weight.numel() == 0:
            return weight.clone()
        small = scales * filters.norms(weight, self.norm == "linf") <= limit  # [filters, groups]
        dead = small.flip(1).cumsum(1).flip(1) > 0  # ring r is in all groups from r on
        split = filters.split(weight)
        return filters.join(split.masked_fill(dead[:, filters.rings].view(len(split), 1, *split.shape[2:]), 0.0))

    def shrink(self, weight: Tensor, filters: Filters, step: float, metric: Tensor | None) -> Tensor:
        """Return the prox of a weight with these filters, without checking the arguments."""
        thresholds, squared = self._thresholds(filters, step)
        linf, joins = self.norm == "linf", self._joins_filters

        def prox(x: Tensor, rings: list[int], d: Tensor | None) -> Tensor:
            return ops.ring_prox(x, rings, thresholds, squared, d, linf=linf, joint=joins)

        if isinstance(filters, BlockFilters):
            weight = weight.detach()
            if weight.numel() == 0:
                return weight
            if metric is None and not linf and (shrunk := _shrink_rings(weight, filters, prox)) is not None:
                return shrunk
        return filters.join(
            prox(filters.split(weight), filters.rings, None if metric is None else filters.split(metric, 1.0))
        )

    def _thresholds(self, filters: Filters, step: float) -> tuple[Tensor, Tensor | None]:
        """Return ``thresholds`` and ``squared`` of :func:`loco_ext.ops.ring_prox` for a step of this size."""
        size = step * self.strength
        if self.power == 1:
            return filters.factors(self.weighting, size), None
        squared = filters.factors(self.weighting, math.sqrt(size))
        return torch.zeros_like(squared), squared


def _shrink_rings(values: Tensor, filters: BlockFilters, prox: Callable[..., Tensor]) -> Tensor | None:
    """Return the blocks after a Euclidean prox, which shrinks all weights of a ring by one factor; None if not finite.

    The factors depend only on the rings' norms, to which ``prox`` is applied.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = filters.ring_norms(values.to(dtype))
    if not norms.isfinite().all():
        return None
    # Squares of weights below this underflow to zero. Any threshold above it removes them; a threshold of 0 does not.
    least = math.sqrt(torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    norms.masked_fill_(norms == 0, least)
    factors = prox(norms, list(range(filters.count)), None) / norms
    return (values * filters.by_ring(factors)).to(values.dtype)


@dataclass(frozen=True)
class RingPenalty(_GroupPenalty):
    """``strength * sum_n w_n ||k(G_n)||``, summed over filters: rings vanish one by one, from the outside in.

    For the ``weight`` of a locally connected layer, a filter is the weights of one output unit, and its rings
    are those of :func:`loco_ext.geometry.block_rings`, at most 64.

    Args:
        strength: the draft's alpha, finite and at least 0.
        kind: with ``"half"`` rings, filters can have every size; with ``"full"`` rings, odd sizes and 0 (odd kernels
            only).
        weighting: ``w_n`` of a group of ``m`` weights: ``"plain"`` is 1, ``"normalized"`` is ``m**-0.5`` (eq. 25, the
            root mean square), ``"scaled"`` is ``m**0.5`` (eq. 29).
        norm: norm of a group: ``"l2"``, or ``"linf"``, its largest absolute weight.
        power: 2 squares each filter's sum (eq. 33). Its prox sets outer rings to exactly zero, never a whole filter.
        first: the side that the outermost half ring is on, as for :func:`loco_ext.geometry.ring_index`.

    Raises:
        TypeError, ValueError: the message names the argument. In use also for a tensor that is not a convolution's
            weight, for filters without a weight, and for even sizes with ``kind="full"``.

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
    _joins_filters = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, KINDS)
        check_choice("first", self.first, FIRST)

    def filters(self, weight: Tensor) -> Filters:
        return filters_of(weight, self.kind, self.first)

    def total(self, values: Tensor) -> Tensor:
        return (values if self.power == 1 else values.square()).sum()


@dataclass(frozen=True)
class KernelPenalty(_GroupPenalty):
    """``strength * sum_j w ||k_j||`` over the filters of a layer: whole filters vanish (eqs. 12-13).

    Args:
        strength, weighting, norm: as for :class:`RingPenalty`, the whole filter being the only group.
        power: 2 squares the layer's sum (eq. 32). Its prox sets weak filters to exactly zero, never a whole layer.

    Raises:
        TypeError, ValueError: as for :class:`RingPenalty`.

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
    _joins_filters = True

    def filters(self, weight: Tensor) -> Filters:
        return filters_of(weight, None)

    def total(self, values: Tensor) -> Tensor:
        return values.sum() if self.power == 1 else values.sum().square()


GroupPenalty = RingPenalty | KernelPenalty
