"""The prox after the step of a parameter whose penalty no kernel applies: a LayerPenalty, or any if torch steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from loco_ext.ops.penalties import LayerPenalty, OfStep, StepPenalty
from loco_ext.ops.ring_prox import ring_prox
from loco_ext.ops.step_args import StepArgs
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


def step_on_copies(args: StepArgs, step: Callable[[StepArgs], None]) -> None:
    """Call ``step`` with contiguous copies in place of penalised parameters whose filters have another layout."""
    params = list(args.params)
    odd = [i for i, param in enumerate(params) if not stepped_in_place(param, args.penalties[i])]
    for i in odd:
        params[i] = params[i].detach().clone(memory_format=torch.contiguous_format)
    step(replace(args, params=params))
    for i in odd:
        args.params[i].copy_(params[i])


def shrink(args: StepArgs, index: int, w: Tensor) -> Tensor:
    """Return the prox of ``w``, a penalised parameter after its step."""
    size, metric = prox_step(args, index, w.dtype)
    penalty = args.penalties[index]
    assert penalty is not None
    return w if size == 0 else prox_of(penalty, w, size, metric)


def prox_of(penalty: OfStep, w: Tensor, size: float, metric: Tensor | None) -> Tensor:
    """Return the penalty's prox of the weights ``w`` for a step of this size in the metric; None: ones."""
    if isinstance(penalty, LayerPenalty):
        return penalty.prox(w, size, metric)
    thresholds, squared = penalty.scaled(size)
    return ring_prox(w, penalty.rings, thresholds, squared, metric, linf=penalty.linf, coupled=penalty.coupled)


def step_then_shrink(args: StepArgs, step: Callable[[StepArgs], None]) -> None:
    """Step by kernels that do not support these penalties, then apply the prox to each penalised parameter.

    Args:
        args: the arguments of the step.
        step: makes the step without these penalties.

    Raises:
        NotImplementedError: parameters would be rounded stochastically before the prox.
    """
    chosen = [i for i, penalty in enumerate(args.penalties) if penalty is not None]
    if args.seed is not None and any(args.params[i].dtype == torch.bfloat16 for i in chosen):
        raise NotImplementedError(
            "stochastic_rounding: expected None for bfloat16 parameters with a penalty whose prox is no part of the "
            "step's kernels"
        )
    # Whatever the prox reads is kept in the compute dtype, so that it is rounded once, afterwards: the parameters and
    # the second moments.
    wide = replace(args, params=list(args.params), states=[list(tensors) for tensors in args.states])
    copied = [(wide.params, args.params), *zip(wide.states[1:], args.states[1:], strict=True)]
    for tensors, _ in copied:
        for i in chosen:
            tensors[i] = tensors[i].to(arithmetic_dtype(args.params[i]))  # type: ignore[index]
    step(wide)
    for i in chosen:
        shrunk = shrink(wide, i, wide.params[i])
        if args.found_inf is not None:
            shrunk = torch.where(args.found_inf.to(shrunk.device) == 0, shrunk, args.params[i].to(shrunk.dtype))
        args.params[i].copy_(shrunk)
        for tensors, own in copied[1:]:
            if tensors[i] is not own[i]:
                own[i].copy_(tensors[i])
