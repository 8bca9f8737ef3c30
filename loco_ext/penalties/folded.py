"""Penalties on the filters of a convolution after the batch norm behind it is folded into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext import ops
from loco_ext.argument_checks import check_number
from loco_ext.ops.joint import factor_of_norms
from loco_ext.penalties.base import Penalty
from loco_ext.penalties.group import KernelPenalty, RingPenalty
from loco_ext.penalties.penalty_checks import check_convolution

_LEAST_FACTOR = 1e-20  # keeps quotients finite in float32


@dataclass(frozen=True)
class FoldedPenalty(Penalty):
    """A penalty on the filters of a convolution after the batch norm behind it is folded into it.

    The folded filter ``j`` is ``z_j = gamma_j k_j / sigma_j``, with the norm's weight gamma and
    ``sigma = sqrt(running_var + eps)``. Shrinking ``k`` alone does not change ``z``, since sigma is proportional to
    ``||k||`` (the draft's eqs. 30-31). The penalty therefore acts on both factors: on the length of ``z`` through
    gamma, and on its direction, where there are several rings, through ``k``, whose norm it keeps. With
    ``P(k, gamma) = strength * Omega(gamma k / sigma)`` and sigma proportional to ``||k||``, its gradient for gamma is
    ``strength * Omega(k) / sigma``, and its gradient for ``k`` has no part along ``k``. Where both balance the
    gradients of the loss, ``-dL/dz`` is a subgradient of ``strength * Omega`` at ``z``, which is the optimality
    condition for the sum of loss and penalty. This is exact if the convolution's inputs are white; otherwise sigma also
    depends on the direction of ``k``, which the penalty ignores. While the norm is in evaluation mode, sigma does not
    depend on ``k`` at all: the loss then has a gradient along ``k`` too, and training ends near the minimum.

    Rings that vanish are zeros in ``k``. A filter that vanishes is a zero in gamma; its ``k`` keeps its direction, so
    that the filter can come back when the loss requires it: in that direction alone, as the loss has no gradient for
    ``k`` while gamma is zero. A filter whose gamma vanishes before ``k`` has turned may therefore stay zero though the
    minimum has it, in SGD more than in Adam. (:func:`zero_dead_filters` clears ``k`` after training.)

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
    _stored = "penalty"

    def __post_init__(self) -> None:
        if not isinstance(self.penalty, RingPenalty | KernelPenalty):
            raise TypeError(f"penalty: expected a RingPenalty or a KernelPenalty, got {self.penalty!r}")
        if not isinstance(self.batch_norm, _BatchNorm):
            raise TypeError(f"batch_norm: expected a batch norm, got {type(self.batch_norm).__name__}")
        if self.batch_norm.running_var is None:
            raise ValueError("batch_norm: expected one with track_running_stats=True, got False")
        if self.batch_norm.weight is None:
            raise ValueError("batch_norm: expected one with affine=True, whose weight can shrink, got False")

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of the folded filters: float64 scalar, differentiable for both weights.

        As the network's function does not depend on the length of a filter in ``weight``, the gradient for ``weight``
        has no part along the filter.
        """
        factors, inner = self.factors(weight), self.penalty
        dead = lengths_of(weight.detach()) == 0
        lengths = lengths_of(weight.masked_fill(column_of(dead, weight), 1.0))  # differentiable
        values = inner.filter_values(weight, factors.filters) * (lengths.detach() / lengths)
        folded = values * factors.reciprocal_sigma() * self.batch_norm.weight.double().abs()
        return inner.strength * inner.total(folded)

    def prox(self, weight: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Return both factors after a step of the penalty alone; the arguments and the norm are not changed.

        The results have no gradients, also under torch.func.

        Args:
            weight: the convolution's weight.
            step: size of the corresponding gradient step, in either factor; finite and at least 0.

        Returns:
            The convolution's weight, with the norm of each filter unchanged, and the norm's weight.

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
        size, factors, weight = check_number("step", step), self.factors(weight), weight.detach()
        rotated = factors.rotate(weight, factors.scales(), size, lengths_of(weight))
        gamma = self.batch_norm.weight.detach()
        return rotated, factors.shorten(gamma, factors.values(rotated), size).to(gamma.dtype)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """Set small groups to zero, as :meth:`loco_ext.sparsity.RingPenalty.threshold` does.

        ``tau`` applies to the folded filters.
        """
        factors, limit = self.factors(weight), check_number("tau", tau)
        return self.penalty.zero_small_groups(weight.detach(), factors.filters, limit, factors.scales()[:, None])

    def for_step(self, weight: Tensor) -> None:
        """Return None: the optimizers apply this penalty around the step, by :meth:`factors`."""
        self.factors(weight)

    def factors(self, weight: Tensor) -> FoldedFactors:
        """Return the penalty as a function of this weight and the norm's; raise unless they fit each other."""
        check_convolution("weight", weight)
        if len(weight) != self.batch_norm.num_features:
            raise ValueError(
                f"weight: expected {self.batch_norm.num_features} filters as batch_norm, got {len(weight)}"
            )
        return FoldedFactors(self, weight)


class FoldedFactors:
    """A :class:`FoldedPenalty` as a function of its two factors, filters of one shape and gamma.

    No method synchronises with the device. ``scales`` are ``|gamma| / sigma`` of each filter, ``(C_out,)``; ``size`` is
    that of the step, a number or float64 on the device.
    """

    def __init__(self, penalty: FoldedPenalty, weight: Tensor) -> None:
        self.inner, self.batch_norm = penalty.penalty, penalty.batch_norm
        self.filters = self.inner.filters(weight)

    @property
    def depend_on_direction(self) -> bool:
        """Return whether the penalty depends on a filter's direction, not only on its Euclidean length."""
        return self.filters.count > 1 or self.inner.norm == "linf"

    def reciprocal_sigma(self) -> Tensor:
        """Return ``1 / sigma``, 0 where that is not finite: float64 ``(C_out,)``."""
        assert self.batch_norm.running_var is not None
        reciprocal = (self.batch_norm.running_var.detach().double() + self.batch_norm.eps).rsqrt()
        return torch.where(reciprocal.isfinite(), reciprocal, 0.0)

    def scales(self) -> Tensor:
        """Return ``|gamma| / sigma`` of each filter, 0 where that is not finite: float64 ``(C_out,)``."""
        scales = self.batch_norm.weight.detach().double().abs() * self.reciprocal_sigma()
        return torch.where(scales.isfinite(), scales, 0.0)

    def values(self, weight: Tensor) -> Tensor:
        """Return ``Omega(k)`` of each filter, without the strength: float64 ``(C_out,)``."""
        return self._norms(weight) @ self._weights_on(weight.device)

    def for_kernels(self) -> ops.StepPenalty | None:
        """Return the penalty on directions as the step's kernels on the CPU apply it; None if they do not.

        Its ``scales`` are those of this moment; the step writes :meth:`values` into their second row.
        """
        if self.inner.norm != "l2":
            return None
        weights, scales, squared = self.filters.factors(self.inner.weighting), self.scales(), None
        if self._squares_filters:
            weights, squared, scales = torch.zeros_like(weights), weights, math.sqrt(self.inner.strength) * scales
        else:
            scales *= self.inner.strength
        return ops.StepPenalty(
            self.filters.rings, weights, squared, scales=torch.stack([scales, torch.zeros_like(scales)])
        )

    def pull_along(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Return the coefficient of ``weight`` in the gradient of the penalty, ``(C_out,)``, which is not positive.

        ``Omega(k) / ||k||`` is pulled inwards by ``Omega``, which a prox handles, and outwards by ``1 / ||k||``, which
        remains.
        """
        norms, weights = self._norms(weight), self._weights_on(weight.device)
        turning = norms @ (weights if self._squares_filters else self._without_length(weights))
        pull = -self._slopes(norms @ weights, scales) * turning / lengths_of(weight).square()
        return torch.where(pull.isfinite(), pull, 0.0)

    def rotate(
        self, weight: Tensor, scales: Tensor, size: float | Tensor, lengths: Tensor, metric: Tensor | None = None
    ) -> Tensor:
        """Return the prox of the penalty on ``weight``'s direction, with filters scaled to ``lengths``, ``(C_out,)``.

        With a metric, :meth:`pull_along` must have been part of the gradient.
        """
        if not self.depend_on_direction:
            return weight
        inner, rings, linf = self.inner, self.filters.rings, self.inner.norm == "linf"
        plain, squared = self.filters.factors(inner.weighting), None
        if metric is not None and self._squares_filters:
            plain, squared, factors = 0 * plain, plain, size * inner.strength * scales.square()
        else:
            factors = size * self._slopes(self.values(weight), scales)
            plain = self._without_length(plain)
        # The operator takes the penalty's factors on the host, so they are divided out on the device.
        shrinks = factors > _LEAST_FACTOR
        safe = column_of(torch.where(shrinks, factors, 1.0).to(weight.dtype), weight)
        if metric is not None:
            shrunk = ops.ring_prox(weight, rings, plain, squared, (metric / safe).to(weight.dtype), linf=linf)
        else:
            shrunk = ops.ring_prox(weight / safe, rings, plain, linf=linf)
        after = lengths_of(shrunk)
        rescaled = shrunk * column_of((lengths / after).to(weight.dtype), weight)
        return torch.where(column_of(shrinks & (after > 0), weight), rescaled, weight)

    def shorten(self, gamma: Tensor, values: Tensor, size: float | Tensor) -> Tensor:
        """Return the prox of the penalty on gamma, float64 ``(C_out,)``, with the weight fixed.

        ``values``: those of the weight, see :meth:`values`. ``size`` may also be one for each channel.
        """
        gamma, strength = gamma.double(), self.inner.strength
        sizes = size.to(gamma).expand_as(gamma) if isinstance(size, Tensor) else torch.full_like(gamma, size)
        slopes = values * self.reciprocal_sigma()
        if self.inner.power == 1:
            length = (gamma.abs() - sizes * strength * slopes).clamp(min=0)
        elif self._squares_filters:
            length = gamma.abs() / (1 + 2 * sizes * strength * slopes.square())
        else:
            roots = torch.where(sizes > 0, sizes.sqrt(), 1.0)
            q = torch.where(sizes > 0, math.sqrt(strength) * roots * slopes, 0.0)
            length = (gamma.abs() - roots * q * factor_of_norms(gamma.abs() / roots, q)).clamp(min=0)
        return torch.where(length.isfinite(), torch.copysign(length, gamma), gamma)

    @property
    def _squares_filters(self) -> bool:
        """Return whether each filter's sum is squared. In a metric, slopes at the former sum would miss the minimum."""
        return self.inner.power == 2 and isinstance(self.inner, RingPenalty)

    def _weights_on(self, device: torch.device) -> Tensor:
        return self.filters.factors_on(device, self.inner.weighting)

    def _norms(self, weight: Tensor) -> Tensor:
        return self.filters.norms(weight, self.inner.norm == "linf")

    def _without_length(self, weights: Tensor) -> Tensor:
        """Return the groups' weights, without that of the whole filter's Euclidean norm, which no direction changes."""
        if self.inner.norm == "linf":
            return weights
        return torch.cat([weights[:-1], torch.zeros_like(weights[-1:])])

    def _slopes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the derivative of the penalty for each filter's ``Omega(k)``, given as ``values``: ``(C_out,)``."""
        slopes = self.inner.strength * scales
        if self.inner.power == 1:
            return slopes
        values = scales * values
        return 2 * slopes * (values if self._squares_filters else values.sum())


def lengths_of(weight: Tensor) -> Tensor:
    """Return the Euclidean norm of each filter: float64 ``(C_out,)``."""
    return torch.linalg.vector_norm(weight.double().flatten(1), dim=1)


def column_of(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each filter, ``(C_out,)``, in a shape that broadcasts over the weight."""
    return numbers.view(-1, *[1] * (weight.dim() - 1))
