"""The arguments of one optimizer step, for every rule and backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from loco_ext.ops.penalties import OfStep, StepPenalty


class Rule(NamedTuple):
    """An update rule: how the operators know it, and the names of what it takes."""

    id: int  # RuleId in csrc/optim_step/rules.h
    columns: tuple[str, ...]  # of hyper
    states: tuple[str, ...]  # the lists of states, in order
    counts_steps: bool


SGD = Rule(0, ("lr", "weight_decay", "momentum", "dampening"), ("momentum_buffers",), False)
ADAM = Rule(
    1,
    ("lr", "weight_decay", "beta1", "beta2", "eps"),
    ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    True,
)


class Flags(NamedTuple):
    """Options that apply to all tensors of a step, in the order that the operators take them."""

    maximize: bool = False
    l1: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    decoupled: bool = False


@dataclass(slots=True)
class StepArgs:
    """The arguments of a step; :mod:`loco_ext.ops.optim_step` describes them.

    Lists of tensors and indices have one entry per parameter unless stated otherwise.
    """

    rule: Rule
    flags: Flags
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # one list for each of the first names of rule.states
    steps: Sequence[Tensor]  # empty unless rule.counts_steps
    hyper: Tensor  # float64, [groups, columns]
    first: Sequence[int] = ()  # empty: all 0
    group_index: Sequence[int] = ()  # empty: all 0
    lrs: Sequence[Tensor] = ()  # any number
    lr_index: Sequence[int] = ()  # [groups]; empty: all -1
    maps: Sequence[Tensor] = ()  # any number
    map_index: Sequence[int] = ()  # empty: all -1
    penalties: Sequence[OfStep | None] = ()  # empty: all None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    ordinals: Sequence[int] = ()  # read only with a seed
    seed: int | None = None
    rounding_step: int = 0
    shapes: Tensor | None = None  # expected of params: dimensions and sizes of each, float64; None: not checked

    def group_of(self, index: int) -> int:
        """Return the row of ``hyper`` for a parameter."""
        return self.group_index[index] if self.group_index else 0

    def map_of(self, index: int) -> Tensor | None:
        """Return the decay map of a parameter, None for uniform decay."""
        which = self.map_index[index] if self.map_index else -1
        return None if which < 0 else self.maps[which]

    def lr_of(self, group: int) -> Tensor | None:
        """Return the tensor that replaces the learning rate in a row of ``hyper``, None if there is none."""
        which = self.lr_index[group] if self.lr_index else -1
        return None if which < 0 else self.lrs[which]

    def penalty_of(self, index: int) -> OfStep | None:
        """Return the penalty of a parameter."""
        return self.penalties[index] if self.penalties else None

    def operands(self) -> dict[str, Sequence[Tensor]]:
        """Return the lists of tensors of the parameters' shapes, by name."""
        return {"params": self.params, "grads": self.grads, **dict(zip(self.rule.states, self.states, strict=False))}

    def written(self) -> tuple[Sequence[Tensor], ...]:
        """Return the lists of tensors that the step changes."""
        return self.params, () if self.grad_scale is None else self.grads, *self.states, self.steps

    def for_operator(self) -> tuple[object, ...]:
        """Return the arguments of ``torch.ops.loco_ext.optim_step``, which takes penalties that are a StepPenalty."""
        tables = {id(p): p.table for p in self.penalties if isinstance(p, StepPenalty)}
        places = {key: i for i, key in enumerate(tables)}
        index = [places.get(id(p), -1) for p in self.penalties] if tables else ()
        states = self.states[0] if len(self.states) == 1 else [*chain.from_iterable(self.states)]
        return (
            *(self.rule.id, self.flags, self.params, self.grads, states, self.steps, self.first, self.hyper),
            *(self.group_index, self.lrs, self.lr_index, self.maps, self.map_index),
            *([*tables.values()], index),
            *(self.grad_scale, self.found_inf, self.ordinals, self.seed, self.rounding_step, self.shapes),
        )
