"""Penalties that select kernel sizes and layer widths, as loss terms and through their exact prox.

They are those of the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": section 3.3,
eqs. 12-13 (kernels) and 21-22 (rings); the variants of eqs. 25 and 29 (weightings), eqs. 32 and 33 (squares) and the
largest weight instead of the Euclidean norm; and the problem of batch norm raised in its eqs. 30-31.
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
from loco_ext.geometry.attached_pattern import pattern_of
from loco_ext.ops import transforms
from loco_ext.ops.coupled import factor_of_norms
from loco_ext.ops.penalties import OfStep
from loco_ext.ops.ring_prox import group_norms
from loco_ext.sparsity.prox import check_convolution, check_metric, check_norm, check_number, rings_of
from loco_ext.sparsity.weightings import WEIGHTINGS, as_thresholds, group_weights

if TYPE_CHECKING:
    from loco_ext.sparsity.block_penalties import BlockPenalty


class _Penalty:
    """Base class of both penalties: checks of their settings, and the norms of nested groups."""

    strength: float
    weighting: str
    norm: str
    power: int
    _coupled: ClassVar[bool]  # whether power 2 squares the sum over a layer's kernels

    def __post_init__(self) -> None:
        check_number("strength", self.strength)
        if self.weighting not in tuple(WEIGHTINGS):
            raise ValueError(f"weighting: expected 'plain', 'normalized' or 'scaled', got {self.weighting!r}")
        check_norm(self.norm)
        if isinstance(self.power, bool) or not isinstance(self.power, Real) or self.power not in (1, 2):
            raise ValueError(f"power: expected 1 or 2, got {self.power!r}")

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        """Return the ring of each tap, in the order of a contiguous kernel, and the number of rings."""
        raise NotImplementedError

    def group_weights(self, weight: Tensor) -> Tensor:
        """Return ``w_n`` of each group, float64: 1, or the group's number of weights to the power -1/2 or 1/2."""
        weights = group_weights(*self.rings(weight), weight.shape[1], self.weighting)
        return torch.tensor(weights, dtype=torch.float64, device="cpu")

    def _group_norms(self, weight: Tensor) -> Tensor:
        """Return ``||k(G_n)||`` of each group of each kernel: float64, differentiable, ``(C_out, groups)``."""
        return group_norms(weight, *self.rings(weight), self.norm == "linf")

    def _kernel_values(self, weight: Tensor) -> Tensor:
        """Return ``sum_n w_n ||k(G_n)||`` of each kernel, without strength: float64, differentiable, ``(C_out,)``."""
        return (self._group_norms(weight) * self.group_weights(weight).to(weight.device)).sum(1)

    def for_step(self, weight: Tensor) -> OfStep:
        """Return the argument that the optimizer step's operators take for this weight.

        Raises:
            TypeError, ValueError: as for :meth:`prox`.
        """
        blocks = self._for_blocks(weight)
        return self._for_kernels(weight) if blocks is None else ops.LayerPenalty(blocks.shrink)

    def _for_kernels(self, weight: Tensor) -> OfStep:
        """Return the argument of the optimizer step for a convolution's weight."""
        (rings, _), weights, linf = self.rings(weight), self.group_weights(weight), self.norm == "linf"
        if self.power == 1:
            return ops.StepPenalty(rings, self.strength * weights, None, linf)
        return ops.StepPenalty(rings, 0 * weights, math.sqrt(self.strength) * weights, linf, self._coupled)

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one layer's weight: float64 scalar, differentiable; a zero norm has gradient 0."""
        blocks = self._for_blocks(weight)
        return self._value(weight) if blocks is None else blocks.value(weight)

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """Return ``argmin_x sum_i d_i (x_i - weight_i)^2 / 2 + step * value(x)``, exactly; d is ``metric``, or ones.

        Args:
            weight: a convolution's weight; it is not changed.
            step: size of the corresponding gradient step, finite and at least 0.
            metric: positive tensor of weight's shape and device; None: ones.
        """
        blocks = self._for_blocks(weight)
        return self._checked_prox(weight, step, metric) if blocks is None else blocks.prox(weight, step, metric)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """Return the weight with every group of norm at most ``tau`` set to zero.

        The draft's eqs. 15 and 23 end a training with :meth:`value` as a loss term this way, since it leaves groups
        small but not zero. (Weights trained with :meth:`prox` need no such choice.) As groups are nested, each kernel
        loses the largest such group; its other weights stay.

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
        blocks = self._for_blocks(weight)
        return self._threshold(weight, tau) if blocks is None else blocks.threshold(weight, tau)

    def _for_blocks(self, weight: Tensor) -> BlockPenalty | None:
        """Return the equivalent of this penalty if the weight is the blocks of a locally connected layer, else None."""
        if (pattern := pattern_of(weight)) is None:
            return None
        from loco_ext.sparsity.block_penalties import BlockPenalty

        with transforms.suspended():  # transforms must not see tensors that depend only on the pattern
            return BlockPenalty(self, pattern, weight.shape)  # type: ignore[arg-type]

    def _value(self, weight: Tensor) -> Tensor:
        return self.strength * self._total(self._kernel_values(weight))

    def _total(self, values: Tensor) -> Tensor:
        """Return the penalty of a layer, given the values of its kernels, ``(C_out,)``."""
        raise NotImplementedError

    def _threshold(self, weight: Tensor, tau: float, scales: Tensor | None = None) -> Tensor:
        """Set small groups to zero; ``scales`` multiply the kernels' norms, ``(C_out,)``; None: ones."""
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
        """Return the prox, without checking the arguments."""
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

    For the ``values`` parameter of a locally connected layer, a kernel is the weights of one output unit, and its rings
    are those of :func:`loco_ext.geometry.block_rings`, at most 64.

    Args:
        strength: the draft's alpha, finite and at least 0.
        kind: ``"half"`` rings leave every size, ``"full"`` rings leave odd sizes and 0 (odd kernels only).
        weighting: ``w_n``: ``"plain"`` is 1, ``"normalized"`` the group's number of weights to the power -1/2 (eq. 25,
            the root mean square), ``"scaled"`` to the power 1/2 (eq. 29).
        norm: norm of a group: ``"l2"``, or ``"linf"``, its largest weight.
        power: 2 squares each kernel's sum (eq. 33). Its prox sets outer rings to exactly zero, never a whole kernel.
        first: the side that the outermost half ring is on, as for :func:`loco_ext.geometry.ring_index`.

    Raises:
        TypeError, ValueError: the message names the argument; in use also for a tensor that is no convolution's weight,
            for kernels without a weight, and for even sizes with ``kind="full"``.

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
        strength, weighting, norm: as for :class:`RingPenalty`, the whole kernel being the only group.
        power: 2 squares the layer's sum (eq. 32). Its prox sets weak kernels to exactly zero, never a whole layer.

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
    _coupled = True

    def rings(self, weight: Tensor) -> tuple[list[int], int]:
        check_convolution("weight", weight)
        return [0] * weight.shape[2:].numel(), 1

    def _total(self, values: Tensor) -> Tensor:
        return values.sum() if self.power == 1 else values.sum().square()


def lengths_of(weight: Tensor) -> Tensor:
    """Return the Euclidean norm of each kernel: float64 ``(C_out,)``."""
    return torch.linalg.vector_norm(weight.double().flatten(1), dim=1)


@dataclass(frozen=True)
class FoldedPenalty:
    """A penalty on the kernels of a convolution after the batch norm behind it is folded into it.

    The folded kernel ``j`` is ``z_j = gamma_j k_j / sigma_j``, with the norm's weight gamma and
    ``sigma = sqrt(running_var + eps)``. Shrinking ``k`` alone does not change ``z``, since sigma is proportional to
    ``||k||`` (the draft's eqs. 30-31). The penalty therefore acts on both factors: on the length of ``z`` through
    gamma, and on its direction through ``k``, whose norm it keeps. With
    ``P(k, gamma) = strength * Omega(gamma k / sigma)`` and sigma proportional to ``||k||``, its gradient for gamma is
    ``strength * Omega(k) / sigma``, and its gradient for ``k`` has no part along ``k``. Where both balance the
    gradients of the loss, ``-dL/dz`` is a subgradient of ``strength * Omega`` at ``z``, which is the optimality
    condition for the sum of loss and penalty. This is exact if the convolution's inputs are white, or if the norm is in
    evaluation mode; otherwise sigma also depends on the direction of ``k``, which the penalty ignores.

    Rings that vanish are zeros in ``k``. A kernel that vanishes is a zero in gamma; its ``k`` keeps its direction, so
    that the kernel can come back when the loss requires it. (:func:`zero_dead_kernels` clears ``k`` after training.)

    The optimizers of :mod:`loco_ext.optim` accept it for the convolution's weight; the norm's weight must be a
    parameter of the same optimizer and require a gradient. Each of the two is shrunk in the steps in which it has a
    gradient, with the learning rate, momentum and metric of its own group. In several processes the running variances
    must agree, as those of SyncBatchNorm do.

    Args:
        penalty: a :class:`RingPenalty` or a :class:`KernelPenalty`.
        batch_norm: the batch norm that takes the convolution's output; it must have a weight (``affine=True``) and
            track running statistics. See :func:`folded_penalties`. An optimizer's checkpoint does not contain it: it
            has to be loaded into an optimizer that has a FoldedPenalty in the same place.

    Raises:
        TypeError, ValueError: the message names the argument; in use also if the numbers of channels differ.

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
        """Return ``|gamma| / sigma`` of each kernel, 0 where that is not finite: float64 ``(C_out,)``."""
        scales = self.batch_norm.weight.detach().double().abs() * self._reciprocal_sigma(weight)
        return torch.where(scales.isfinite(), scales, 0.0)

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of the folded kernels: float64 scalar, differentiable for both weights.

        As the network's function does not depend on the length of a kernel in ``weight``, the gradient for ``weight``
        has no part along the kernel.
        """
        dead = lengths_of(weight.detach()) == 0
        lengths = lengths_of(weight.masked_fill(dead.view(-1, *[1] * (weight.dim() - 1)), 1.0))  # differentiable
        constant_length = lengths.detach() / lengths
        values = self.penalty._kernel_values(weight) * constant_length * self._reciprocal_sigma(weight)
        return self.penalty.strength * self.penalty._total(values * self.batch_norm.weight.double().abs())

    def prox(self, weight: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Return both factors after a step of the penalty alone; the arguments and the norm are not changed.

        Args:
            weight: the convolution's weight.
            step: size of the corresponding gradient step, in either factor; finite and at least 0.

        Returns:
            The convolution's weight, with the norm of each kernel unchanged, and the norm's weight.

        Raises:
            TypeError, ValueError: the message names the argument, what was expected and what it got.

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
        """Set small groups to zero, as :meth:`RingPenalty.threshold` does; ``tau`` applies to the folded kernels."""
        self.check(weight)
        return self.penalty._threshold(weight, tau, self.scales(weight))

    def check(self, weight: Tensor) -> None:
        """Raise TypeError or ValueError unless ``weight`` can be that of the convolution."""
        self.penalty.rings(weight)
        if len(weight) != self.batch_norm.num_features:
            raise ValueError(
                f"weight: expected {self.batch_norm.num_features} kernels as batch_norm, got {len(weight)}"
            )

    # The methods below do not synchronise with the device. ``scales`` are as above; ``weights`` are those of the
    # groups, on the device; ``size`` is that of the step, a number or float64 on the device, for gamma also one for
    # each channel.

    @property
    def _turns(self) -> bool:
        """Whether the penalty depends on the direction of a kernel, not only on its Euclidean length."""
        return isinstance(self.penalty, RingPenalty) or self.penalty.norm == "linf"

    @property
    def _squares_kernels(self) -> bool:
        """Whether each kernel's sum is squared. In a metric, slopes at the previous sum would miss the minimum."""
        return self.penalty.power == 2 and not self.penalty._coupled

    def _reciprocal_sigma(self, weight: Tensor) -> Tensor:
        """Return ``1 / sigma``, 0 where that is not finite: float64 ``(C_out,)``."""
        self.check(weight)
        norm = self.batch_norm
        assert norm.running_var is not None
        reciprocal = (norm.running_var.detach().double() + norm.eps).rsqrt()
        return torch.where(reciprocal.isfinite(), reciprocal, 0.0).to(weight.device)

    def _turning_weights(self, weights: Tensor) -> Tensor:
        """Return the groups' weights, without that of the whole kernel's Euclidean norm, which no direction changes."""
        if self.penalty.norm == "linf":
            return weights
        return torch.cat([weights[:-1], torch.zeros_like(weights[-1:])])

    def _slopes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the derivative of the penalty for each kernel's ``Omega(k)``, given as ``values``: ``(C_out,)``."""
        slopes = self.penalty.strength * scales
        if self.penalty.power == 1:
            return slopes
        values = scales * values
        return 2 * slopes * (values.sum() if self.penalty._coupled else values)

    def _pull_along(self, weight: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
        """Return the coefficient of ``weight`` in the gradient of the penalty, ``(C_out,)``, which is not positive.

        ``Omega(k) / ||k||`` is pulled inwards by ``Omega``, which a prox handles, and outwards by ``1 / ||k||``, which
        remains.
        """
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
        """Return the prox of the penalty on ``weight``'s direction, with kernels scaled to ``lengths``, ``(C_out,)``.

        With a metric, :meth:`_pull_along` must have been part of the gradient.
        """
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
        # The operator takes the penalty's factors on the host, so they are divided out on the device.
        safe = factors.clamp(min=_LEAST_FACTOR).to(weight.dtype).view(column)
        if metric is not None:
            shrunk = ops.ring_prox(weight, rings, plain, squared, (metric / safe).to(weight.dtype), linf=linf)
        else:
            shrunk = ops.ring_prox(weight / safe, rings, plain, linf=linf)
        after = lengths_of(shrunk)
        rescaled = shrunk * (lengths / after).to(weight.dtype).view(column)
        return torch.where(live & (after > 0).view(column), rescaled, weight)

    def _shortened(self, gamma: Tensor, weight: Tensor, weights: Tensor, size: float | Tensor) -> Tensor:
        """Return the prox of the penalty on gamma, float64 ``(C_out,)``, with ``weight`` fixed."""
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
