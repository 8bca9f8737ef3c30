"""The optimizer step in Triton, for GPUs that the compiled library is not built for.

One launch steps all tensors whose operands have the same dtypes and are equally suitable for vector access; Adam has
one more, which increments the step counts. The table that tells the programs about the tensors is that of the CUDA
kernels (``csrc/optim_step/gpu_table.h``), built and checked by the compiled library, and copied to the device when
something in it changes. Learning rates, step counts, ``grad_scale`` and ``found_inf`` are read on the device, so that
the host never waits for it and a CUDA graph can capture the step. A graph repeats the hyperparameters and the
``rounding_step`` that it was captured with. Penalties are not supported here: :mod:`loco_ext.ops.prox_after_step`
applies their prox after the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from loco_ext.triton_kernels.launch import on_device
from loco_ext.triton_kernels.optim_step_kernels import OPERANDS, SCALARS, StepForm, prepare_kernel, step_kernel
from loco_ext.triton_kernels.uploads import Uploads, upload
from torch import Tensor

from loco_ext.ops import backends
from loco_ext.ops.step_args import SGD, StepArgs

# 256 threads, also in HIP, whose warps have 64; each has 8 elements of a block: 16 bytes in bfloat16.
WARPS = 4 if torch.version.hip else 8

_DTYPES = (None, tl.float64, tl.float32, tl.bfloat16, tl.float16)  # by 1 + DType, 0 if absent
_UPLOADS = Uploads()


@dataclass
class StepTable:
    """The table of one step on the device, and where its sections and launches begin."""

    memory: Tensor  # uint8
    hyper_at: int
    lrs_at: int
    entries_at: int
    nests_at: int
    maps_at: int
    chunks_at: int
    launches: list[tuple[int, int, int]]  # kind, first chunk, number of chunks


class CachedStep(NamedTuple):
    """Result of ``torch.ops.loco_ext.optim_step_table``, which ``csrc/schemas.h`` describes."""

    table: Tensor
    layout: list[int]
    step: Tensor


def optim_step(args: StepArgs) -> CachedStep:
    """Make the step; see :func:`loco_ext.ops.optim_step_sgd` and :func:`loco_ext.ops.optim_step_adam`.

    Adam's step counts must be whole numbers. ``beta^t`` is rounded once, from about 100 bits.

    Returns:
        The step, for :func:`optim_step_again`.

    Raises:
        RuntimeError: the step cannot be made; nothing is written then.
    """
    with on_device(args.params[0].device):
        cached = describe(args)
        _run(cached, args)
    return cached


def optim_step_again(cached: CachedStep, args: StepArgs, check: bool = False) -> bool:
    """Make a step once more; :func:`loco_ext.ops.optim_step.run_again` describes the arguments and the result."""
    scalars = args.lrs, args.lr_index, args.grad_scale, args.found_inf
    again = backends.operators().optim_step_table_again
    if not again(cached.step, args.grads, args.hyper, *scalars, check):
        return False
    if not check:
        with on_device(args.params[0].device):
            _run(cached, args)
    return True


def _run(cached: CachedStep, args: StepArgs) -> None:
    table = upload_table(cached, args.params[0].device)
    launch(table, args, prepare(table, args) if args.rule.counts_steps else None)


def describe(args: StepArgs) -> CachedStep:
    """Check the step, and return its table on the host."""
    return CachedStep(*backends.operators().optim_step_table(*args.for_operator()))


def upload_table(cached: CachedStep, device: torch.device) -> StepTable:
    """Return the step's table on the device."""
    data = cached.table.numpy()
    (memory,), _host = _UPLOADS.find("step", device, data.tobytes, lambda: upload([data], device))
    hyper, lrs, entries, nests, maps, chunks, *launches = cached.layout
    numbers = iter(launches)
    return StepTable(
        memory, hyper, lrs, entries, nests, maps, chunks, list(zip(numbers, numbers, numbers, strict=True))
    )


def prepare(table: StepTable, args: StepArgs) -> Tensor:
    """Increment the step counts, and return the scalars of each tensor's step: float64, [tensors, SCALARS]."""
    count = len(args.params)
    scalars = torch.empty(count, SCALARS.value, dtype=torch.float64, device=table.memory.device)
    sections = (table.hyper_at, table.lrs_at, table.entries_at)
    prepare_kernel[(count,)](table.memory, *sections, args.found_inf, scalars, num_warps=1, enable_fp_fusion=False)
    return scalars


def form_of(kind: int, args: StepArgs) -> StepForm:
    """Return the compile-time constants of a launch's kernel; ``kind``: as in ``csrc/optim_step/bind_table.cpp``."""
    dtypes = tuple(_DTYPES[kind >> 3 * k & 7] for k in range(OPERANDS))
    flat, aligned, wide = (bool(kind >> 3 * OPERANDS + k & 1) for k in range(3))
    stochastic = args.seed is not None and dtypes[0] == tl.bfloat16
    rule = "sgd" if args.rule is SGD else "adam"
    return StepForm(rule, dtypes, flat, aligned, wide, stochastic=stochastic, **args.flags._asdict())


def launch(table: StepTable, args: StepArgs, scalars: Tensor | None) -> None:
    """Launch the kernels that step all tensors; ``scalars``: from :func:`prepare`, None for SGD."""
    words = [_signed(value) for value in (args.seed or 0, (args.seed or 0) >> 32, args.rounding_step)]
    sections = (table.hyper_at, table.lrs_at, table.entries_at, table.nests_at, table.maps_at)
    for kind, first, count in table.launches:
        step_kernel[(count,)](
            table.memory,
            *sections,
            table.chunks_at + 12 * first,
            scalars,
            args.grad_scale,
            args.found_inf,
            *words,
            FORM=form_of(kind, args),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed number, so that the kernel's argument always has one type."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
