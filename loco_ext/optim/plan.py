"""Gathering the parameters of a step: plans of groups, selections by gradient and device, batches of operator calls."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter

from loco_ext.geometry.attached_pattern import attached_pattern, pattern_of
from loco_ext.ops import backend
from loco_ext.ops.optim_step import run_step
from loco_ext.ops.penalties import LayerPenalty, OfStep
from loco_ext.ops.step_args import StepArgs
from loco_ext.ops.streams import is_capturing
from loco_ext.optim.locality import decay_maps
from loco_ext.optim.options import Group
from loco_ext.optim.penalty import step_penalties
from loco_ext.optim.sharding import local_tensors
from loco_ext.penalties.folded import FoldedLayer


def same_objects(a: Collection[object], b: Collection[object]) -> bool:
    """Return whether both hold the very same objects in the same order."""
    return len(a) == len(b) and all(map(is_, a, b))


# The options that a group's checks, maps, penalties and flags depend on, beside momentum.
_OPTIONS = (
    *("locality", "penalty", "norm", "state_dtype", "stochastic_rounding", "foreach", "differentiable", "fused"),
    *("nesterov", "maximize", "amsgrad", "decoupled_weight_decay"),
)


def _options_of(group: Group) -> list[object]:
    """Return the values of ``_OPTIONS``; lists are copied, as they can be changed."""
    options = [group.get(key) for key in _OPTIONS]
    return [list(option) if isinstance(option, list) else option for option in options]


def _momentum_of(group: Group) -> Any:
    """Return a group's momentum, or 0.5 for all numbers between 0 and 1: schedules that change it keep the plan."""
    momentum = group.get("momentum")
    return 0.5 if isinstance(momentum, float) and 0 < momentum < 1 else momentum


def _shapes(group: Group) -> list[torch.Size]:
    """Return the parameters' shapes if maps or penalties may depend on them, else an empty list."""
    if group["locality"] is None and group["penalty"] is None:
        return []
    return [p.shape for p in group["params"]]


def _fake_mode() -> Any:
    """Return the active FakeTensorMode, under which every new tensor is a fake one, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


@dataclass
class StepPlan:
    """The decay maps and penalties of a group's parameters, cached while the group stays as it is."""

    params: list[Tensor]
    options: list[object]
    momentum: Any
    shapes: list[torch.Size]  # empty if maps and penalties cannot depend on them
    maps: list[Tensor]  # without duplicates
    map_index: list[int]  # for each parameter, the index of its map; -1: uniform decay
    penalties: list[OfStep | None]  # for each parameter, without FoldedPenalty; empty if no parameter has one
    folded: list[tuple[Tensor, FoldedLayer]]  # the parameters with a FoldedPenalty
    plain: bool  # no parameter is of a tensor subclass such as DTensor
    fake_mode: object

    def __post_init__(self) -> None:
        # For weights with as many dimensions as those of locally connected layers, what is attached and the pattern.
        self.patterns = [
            (p, attached_pattern(p), pattern_of(p))
            for p, shape in zip(self.params, self.shapes, strict=False)
            if len(shape) == 4
        ]
        self.preparations = [penalty.prepare for penalty in self.penalties if isinstance(penalty, LayerPenalty)]

    def fits(self, group: Group) -> bool:
        """Return whether the plan is still valid: nothing that it was made from has changed."""
        return self.fits_but_for_shapes(group) and _shapes(group) == self.shapes

    def fits_but_for_shapes(self, group: Group) -> bool:
        """Return whether the plan is still valid if the parameters' shapes are those that it was made from."""
        same = self.fake_mode is _fake_mode() and [group.get(key) for key in _OPTIONS] == self.options
        same = same and _momentum_of(group) == self.momentum and same_objects(group["params"], self.params)
        # A plan made under a transform from what is attached to the tensor that the transform was given fits no group.
        return same and all(
            [
                attached_pattern(p) is shared and (None if shared is None else shared.pattern) is pattern
                for p, shared, pattern in self.patterns
            ]
        )

    def map_of(self, index: int) -> Tensor | None:
        """Return the decay map of a parameter, None for uniform decay."""
        return self.maps[self.map_index[index]] if self.map_index[index] >= 0 else None


@torch.inference_mode(False)  # the maps are also used outside inference mode
def make_plan(group: Group) -> StepPlan:
    """Check the group's locality and penalty, and return its plan with the decay maps."""
    params, locality, penalty = group["params"], group["locality"], group["penalty"]
    fake_mode, momentum = _fake_mode(), _momentum_of(group)
    with unset_fake_temporarily():
        maps = decay_maps(params, locality)
    unique = list({id(m): m for m in maps if m is not None}.values())
    places = {id(m): i for i, m in enumerate(unique)}
    if fake_mode is not None:
        unique = [fake_mode.from_tensor(decay_map) for decay_map in unique]
    return StepPlan(
        list(params),
        _options_of(group),
        momentum.item() if isinstance(momentum, Tensor | np.ndarray) else momentum,  # which can be changed in place
        _shapes(group),
        unique,
        [places.get(id(m), -1) for m in maps],
        *step_penalties(params, penalty),
        all(type(p) in (Tensor, Parameter) for p in params),
        fake_mode,
    )


def resolve_negated_grads(params: list[Tensor]) -> None:
    """Materialise lazily negated gradients: operators on mutable lists do not accept them."""
    grads = [p.grad for p in params]
    if any([g is not None and g.is_neg() for g in grads]):
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.resolve_neg()


def select(plan: StepPlan) -> dict[str, list[int]]:
    """Return the indices of the group's parameters that have gradients, by device."""
    selections: dict[str, list[int]] = {}
    for index, param in enumerate(plan.params):
        if param.grad is not None:
            selections.setdefault("cpu" if param.is_cpu else str(param.device), []).append(index)
    return selections


_NO_ROWS = torch.empty(0, device="cpu")


@dataclass(kw_only=True)
class Batch(StepArgs):
    """The arguments of one operator call, collected group by group."""

    hyper: Tensor = _NO_ROWS  # until the groups are known
    reference: bool  # whether the reference makes the step
    groups: list[int] = field(default_factory=list)  # for each row of hyper, the index of the optimizer's group
    # (parameter, key, tensor) of the states created for this step; stored once the operator has returned.
    created: list[tuple[Tensor, str, Tensor]] = field(default_factory=list)
    plain: bool = True

    def add(self, plan: StepPlan, selected: list[int], group: int, ordinal: int) -> None:
        """Add the selected parameters of a group, given by its index and the ordinal of its first parameter."""
        count, before, base = len(selected), len(self.params), len(self.maps)
        self.plain &= plan.plain
        map_index = [plan.map_index[i] + base if plan.map_index[i] >= 0 else -1 for i in selected] if plan.maps else []
        extend(self.map_index, -1, before, map_index, count)
        extend(self.group_index, 0, before, [len(self.groups)] * count if self.groups else [], count)
        extend(self.penalties, None, before, [plan.penalties[i] for i in selected] if plan.penalties else [], count)
        self.maps += plan.maps
        self.groups.append(group)
        self.params += [plan.params[i] for i in selected]
        self.grads += [grad for param in self.params[before:] if (grad := param.grad) is not None]
        if self.seed is not None:
            self.ordinals += [ordinal + i for i in selected]

    def launch(self) -> None:
        """Make the operator call."""
        with backend("reference") if self.reference else nullcontext():
            run_step(self)

    def check_capture(self) -> None:
        """Raise RuntimeError if a CUDA graph is being captured that would not replay this step as intended."""
        if self.created:
            check_not_captured(self.params[0])
        if self.seed is not None and is_capturing(self.params[0].device):
            raise RuntimeError(
                "stochastic_rounding: expected None while a CUDA graph is captured, as replays round alike"
            )

    def localize(self) -> None:
        """Replace DTensors by their local shards, which the step updates in place."""
        if not self.plain:
            maps = [self.map_of(i) for i in range(len(self.params))]
            penalties = self.penalties or [None] * len(self.params)
            local_tensors(self.params, self.grads, [*self.states, self.steps], maps, penalties)


def extend(values: list[Any], default: Any, before: int, more: Sequence[Any], count: int) -> None:
    """Extend a list, empty while all entries are the default, that stands for ``before`` entries.

    ``more``: the ``count`` further entries, or empty if they are the default.
    """
    if values or more:
        values += [default] * (before - len(values))
        values += more or [default] * count


def check_not_captured(param: Tensor) -> None:
    """Raise RuntimeError if states are about to be created or moved under capture: every replay would do so again."""
    if is_capturing(param.device):
        raise RuntimeError("step: expected the optimizer to have made a step before a CUDA graph captures one")
