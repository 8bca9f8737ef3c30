"""A penalty on all filters of a model by what they cost, whose strength a controller adjusts."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_ext.penalties.folded import column_of
from loco_ext.penalties.group import KernelPenalty, RingPenalty
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.sparsity.budget.size_problem import SizeProblem, Sizes
from loco_ext.sparsity.budget.structure import PrunableLayer, Structure
from loco_ext.sparsity.compaction.disjoint_set import Integers

_BISECTIONS = 20
_GROWTH = 2.0  # factor of the strength if more is left than it should have left


class CostPenalty:
    """Penalties on the filters of all layers, in proportion to the cost of a filter of the layer.

    They are :class:`RingPenalty`, or :class:`KernelPenalty` where filters have one size. Where a batch norm scales a
    layer's output, they act on ``gamma k / ||k||`` instead of the filter ``k``, whose length the norm cancels: the prox
    gives gamma its length and ``k`` its direction.

    Args:
        structure: the layers; those whose filters must stay, and those whose weight or whose norm's weight the
            optimizer does not have, are left alone.
        problem: what the filters cost; their importance does not matter.
        optimizer: its learning rates times the strength are the sizes of the steps.
    """

    def __init__(self, structure: Structure, problem: SizeProblem, optimizer: torch.optim.Optimizer) -> None:
        self.strength, self.wanted = 0.0, 1.0
        self._optimizer, owned = optimizer, _learning_rates(optimizer)
        costs = dict(zip((layer.name for layer in structure.layers), problem.filter_costs(), strict=True))
        may_go = [layer for layer in structure.layers if not layer.kept and not structure.fixed[layer.writes].all()]
        self._factors = {layer.name: costs[layer.name] for layer in may_go if id(_length(layer)) in owned}
        mean = sum(self._factors.values()) / max(1, len(self._factors))
        self._factors = {name: cost / mean for name, cost in self._factors.items()}
        self._layers, self._problem = structure.layers, problem

    @torch.no_grad()
    def shrink(self) -> None:
        """Take a step of the penalty, in place."""
        for layer, step in self._steps(self.strength):
            if step > 0:
                _replace(layer, _prox(layer, step))

    @torch.no_grad()
    def adjust(self, wanted: float, steps: int) -> None:
        """Change the strength so that a share of the cost is left after some steps.

        If more is left now, it becomes at least the strength that would reach the share if no gradient held the
        filters, and doubles where filters were held before. Else it falls, in proportion to the share that is left.
        """
        left = self._left(0.0)
        if left <= wanted:
            self.strength *= left / wanted
        else:
            low, high = 0.0, self._most()
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                low, high = (low, middle) if self._left(middle) <= wanted else (middle, high)
            self.strength = max(high / steps, self.strength * (_GROWTH if left > self.wanted else 1.0))
        self.wanted = wanted

    def state(self) -> tuple[float, float]:
        """Return the state that :meth:`load` takes."""
        return self.strength, self.wanted

    def check(self, state: Sequence[Any]) -> None:
        """Raise ValueError unless :meth:`load` takes the state."""
        numbers = len(state) == 2 and all(isinstance(each, float | int) for each in state)
        if not numbers or not all(0 <= each < math.inf for each in state):
            raise ValueError(f"state: expected two finite numbers of at least 0 for penalty, got {state!r}")

    def load(self, state: tuple[float, float]) -> None:
        """Continue from a state."""
        self.strength, self.wanted = state

    def _steps(self, strength: float) -> list[tuple[PrunableLayer, float]]:
        """Return all layers, and the sizes of their steps; nothing that requires no gradient is changed."""
        rates = _learning_rates(self._optimizer)
        return [
            (layer, strength * self._factors[layer.name] * float(rates[id(_length(layer))]))
            if layer.name in self._factors and _trains(layer)
            else (layer, 0.0)
            for layer in self._layers
        ]

    def _left(self, strength: float) -> float:
        """Return the share of the cost that is left after one step of a strength."""
        sizes: Sizes = [_sizes(layer, _prox(layer, step)) for layer, step in self._steps(strength)]
        return self._problem.cost(sizes) / self._problem.whole_cost

    def _most(self) -> float:
        """Return the strength of a step that leaves nothing."""
        steps = [(layer, step) for layer, step in self._steps(1.0) if step > 0]
        return max((_lengths(_filters(layer)).max().item() / step for layer, step in steps), default=0.0)


def _learning_rates(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the learning rate of each parameter, by its id."""
    return {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def _scale(layer: PrunableLayer) -> Tensor | None:
    """Return the weight of the norm behind a layer; None if there is none, or one for each call."""
    return layer.norms[0].weight if len(layer.norms) == 1 else None


def _length(layer: PrunableLayer) -> Tensor:
    """Return the parameter that has the lengths of the filters."""
    scale = _scale(layer)
    return layer.module.weight if scale is None else scale


def _trains(layer: PrunableLayer) -> bool:
    """Return whether all parameters train that a step of the penalty may change."""
    return layer.module.weight.requires_grad and _length(layer).requires_grad


def _lengths(filters: Tensor) -> Tensor:
    """Return the Euclidean norms of filters, ``(C_out,)``, in the compute dtype."""
    return torch.linalg.vector_norm(filters.flatten(1), dim=1, dtype=compute_dtype(filters.dtype))


def _filters(layer: PrunableLayer) -> Tensor:
    """Return the filters that are penalised, ``(C_out, C_in/groups, *kernel_size)``, of one tap for a linear layer.

    They are in the compute dtype: rounded to half precision, they would hide small steps from the norm's weight.
    """
    weight, scale = layer.weight.detach(), _scale(layer)
    weight = weight.to(compute_dtype(weight.dtype))
    weight = weight if weight.dim() > 2 else weight[..., None]
    if scale is None:
        return weight
    lengths = _lengths(weight)
    return weight * column_of(scale.detach().abs() / torch.where(lengths == 0, 1.0, lengths), weight)


def _prox(layer: PrunableLayer, step: float) -> Tensor:
    """Return a layer's filters after a step of its penalty, shaped as by :func:`_filters`."""
    penalty = RingPenalty(1.0) if len(layer.taps) > 2 else KernelPenalty(1.0)
    filters = _filters(layer)
    return penalty.prox(filters, step) if step > 0 else filters


def _replace(layer: PrunableLayer, filters: Tensor) -> None:
    """Give a layer these filters."""
    weight, scale = layer.weight.detach(), _scale(layer)
    if scale is None:
        weight.copy_(filters.view_as(weight))
        return
    lengths = _lengths(filters)
    scale.copy_(torch.copysign(lengths, scale.detach()))
    if len(layer.taps) > 2:
        factors = column_of(_lengths(weight) / lengths, weight)
        weight.copy_(torch.where(factors.isfinite(), filters * factors, weight))


def _sizes(layer: PrunableLayer, filters: Tensor) -> Integers:
    """Return the choice that each filter's zeros make: without its outer rings of zeros."""
    left = (filters.flatten(2) != 0).any(1).cpu().numpy()  # [C_out, taps]
    return np.where(left, layer.rings, len(layer.taps) - 1).min(1)
