"""Penalties that choose kernel sizes and layer widths, as loss terms and through their exact prox.

They are those of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": section 3.3,
eqs. 12-13 (kernels) and 21-22 (rings); its variants, eqs. 25 and 29 (weightings), 32 and 33 (squares) and the largest
weight instead of the Euclidean norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.sparsity.prox import check_convolution, check_metric, check_norm, rings_of

WEIGHTINGS = {"plain": 0.0, "normalized": -0.5, "scaled": 0.5}  # exponents of a group's number of weights


class _Penalty:
    """What both penalties share: checks of their settings, and the norms of nested groups."""

    strength: float
    weighting: str
    norm: str
    power: int

    def __post_init__(self) -> None:
        _check_number("strength", self.strength)
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
        rings, count = self.rings(weight)
        taps = itertools.accumulate(rings.count(n) for n in range(count))
        sizes = torch.tensor([weight.shape[1] * number for number in taps], dtype=torch.float64, device="cpu")
        return sizes ** WEIGHTINGS[self.weighting]

    def _group_norms(self, weight: Tensor) -> Tensor:
        """``||k(G_n)||`` of each group of each kernel: float64, differentiable, ``(C_out, groups)``."""
        rings, count = self.rings(weight)
        if self.norm == "linf":
            sizes = weight.abs().flatten(2).amax(1)  # [C_out, taps]
            of_ring = [sizes[:, [ring == n for ring in rings]].amax(1) for n in range(count)]
            return torch.stack(of_ring, 1).double().cummax(1).values
        norms = ops.ring_norms(weight, rings, count).double()
        inside = torch.ones(count, count, dtype=torch.bool, device=weight.device).tril()
        return torch.linalg.vector_norm(norms[:, None, :].where(inside, 0.0), dim=2)

    def _kernel_values(self, weight: Tensor) -> Tensor:
        """``sum_n w_n ||k(G_n)||`` of each kernel, without the strength: float64, differentiable, ``(C_out,)``."""
        return self._group_norms(weight) @ self.group_weights(weight).to(weight.device)

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
        limit = _check_number("tau", tau)
        rings, _ = self.rings(weight)
        small = self._group_norms(weight.detach()) <= limit  # [C_out, groups]
        dead = small.flip(1).cumsum(1).flip(1) > 0  # ring r is in all groups from r on
        by_tap = dead[:, rings].view(len(weight), 1, *weight.shape[2:])
        return weight.detach().masked_fill(by_tap, 0.0)

    def for_step(self, weight: Tensor) -> ops.StepPenalty:
        """What the operators of the optimizer step take for this weight.

        Raises:
            TypeError, ValueError: as for :meth:`prox`.
            NotImplementedError: the penalty does not fall into one for each kernel.
        """
        rings, _ = self.rings(weight)
        weights, linf = self.group_weights(weight), self.norm == "linf"
        if self.power == 1:
            return ops.StepPenalty(rings, self.strength * weights, None, linf)
        return ops.StepPenalty(rings, torch.zeros_like(weights), math.sqrt(self.strength) * weights, linf)

    def _prox(self, weight: Tensor, thresholds: Tensor, squared: Tensor | None, metric: Tensor | None) -> Tensor:
        rings, _ = self.rings(weight)
        if metric is not None:
            check_metric(metric, weight)
        return ops.ring_prox(weight, rings, thresholds, squared, metric, linf=self.norm == "linf")


@dataclass(frozen=True)
class RingPenalty(_Penalty):
    """``strength * sum_n w_n ||k(G_n)||``, summed over kernels: rings vanish one by one, from the outside in.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("half", "full"):
            raise ValueError(f"kind: expected 'half' or 'full', got {self.kind!r}")
        if self.first not in ("auto", "top_left", "bottom_right"):
            raise ValueError(f"first: expected 'auto', 'top_left' or 'bottom_right', got {self.first!r}")

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        return rings_of(weight, self.kind, self.first)

    def value(self, weight: Tensor) -> Tensor:
        """The penalty of one layer's weight: float64 scalar, differentiable; where a norm is 0, its gradient is 0."""
        values = self._kernel_values(weight)
        return self.strength * (values if self.power == 1 else values.square()).sum()

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d = metric, or ones.

        Args:
            weight: of a convolution; left alone.
            step: finite and at least 0: how far a gradient step would go.
        """
        size = _check_number("step", step) * self.strength
        weights = self.group_weights(weight)
        if self.power == 1:
            return self._prox(weight, size * weights, None, metric)
        return self._prox(weight, torch.zeros_like(weights), math.sqrt(size) * weights, metric)


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

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        check_convolution("weight", weight)
        return [0] * weight.shape[2:].numel(), 1

    def for_step(self, weight: Tensor) -> ops.StepPenalty:
        if self.power == 2:
            raise NotImplementedError(
                "penalty: expected power=1 for a KernelPenalty in an optimizer, got power=2, which couples the kernels "
                "of a layer; add its value to the loss, or call its prox after the step"
            )
        return super().for_step(weight)

    def value(self, weight: Tensor) -> Tensor:
        """The penalty of one layer's weight: float64 scalar, differentiable; where a norm is 0, its gradient is 0."""
        total = self._kernel_values(weight).sum()
        return self.strength * (total if self.power == 1 else total.square())

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d = metric, or ones.

        Args:
            weight: of a convolution; left alone.
            step: finite and at least 0: how far a gradient step would go.
        """
        size = _check_number("step", step) * self.strength
        weights = self.group_weights(weight)
        if self.power == 1:
            return self._prox(weight, size * weights, None, metric)
        # All kernels have one threshold, in which the sum over the kernels of the result stands.
        factor = 2 * size * float(weights)
        values = self._finite_values(weight)
        if metric is None and self.norm == "l2":
            norms = values / weights.to(weight.device)
            threshold = _shared_threshold(norms.sort(descending=True).values, factor * float(weights))
        else:

            def falling(t: float) -> float:
                shrunk = self._prox(weight, torch.tensor([t], dtype=torch.float64, device="cpu"), None, metric)
                return factor * self._finite_values(shrunk).sum().item()

            threshold = _balance(falling, factor * values.sum().item())
        return self._prox(weight, torch.tensor([threshold], dtype=torch.float64, device="cpu"), None, metric)

    def _finite_values(self, weight: Tensor) -> Tensor:
        """``w ||k||`` of each kernel, 0 where that is no number: such kernels have no part in the layer's sum."""
        values = self._kernel_values(weight.detach())
        return torch.where(values.isfinite(), values, 0.0)


Penalty = RingPenalty | KernelPenalty


def _shared_threshold(norms: Tensor, factor: float) -> float:
    """``t = factor * sum max(norms - t, 0)``; norms descend (eq. 32). The K largest exceed it."""
    sums = norms.cumsum(0)
    counts = torch.arange(1, len(norms) + 1, dtype=norms.dtype, device=norms.device)
    thresholds = factor * sums / (1 + factor * counts)
    exceeding = int((norms > thresholds).sum())
    return thresholds[exceeding - 1].item() if exceeding else 0.0


def _balance(falling: Callable[[float], float], upper: float) -> float:
    """Where ``falling(t) = t``, between 0 and ``upper``, by bisection."""
    lower, middle = 0.0, upper / 2
    while lower < middle < upper:
        lower, upper = (middle, upper) if falling(middle) > middle else (lower, middle)
        middle = (lower + upper) / 2
    return upper


def _check_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return float(value)
