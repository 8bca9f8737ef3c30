"""The prox after the step of a parameter whose penalty no kernel applies: a LayerPenalty, or any if torch steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops.penalties import LayerPenalty, StepPenalty
from loco_ext.ops.ring_prox import ring_prox
from loco_ext.reference.optim_step import arithmetic_dtype, prox_step


def lies_by_kernels(param: Tensor) -> bool:
    """Return whether filters follow each other, each contiguous or channels_last, as compiled prox kernels require."""
    if param.is_contiguous() or param.numel() == 0:
        return True
    kernel = param[0]
    whole = kernel.is_contiguous() or kernel.movedim(0, -1).is_contiguous()
    return whole and (len(param) == 1 or param.stride(0) >= kernel.numel())


def stepped_in_place(param: Tensor, penalty: StepPenalty | LayerPenalty | None) -> bool:
    """Return whether compiled kernels apply the penalty's prox in place at the end of the parameter's step."""
    return penalty is None or (isinstance(penalty, StepPenalty) and lies_by_kernels(param))


def step_on_copies(named: dict[str, Any], step: Callable[[list[Tensor]], None]) -> None:
    """Call ``step`` with contiguous copies in place of penalised parameters whose filters have another layout."""
    params, penalties = named["params"], named["penalties"]
    odd = [i for i, penalty in enumerate(penalties) if not stepped_in_place(params[i], penalty)]
    copies = list(params)
    for i in odd:
        copies[i] = params[i].detach().clone(memory_format=torch.contiguous_format)
    step(copies)
    for i in odd:
        params[i].copy_(copies[i])


def shrink(name: str, named: Mapping[str, Any], index: int, w: Tensor) -> Tensor:
    """Return the prox of ``w``, a penalised parameter after its step; ``named``: the step's arguments by name."""
    size, metric = prox_step(name, named, index, w.dtype)
    return w if size == 0 else prox_of(named["penalties"][index], w, size, metric)


def prox_of(penalty: StepPenalty | LayerPenalty, w: Tensor, size: float, metric: Tensor | None) -> Tensor:
    """Return the penalty's prox of the weights ``w`` for a step of this size in the metric; None: ones."""
    if isinstance(penalty, LayerPenalty):
        return penalty.prox(w, size, metric)
    thresholds, squared = penalty.scaled(size)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, linf=penalty.linf, coupled=penalty.coupled)


def step_then_shrink(name: str, named: dict[str, Any], step: Callable[[dict[str, list[Tensor]]], None]) -> None:
    """Step by kernels that do not support these penalties, then apply the prox to each penalised parameter.

    Args:
        name: the operator's name.
        named: its arguments by name.
        step: makes the step without these penalties; its dict replaces the lists of the same names.

    Raises:
        NotImplementedError: parameters would be rounded stochastically before the prox.
    """
    penalties = named["penalties"]
    chosen = [i for i, penalty in enumerate(penalties) if penalty is not None]
    if named["seed"] is not None and any(named["params"][i].dtype == torch.bfloat16 for i in chosen):
        raise NotImplementedError(
            "stochastic_rounding: expected None for bfloat16 parameters with a penalty whose prox is no part of the "
            "step's kernels"
        )
    # Whatever the prox reads is kept in the compute dtype, so that it is rounded once, afterwards.
    names = ["params", *(key for key in ("exp_avg_sqs", "max_exp_avg_sqs") if named.get(key))]
    held = {key: list(named[key]) for key in names}
    for key in names:
        for i in chosen:
            held[key][i] = held[key][i].to(arithmetic_dtype(named["params"][i]))
    step(held)
    found_inf = named["found_inf"]
    for i in chosen:
        shrunk = shrink(name, {**named, **held}, i, held["params"][i])
        if found_inf is not None:
            shrunk = torch.where(found_inf.to(shrunk.device) == 0, shrunk, named["params"][i].to(shrunk.dtype))
        named["params"][i].copy_(shrunk)
        for key in names[1:]:
            if held[key][i] is not named[key][i]:
                named[key][i].copy_(held[key][i])
