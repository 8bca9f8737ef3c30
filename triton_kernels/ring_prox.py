"""Ring norms and the exact prox of nested rings in Triton, for GPUs that the compiled library is not built for.

One launch handles all filters of all weights whose kernels have the same compile-time constants. Weights of any strides
are read and written in place: a table in device memory lists where they and the taps of each ring are. The host never
waits for the device, and a CUDA graph can capture a call; the graph repeats the thresholds that it was captured with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton.language as tl
from loco_ext.triton_kernels.launch import next_power_of_2, on_device
from loco_ext.triton_kernels.ring_prox_kernels import norms_kernel, prox_kernel
from loco_ext.triton_kernels.ring_prox_weights import COLUMNS, WeightForm
from loco_ext.triton_kernels.uploads import Uploads, upload
from torch import Tensor

from loco_ext.ops.ring_prox import ProxCall
from loco_ext.reference.dtypes import compute_dtype

DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BLOCKS = (32, 1024)  # least and most weights that a program works on at a time
PER_THREAD = 4  # weights per thread
NARROW = 2**31 - BLOCKS[1]  # most weights of a filter whose indices fit into 32 bits
ALIGNED = 16  # bytes between aligned addresses, and elements between aligned filters and taps

_UPLOADS = Uploads(size=128)


@dataclass(frozen=True)
class _Layer:
    """One weight of a launch."""

    form: WeightForm
    operands: list[Tensor]  # weight, out, and the metric if there is one
    rings: int
    taps: np.ndarray  # from _tap_table
    t: Tensor | None
    q: Tensor | None


@torch.compiler.disable
def ring_norms(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
    """Return the Euclidean norm of each ring of each filter; :func:`loco_ext.ops.ring_norms` checks the arguments."""
    dtype = compute_dtype(weight.dtype)
    norms = torch.empty((weight.shape[0], count), dtype=dtype, device=weight.device)
    weight = weight.resolve_neg()  # kernels ignore the lazy negation flag
    with on_device(weight.device):
        _launch(norms_kernel, [_layer([weight, norms], rings, count)])
    return norms


@torch.compiler.disable
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
    return ring_proxes([ProxCall(weight, rings, thresholds, squared, metric, linf)])[0]


@torch.compiler.disable
def ring_proxes(calls: Sequence[ProxCall]) -> list[Tensor]:
    """Return :func:`ring_prox` of each call, all on one device."""
    outs = [torch.empty_like(call.weight) for call in calls]
    with on_device(outs[0].device):
        layers = [_prox_layer(call, out) for call, out in zip(calls, outs, strict=True)]
        _launch(prox_kernel, layers)
    return outs


def _prox_layer(call: ProxCall, out: Tensor) -> _Layer:
    t, q, operands = call.t, call.q, [call.weight.resolve_neg(), out]
    if call.metric is not None:
        metric = call.metric.resolve_neg()
        if metric.dtype == torch.float64:
            metric, t, q = _near_one(metric, *_thresholds_on(out.device, t, q))
        operands.append(metric)
    return _layer(operands, call.rings, t.shape[-1], t, q, call.linf)


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


def _thresholds_on(device: torch.device, t: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return thresholds in the device's memory."""
    if t.device == device:
        return t, q
    host = [each.detach().numpy() for each in (t, q) if each is not None]
    (t_there, *q_there), _host = _UPLOADS.find(
        "thresholds",
        device,
        lambda: [array.tobytes() for array in host],
        lambda: upload([array.ravel() for array in host], device),
    )
    return t_there.view(t.shape), q_there[0].view(t.shape) if q_there else None


def _layer(
    operands: list[Tensor],
    rings: Sequence[int],
    count: int,
    t: Tensor | None = None,
    q: Tensor | None = None,
    linf: bool = False,
) -> _Layer:
    """Return the layer of a weight, its prox or its norms, which have two dimensions, and perhaps a metric."""
    weight, metric = operands[0], operands[2] if len(operands) > 2 else None
    channels, taps = weight.shape[1], tuple(weight.shape[2:])
    # Norms have no taps: they are given the weight's.
    strides = tuple((weight if x.dim() == 2 else x).stride()[2:] for x in operands)
    table, aligned, most = _tap_table(taps, strides, tuple(rings), count)
    form = WeightForm(
        weight=DTYPES[weight.dtype],
        metric=None if metric is None else DTYPES[metric.dtype],
        linf=linf,
        squared=q is not None,
        block=next_power_of_2(min(max(channels * most, BLOCKS[0]), BLOCKS[1])),
        padded_rings=next_power_of_2(count),
        taps_fastest=channels == 1 or weight.stride(1) != 1,
        adjacent=all(x.stride(1) == 1 for x in operands),
        aligned=aligned
        and channels % ALIGNED == 0
        and all(map(_is_aligned, operands if t is not None else operands[:1])),
        on_device=t is not None and _is_on_device(t),
        wide=channels * len(rings) > NARROW,
    )
    return _Layer(form, operands, count, table, t, q)


def _is_on_device(thresholds: Tensor) -> bool:
    return thresholds.device.type != "cpu"


def _is_aligned(operand: Tensor) -> bool:
    return operand.stride(0) % ALIGNED == 0 and operand.data_ptr() % ALIGNED == 0


@lru_cache(maxsize=512)  # more layers than networks have
def _tap_table(
    taps: tuple[int, ...], strides: tuple[tuple[int, ...], ...], rings: tuple[int, ...], count: int
) -> tuple[np.ndarray, bool, int]:
    """Return the taps of a row of the table, whether all are at multiples of 16, and the most taps of a ring.

    Offsets of each of three operands' taps, sorted by ring; then the first tap of each ring and their number.
    """
    order = np.argsort(np.asarray(rings, dtype=np.int64), kind="stable")
    steps = np.stack([axis.ravel() for axis in np.indices(taps)]) if taps else np.zeros((0, 1), dtype=np.int64)
    offsets = np.zeros((3, len(rings)), dtype=np.int64)
    offsets[: len(strides)] = np.asarray(strides, dtype=np.int64).reshape(len(strides), len(taps)) @ steps
    sizes = np.bincount(rings, minlength=count)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    table = np.concatenate([offsets[:, order].ravel(), begins]).astype(np.int64)
    return table, not (offsets % ALIGNED).any(), int(sizes.max())


def _launch(kernel: Any, layers: Sequence[_Layer]) -> None:
    """Launch a kernel for all layers that have filters."""
    launches: dict[WeightForm, list[_Layer]] = defaultdict(list)
    for layer in layers:
        if len(layer.operands[0]) > 0:
            launches[layer.form].append(layer)
    if not launches:
        return
    device = layers[0].operands[0].device
    data = _table([*launches.values()])
    (table,), _host = _UPLOADS.find("table", device, data.tobytes, lambda: upload([data], device))
    first_row = 0
    for form, chosen in launches.items():
        filters = sum(len(layer.operands[0]) for layer in chosen)
        warps = max(1, form.block // (PER_THREAD * (64 if torch.version.hip else 32)))
        kernel[(filters,)](table, first_row, len(chosen), FORM=form, num_warps=warps, enable_fp_fusion=False)
        first_row += len(chosen)


def _table(launches: Sequence[Sequence[_Layer]]) -> np.ndarray:
    """Return the table of ring_prox_weights.py: rows, launch after launch, then what they refer to."""
    rows: list[list[int]] = []
    parts: list[np.ndarray] = []
    end = COLUMNS.value * sum(map(len, launches))

    def put(part: np.ndarray) -> int:
        nonlocal end
        parts.append(part)
        end += len(part)
        return end - len(part)

    def place(thresholds: Tensor | None) -> int:
        if thresholds is None:
            return 0
        if _is_on_device(thresholds):
            return thresholds.data_ptr()
        return put(thresholds.detach().numpy().ravel().view(np.int64))

    for chosen in launches:
        begins = accumulate((len(layer.operands[0]) for layer in chosen), initial=0)
        for layer, begin in zip(chosen, begins, strict=False):
            weight, t = layer.operands[0], layer.t
            stride = layer.rings if t is not None and t.dim() == 2 else 0
            row = [begin, weight.shape[1], weight.shape[2:].numel(), layer.rings, put(layer.taps)]
            row += [place(t), place(layer.q), stride]
            for operand in layer.operands:
                row += [operand.data_ptr(), operand.stride(0), operand.stride(1)]
            rows.append(row + [0] * (COLUMNS.value - len(row)))
    return np.concatenate([np.asarray(rows, dtype=np.int64).ravel(), *parts])
