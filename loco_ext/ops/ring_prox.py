"""Nested rings of a convolution's weights: their norms, and the exact prox of penalties on their norms.

A *filter* is one output channel's weights: ``weight[o]``, of shape ``(channels, *taps)``. ``rings`` gives the ring of
every tap, in the order of a contiguous filter, counted from 0, the outermost, as :func:`loco_ext.geometry.ring_index`
does. Group n consists of the rings 0 to n, so that groups are nested and the last is the whole filter.

Sums and everything derived from them are in float64; weights are float32, float64, bfloat16 or float16, of any strides.

All functions here raise TypeError for a wrong dtype, layout or device, ValueError for wrong shapes, counts or values.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loco_ext import compiler
from loco_ext.argument_checks import check_memory
from loco_ext.ops import backends, transforms
from loco_ext.ops.joint import group_norms_by, shared_factor
from loco_ext.ops.penalties import MOST_RINGS
from loco_ext.reference import ring_prox as _reference
from loco_ext.reference.dtypes import compute_dtype

_FAMILY = "ring_prox"


def ring_norms(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
    """Return the Euclidean norm of each ring of each filter, differentiable any number of times (0 where a norm is 0).

    Args:
        weight: ``(C_out, channels, *taps)``.
        rings: the ring of each tap, below ``count``, which is at most 64.

    Returns:
        ``(C_out, count)``, float64 for float64 weights, else float32.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> ops.ring_norms(torch.tensor([[[3.0, 5.0, 4.0]]]), [0, 1, 0], 2)
        tensor([[5., 5.]])
    """
    _check_weight("weight", weight)
    _check_rings(weight, rings, count)
    if compiler.is_exporting() or torch.jit.is_tracing():
        return torch.ops.loco_ext.ring_norms_traced(weight, rings, count)
    return _norms(weight, list(rings), count)


def _norms(weight: Tensor, rings: list[int], count: int) -> Tensor:
    function = _TransformableRingNorms if transforms.are_active() else _RingNorms
    return function.apply(weight, rings, count)


class _RingNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rings: list[int], count: int) -> Tensor:
        norms = _run("ring_norms", weight, rings, count)
        ctx.rings = rings
        ctx.save_for_backward(weight, norms)
        return norms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, norms = ctx.saved_tensors
        grad = torch.where(norms > 0, grads[0], 0)[:, ctx.rings].view(_of_taps(weight))
        return (_directions(weight, norms, ctx.rings) * grad).to(weight.dtype), None, None


class _TransformableRingNorms(_RingNorms):
    """_RingNorms for torch.func and forward-mode AD; torch.compile accepts no function with a ``jvp``."""

    @staticmethod
    def forward(weight: Tensor, rings: list[int], count: int) -> Tensor:  # type: ignore[override]
        return _run("ring_norms", weight, rings, count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, ctx.rings, ctx.count = inputs
        ctx.save_for_backward(weight, output)
        ctx.save_for_forward(weight, output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        weight, norms = ctx.saved_tensors
        along = _directions(weight, norms, ctx.rings) * tangent.to(norms.dtype)
        of_taps = along.flatten(2).sum(1)  # [C_out, taps]
        rings = torch.tensor(ctx.rings, device=weight.device)
        change = norms.new_zeros(norms.shape).index_add(1, rings, of_taps)
        return torch.where(norms > 0, change, 0)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], weight: Tensor, rings: list[int], count: int
    ) -> tuple[Tensor, int]:
        weight = weight.movedim(in_dims[0], 0)
        return _norms(weight.flatten(0, 1), rings, count).unflatten(0, weight.shape[:2]), 0


def _of_taps(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor with one number for each tap of each filter."""
    return (weight.shape[0], 1, *weight.shape[2:])


def _directions(weight: Tensor, norms: Tensor, rings: list[int]) -> Tensor:
    """Return the weights divided by the norm of their ring; those of norm 0 stay as they are."""
    return weight.to(norms.dtype) / torch.where(norms > 0, norms, 1)[:, rings].view(_of_taps(weight))


def ring_prox(
    weight: Tensor,
    rings: Sequence[int],
    thresholds: Tensor,
    squared: Tensor | None = None,
    metric: Tensor | None = None,
    *,
    linf: bool = False,
    joint: bool = False,
) -> Tensor:
    """Return the exact minimiser over x, for each filter and with t = thresholds, q = squared, d = metric, of

    ``sum_i d_i (x_i - weight_i)^2 / 2 + sum_n t_n ||x(group n)|| + (sum_n q_n ||x(group n)||)^2``.

    Which weights become zero is exact: no tolerance is involved. All rings before the last vanishing ring vanish too. A
    NaN spreads in its filter. Infinite weights stay, and ``squared`` does not act on their filter, unless ``joint``.
    The result has no gradient, also under torch.func.

    Args:
        weight: ``(C_out, channels, *taps)``; not modified.
        rings: the ring of each tap, below ``thresholds.shape[-1]``.
        thresholds: finite, at least 0, float64 on the CPU: one for each group, ``(groups,)``, or ``(C_out, groups)``.
        squared: as ``thresholds``, and of their shape; None for zeros.
        metric: of weight's shape and device and any of the four dtypes, positive; None for ones.
        linf: whether groups are measured by their largest weight instead of the Euclidean norm.
        joint: whether the squared sum runs over all filters whose norms are finite; the thresholds of all filters are
            then ``t + f q`` with the same f, found to the precision of the weights' dtype.

    Returns:
        A tensor like ``weight``.

    Source:
        Groups: the draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", eqs. 17-22, 32-33.
        The order that makes shrinking group by group exact: Jenatton, Mairal, Obozinski, Bach, "Proximal methods for
        sparse hierarchical dictionary learning" (2010).

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> ops.ring_prox(torch.tensor([[[3.0, 5.0, 4.0]]]), [0, 1, 0], torch.tensor([5.0, 1.0], dtype=torch.float64))
        tensor([[[0., 4., 0.]]])
    """
    _check_weight("weight", weight)
    check_thresholds("thresholds", thresholds, weight)
    _check_rings(weight, rings, thresholds.shape[-1])
    if squared is not None:
        check_thresholds("squared", squared, weight)
        if squared.shape != thresholds.shape:
            raise ValueError(f"squared: expected shape {tuple(thresholds.shape)}, got {tuple(squared.shape)}")
        squared = squared.contiguous()
    if metric is not None:
        check_metric(metric, weight)
    weight, rings = weight.detach(), list(rings)
    if not joint or squared is None:
        return _run("ring_prox", weight, rings, thresholds.contiguous(), squared, metric, linf)
    if joins_in_kernel(weight):
        return run_joint_kernels([ProxCall(weight, rings, thresholds.contiguous(), squared, metric, linf)])[0]
    t, q = thresholds.to(weight.device), squared.to(weight.device)
    return run_joint_prox(weight, rings, t.contiguous(), q, metric, linf, plain=not thresholds.any())


def joins_in_kernel(weight: Tensor) -> bool:
    """Return whether :func:`run_joint_kernels` serves the weight."""
    return backends.choose(_FAMILY, weight.device) == "native" and backends.runs_gpu_kernels(weight.device)


@dataclass(frozen=True)
class ProxCall:
    """The arguments of :func:`ring_prox`, unchecked.

    ``t`` and ``q`` are contiguous, on the CPU or the weight's device.
    """

    weight: Tensor
    rings: Sequence[int]
    t: Tensor
    q: Tensor | None
    metric: Tensor | None
    linf: bool


def run_proxes(calls: Sequence[ProxCall]) -> list[Tensor]:
    """Return the prox of each filter by itself of each weight, all on one device; Triton shares launches."""
    if calls and backends.choose(_FAMILY, calls[0].weight.device) == "triton":
        return _triton().ring_proxes(calls)
    return [_run("ring_prox", call.weight, list(call.rings), call.t, call.q, call.metric, call.linf) for call in calls]


def run_joint_kernels(calls: Sequence[ProxCall]) -> list[Tensor]:
    """Return the prox of each weight, all on one device; weights of a kind share a launch, and no host waits for it."""
    results: dict[int, Tensor] = {}
    for kind in {(call.metric is None, call.linf) for call in calls}:
        chosen = [i for i, call in enumerate(calls) if (call.metric is None, call.linf) == kind]
        of_kind = [calls[i] for i in chosen]
        outs = backends.operators().joint_ring_prox(
            [call.weight for call in of_kind],
            [ring for call in of_kind for ring in call.rings],
            [call.t for call in of_kind],
            [call.q for call in of_kind],
            [call.metric for call in of_kind if call.metric is not None],
            kind[1],
        )
        results.update(zip(chosen, outs, strict=True))
    return [results[i] for i in range(len(calls))]


def run_joint_prox(
    weight: Tensor, rings: list[int], t: Tensor, q: Tensor, metric: Tensor | None, linf: bool, plain: bool
) -> Tensor:
    """Return :func:`ring_prox` of all filters together without :func:`run_joint_kernels`, unchecked.

    The host waits for no GPU.

    Args:
        t, q: contiguous, on the weight's device.
        plain: whether t is known to be 0.
    """
    chosen = backends.choose(_FAMILY, weight.device)
    if chosen == "reference":
        return _reference.ring_prox(weight, rings, t, q, metric, linf, True)

    def prox(u: Tensor, factor: Tensor) -> Tensor:
        return _run("ring_prox", u, rings, t + factor * q, None, metric, linf)

    norms_of = partial(group_norms, rings=rings, count=q.shape[-1], linf=linf)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    plain, waits = plain and metric is None and not linf, chosen == "native" and weight.is_cpu
    return prox(weight, shared_factor(partial(prox, wide), norms_of, wide, q.expand(len(weight), -1), plain, waits))


def group_norms(weight: Tensor, rings: Sequence[int], count: int, linf: bool) -> Tensor:
    """Return ``||k(G_n)||`` of each group of each filter: float64, differentiable, ``(C_out, groups)``."""
    return group_norms_by(ring_norms, weight, rings, count, linf)


def _run(name: str, weight: Tensor, *arguments: Any) -> Tensor:
    chosen = backends.choose(_FAMILY, weight.device)
    if chosen == "reference":
        return getattr(_reference, name)(weight, *arguments)
    if chosen == "triton":
        return getattr(_triton(), name)(weight, *arguments)
    return getattr(backends.operators(), name)(weight, *arguments)


def _triton() -> ModuleType:
    return importlib.import_module("loco_ext.triton_kernels.ring_prox")


def _check_weight(name: str, weight: Tensor) -> None:
    check_memory(name, weight)
    if weight.dim() < 2 or weight.shape[1:].numel() == 0:
        raise ValueError(
            f"{name}: expected shape (C_out, channels, *taps) with at least one weight a filter, "
            f"got {tuple(weight.shape)}"
        )


def _check_rings(weight: Tensor, rings: Sequence[int], count: int) -> None:
    if not 1 <= count <= MOST_RINGS:
        raise ValueError(f"rings: expected 1 to {MOST_RINGS} of them, got {count}")
    taps = weight.shape[2:].numel()
    if len(rings) != taps:
        raise ValueError(f"rings: expected one entry for each of the {taps} taps of weight, got {len(rings)}")
    if any(not 0 <= ring < count for ring in rings):
        raise ValueError(f"rings: expected entries from 0 to {count - 1}, got {list(rings)}")


def check_thresholds(name: str, thresholds: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError for unusable thresholds; values are checked only in eager calls."""
    if thresholds.dtype != torch.float64 or not thresholds.is_cpu:
        raise TypeError(f"{name}: expected a float64 tensor on the CPU, got {thresholds.dtype} on {thresholds.device}")
    if thresholds.dim() not in (1, 2) or (thresholds.dim() == 2 and len(thresholds) != len(weight)):
        raise ValueError(f"{name}: expected shape (groups,) or ({len(weight)}, groups), got {tuple(thresholds.shape)}")
    if not torch.compiler.is_compiling() and not _are_sizes(thresholds):
        raise ValueError(f"{name}: expected finite numbers of at least 0, got {thresholds.tolist()}")


def _are_sizes(thresholds: Tensor) -> bool:
    """Return whether all are finite and at least 0; for a few numbers Python is faster than a call to torch."""
    if thresholds.dim() == 1:
        return all(0.0 <= threshold < math.inf for threshold in thresholds.tolist())
    return bool(((thresholds >= 0) & (thresholds < torch.inf)).all())


def check_metric(metric: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError for an unusable metric; its values are not checked."""
    _check_weight("metric", metric)
    if metric.device != weight.device:
        raise TypeError(f"metric: expected device {weight.device} as weight, got {metric.device}")
    if metric.shape != weight.shape:
        raise ValueError(f"metric: expected weight's shape {tuple(weight.shape)}, got {tuple(metric.shape)}")


# torch.jit.trace and torch.export record this operator in place of autograd functions, which they cannot save; it is
# differentiable as they are.
_TRACED = torch.library.Library("loco_ext", "FRAGMENT")
_TRACED.define("ring_norms_traced(Tensor weight, int[] rings, int count) -> Tensor")
torch.library.impl(_TRACED, "ring_norms_traced", "CompositeImplicitAutograd")(_norms)

if backends.library is not None:

    @torch.library.register_fake("loco_ext::ring_norms")
    def _(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
        return weight.new_empty((weight.shape[0], count), dtype=compute_dtype(weight.dtype))

    @torch.library.register_fake("loco_ext::ring_prox")
    def _(weight: Tensor, rings: Any, thresholds: Any, squared: Any, metric: Tensor | None, linf: bool) -> Tensor:
        backends.check_one_device(weight=weight, metric=metric)
        return torch.empty_like(weight)

    @torch.library.register_fake("loco_ext::joint_ring_prox")
    def _(weights: list[Tensor], rings: Any, t: Any, q: Any, metrics: list[Tensor], linf: bool) -> list[Tensor]:
        for i, weight in enumerate(weights):
            backends.check_one_device(weight=weight, metric=metrics[i] if metrics else None)
        return [torch.empty_like(weight) for weight in weights]
