"""The prox after the step of a parameter whose penalty the step's kernels do not apply.

Those are penalties on a filter's largest weight, joint penalties, functions (:class:`LayerPenalty`), filters that lie
apart in memory, and any penalty where Triton or torch makes the step. On a GPU the host reads no value, except for a
function, so that a CUDA graph can capture the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops import backends
from loco_ext.ops.penalties import LayerPenalty, OfStep, StepPenalty
from loco_ext.ops.ring_prox import ProxCall, joins_in_kernel, run_joint_kernels, run_joint_prox, run_proxes
from loco_ext.ops.step_args import StepArgs
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.reference.optim_step import prox_sizes
from loco_ext.reference.rounding import RoundedResults, store_all

MOST_IN_A_BATCH = 2**24


def applied_by_kernels(param: Tensor, penalty: OfStep | None) -> bool:
    """Return whether compiled kernels apply the penalty's prox at the end of the parameter's step."""
    if penalty is None:
        return True
    return isinstance(penalty, StepPenalty) and not (penalty.linf or penalty.joint) and _lies_by_filters(param)


def _lies_by_filters(param: Tensor) -> bool:
    """Return whether filters follow each other, each contiguous or channels_last."""
    if param.is_contiguous() or param.numel() == 0:
        return True
    first = param[0]
    whole = first.is_contiguous() or first.movedim(0, -1).is_contiguous()
    return whole and (len(param) == 1 or param.stride(0) >= first.numel())


def _batches(args: StepArgs, chosen: Sequence[int]) -> Iterator[list[int]]:
    """Divide penalised parameters into batches.

    On a GPU, the metrics of a batch share launches, and so do joint penalties and, in Triton, all other proxes. As its
    memory holds the metrics and proxes of a batch together, a batch has one parameter or at most MOST_IN_A_BATCH
    elements; elsewhere it has one parameter.
    """
    batch: list[int] = []
    elements = 0
    for i in chosen:
        w = args.params[i]
        if batch and (not backends.runs_gpu_kernels(w.device) or elements + w.numel() > MOST_IN_A_BATCH):
            yield batch
            batch, elements = [], 0
        batch.append(i)
        elements += w.numel()
    if batch:
        yield batch


def _prox_sizes(args: StepArgs, chosen: Sequence[int]) -> list[tuple[Any, Tensor | None]]:
    rows = [args.row_of(i) for i in chosen]
    for row in rows:
        if isinstance(row[0], Tensor):
            row[0] = row[0].double()
    steps = [args.steps[i] if args.rule.counts_steps else None for i in chosen]
    return prox_sizes(args.rule, rows, [args.states[-1][i] if args.states else None for i in chosen], steps)


def proxes_of(
    penalties: Sequence[OfStep | None], weights: Sequence[Tensor], sizes: Sequence[tuple[Any, Tensor | None]]
) -> list[Tensor]:
    """Return the prox of each weight, all on one device, for its penalty and a step of its size.

    Args:
        sizes: sizes of the steps, and each metric times that size (None: ones).
    """
    results = list(weights)
    alone: dict[int, ProxCall] = {}
    joint: dict[int, ProxCall] = {}
    for k, (penalty, w, (size, divisor)) in enumerate(zip(penalties, weights, sizes, strict=True)):
        if isinstance(penalty, LayerPenalty):
            size = float(size)
        if penalty is None or (not isinstance(size, Tensor) and size == 0):  # the host reads no size from the device
            continue
        if isinstance(penalty, LayerPenalty):
            results[k] = penalty.prox(w, size, None) if divisor is None else penalty.prox(w, 1.0, divisor / size)
            continue
        in_torch = penalty.joint and not joins_in_kernel(w)
        t, q = penalty.scaled(size, w.device if in_torch or isinstance(size, Tensor) else None)
        if in_torch and q is not None:
            plain = not penalty.thresholds.any()
            results[k] = run_joint_prox(w, penalty.rings, t, q, divisor, penalty.linf, plain)
        else:
            (joint if penalty.joint else alone)[k] = ProxCall(w, penalty.rings, t, q, divisor, penalty.linf)
    for calls, run in ((alone, run_proxes), (joint, run_joint_kernels)):
        for k, shrunk in zip(calls, run(list(calls.values())), strict=True):
            results[k] = shrunk
    return results


@torch.no_grad()
def step_then_prox(args: StepArgs, step: Callable[[StepArgs], None]) -> None:
    """Step by kernels that do not apply these penalties, then apply the prox to each penalised parameter.

    Args:
        args: the arguments of the step.
        step: makes the step without these penalties.
    """
    chosen = [i for i, penalty in enumerate(args.penalties) if penalty is not None]
    # Kernels round nothing here: what they write is kept in the compute dtype, and rounded once, after the prox.
    wide = replace(args, params=list(args.params), states=[list(tensors) for tensors in args.states])
    written = list(zip((wide.params, *wide.states), (args.params, *args.states), strict=True))
    for tensors, own in written:
        for i in chosen:
            tensors[i] = own[i].to(compute_dtype(args.params[i].dtype))
    step(wide)
    for indices in _batches(wide, chosen):
        penalties, weights = [args.penalties[i] for i in indices], [wide.params[i] for i in indices]
        shrunk = proxes_of(penalties, weights, _prox_sizes(wide, indices))
        params = [args.params[i] for i in indices]
        if args.found_inf is not None:
            kept = [args.found_inf.to(w.device) == 0 for w in shrunk]
            shrunk = [torch.where(keep, w, p.to(w.dtype)) for keep, w, p in zip(kept, shrunk, params, strict=True)]
        roundings = [RoundedResults(args.params[i], args.ordinals, i, args.seed, args.rounding_step) for i in indices]
        results = [shrunk, *([tensors[i] for i in indices] for tensors, _ in written[1:])]
        for word, (values, (_, own)) in enumerate(zip(results, written, strict=True)):
            store_all(roundings, [own[i] for i in indices], values, word)
