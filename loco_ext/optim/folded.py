"""FoldedPenalty in the optimizers: what they add to a step of convolutions' weights and of their norms' weights.

:class:`loco_ext.sparsity.FoldedPenalty` states what is minimised. Its pulls on the norm's weight and on the direction
of the filters are proxes after the step, each with the step size or metric of its parameter. The second pull keeps the
filters' norms by scaling them back. In Adam's metric that alone would lead to another minimum. There the part of the
pull that points outwards along the filter, which is smooth, joins the gradient instead, so that nothing is left to
scale back at the minimum.

Layers of one kind share torch's calls.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from loco_ext.optim.options import Group
from loco_ext.optim.plan import StepPlan
from loco_ext.penalties.folded import FoldedLayer, FoldedLayers, column_of
from loco_ext.reference.dtypes import compute_dtype

MOST_IN_A_BATCH = 2**22  # some buffers of the weights' size are held for all of a batch

_ProxSize = tuple[Any, Tensor | None]


class _Optimizer(Protocol):
    param_groups: list[Group]
    state: Any

    def _prox_sizes(self, groups: Sequence[Group], params: Sequence[Tensor]) -> list[_ProxSize]: ...


@contextmanager
def folded_steps(optimizer: _Optimizer, plans: list[StepPlan]) -> Iterator[None]:
    """Return a context in which the optimizer steps without these penalties; they are applied at its end.

    Raises:
        ValueError: a norm's weight is not stepped by this optimizer. Nothing has changed then.
        NotImplementedError: parameters are sharded, or rounding is stochastic.
    """
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    entries = [_entry(group_of, weight, layer) for plan in plans for weight, layer in plan.folded]
    steps = [_FoldedStep(optimizer, batch) for batch in _batches(entries)]
    gradients = [(entry.weight, entry.weight.grad) for entry in entries]
    found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    try:
        for step in steps:
            step.begin(scale)
        yield
    finally:
        changed = [(weight, grad) for weight, grad in gradients if grad is not weight.grad]
        for weight, grad in changed:
            weight.grad = grad
    if scale is not None:  # the fused step divides gradients by their scale, in memory too
        for _, grad in changed:
            assert grad is not None
            grad.copy_(_unless(found_inf, grad / scale.to(grad), grad))
    for step in steps:
        step.end(found_inf)


@dataclass
class _Entry:
    """A convolution's weight and its norm's weight in one step."""

    weight: Tensor
    layer: FoldedLayer
    group: Group
    gamma_group: Group

    @property
    def gamma(self) -> Tensor:
        return self.layer.batch_norm.weight


def _entry(group_of: dict[int, Group], weight: Tensor, layer: FoldedLayer) -> _Entry:
    """Return the entry of a weight; raise as :func:`folded_steps` does."""
    gamma: Tensor = layer.batch_norm.weight
    if id(gamma) not in group_of:
        raise ValueError(
            "penalty: expected the weight of the batch norm of a FoldedPenalty among the parameters of the same "
            f"optimizer, as it shrinks with the filters, got none of the {len(group_of)}; without it use "
            f"{type(layer.inner).__name__} alone"
        )
    if weight.grad is not None and not gamma.requires_grad:
        raise ValueError(
            "penalty: expected a batch norm whose weight requires a gradient, as it shrinks with the filters of a "
            f"FoldedPenalty, got a frozen one; without it use {type(layer.inner).__name__} alone"
        )
    for param in (weight, gamma):
        if type(param) not in (Tensor, Parameter):
            raise NotImplementedError(
                "penalty: expected no sharding, ordinary parameters, for a FoldedPenalty and its batch norm, got "
                f"{type(param).__name__}"
            )
        if group_of[id(param)]["stochastic_rounding"] is not None and param.dtype == torch.bfloat16:
            raise NotImplementedError(
                "stochastic_rounding: expected None for bfloat16 parameters with a FoldedPenalty, of which a part "
                "follows the step's kernels"
            )
    return _Entry(weight, layer, group_of[id(weight)], group_of[id(gamma)])


def _batches(entries: Sequence[_Entry]) -> Iterable[list[_Entry]]:
    """Divide entries into batches of one kind and device, with about MOST_IN_A_BATCH elements of weights at most.

    A norm that follows several convolutions is in several batches, each of which shrinks it.
    """
    batches: dict[object, list[_Entry]] = {}
    uses: Counter[int] = Counter()
    elements = 0
    for entry in entries:
        key = entry.weight.device, entry.layer.kind, uses[id(entry.gamma)], elements // MOST_IN_A_BATCH
        batches.setdefault(key, []).append(entry)
        uses[id(entry.gamma)] += 1
        elements += entry.weight.numel()
    return batches.values()


class _FoldedStep:
    """One step of a batch of layers, of one kind and on one device."""

    def __init__(self, optimizer: _Optimizer, entries: list[_Entry]) -> None:
        self.optimizer, self.entries = optimizer, entries
        # The step's end shrinks the directions of these layers' filters.
        self.rotated = [e for e in entries if e.weight.grad is not None and e.layer.depends_on_direction]

    def begin(self, scale: Tensor | None) -> None:
        """Read what the penalties depend on before the step. ``scale``: the factor that gradients carry, or None."""
        if not self.rotated:
            return
        self.layers = FoldedLayers([entry.layer for entry in self.rotated])
        self.scales = self.layers.scales()
        if "betas" in self.rotated[0].group:
            self._pull(scale)

    def _pull(self, scale: Tensor | None) -> None:
        """Add the pull along the filters to the gradients."""
        weights = [entry.weight.detach() for entry in self.rotated]
        pull, self.lengths = self.layers.pull_along(weights, self.scales)
        pull = pull if scale is None else pull * scale.to(pull)
        for entry, weight, of_layer in zip(self.rotated, weights, self.layers.split(pull), strict=True):
            column = column_of(of_layer.to(compute_dtype(weight.dtype)), weight)
            grad = entry.weight.grad
            assert grad is not None
            product = (column * weight).to(grad.dtype)
            entry.weight.grad = grad - product if entry.group["maximize"] else grad + product

    def end(self, found_inf: Tensor | None) -> None:
        """Shrink both factors by the step sizes or metrics that the step has used."""
        if found_inf is not None and not self._have_states():
            return  # the step was skipped: not even states were created
        values: dict[int, Tensor] = {}
        if self.rotated:
            values = dict(zip(map(id, self.rotated), self.layers.split(self._rotate(found_inf)), strict=True))
        if shortened := [entry for entry in self.entries if entry.gamma.grad is not None]:
            self._shorten(shortened, values, found_inf)

    def _rotate(self, found_inf: Tensor | None) -> Tensor:
        """Shrink the filters' directions; return their :meth:`FoldedLayers.values`."""
        params = [entry.weight for entry in self.rotated]
        wide = [param.detach().to(compute_dtype(param.dtype)) for param in params]
        prox_sizes = self.optimizer._prox_sizes([entry.group for entry in self.rotated], params)
        sizes, metrics = zip(*prox_sizes, strict=True)
        size = self.layers.spread(sizes)
        if metrics[0] is None:
            results, values = self.layers.rotate(wide, self.scales, size)
        else:
            results, values = self.layers.rotate(wide, self.scales, size, self.lengths, metrics)
        for param, result in zip(params, results, strict=True):
            param.detach().copy_(_unless(found_inf, result, param.detach()))
        return values

    def _shorten(self, entries: list[_Entry], values: dict[int, Tensor], found_inf: Tensor | None) -> None:
        """Shrink the norms' weights, given :meth:`FoldedLayers.values` by the ids of entries where they are known."""
        if others := [entry for entry in entries if id(entry) not in values]:
            layers = FoldedLayers([entry.layer for entry in others])
            found = layers.values(layers.norms([entry.weight.detach() for entry in others]))
            values |= zip(map(id, others), layers.split(found), strict=True)
        layers = FoldedLayers([entry.layer for entry in entries])
        gammas = [entry.gamma for entry in entries]
        prox_sizes = self.optimizer._prox_sizes([entry.gamma_group for entry in entries], gammas)
        sizes, metrics = zip(*prox_sizes, strict=True)
        size = layers.spread(sizes) if metrics[0] is None else layers.spread(sizes) / torch.cat(metrics).double()
        shortened = layers.shorten(torch.cat([values[id(entry)] for entry in entries]), size)
        shortened = _unless(found_inf, shortened, torch.cat(layers.gammas()))
        torch._foreach_copy_(layers.gammas(), list(layers.split(shortened)))

    def _have_states(self) -> bool:
        stepped = [(e.group, e.weight) for e in self.entries] + [(e.gamma_group, e.gamma) for e in self.entries]
        state = self.optimizer.state
        return all("betas" not in group or p.grad is None or state.get(p) for group, p in stepped)


def _unless(found_inf: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new``, or ``old`` in its dtype if GradScaler has found infinite gradients."""
    return new if found_inf is None else torch.where(found_inf.to(new.device) == 0, new, old.to(new.dtype))
