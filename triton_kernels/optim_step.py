"""The optimizer step in Triton, for GPUs that the compiled library is not built for.

One launch steps all tensors whose operands have the same dtypes and are equally suitable for vector access; Adam has
one more, which increments the step counts. Tables tell the programs about the tensors; they are copied to the device
when something in them changes. Learning rates, step counts, ``grad_scale`` and ``found_inf`` are read on the device, so
that the host never waits for it and a CUDA graph can capture the step. A graph repeats the hyperparameters and the
``rounding_step`` that it was captured with. Penalties are not supported here: :mod:`loco_ext.ops.shrink` applies
their prox after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from loco_ext.triton_kernels.optim_step_kernels import Form, prepare_kernel, step_kernel
from loco_ext.triton_kernels.optim_step_tables import BLOCK, OPERANDS, Batch, Plan, Step, Tables
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# 256 threads, also in HIP, whose warps have 64; each has 8 elements of a block: 16 bytes in bfloat16.
WARPS = 4 if torch.version.hip else 8

_TABLES = Tables()


def optim_step_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    first: Sequence[int],
    group_index: Sequence[int],
    hyper: Tensor,
    lrs: Sequence[Tensor],
    lr_index: Sequence[int],
    maps: Sequence[Tensor],
    map_index: Sequence[int],
    penalties: Sequence[object],
    nesterov: bool,
    maximize: bool,
    l1: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ordinals: Sequence[int],
    seed: int | None,
    rounding_step: int,
) -> None:
    """Make an SGD step with momentum; see :func:`loco_ext.ops.optim_step_sgd`, which has checked the arguments.

    Args:
        hyper, maps: in host memory; all other tensors are on the device of the parameters.
        lrs, lr_index: ``lrs[lr_index[g]]``, one float32 or float64 element, replaces the learning rate of row ``g``;
            -1, or an empty ``lr_index``, keeps the row's own.

    Raises:
        TypeError: for lazily negated views among params, grads and states; nothing is written then.
    """
    if not params:
        return
    states = [momentum_buffers] if momentum_buffers else []
    step = Step(params, grads, states, group_index, lrs, lr_index, maps, map_index, (), first, ordinals)
    form = {"rule": "sgd", "nesterov": nesterov, "maximize": maximize, "l1": l1}
    step.check()
    with _device(params[0]):
        plan = _TABLES.plan(step)
        _launch(plan, _TABLES.hyper(hyper, params[0].device), grad_scale, found_inf, seed, rounding_step, form)


def optim_step_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    group_index: Sequence[int],
    hyper: Tensor,
    lrs: Sequence[Tensor],
    lr_index: Sequence[int],
    maps: Sequence[Tensor],
    map_index: Sequence[int],
    penalties: Sequence[object],
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    l1: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ordinals: Sequence[int],
    seed: int | None,
    rounding_step: int,
) -> None:
    """Make an Adam (coupled decay) or AdamW step; see :func:`loco_ext.ops.optim_step_adam`, :func:`optim_step_sgd`.

    Step counts must be whole numbers. ``beta^t`` is rounded once, from about 100 bits.
    """
    if not params:
        return
    seconds = [exp_avg_sqs, max_exp_avg_sqs] if amsgrad else [exp_avg_sqs]
    step = Step(params, grads, [exp_avgs, *seconds], group_index, lrs, lr_index, maps, map_index, steps, (), ordinals)
    form = {"rule": "adam", "amsgrad": amsgrad, "maximize": maximize, "decoupled": decoupled, "l1": l1}
    step.check()
    with _device(params[0]):
        plan = _TABLES.plan(step)
        rows = _TABLES.hyper(hyper, params[0].device)
        prepare_kernel[(len(params),)](plan.rows, rows, found_inf, plan.scalars, num_warps=1, enable_fp_fusion=False)
        _launch(plan, plan.scalars, grad_scale, found_inf, seed, rounding_step, form)


def form_of(batch: Batch, seed: int | None, **options: Any) -> Form:
    """Return the compile-time constants of a batch's kernel."""
    dtypes = [DTYPES[dtype] for dtype in batch.kind.dtypes]
    absent = (None,) * (OPERANDS - len(dtypes))
    stochastic = seed is not None and dtypes[0] == tl.bfloat16
    _dtypes, flat, aligned, wide = batch.kind
    return Form(
        dtypes=(*dtypes, *absent), flat=flat, aligned=aligned, wide=wide, block=BLOCK, stochastic=stochastic, **options
    )


def _launch(
    plan: Plan,
    numbers: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    seed: int | None,
    rounding_step: int,
    form: dict[str, Any],
) -> None:
    words = [_signed(value) for value in (seed or 0, (seed or 0) >> 32, rounding_step)]
    for batch in plan.batches:
        step_kernel[(len(batch.owners),)](
            plan.rows,
            plan.axes,
            batch.owners,
            plan.maps,
            numbers,
            grad_scale,
            found_inf,
            *words,
            FORM=form_of(batch, seed, **form),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed number, so that the kernel's argument always has one type."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _device(tensor: Tensor) -> torch.cuda.device | nullcontext[None]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
