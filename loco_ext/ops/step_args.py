"""The arguments of one optimizer step, for every rule and backend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from loco_ext.ops.penalties import OfStep, StepPenalty

_ROUNDING = 1e-12  # a schedule that ends at 0 may end as far below it


class Rule(NamedTuple):
    """An update rule: how the operators know it, and the names of what it takes."""

    id: int  # RuleId in csrc/optim_step/rules.h
    columns: tuple[str, ...]  # of hyper
    states: tuple[str, ...]  # of a parameter, as an optimizer's state names them, in order
    optional: str  # the option without which there is no last state
    counts_steps: bool

    def are_valid(self, row: Sequence[float]) -> bool:
        """Return whether these are values of the columns that need no further check; schedulers may round below 0."""
        valid = len(row) == len(self.columns) and all([-_ROUNDING < number < math.inf for number in row])
        return valid and not (self.counts_steps and (row[2] >= 1 or row[3] >= 1))  # Adam's betas


SGD = Rule(0, ("lr", "weight_decay", "momentum", "dampening"), ("momentum_buffer",), "momentum", False)
ADAM = Rule(
    1, ("lr", "weight_decay", "beta1", "beta2", "eps"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "amsgrad", True
)


class Flags(NamedTuple):
    """Options that apply to all tensors of a step, in the order that the operators take them."""

    maximize: bool = False
    l1: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    decoupled: bool = False


@dataclass(slots=True, kw_only=True)
class StepArgs:
    """The arguments of a step; :mod:`loco_ext.ops.optim_step` describes them.

    Lists of tensors and indices have one entry per parameter unless stated otherwise.
    """

    rule: Rule
    flags: Flags
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]]  # one list for each of the first names of rule.states
    steps: list[Tensor] = field(default_factory=list)  # empty unless rule.counts_steps
    hyper: Tensor  # float64, [groups, columns]
    first: list[int] = field(default_factory=list)  # empty: all 0
    group_index: list[int] = field(default_factory=list)  # empty: all 0
    lrs: list[Tensor] = field(default_factory=list)  # any number
    lr_index: list[int] = field(default_factory=list)  # [groups]; empty: all -1
    maps: list[Tensor] = field(default_factory=list)  # any number
    map_index: list[int] = field(default_factory=list)  # empty: all -1
    penalties: list[OfStep | None] = field(default_factory=list)  # empty: all None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    ordinals: list[int] = field(default_factory=list)  # read only with a seed
    seed: int | None = None
    rounding_step: int = 0
    shapes: Tensor | None = None  # expected of params: dimensions and sizes of each, float64; None: not checked

    def row_of(self, index: int) -> list[Any]:
        """Return a parameter's row of ``hyper``, with its learning rate in place: a number, or a scalar tensor."""
        group = self.group_index[index] if self.group_index else 0
        row = self.hyper[group].tolist()
        if self.lr_index and (which := self.lr_index[group]) >= 0:
            row[0] = self.lrs[which].reshape(())
        return row

    def map_of(self, index: int) -> Tensor | None:
        """Return the decay map of a parameter, None for uniform decay."""
        which = self.map_index[index] if self.map_index else -1
        return None if which < 0 else self.maps[which]

    def states_by_name(self) -> dict[str, list[Tensor]]:
        """Return the lists of states, and the step counts as "step"."""
        states = dict(zip(self.rule.states, self.states, strict=False))
        return {**states, "step": self.steps} if self.rule.counts_steps else states

    def operands(self) -> dict[str, Sequence[Tensor]]:
        """Return the lists of tensors of the parameters' shapes, by name."""
        states = {f"{name}s": tensors for name, tensors in zip(self.rule.states, self.states, strict=False)}
        return {"params": self.params, "grads": self.grads, **states}

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
            *([*tables.values()], index, self.grad_scale, self.found_inf, self.ordinals),
            *(self.seed, self.rounding_step, self.shapes),
        )
