"""Rings of convolution weights: their norms, the kernel sizes they leave, and the exact prox of their penalties.

Half rings and rings are numbered as by :func:`loco_ext.geometry.ring_index`, 0 being the outermost. Group ``G_(n+1)``
consists of the rings 0 to n: the groups are nested, and the last is the whole filter. A filter is the weights of one
output channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.argument_checks import check_choice
from loco_ext.penalties.filters import conv_filters
from loco_ext.penalties.penalty_checks import NORMS, check_metric, thresholds_of


def ring_norms(weight: Tensor, kind: str = "half", *, first: str = "auto") -> Tensor:
    """Return the Euclidean norm of each ring (not group) of each filter; differentiable.

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
    filters = conv_filters(weight, kind, first)
    return ops.ring_norms(weight, filters.rings, filters.count)


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
    """Return the exact minimiser, filter by filter, with t = thresholds, q = squared, d = metric, over x of

    ``sum_i d_i (x_i - weight_i)^2 / 2 + sum_n t_n ||x(G_(n+1))|| + (sum_n q_n ||x(G_(n+1))||)^2``.

    Args:
        weight: a convolution's weight, ``(C_out, C_in/groups, *kernel_size)``; it is not changed.
        thresholds: ``thresholds[n]`` for group ``G_(n+1)``, or one such row per output channel; finite, at least 0.
        kind, first: as for :func:`loco_ext.geometry.ring_index`.
        norm: norm of the groups, ``"l2"`` or ``"linf"``.
        metric: positive tensor of weight's shape and device; None: ones.
        squared: as ``thresholds`` and of the same shape (eq. 33 of the draft); None: zeros.

    Returns:
        A tensor like ``weight``, without a gradient, also under torch.func. Rings that vanish are exactly zero.

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
    filters = conv_filters(weight, kind, first)
    check_choice("norm", norm, NORMS)
    check_metric(metric, weight)
    t = thresholds_of("thresholds", thresholds, filters.count, len(weight))
    q = None if squared is None else thresholds_of("squared", squared, filters.count, len(weight))
    return ops.ring_prox(weight, filters.rings, t, q, metric, linf=norm == "linf")


def kernel_sizes(weight: Tensor, kind: str = "half", *, first: str = "auto") -> Tensor:
    """Return the remaining size of each filter along its longest axis.

    With ``m`` non-zero groups, the size is ``m`` for half rings (eq. 20 of the draft) and ``2m - 1`` for full rings. It
    is 0 if the whole filter is zero.

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
    filters = conv_filters(weight, kind, first)
    live = (weight.detach() != 0).flatten(2).any(1)  # [C_out, taps]
    taps_of = [[k for k, ring in enumerate(filters.rings) if ring == n] for n in range(filters.count)]
    live_rings = torch.stack([live[:, taps].any(1) for taps in taps_of], 1)
    groups = live_rings.cummax(1).values.sum(1)
    return groups if kind == "half" else (2 * groups - 1).clamp(min=0)
