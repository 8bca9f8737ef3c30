"""Steps of torch's own optimizer classes, with the decay that they lack: by a map, or L1."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco_ext.optim.options import Group, is_zero
from loco_ext.optim.plan import StepPlan
from loco_ext.optim.sharding import is_sharded, replicated_maps


def check_torch_step(group: Group, plan: StepPlan, states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Raise if the decay or the penalties, of which torch knows nothing, cannot be applied; nothing is written.

    Raises:
        TypeError, ValueError, KeyError: torch would refuse the step after a decoupled decay has been written; or the
            gradient of a parameter whose decay torch does not know is sparse.
        NotImplementedError: parameters of a group with penalties are sharded.
    """
    grads = {i: param.grad for i, param in enumerate(plan.params) if param.grad is not None}
    by_hand = [grad for i, grad in grads.items() if _decays_by_hand(group, plan, i)]
    written = bool(by_hand and group.get("decoupled_weight_decay"))
    for grad in grads.values() if written else by_hand:
        if grad.is_sparse:
            shape = tuple(grad.shape)
            raise TypeError(f"locality, norm: expected a dense gradient for shape {shape}, got a sparse one")
    if written:
        _check_adamw(group, plan)
        stepped = [states[plan.params[i]] for i in grads if plan.params[i] in states]
        if group["amsgrad"] and any(state and "max_exp_avg_sq" not in state for state in stepped):
            raise KeyError("state: expected max_exp_avg_sq of all parameters with amsgrad=True, got some without it")
    if plan.penalties and any(map(is_sharded, plan.params)):
        raise NotImplementedError("penalty: expected foreach=False or None for DTensor parameters")


def _check_adamw(group: Group, plan: StepPlan) -> None:
    """Raise if torch's AdamW, which knows no ``locality``, would refuse the options of the group."""
    for name in ("lr", "betas") if group["foreach"] and not group["capturable"] else ():
        values = group[name] if name == "betas" else [group[name]]
        if any(isinstance(value, Tensor) for value in values):
            raise TypeError(f"{name}: expected no tensor with foreach=True and capturable=False, got {group[name]!r}")
    if group["foreach"] and group["differentiable"]:
        raise ValueError("foreach, differentiable: expected only one of them, got both")
    if group["capturable"] and any(param.is_cpu for param in plan.params):
        raise ValueError("capturable: expected False for parameters on the CPU, got True")


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
