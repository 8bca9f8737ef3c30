"""The prox after the step of a parameter whose penalty the step's kernels do not apply.

Those are penalties on a filter's largest weight, joint penalties, functions (:class:`LayerPenalty`), filters that lie
apart in memory, and any penalty where Triton or torch makes the step. On a GPU the host reads no value, except for a
function, so that a CUDA graph can capture the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops.penalties import LayerPenalty, StepPenalty
from loco_ext.ops.ring_prox import run_joint_prox, run_prox
from loco_ext.reference.optim_step import arithmetic_dtype, correctly_rounded_sqrt
from loco_ext.reference.rounding import RoundedResults

_STATES = ("momentum_buffers", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_WORDS = {"params": 0, "momentum_buffers": 1, "exp_avgs": 1, "exp_avg_sqs": 2, "max_exp_avg_sqs": 3}


def applied_by_kernels(param: Tensor, penalty: StepPenalty | LayerPenalty | None) -> bool:
    """Return whether compiled kernels apply the penalty's prox at the end of the parameter's step."""
    if penalty is None:
        return True
    return isinstance(penalty, StepPenalty) and not (penalty.linf or penalty.joint) and _lies_by_filters(param)


def _lies_by_filters(param: Tensor) -> bool:
    """Return whether filters follow each other, each contiguous or channels_last."""
    if param.is_contiguous() or param.numel() == 0:
        return True
    kernel = param[0]
    whole = kernel.is_contiguous() or kernel.movedim(0, -1).is_contiguous()
    return whole and (len(param) == 1 or param.stride(0) >= kernel.numel())


def shrink(name: str, named: Mapping[str, Any], index: int, w: Tensor) -> Tensor:
    """Return the prox of ``w``, a penalised parameter after its step; ``named``: the step's arguments by name."""
    size, divisor = _size_and_divisor(name, named, index, w.dtype)
    return prox_of(named["penalties"][index], w, size, divisor)


def prox_of(penalty: StepPenalty | LayerPenalty, w: Tensor, size: Tensor | float, divisor: Tensor | None) -> Tensor:
    """Return the prox of ``w`` for a step of this size; ``divisor``: the metric times the size (None: ones)."""
    if not isinstance(size, Tensor) and size == 0:
        return w
    if isinstance(penalty, LayerPenalty):
        size = float(size)
        if size == 0:
            return w
        return penalty.prox(w, size, None) if divisor is None else penalty.prox(w, 1.0, divisor / size)
    t, q = penalty.thresholds, penalty.squared
    if isinstance(size, Tensor) or penalty.joint:
        t, q = _on_device(t, w.device), None if q is None else _on_device(q, w.device)
    t, q = t * size, None if q is None else q * size**0.5
    if q is None or not penalty.joint:
        return run_prox(w, penalty.rings, t, q, divisor, penalty.linf)
    plain = not penalty.thresholds.any()
    return run_joint_prox(w, penalty.rings, t, q, divisor, penalty.linf, plain)


def _size_and_divisor(
    name: str, named: Mapping[str, Any], index: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | None]:
    """Return the step size of the prox that ends a parameter's step, and the metric times that size (None: ones).

    ``named``: the operator's arguments by name, after the step. ``dtype``: the compute dtype.
    """
    group = named["group_index"][index]
    row = named["hyper"][group].tolist()
    which = named["lr_index"][group] if named["lr_index"] else -1
    lr = row[0] if which < 0 else named["lrs"][which].double().reshape(())
    if name == "optim_step_sgd":
        _, _, momentum, dampening = row
        return lr * ((1 - dampening) / (1 - momentum)) if named["momentum_buffers"] else lr, None
    *_, beta2, eps = row
    second = named["max_exp_avg_sqs" if named["amsgrad"] else "exp_avg_sqs"][index].to(dtype)
    correction = (1 - beta2 ** named["steps"][index].double()).sqrt().to(second)
    return lr, correctly_rounded_sqrt(second) / correction + eps


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a few numbers on the device; filling needs no wait, as a copy of host memory would."""
    if device.type == "cpu":
        return values
    return torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in values.tolist()])


def step_then_shrink(name: str, named: dict[str, Any], step: Callable[[dict[str, list[Tensor]]], None]) -> None:
    """Step by kernels that do not apply these penalties, then apply the prox to each penalised parameter.

    Args:
        name: the operator's name.
        named: its arguments by name.
        step: makes the step without these penalties; its dict replaces the lists of the same names.
    """
    chosen = [i for i, penalty in enumerate(named["penalties"]) if penalty is not None]
    # Kernels round nothing here: what they write is kept in the compute dtype, and rounded once, after the prox.
    wide = {key: list(named[key]) for key in ("params", *_STATES) if named.get(key)}
    for tensors in wide.values():
        for i in chosen:
            tensors[i] = tensors[i].to(arithmetic_dtype(named["params"][i]))
    step(wide)
    found_inf = named["found_inf"]
    for i in chosen:
        param = named["params"][i]
        w = shrink(name, {**named, **wide}, i, wide["params"][i])
        if found_inf is not None:
            w = torch.where(found_inf.to(w.device) == 0, w, param.to(w.dtype))
        results = RoundedResults(param, named["ordinals"], i, named["seed"], named["rounding_step"])
        results.store(param, w, _WORDS["params"])
        for key in wide.keys() - {"params"}:
            if wide[key][i] is not named[key][i]:
                results.store(named[key][i], wide[key][i], _WORDS[key])
