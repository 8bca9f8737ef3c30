"""Preparation of a group for torch's own optimizer functions, which have no decay map and no L1 decay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loco_ext.optim.options import Group
from loco_ext.optim.plan import Plan
from loco_ext.optim.sharding import replicated_maps


@dataclass
class Part:
    """Parameters, by index, that torch's function can take in one call with these arguments."""

    indices: list[int]
    grads: list[Tensor]
    weight_decay: Any
    maximize: bool


def split_by_decay(group: Group, plan: Plan, params: list[Tensor], grads: list[Tensor]) -> Iterator[Part]:
    """Yield the parameters that torch can decay itself, then those whose decay is applied here."""
    maps = [plan.map_of(i) for i, p in enumerate(plan.params) if p.grad is not None]
    l1 = group["norm"] == "l1"
    by_hand = [i for i, m in enumerate(maps) if (m is not None or l1) and _nonzero(group["weight_decay"])]
    rest = [i for i in range(len(params)) if i not in set(by_hand)]
    if rest:
        yield Part(rest, [grads[i] for i in rest], group["weight_decay"], group["maximize"])
    if by_hand:
        decayed = [_decay(group, params[i], grads[i], maps[i], l1) for i in by_hand]
        yield Part(by_hand, decayed, 0, maximize=False)


def _nonzero(weight_decay: float | Tensor) -> bool:
    return isinstance(weight_decay, Tensor) or weight_decay != 0


def _decay(group: Group, param: Tensor, grad: Tensor, decay_map: Tensor | None, l1: bool) -> Tensor:
    """Return the gradient with its decay; decoupled decay changes the parameter itself instead."""
    if grad.is_sparse:
        raise TypeError(f"locality, norm: expected a dense gradient for shape {tuple(param.shape)}, got a sparse one")
    grad = -grad if group["maximize"] else grad
    scale: Any = 1.0 if decay_map is None else decay_map.to(param.device)
    with replicated_maps(param):
        if group.get("decoupled_weight_decay"):
            param.mul_(_like(1 - group["lr"] * group["weight_decay"] * scale, param))
            return grad
        return grad + _like(group["weight_decay"] * scale, param) * (torch.sign(param) if l1 else param)


def _like(coefficient: Any, param: Tensor) -> Any:
    return coefficient.to(param.dtype) if isinstance(coefficient, Tensor) else coefficient
