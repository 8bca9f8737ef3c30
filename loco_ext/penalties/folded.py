"""Penalties on the filters of a convolution after the batch norm behind it is folded into it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext import ops
from loco_ext.argument_checks import check_number
from loco_ext.ops.joint import factor_of_norms, group_norms_by
from loco_ext.ops.ring_prox import ProxCall, run_proxes
from loco_ext.penalties.base import Penalty
from loco_ext.penalties.filters import Filters
from loco_ext.penalties.group import KernelPenalty, RingPenalty
from loco_ext.penalties.penalty_checks import check_convolution
from loco_ext.reference.dtypes import compute_dtype


@dataclass(frozen=True)
class FoldedPenalty(Penalty):
    """A penalty on the filters that a convolution has once the batch norm behind it is folded into it.

    The folded filter ``j`` is ``z_j = gamma_j k_j / sigma_j``, with the norm's weight gamma and
    ``sigma = sqrt(running_var + eps)``. Shrinking ``k`` alone does not change ``z``, since sigma is proportional to
    ``||k||`` (the draft's eqs. 30-31). The penalty therefore acts on both factors. Through gamma it acts on the length
    of ``z``. If there are several rings, it also acts on the direction of ``z``, through ``k``, whose norm it keeps.

    Let ``P(k, gamma) = strength * Omega(gamma k / sigma)``, with sigma proportional to ``||k||``. Its gradient for
    gamma is ``strength * Omega(k) / sigma``, and its gradient for ``k`` has no part along ``k``. Where both balance the
    gradients of the loss, ``-dL/dz`` is a subgradient of ``strength * Omega`` at ``z``, which is the optimality
    condition for the sum of loss and penalty. This is exact if the convolution's inputs are white. Otherwise sigma also
    depends on the direction of ``k``, which the penalty ignores. While the norm is in evaluation mode, sigma does not
    depend on ``k`` at all. The loss then has a gradient along ``k`` too, and training ends near the minimum.

    A ring that vanishes becomes zeros in ``k``. A filter that vanishes becomes a zero in gamma. Its ``k`` keeps its
    direction, so the filter can come back when the loss requires it, but only in that direction, because the loss has
    no gradient for ``k`` while gamma is zero. A filter whose gamma vanishes before ``k`` has turned may therefore stay
    zero even if it is not zero at the minimum, with SGD more than with Adam. (:func:`zero_dead_filters` clears ``k``
    after training.)

    The optimizers of :mod:`loco_ext.optim` accept it for the convolution's weight. The norm's weight must be a
    parameter of the same optimizer and require a gradient. Each of the two is shrunk in the steps in which it has a
    gradient, with the learning rate, momentum and metric of its own group. In several processes the running variances
    must agree, as those of SyncBatchNorm do; the optimizers warn of other norms.

    Args:
        penalty: a :class:`RingPenalty` or a :class:`KernelPenalty`.
        batch_norm: the batch norm that receives the convolution's output. It must have a weight (``affine=True``) and
            track running statistics. See :func:`folded_penalties`. An optimizer's checkpoint does not contain it; load
            the checkpoint into an optimizer that has a FoldedPenalty in the same place.

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

        The network's output does not depend on the length of a filter in ``weight``, so the gradient for ``weight`` has
        no part along the filter.
        """
        layers, inner = FoldedLayers([self.layer(weight)]), self.penalty
        dead = layers.lengths([weight.detach()]) == 0
        lengths = layers.lengths([weight.masked_fill(column_of(dead, weight), 1.0)])  # differentiable
        values = inner.filter_values(weight, self.layer(weight).filters) * (lengths.detach() / lengths)
        folded = values * layers.reciprocal_sigma() * self.batch_norm.weight.double().abs()
        return inner.strength * inner.total(folded)

    def prox(self, weight: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Return new weights of convolution and norm after a step of the penalty alone; nothing is changed in place.

        The results have no gradients, also under torch.func.

        Args:
            weight: the convolution's weight.
            step: size of the corresponding gradient step, for either weight; finite and at least 0.

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
        size, layer, weight = check_number("step", step), self.layer(weight), weight.detach()
        layers = FoldedLayers([layer])
        rotated = [weight]
        if layer.depends_on_direction:
            rotated, values = layers.rotate([weight], layers.scales(), size)
        else:
            values = layers.values(layers.norms([weight]))
        return rotated[0], layers.shorten(values, size).to(self.batch_norm.weight.dtype)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """Set small groups to zero, as :meth:`loco_ext.sparsity.RingPenalty.threshold` does.

        ``tau`` applies to the folded filters.
        """
        layer, limit = self.layer(weight), check_number("tau", tau)
        scales = FoldedLayers([layer]).scales()[:, None]
        return self.penalty.zero_small_groups(weight.detach(), layer.filters, limit, scales)

    def for_step(self, weight: Tensor) -> None:
        """Return None: the optimizers apply this penalty around the step, to the :meth:`layer`."""
        self.layer(weight)

    def layer(self, weight: Tensor) -> "FoldedLayer":
        """Return the penalty with the batch norm and the filters of this weight; raise unless they fit each other."""
        check_convolution("weight", weight)
        if len(weight) != self.batch_norm.num_features:
            raise ValueError(
                f"weight: expected {self.batch_norm.num_features} filters as batch_norm, got {len(weight)}"
            )
        return FoldedLayer(self.penalty, self.batch_norm, self.penalty.filters(weight))


@dataclass(frozen=True)
class FoldedLayer:
    """A convolution under a :class:`FoldedPenalty`: the penalty on its filters, the norm behind it, and its filters."""

    inner: RingPenalty | KernelPenalty
    batch_norm: _BatchNorm
    filters: Filters

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what layers have in common that :class:`FoldedLayers` treats together."""
        return type(self.inner), self.inner.power, self.inner.norm

    @property
    def depends_on_direction(self) -> bool:
        """Return whether the penalty depends on a filter's direction, not only on its Euclidean length."""
        return self.filters.count > 1 or self.inner.norm == "linf"

    @property
    def squares_filters(self) -> bool:
        """Return whether each filter's sum is squared. In a metric, slopes at the former sum would miss the minimum."""
        return self.inner.power == 2 and isinstance(self.inner, RingPenalty)


class FoldedLayers:
    """The penalties of layers of one kind, on one device, as functions of filters and gamma.

    A call of torch's takes longer than its work on the numbers of one layer. All layers therefore share it: what there
    is for each filter is one vector, float64 ``(filters,)``, of one layer's filters after the other's. Below,
    ``Omega(k)`` is ``sum_n w_n ||k(G_n)||`` of a filter, ``scales`` are ``|gamma| / sigma``, and ``size`` is that of
    the step, as :meth:`spread` returns it. No method synchronises with the device.
    """

    def __init__(self, layers: Sequence[FoldedLayer]) -> None:
        self._layers, self._first = list(layers), layers[0]
        self._groups = max(layer.filters.count for layer in layers)

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers of each layer's filters."""
        return numbers.split([layer.batch_norm.num_features for layer in self._layers])

    def spread(self, of_layers: Sequence[float | Tensor]) -> float | Tensor:
        """Return what there is for each layer, a number or a tensor ``()`` or ``(filters,)``, for each filter.

        It is a single number if all layers have the same.
        """
        first = of_layers[0]
        if not isinstance(first, Tensor) and all(type(each) is type(first) and each == first for each in of_layers):
            return first
        like = self._layers[0].batch_norm.weight.detach()
        return torch.cat(
            [
                each.double().expand(layer.batch_norm.num_features)
                if isinstance(each, Tensor)
                else like.new_full((layer.batch_norm.num_features,), each, dtype=torch.float64)
                for layer, each in zip(self._layers, of_layers, strict=True)
            ]
        )

    def gammas(self) -> list[Tensor]:
        """Return each norm's weight."""
        return [layer.batch_norm.weight.detach() for layer in self._layers]

    def reciprocal_sigma(self) -> Tensor:
        """Return ``1 / sigma``, 0 where that is not finite."""
        variances = [layer.batch_norm.running_var for layer in self._layers]
        sums = torch.cat([each.detach() for each in variances if each is not None]).double()
        reciprocal = (sums + self.spread([layer.batch_norm.eps for layer in self._layers])).rsqrt()
        return torch.where(reciprocal.isfinite(), reciprocal, 0.0)

    def scales(self) -> Tensor:
        """Return ``|gamma| / sigma`` of each filter, 0 where that is not finite."""
        scales = torch.cat(self.gammas()).double().abs() * self.reciprocal_sigma()
        return torch.where(scales.isfinite(), scales, 0.0)

    def lengths(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm of each filter, differentiable."""
        return torch.cat([torch.linalg.vector_norm(weight.double().flatten(1), dim=1) for weight in weights])

    def norms(self, weights: Sequence[Tensor]) -> Tensor:
        """Return ``||k(G_n)||`` of each filter, float64 ``(filters, groups)``, of as many groups as any layer has."""
        filters = [layer.filters for layer in self._layers]
        if self._first.inner.norm == "linf":
            return self._padded([each.norms(weight, True) for each, weight in zip(filters, weights, strict=True)])

        def of_all(*_: object) -> Tensor:
            rings = [ops.ring_norms(w, each.rings, each.count) for each, w in zip(filters, weights, strict=True)]
            return self._padded(rings)

        return group_norms_by(of_all, weights[0], [], self._groups, False)

    def values(self, norms: Tensor) -> Tensor:
        """Return ``Omega(k)`` of each filter."""
        return (norms * self._weights(norms.device)).sum(1)

    def pull_along(self, weights: Sequence[Tensor], scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficient of each filter in the gradient of the penalty, not positive, and the filters' lengths.

        ``Omega(k) / ||k||`` is pulled inwards by ``Omega``, which a prox handles, and outwards by ``1 / ||k||``, which
        remains.
        """
        norms = self.norms(weights)
        lengths = self._lengths(norms, weights)
        weighted = self._weights(norms.device, without_lengths=not self._first.squares_filters)
        of_direction = (norms * weighted).sum(1)
        pull = -self._slopes(self.values(norms), scales) * of_direction / lengths.square()
        return torch.where(pull.isfinite(), pull, 0.0), lengths

    def rotate(
        self,
        weights: Sequence[Tensor],
        scales: Tensor,
        size: float | Tensor,
        lengths: Tensor | None = None,
        metrics: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the prox of the penalty on each weight's direction, and the :meth:`values` of the results.

        Filters keep their lengths, with metrics those that are given; then :meth:`pull_along` must have been part of
        the gradient.
        """
        norms = self.norms(weights)
        values, lengths = self.values(norms), self._lengths(norms, weights) if lengths is None else lengths
        if metrics is not None and self._first.squares_filters:
            factors = size * self._strength() * scales.square()
        else:
            factors = size * self._slopes(values, scales)
        shrinks = factors > 0
        factors = torch.where(shrinks, factors, 0.0)[:, None]
        squared = None
        if metrics is not None and self._first.squares_filters:
            squared = self.split(factors.sqrt() * self._weights(factors.device))
            plain = self.split(torch.zeros_like(factors).expand(-1, self._groups))
        else:
            plain = self.split(factors * self._weights(factors.device, without_lengths=True))
        linf = self._first.inner.norm == "linf"
        calls = []
        for i, (layer, weight) in enumerate(zip(self._layers, weights, strict=True)):
            t, q = (None if of is None else of[i][:, : layer.filters.count].contiguous() for of in (plain, squared))
            assert t is not None
            calls.append(ProxCall(weight, layer.filters.rings, t, q, None if metrics is None else metrics[i], linf))
        shrunk = run_proxes(calls)
        norms = self.norms(shrunk)
        ratios = lengths / self._lengths(norms, shrunk)
        rotates = shrinks & (ratios <= torch.finfo(torch.float32).max)  # finite in the weights' dtypes, too
        results = []
        for rotated, ratio, each, weight in zip(self.split(rotates), self.split(ratios), shrunk, weights, strict=True):
            rescaled = each * column_of(ratio.to(compute_dtype(weight.dtype)), weight)
            results.append(torch.where(column_of(rotated, weight), rescaled.to(weight.dtype), weight))
        return results, torch.where(rotates, self.values(norms) * ratios, values)

    def shorten(self, values: Tensor, size: float | Tensor) -> Tensor:
        """Return the prox of the penalty on gamma, with the weights fixed, given their :meth:`values`."""
        gamma, strength = torch.cat(self.gammas()).double(), self._strength()
        slopes = values * self.reciprocal_sigma()
        if self._first.inner.power == 1:
            length = (gamma.abs() - size * strength * slopes).clamp(min=0)
        elif self._first.squares_filters:
            length = gamma.abs() / (1 + 2 * size * strength * slopes.square())
        else:
            size = size.expand_as(gamma) if isinstance(size, Tensor) else torch.full_like(gamma, size)
            roots = torch.where(size > 0, size.sqrt(), 1.0)
            q = torch.where(size > 0, roots * slopes * strength**0.5, 0.0)
            of_layers = zip(self.split(gamma.abs() / roots), self.split(q), strict=True)
            factor = torch.cat([factor_of_norms(n, each).expand_as(each) for n, each in of_layers])
            length = (gamma.abs() - roots * q * factor).clamp(min=0)
        return torch.where(length.isfinite(), torch.copysign(length, gamma), gamma)

    def _lengths(self, norms: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm of each filter, given the norms of its groups."""
        return norms[:, -1] if self._first.inner.norm == "l2" else self.lengths(weights)

    def _padded(self, of_layers: Sequence[Tensor]) -> Tensor:
        """Return numbers ``(filters, groups)`` of each layer as one tensor, with zeros where it has fewer groups."""
        missing = [self._groups - each.shape[1] for each in of_layers]
        return torch.cat([pad(each, (0, n)) if n else each for each, n in zip(of_layers, missing, strict=True)])

    def _weights(self, device: torch.device, without_lengths: bool = False) -> Tensor:
        """Return ``w_n`` of each group, ``(filters, groups)``.

        ``without_lengths``: with 0 for the Euclidean norm of a whole filter, which no direction changes.
        """
        leaves_out = without_lengths and self._first.inner.norm == "l2"
        of_layers = []
        for layer in self._layers:
            weights = layer.filters.factors_on(device, layer.inner.weighting)
            weights = weights[:-1] if leaves_out else weights
            of_layers.append(weights.expand(layer.batch_norm.num_features, -1))
        return self._padded(of_layers)

    def _strength(self) -> float | Tensor:
        return self.spread([layer.inner.strength for layer in self._layers])

    def _slopes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the derivative of the penalty for each filter's ``Omega(k)``, given as ``values``."""
        slopes = self._strength() * scales
        if self._first.inner.power == 1:
            return slopes
        values = scales * values
        if not self._first.squares_filters:
            values = torch.cat([each.sum().expand_as(each) for each in self.split(values)])
        return 2 * slopes * values


def column_of(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each filter, ``(C_out,)``, in a shape that broadcasts over the weight."""
    return numbers.view(-1, *[1] * (weight.dim() - 1))
