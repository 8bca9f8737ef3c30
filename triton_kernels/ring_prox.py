"""Ring norms and the exact prox of nested rings in Triton, for GPUs that the compiled library is not built for.

One launch handles all filters of a weight. Weights of any strides are read and written in place: a table in device
memory lists where the taps of each ring are. The host never waits for the device, and a CUDA graph can capture a call;
the graph repeats the thresholds that it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton.language as tl
from loco_ext.triton_kernels.ring_prox_kernels import norms_kernel, prox_kernel
from loco_ext.triton_kernels.ring_prox_weights import WeightForm
from loco_ext.triton_kernels.sizes import next_power_of_2
from loco_ext.triton_kernels.uploads import Uploads, upload
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BLOCKS = (32, 1024)  # least and most weights that a program works on at a time
PER_THREAD = 4  # weights per thread
NARROW = 2**31 - BLOCKS[1]  # most weights of a filter whose indices fit into 32 bits
ALIGNED = 16  # elements: taps at multiples of it count as aligned

# Caches tables and thresholds of more layers than networks have.
_UPLOADS = Uploads(size=512)


def ring_norms(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
    """Return the Euclidean norm of each ring of each filter; :func:`loco_ext.ops.ring_norms` checks the arguments."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    norms = torch.empty((weight.shape[0], count), dtype=dtype, device=weight.device)
    weight = weight.resolve_neg()  # kernels ignore the lazy negation flag
    if weight.shape[0] == 0:
        return norms
    with _device(weight.device):
        table, options = _plan([weight], rings, count)
        sizes = (weight.shape[1], len(rings), count)
        norms_kernel[(weight.shape[0],)](weight, norms, table, *sizes, weight.stride()[:2], **options)
    return norms


def ring_prox(
    weight: Tensor,
    rings: Sequence[int],
    thresholds: Tensor,
    squared: Tensor | None,
    metric: Tensor | None,
    linf: bool,
) -> Tensor:
    """Return the prox of nested groups; see :func:`loco_ext.ops.ring_prox`, which has checked the arguments.

    Args:
        thresholds, squared: contiguous, in host memory or on the weight's device.
    """
    t, q = thresholds, squared
    if t.device != weight.device:
        t, q = thresholds_on(weight.device, thresholds, squared)
    weight = weight.resolve_neg()  # kernels ignore the lazy negation flag
    metric = None if metric is None else metric.resolve_neg()
    out = torch.empty_like(weight)
    if weight.shape[0] == 0:
        return out
    if metric is not None and metric.dtype == torch.float64:
        metric, t, q = _near_one(metric, t, q)
    count = t.shape[-1]
    operands = [weight, out, weight if metric is None else metric]
    with _device(weight.device):
        table, options = _plan(operands, rings, count, metric=metric, linf=linf, squared=q is not None)
        prox_kernel[(weight.shape[0],)](
            weight,
            metric,
            out,
            t,
            q,
            table,
            weight.shape[1],
            len(rings),
            count,
            0 if t.dim() == 1 else count,
            *(operand.stride()[:2] for operand in operands),
            **options,
        )
    return out


def _near_one(metric: Tensor, t: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scale each filter's metric and ``t`` by a power of four and ``q`` by its root, which changes no result.

    The squares of weights times finite metrics then stay within float64.
    """
    largest = metric.masked_fill(metric.isinf(), 0.0).flatten(1).amax(1)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).clamp(-1020, 1020) // 2
    root = torch.ldexp(torch.ones_like(largest), -exponent)
    metric = metric * (root * root).view(-1, *[1] * (metric.dim() - 1))
    return (
        metric,
        (t * root[:, None] * root[:, None]).contiguous(),
        None if q is None else (q * root[:, None]).contiguous(),
    )


def thresholds_on(device: torch.device, thresholds: Tensor, squared: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return thresholds and squared, which may be None, in the device's memory."""
    host = [each.detach().numpy() for each in (thresholds, squared) if each is not None]
    with _device(device):
        (t, *q), _host = _UPLOADS.find(
            "thresholds",
            device,
            lambda: [array.tobytes() for array in host],
            lambda: upload([array.ravel() for array in host], device),
        )
    return t.view(thresholds.shape), q[0].view(thresholds.shape) if q else None


def _plan(
    operands: Sequence[Tensor],
    rings: Sequence[int],
    count: int,
    metric: Tensor | None = None,
    linf: bool = False,
    squared: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the table of the taps, and the kernel's compile-time constants and launch options."""
    weight = operands[0]
    device, channels, taps = weight.device, weight.shape[1], tuple(weight.shape[2:])
    strides = tuple(operand.stride()[2:] for operand in operands)
    (uploaded, _host), aligned, most = _UPLOADS.find(
        "table",
        device,
        lambda: (taps, strides, tuple(rings), count),
        lambda: _table(taps, strides, rings, count, device),
    )
    block = next_power_of_2(min(max(channels * most, BLOCKS[0]), BLOCKS[1]))
    form = WeightForm(
        weight=DTYPES[weight.dtype],
        metric=None if metric is None else DTYPES[metric.dtype],
        linf=linf,
        squared=squared,
        block=block,
        padded_rings=next_power_of_2(count),
        taps_fastest=channels == 1 or weight.stride(1) != 1,
        aligned=aligned,
        wide=channels * len(rings) > NARROW,
    )
    warps = max(1, block // (PER_THREAD * (64 if torch.version.hip else 32)))
    return uploaded[0], {"FORM": form, "num_warps": warps, "enable_fp_fusion": False}


def _table(
    taps: tuple[int, ...],
    strides: Sequence[tuple[int, ...]],
    rings: Sequence[int],
    count: int,
    device: torch.device,
) -> tuple[Any, bool, int]:
    """Return the table in device memory, whether all taps are at multiples of 16, and the most taps of a ring.

    Rows are offsets of each operand's taps, sorted by ring; then follow the first tap of each ring and their number.
    """
    order = np.argsort(np.asarray(rings, dtype=np.int64), kind="stable")
    steps = np.stack([axis.ravel() for axis in np.indices(taps)]) if taps else np.zeros((0, 1), dtype=np.int64)
    offsets = np.asarray(strides, dtype=np.int64).reshape(len(strides), len(taps)) @ steps
    sizes = np.bincount(rings, minlength=count)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    table = np.concatenate([offsets[:, order].ravel(), begins]).astype(np.int64)
    return upload([table], device), not (offsets % ALIGNED).any(), int(sizes.max())


def _device(device: torch.device) -> torch.cuda.device | nullcontext[None]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
