"""Rings of convolution weights: their norms, the kernel sizes they leave, and the exact prox of their penalties.

Half rings and rings are numbered as by :func:`loco_ext.geometry.ring_index`, 0 being the outermost. Group ``G_(n+1)``
consists of the rings 0 to n: the groups are nested, and the last is the whole kernel. A kernel is the weights of one
output channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from loco_ext import geometry, ops
from loco_ext.geometry.attached_pattern import pattern_of
from loco_ext.ops.checks import DTYPES
from loco_ext.ops.ring_prox import check_metric as check_like

NORMS = ("l2", "linf")


def ring_norms(weight: Tensor, kind: str = "half", *, first: str = "auto") -> Tensor:
    """Return the Euclidean norm of each ring (not group) of each kernel; differentiable.

    Args:
        weight: a convolution's weight, ``(C_out, C_in/groups, *kernel_size)`` with 1 to 3 spatial axes.
        kind, first: as for :func:`loco_ext.geometry.ring_index`.

    Returns:
        ``(C_out, rings)``, ring 0 being the outermost; float64 for float64 weights, else float32.

    Raises:
        TypeError, ValueError: ``weight`` has a wrong type or shape, ``kind`` or ``first`` is unknown, or sizes are even
            with ``kind="full"``.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> sparsity.ring_norms(torch.ones(1, 1, 3, 3), kind="full").round(decimals=4)
        tensor([[2.8284, 1.0000]])
    """
    rings, count = rings_of(weight, kind, first)
    return ops.ring_norms(weight, rings, count)


def ring_prox(
    weight: Tensor,
    thresholds: Sequence[float] | Tensor,
    kind: str = "half",
    norm: str = "l2",
    metric: Tensor | None = None,
    *,
    squared: Sequence[float] | Tensor | None = None,
    first: str = "auto",
) -> Tensor:
    """Return the exact minimiser, kernel by kernel, with t = thresholds, q = squared, d = metric, over x of

    ``sum_i d_i (x_i - weight_i)^2 / 2 + sum_n t_n ||x(G_(n+1))|| + (sum_n q_n ||x(G_(n+1))||)^2``.

    Args:
        weight: a convolution's weight, ``(C_out, C_in/groups, *kernel_size)``; it is not changed.
        thresholds: ``thresholds[n]`` for group ``G_(n+1)``, or one such row per output channel; finite, at least 0.
        kind, first: as for :func:`loco_ext.geometry.ring_index`.
        norm: norm of the groups, ``"l2"`` or ``"linf"``.
        metric: positive tensor of weight's shape and device; None: ones.
        squared: as ``thresholds`` and of the same shape (eq. 33 of the draft); None: zeros.

    Returns:
        A tensor like ``weight``. Rings that vanish are exactly zero.

    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what it got.

    Source:
        Jenatton, Mairal, Obozinski, Bach, "Proximal methods for sparse hierarchical dictionary learning" (2010); the
        draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", eqs. 17-22 and 33.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> sparsity.ring_prox(torch.ones(1, 1, 3, 3), [3.0, 0.0], kind="full")[0, 0]
        tensor([[0., 0., 0.],
                [0., 1., 0.],
                [0., 0., 0.]])
    """
    rings, count = rings_of(weight, kind, first)
    check_norm(norm)
    if metric is not None:
        check_metric(metric, weight)
    t = thresholds_of("thresholds", thresholds, count, len(weight))
    q = None if squared is None else thresholds_of("squared", squared, count, len(weight))
    return ops.ring_prox(weight, rings, t, q, metric, linf=norm == "linf")


def kernel_sizes(weight: Tensor, kind: str = "half", *, first: str = "auto") -> Tensor:
    """Return the size that is left of each kernel along its longest axis.

    ``m`` non-zero groups leave size ``m`` for half rings (eq. 20 of the draft) and ``2m - 1`` for rings; the size is 0
    if the whole kernel is zero.

    Args:
        weight: a convolution's weight, ``(C_out, C_in/groups, *kernel_size)``. NaN counts as non-zero.
        kind, first: as for :func:`loco_ext.geometry.ring_index`.

    Returns:
        int64 ``(C_out,)``.

    Raises:
        TypeError, ValueError: as for :func:`ring_norms`.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> weight = torch.ones(2, 1, 5, 5)
        >>> weight[0, :, 0] = weight[0, :, :, 0] = 0
        >>> sparsity.kernel_sizes(weight)
        tensor([4, 5])
    """
    rings, count = rings_of(weight, kind, first)
    live = (weight.detach() != 0).flatten(2).any(1)  # [C_out, taps]
    live_rings = torch.stack([live[:, [ring == n for ring in rings]].any(1) for n in range(count)], 1)
    groups = live_rings.cummax(1).values.sum(1)
    return groups if kind == "half" else (2 * groups - 1).clamp(min=0)


def rings_of(weight: Tensor, kind: str, first: str) -> tuple[list[int], int]:
    """Return the ring of each tap of a convolution's weight, in order, and the number of rings, after checks."""
    check_convolution("weight", weight)
    divide = _divide if torch.compiler.is_compiling() else _divide_once  # torch.compile warns about lru_cache
    return divide(tuple(weight.shape[2:]), kind, first)


def _divide(kernel_size: tuple[int, ...], kind: str, first: str) -> tuple[list[int], int]:
    rings = geometry.ring_list(kernel_size, kind, first)
    return rings, max(rings) + 1


_divide_once = lru_cache(maxsize=256)(_divide)


def check_convolution(name: str, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless ``weight`` can be a convolution's, with at least one weight per kernel."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(weight).__name__}")
    if weight.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {weight.layout}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {weight.dtype}")
    if pattern_of(weight) is not None:
        raise TypeError(f"{name}: expected a convolution's weight, got the blocks of a locally connected layer")
    if not 3 <= weight.dim() <= 5:
        raise ValueError(
            f"{name}: expected a convolution's weight of 3 to 5 dimensions, (C_out, C_in/groups, *kernel_size), "
            f"got shape {tuple(weight.shape)}"
        )
    if weight.shape[1:].numel() == 0:
        raise ValueError(f"{name}: expected at least one weight a kernel, got shape {tuple(weight.shape)}")


def check_number(name: str, value: float) -> float:
    """Return the value as a float; raise TypeError or ValueError unless it is finite and at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return float(value)


def check_norm(norm: str) -> None:
    """Raise ValueError unless ``norm`` is a norm of groups."""
    if norm not in NORMS:
        raise ValueError(f"norm: expected 'l2' or 'linf', got {norm!r}")


def check_metric(metric: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless ``metric`` is like ``weight`` and, outside of torch.compile, positive."""
    if not isinstance(metric, Tensor):
        raise TypeError(f"metric: expected a tensor or None, got {type(metric).__name__}")
    check_like(metric, weight)
    if not torch.compiler.is_compiling() and (metric <= 0).any():
        raise ValueError(f"metric: expected positive numbers, got {metric.min().item()}")


def thresholds_of(name: str, values: Sequence[float] | Tensor, count: int, kernels: int) -> Tensor:
    """Return float64 on the CPU, ``(count,)`` or ``(kernels, count)``; raise TypeError or ValueError otherwise."""
    try:
        t = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor or a sequence of numbers, got {values!r}") from error
    if t.shape not in ((count,), (kernels, count)):
        raise ValueError(
            f"{name}: expected {count} numbers, one for each group, or a row of them for each of {kernels} kernels, "
            f"got shape {tuple(t.shape)}"
        )
    return t
