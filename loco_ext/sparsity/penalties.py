"""Penalties that choose kernel sizes and layer widths, as loss terms and through their exact prox.

They are those of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": section 3.3,
eqs. 12-13 (kernels) and 21-22 (rings); its variants, eqs. 25 and 29 (weightings), 32 and 33 (squares) and the largest
weight instead of the Euclidean norm; and the worry of its eqs. 30-31, batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext import ops
from loco_ext.geometry.marks import pattern_of
from loco_ext.ops import transforms
from loco_ext.ops.coupled import factor_of_norms
from loco_ext.ops.penalties import OfStep
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
        if isinstance(self.power, bool) or not isinstance(self.power, Real) or self.power not in (1, 2):
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

    def _for_kernels(self, weight: Tensor) -> OfStep:
        """The same for a convolution's weight."""
        (rings, _), weights, linf = self.rings(weight), self.group_weights(weight), self.norm == "linf"
        if self.power == 1:
            return ops.StepPenalty(rings, self.strength * weights, None, linf)
        return ops.StepPenalty(rings, 0 * weights, math.sqrt(self.strength) * weights, linf, self._coupled)

    def value(self, weight: Tensor) -> Tensor:
        """The penalty of one layer's weight: float64 scalar, differentiable; where a norm is 0, its gradient is 0."""
        blocks = self._for_blocks(weight)
        return self._value(weight) if blocks is None else blocks.value(weight)

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d = metric, or ones.

        Args:
            weight: of a convolution; left alone.
            step: finite and at least 0: how far a gradient step would go.
        """
        blocks = self._for_blocks(weight)
        return self._checked_prox(weight, step, metric) if blocks is None else blocks.prox(weight, step, metric)

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
        return self._threshold(weight, tau) if blocks is None else blocks.threshold(weight, tau)

    def _for_blocks(self, weight: Tensor) -> BlockPenalty | None:
        """What stands for this penalty if these are the blocks of a locally connected layer."""
        if (pattern := pattern_of(weight)) is None:
            return None
        from loco_ext.sparsity.block_penalties import BlockPenalty

        with transforms.suspended():  # what is made of the pattern alone has no part in them
            return BlockPenalty(self, pattern, weight.shape)  # type: ignore[arg-type]

    def _value(self, weight: Tensor) -> Tensor:
        return self.strength * self._total(self._kernel_values(weight))

    def _total(self, values: Tensor) -> Tensor:
        """The penalty of a layer from its kernels'."""
        raise NotImplementedError

    def _threshold(self, weight: Tensor, tau: float, scales: Tensor | None = None) -> Tensor:
        """``scales``: factors of the kernels' norms, ``(C_out,)``; None: ones."""
        limit = check_number("tau", tau)
        norms = self._group_norms(weight.detach())
        small = (norms if scales is None else scales[:, None] * norms) <= limit  # [C_out, groups]
        dead = small.flip(1).cumsum(1).flip(1) > 0  # ring r is in all groups from r on
        by_tap = dead[:, self.rings(weight)[0]].view(len(weight), 1, *weight.shape[2:])
        return weight.detach().masked_fill(by_tap, 0.0)

    def _checked_prox(self, weight: Tensor, step: float, metric: Tensor | None) -> Tensor:
        size = check_number("step", step)
        self.rings(weight)
        if metric is not None:
            check_metric(metric, weight)
        return self._shrink(weight, size, metric)

    def _shrink(self, weight: Tensor, step: float, metric: Tensor | None) -> Tensor:
        """The prox, without checks."""
        size = step * self.strength
        if self.power == 1:
            return self._prox(weight, self._thresholds(weight, size), None, metric)
        weights = self.group_weights(weight)
        return self._prox(weight, torch.zeros_like(weights), math.sqrt(size) * weights, metric)

    def _thresholds(self, weight: Tensor, size: float) -> Tensor:
        if type(self).group_weights is not _Penalty.group_weights:
            return size * self.group_weights(weight)
        numbers = group_weights(*self.rings(weight), weight.shape[1], self.weighting)
        return as_thresholds([size * number for number in numbers], weight)

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


def lengths_of(weight: Tensor) -> Tensor:
    """The Euclidean norm of each kernel: float64 ``(C_out,)``."""
    return torch.linalg.vector_norm(weight.double().flatten(1), dim=1)


@dataclass(frozen=True)
class FoldedPenalty:
    """A penalty of the kernels that a convolution has once the batch norm after it is folded into it.

    Folded, kernel ``j`` is ``z_j = gamma_j k_j / sigma_j``, with the norm's weight gamma and ``sigma = sqrt(running_var
    + eps)``. Shrinking ``k`` alone leaves ``z`` as it is, since sigma is proportional to ``||k||`` (the draft's eqs.
    30-31). The penalty therefore acts on both factors: on the length of ``z`` through gamma, on its direction through
    ``k``, whose norm it keeps. With ``P(k, gamma) = strength * Omega(gamma k / sigma)`` and sigma proportional to
    ``||k||``, its pull on gamma is ``strength * Omega(k) / sigma``, and its pull on ``k`` has no part along ``k``.
    Where both balance the gradients of the loss, ``-dL/dz`` is a subgradient of ``strength * Omega`` at ``z``: the
    condition of the minimum of loss and penalty. This is exact where the convolution's inputs are white, or the norm
    is in evaluation mode; otherwise sigma also depends on the direction of ``k``, which the penalty does not see.

    Rings that vanish are zeros in ``k``. A kernel that vanishes is a zero in gamma; its ``k`` keeps its direction, so
    that the kernel can come back when the loss asks for it. (:func:`zero_dead_kernels` clears ``k`` after training.)

    The optimizers of :mod:`loco_ext.optim` take it for the convolution's weight; the norm's weight must be a parameter
    of the same optimizer and require a gradient. Each of the two is shrunk in the steps in which it has a gradient, by
    the learning rate, momentum and metric of its own group. In several processes the running variances must agree, as
    those of SyncBatchNorm do.

    Args:
        penalty: a :class:`RingPenalty` or a :class:`KernelPenalty`.
        batch_norm: what the convolution's output goes to; it must have a weight (``affine=True``) and track running
            statistics. See :func:`folded_penalties`. A checkpoint of an optimizer does not hold it: it is loaded into
            an optimizer that has a FoldedPenalty at the same place.

    Raises:
        TypeError, ValueError: naming the argument; in use also for another number of channels than the norm has.

    Example:
        >>> import torch
        >>> from loco_ext import optim, sparsity
        >>> conv, norm = torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4)
        >>> penalty = sparsity.FoldedPenalty(sparsity.KernelPenalty(1.0), norm)
        >>> groups = [{"params": [conv.weight], "penalty": penalty}, {"params": [conv.bias, *norm.parameters()]}]
        >>> optimizer = optim.SGD(groups, lr=10.0)
        >>> norm(conv(torch.randn(8, 3, 9, 9))).sum().backward()
        >>> optimizer.step()
        >>> norm.weight.detach().abs()
        tensor([0., 0., 0., 0.])
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
        if self.batch_norm.weight is None:
            raise ValueError("batch_norm: expected one with affine=True, whose weight can shrink, got False")

    def scales(self, weight: Tensor) -> Tensor:
        """``|gamma| / sigma`` of each kernel, 0 where that is no finite number: float64 ``(C_out,)``."""
        scales = self.batch_norm.weight.detach().double().abs() * self._reciprocal_sigma(weight)
        return torch.where(scales.isfinite(), scales, 0.0)

    def value(self, weight: Tensor) -> Tensor:
        """The penalty of the folded kernels: float64 scalar, differentiable for ``weight`` and the norm's weight.

        As the network's function does not depend on the length of a kernel in ``weight``, the gradient for it has no
        part along the kernel.
        """
        dead = lengths_of(weight.detach()) == 0
        lengths = lengths_of(weight.masked_fill(dead.view(-1, *[1] * (weight.dim() - 1)), 1.0))  # with derivatives
        constant_length = lengths.detach() / lengths
        values = self.penalty._kernel_values(weight) * constant_length * self._reciprocal_sigma(weight)
        return self.penalty.strength * self.penalty._total(values * self.batch_norm.weight.double().abs())

    def prox(self, weight: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """What a step of the penalty alone makes of both factors; the arguments and the norm are left alone.

        Args:
            weight: of the convolution.
            step: finite and at least 0: how far a gradient step would go, in either factor.

        Returns:
            The convolution's weight, of the same norm in each kernel, and the norm's weight.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.

        Example:
            >>> import torch
            >>> from loco_ext import sparsity
            >>> conv, norm = torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4)
            >>> penalty = sparsity.FoldedPenalty(sparsity.RingPenalty(1e-3), norm)
            >>> with torch.no_grad():
            ...     for factor, shrunk in zip((conv.weight, norm.weight), penalty.prox(conv.weight, step=0.1)):
            ...         _ = factor.copy_(shrunk)
        """
        size = check_number("step", step)
        self.check(weight)
        weights = self.penalty.group_weights(weight).to(weight.device)
        weight = weight.detach()
        turned = self._turned(weight, self.scales(weight), weights, size, lengths_of(weight))
        gamma = self.batch_norm.weight.detach()
        return turned, self._shortened(gamma, turned, weights, size).to(gamma.dtype)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """As :meth:`RingPenalty.threshold`, ``tau`` being compared with the folded kernels' groups."""
        self.check(weight)
        return self.penalty._threshold(weight, tau, self.scales(weight))

    def check(self, weight: Tensor) -> None:
        """Raises TypeError or ValueError unless ``weight`` may be that of the convolution."""
        self.penalty.rings(weight)
        if len(weight) != self.batch_norm.num_features:
            raise ValueError(
                f"weight: expected {self.batch_norm.num_features} kernels as batch_norm, got {len(weight)}"
            )

    # What follows does not wait for the device. scales: as above. weights: of the groups, on the device. size: of the
    # step, a number or float64 on the device; for gamma also one for each channel.

    @property
    def _turns(self) -> bool:
        """Whether the penalty depends on the direction of a kernel, not on its Euclidean length alone."""
        return isinstance(self.penalty, RingPenalty) or self.penalty.norm == "linf"

    @property
    def _squares_kernels(self) -> bool:
        """Whether each kernel's sum is squared. In a metric, slopes of the sum before would not lead to the minimum."""
        return self.penalty.power == 2 and not self.penalty._coupled

    def _reciprocal_sigma(self, weight: Tensor) -> Tensor:
        """``1 / sigma``, 0 where that is no finite number: float64 ``(C_out,)``."""
        self.check(weight)
        norm = self.batch_norm
        assert norm.running_var is not None
        reciprocal = (norm.running_var.detach().double() + norm.eps).rsqrt()
        return torch.where(reciprocal.isfinite(), reciprocal, 0.0).to(weight.device)

    def _turning_weights(self, weights: Tensor) -> Tensor:
        """The groups' weights without that of the whole kernel's Euclidean norm, which no direction changes."""
        if self.penalty.norm == "linf":
            return weights
        return torch.cat([weights[:-1], torch.zeros_like(weights[-1:])])

    def _slopes(self, values: Tensor, scales: Tensor) -> Tensor:
        """By how much the penalty grows with ``Omega(k)`` of each kernel, from those: float64 ``(C_out,)``."""
        slopes = self.penalty.strength * scales
        if self.penalty.power == 1:
            return slopes
        values = scales * values
        return 2 * slopes * (values.sum() if self.penalty._coupled else values)

    def _pull_along(self, weight: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
        """The coefficient ``(C_out,)`` of ``weight`` in the gradient of the penalty: ``Omega(k) / ||k||`` is pulled
        inwards by ``Omega``, of which a prox takes care, and outwards by ``1 / ||k||``, so this is negative."""
        norms = self.penalty._group_norms(weight)
        lengths = lengths_of(weight)
        turning = norms @ (weights if self._squares_kernels else self._turning_weights(weights))
        pull = -self._slopes(norms @ weights, scales) * turning / lengths.square()
        return torch.where(pull.isfinite(), pull, 0.0)

    def _turned(
        self,
        weight: Tensor,
        scales: Tensor,
        weights: Tensor,
        size: float | Tensor,
        lengths: Tensor,
        metric: Tensor | None = None,
    ) -> Tensor:
        """The prox of the penalty of ``weight``'s direction, the kernels scaled to these lengths, ``(C_out,)``. With a
        metric, :meth:`_pull_along` is to have been part of the gradient."""
        if not self._turns:
            return weight
        inner, column = self.penalty, (-1, *[1] * (weight.dim() - 1))
        rings, linf, plain = inner.rings(weight)[0], inner.norm == "linf", inner.group_weights(weight)
        squared, factors = None, size * self._slopes(inner._group_norms(weight) @ weights, scales)
        if metric is not None and self._squares_kernels:
            plain, squared, factors = 0 * plain, plain, size * inner.strength * scales.square()
        else:
            plain = self._turning_weights(plain)
        live = (factors > 0).view(column)
        # Factors of the penalty, which the operator takes on the host, are divided out on the device.
        safe = factors.clamp(min=_LEAST_FACTOR).to(weight.dtype).view(column)
        if metric is not None:
            shrunk = ops.ring_prox(weight, rings, plain, squared, (metric / safe).to(weight.dtype), linf=linf)
        else:
            shrunk = ops.ring_prox(weight / safe, rings, plain, linf=linf)
        after = lengths_of(shrunk)
        rescaled = shrunk * (lengths / after).to(weight.dtype).view(column)
        return torch.where(live & (after > 0).view(column), rescaled, weight)

    def _shortened(self, gamma: Tensor, weight: Tensor, weights: Tensor, size: float | Tensor) -> Tensor:
        """The prox of the penalty of gamma, float64 ``(C_out,)``, ``weight`` being held fixed."""
        gamma, inner = gamma.double(), self.penalty
        sizes = torch.as_tensor(size, dtype=torch.float64, device=gamma.device).expand_as(gamma)
        slopes = (inner._group_norms(weight) @ weights) * self._reciprocal_sigma(weight)
        if inner.power == 1:
            length = (gamma.abs() - sizes * inner.strength * slopes).clamp(min=0)
        elif not inner._coupled:
            length = gamma.abs() / (1 + 2 * sizes * inner.strength * slopes.square())
        else:
            roots = torch.where(sizes > 0, sizes.sqrt(), 1.0)
            q = torch.where(sizes > 0, math.sqrt(inner.strength) * roots * slopes, 0.0)
            length = (gamma.abs() - roots * q * factor_of_norms(gamma.abs() / roots, q)).clamp(min=0)
        return torch.where(length.isfinite(), torch.copysign(length, gamma), gamma)


_LEAST_FACTOR = 1e-20  # keeps quotients finite in float32
GroupPenalty = RingPenalty | KernelPenalty
