"""The step of parameters with a penalty that no kernel ends it with: a LayerPenalty, or any where torch steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops.penalties import LayerPenalty, StepPenalty
from loco_ext.ops.ring_prox import ring_prox
from loco_ext.reference.optim_step import arithmetic_dtype, prox_step


def lies_by_kernels(param: Tensor) -> bool:
    """Whether kernels lie one after the other, each contiguous or channels_last: what compiled steps can shrink."""
    if param.is_contiguous() or param.numel() == 0:
        return True
    kernel = param[0]
    whole = kernel.is_contiguous() or kernel.movedim(0, -1).is_contiguous()
    return whole and (len(param) == 1 or param.stride(0) >= kernel.numel())


def stepped_in_place(param: Tensor, penalty: StepPenalty | LayerPenalty | None) -> bool:
    """Whether compiled steps end the parameter's step with its penalty's prox where it lies."""
    return penalty is None or (isinstance(penalty, StepPenalty) and lies_by_kernels(param))


def step_on_copies(named: dict[str, Any], step: Callable[[list[Tensor]], None]) -> None:
    """Calls ``step`` with contiguous copies in place of penalised parameters whose kernels lie otherwise."""
    params, penalties = named["params"], named["penalties"]
    odd = [i for i, penalty in enumerate(penalties) if not stepped_in_place(params[i], penalty)]
    copies = list(params)
    for i in odd:
        copies[i] = params[i].detach().clone(memory_format=torch.contiguous_format)
    step(copies)
    for i in odd:
        params[i].copy_(copies[i])


def shrink(name: str, named: Mapping[str, Any], index: int, w: Tensor) -> Tensor:
    """The prox that ends the step by which a penalised parameter has become ``w``; ``named``: the step's arguments."""
    size, metric = prox_step(name, named, index, w.dtype)
    if size == 0:
        return w
    penalty = named["penalties"][index]
    if isinstance(penalty, LayerPenalty):
        return penalty.prox(w, size, metric)
    thresholds, squared = penalty.scaled(size)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, linf=penalty.linf, coupled=penalty.coupled)


def step_then_shrink(name: str, named: dict[str, Any], step: Callable[[dict[str, list[Tensor]]], None]) -> None:
    """The step by kernels that do not know these penalties, then the prox of each penalised parameter.

    Args:
        name: of the operator. named: its arguments by name.
        step: makes the step without these penalties, these lists in place of those of the same names.

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
    # What the prox reads is held in the type that arithmetic is done in, so that it is rounded once, afterwards.
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
