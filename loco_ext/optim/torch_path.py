"""Steps of torch's own optimizer classes, with the decay that they lack: by a map, or L1."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco_ext.optim.options import Group, is_zero
from loco_ext.optim.plan import StepPlan
from loco_ext.optim.sharding import is_sharded, replicated_maps


def check_torch_step(group: Group, plan: StepPlan) -> None:
    """Raise if the decay or the penalties, of which torch knows nothing, cannot be applied; nothing is written.

    Raises:
        TypeError: the gradient of a parameter whose decay torch does not know is sparse.
        NotImplementedError: parameters of a group with penalties are sharded.
    """
    for i, param in enumerate(plan.params):
        if _decays_by_hand(group, plan, i) and param.grad is not None and param.grad.is_sparse:
            shape = tuple(param.shape)
            raise TypeError(f"locality, norm: expected a dense gradient for shape {shape}, got a sparse one")
    if plan.penalties and any(map(is_sharded, plan.params)):
        raise NotImplementedError("penalty: expected foreach=False or None for DTensor parameters")


def _decays_by_hand(group: Group, plan: StepPlan, index: int) -> bool:
    """Return whether torch does not know the decay of a parameter."""
    return not is_zero(group["weight_decay"]) and (group["norm"] == "l1" or plan.map_of(index) is not None)


def step_with_torch(optimizer: Optimizer, group: Group, plan: StepPlan, step: Callable[[], object]) -> None:
    """Step one group by ``step``, torch's function, which steps all groups of the optimizer.

    Parameters whose decay torch does not know are given their decayed gradients, and no further decay, for the step.
    :func:`check_torch_step` comes before it.
    """
    plain: list[Tensor] = []
    by_hand: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for i, param in enumerate(plan.params):
        if param.grad is not None and _decays_by_hand(group, plan, i):
            by_hand.append((param, param.grad, plan.map_of(i)))
        else:
            plain.append(param)
    by_torch = {**group, "fused": False, "params": plain}
    decayed = {**group, "fused": False, "params": [p for p, _, _ in by_hand], "weight_decay": 0, "maximize": False}
    groups = optimizer.param_groups
    try:
        for param, grad, decay_map in by_hand:
            param.grad = _decay(group, param, grad, decay_map)
        optimizer.param_groups = [each for each in (by_torch, decayed) if each["params"]]
        step()
    finally:
        optimizer.param_groups = groups
        for param, grad, _ in by_hand:
            param.grad = grad


def _decay(group: Group, param: Tensor, grad: Tensor, decay_map: Tensor | None) -> Tensor:
    """Return the gradient with its decay; decoupled decay changes the parameter itself instead."""
    grad = -grad if group["maximize"] else grad
    scale: Any = 1.0 if decay_map is None else decay_map.to(param.device)
    with replicated_maps(param):
        if group.get("decoupled_weight_decay"):
            param.mul_(_like(1 - group["lr"] * group["weight_decay"] * scale, param))
            return grad
        before = param.clone() if group["differentiable"] else param  # which the step then changes in place
        pulled = torch.sign(param) if group["norm"] == "l1" else before
        return grad + _like(group["weight_decay"] * scale, param) * pulled


def _like(coefficient: Any, param: Tensor) -> Any:
    return coefficient.to(param.dtype) if isinstance(coefficient, Tensor) else coefficient
