"""Losses that widen the linear regions around training samples."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from loco_ext import compiler
from loco_ext.argument_checks import check_count, check_number
from loco_ext.regularizers.evaluation import constant
from loco_ext.regularizers.frozen import Frozen
from loco_ext.regularizers.gradient_norms import choose_probes, directions, random_directions
from loco_ext.regularizers.ieee import ieee_arithmetic
from loco_ext.regularizers.linear_regions import MEMORY_LIMIT, checked_network, dual_exponent, nearest_bends

_MOST_EXACT = 1024  # directions up to which "auto" computes exactly


class ROLL:
    """Loss that rewards large pre-activations with small gradients, and so wide linear regions.

    It is ``strength`` times the mean over the samples of the mean over units of ``||dz/dx||^2 + hinge * max(0, 1 -
    |z|)``, with the bends ``z`` of :func:`region_radius`. Add it to the training loss, so that one backward pass
    computes both gradients. It runs the model once more, without autocast, and outside of graphs of torch.compile.

    Args:
        strength: factor of the loss, lambda in the paper.
        hinge: factor of the margin's term, C in the paper.
        top_percent: the mean is over this percentage of each sample's units, those with the largest terms, at least
            one; or ``"max"`` for only one. Above 0, up to 100 for all.
        probes: ``"exact"`` for exact norms, the number of random Rademacher probes for unbiased estimates of the
            squared norms, or ``"auto"``: exact where up to 1024 directions suffice or units are selected, otherwise one
            random probe. Estimates cannot select units. With convolutions, each direction takes about as long as one
            to three training steps.
        generator: source of the random probes; None for torch's default.
        memory_limit: bytes that the directions may use, approximately. If they do not all fit, they are computed some
            at a time, and again in the backward pass. A single one needs about as much as a training step.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; random probes with a selection.

    Source:
        Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019), eq. 9.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> roll = regularizers.ROLL(strength=0.1, hinge=0.25, top_percent=50)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> loss = torch.nn.functional.cross_entropy(model(x), y) + roll(model, x)
        >>> loss.backward()
    """

    def __init__(
        self,
        strength: float,
        hinge: float,
        top_percent: float | Literal["max"] = 100,
        *,
        probes: int | Literal["auto", "exact"] = "auto",
        generator: torch.Generator | None = None,
        memory_limit: int = 2**30,
    ) -> None:
        self.strength, self.hinge = check_number("strength", strength), check_number("hinge", hinge)
        self.top_percent = _check_percent(top_percent)
        is_name = isinstance(probes, str) and probes in ("auto", "exact")
        self.probes = probes if is_name else check_count("probes", probes, 1)
        if top_percent != 100 and isinstance(self.probes, int):
            raise ValueError(f"probes: expected 'exact' to select {top_percent} percent of the units, got {probes}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
        self.generator = generator
        self.memory_limit = check_count("memory_limit", memory_limit, 1)

    @compiler.disable
    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the loss, a scalar in the dtype of ``x``.

        Args:
            model, x: as for :func:`region_radius`. ``x`` gets no gradient. Modules with batch statistics or dropout
                have to be in evaluation mode.

        Raises:
            TypeError, ValueError: as for :func:`region_radius`.
        """
        network, x = checked_network(model, x), constant(x)
        if not len(x):
            return x.new_zeros(())
        with ieee_arithmetic(x.device):
            frozen = Frozen(network, x)
            network.check_result_once(x[:1])
            terms = self._terms(frozen, self._squared_norms(frozen, x))
        if not terms.numel():
            return x.new_zeros(())
        return self.strength * terms.mean()

    def _squared_norms(self, frozen: Frozen, x: Tensor) -> dict[fx.Node, Tensor]:
        """Return the squared norms of all gradients, or estimates, ``[N or 1, ...]`` by node."""
        probes = None if isinstance(self.probes, int) else choose_probes(frozen, 2)
        if probes is not None and self.probes == "auto" and self.top_percent == 100 and probes.count > _MOST_EXACT:
            probes = None
        count = self.probes if isinstance(self.probes, int) else 1
        chunk = max(1, self.memory_limit // max(1, frozen.batch * frozen.elements * x.element_size()))
        if probes is None:
            start, total = frozen.network.input, count
            each = random_directions(x, count, self.generator).split(chunk)
        else:
            start, total, count = probes.node, probes.count, 1
            each = directions(probes, frozen, chunk, x)

        def squares(tangents: Tensor) -> dict[fx.Node, Tensor]:
            found: dict[fx.Node, Tensor] = {}
            frozen.tangents({start: tangents}, lambda node, t: found.update({node: t.square().sum(0) / count}))
            return found

        sums: dict[fx.Node, Tensor] = {}
        for tangents in each:
            part = squares(tangents) if total <= chunk else _recomputed(squares, tangents)
            for node, found in part.items():
                sums[node] = sums[node] + found if node in sums else found
        return sums

    def _terms(self, frozen: Frozen, squares: dict[fx.Node, Tensor]) -> Tensor:
        """Return the terms that the mean is over, ``[N, number of units]``."""
        parts = []
        for node, bend in frozen.bends.items():
            z, norms = bend.distances, squares[node].expand(bend.distances.shape)
            if bend.exists is not None:
                z, norms = (each[bend.exists].view(frozen.batch, -1) for each in (z, norms))
            parts.append((norms + self.hinge * (1 - z.abs()).relu()).flatten(1))
        if not parts:
            return torch.empty(0)
        terms = torch.cat(parts, 1)
        if self.top_percent == 100:
            return terms
        count = 1 if self.top_percent == "max" else max(1, round(terms.shape[1] * self.top_percent / 100))
        return terms.topk(count, dim=1).values


def _recomputed(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return the function's result, whose intermediate results are computed again in the backward pass."""

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), ieee_arithmetic(x.device)

    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _check_percent(value: Any) -> float | Literal["max"]:
    if value == "max":
        return "max"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"top_percent: expected a number or 'max', got {value!r}")
    if not 0 < float(value) <= 100:
        raise ValueError(f"top_percent: expected more than 0 and at most 100, or 'max', got {value}")
    return float(value)


class MarginLoss:
    """Loss that rewards large radii themselves: minus ``strength`` times the mean radius of the linear regions.

    Samples whose radius is infinite do not count. The radius is that of :func:`region_radius`. Its gradient with
    respect to the parameters is that of the nearest unit's ``|z| / ||dz/dx||_q``, so it moves only one unit for each
    sample. :class:`ROLL` is the relaxation that moves more.

    Args:
        strength: factor of the loss.
        p: exponent of the norm, at least 1, or ``float("inf")``.
        memory_limit: bytes that the search for the nearest units may use, approximately. The gradient takes about as
            much as a training step on top.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Source:
        Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019), section 4.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(16, 4)
        >>> loss = regularizers.MarginLoss(strength=1.0)(model, x)
        >>> torch.allclose(loss, -regularizers.region_radius(model, x).mean())
        True
    """

    def __init__(self, strength: float, p: float = 2, *, memory_limit: int = MEMORY_LIMIT) -> None:
        self.strength, self._q = check_number("strength", strength), dual_exponent(p)
        self.p = float(p)
        self.memory_limit = check_count("memory_limit", memory_limit, 1)

    @compiler.disable
    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the loss, a scalar in the dtype of ``x``; arguments and errors are those of :class:`ROLL`."""
        with torch.inference_mode(False):  # the loss takes gradients itself, whatever the caller has set
            loss = self._loss(model, x)
        return loss if torch.is_grad_enabled() else loss.detach()

    def _loss(self, model: nn.Module, x: Tensor) -> Tensor:
        network, x = checked_network(model, x), x.detach()
        found = nearest_bends(network, x, self._q, self.memory_limit)
        limited = found.radius.isfinite() | found.radius.isnan()
        if not limited.any():
            return x.new_zeros(())
        x, operation, index = x[limited].requires_grad_(), found.operation[limited], found.index[limited]
        with ieee_arithmetic(x.device):
            frozen = Frozen(network, x)
            z = _select(frozen, {node: bend.distances for node, bend in frozen.bends.items()}, operation, index)
            (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
            step = dual_step(gradient.flatten(1), self._q).view(1, *x.shape)
            # <gradient, step> is the norm, and its gradient does not depend on how the step changes.
            along: dict[fx.Node, Tensor] = {}
            frozen.tangents({network.input: step}, lambda node, tangents: along.update({node: tangents[0]}))
            norm = _select(frozen, along, operation, index)
        return -self.strength * (z.abs() / norm).mean()


def _select(frozen: Frozen, tensors: dict[fx.Node, Tensor], operation: Tensor, index: Tensor) -> Tensor:
    """Return one number for each sample, of the operation and at the index that are its own."""
    result = torch.zeros(frozen.batch, dtype=next(iter(tensors.values())).dtype, device=index.device)
    for number, bending in enumerate(frozen.network.bending_operations):
        (samples,) = (operation == number).nonzero(as_tuple=True)
        if len(samples):
            result = result.index_put((samples,), tensors[bending.node].flatten(1)[samples, index[samples]])
    return result


def dual_step(gradient: Tensor, q: float) -> Tensor:
    """Return steps ``[N, D]``, of norm 1 in the dual norm, whose products with the gradients are their q-norms."""
    sizes = gradient.abs() / gradient.abs().amax(1, keepdim=True)
    if q == math.inf:
        return torch.zeros_like(gradient).scatter(1, sizes.argmax(1, keepdim=True), 1) * gradient.sign()
    powers = sizes ** (q - 1)
    return gradient.sign() * powers / (powers * sizes).sum(1, keepdim=True) ** (1 - 1 / q)
