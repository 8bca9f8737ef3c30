"""Residual of the prox's optimality (KKT) conditions, in float64: the distance of a result from the optimum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.argument_checks import check_choice, check_tensor
from loco_ext.ops.ring_prox import check_thresholds
from loco_ext.penalties.filters import conv_filters
from loco_ext.penalties.penalty_checks import NORMS, check_metric, thresholds_of
from loco_ext.reference.ring_prox import power_of_two
from loco_ext.reference.ring_prox import ring_prox as reference_prox


def kkt_residual(
    weight: Tensor,
    result: Tensor,
    thresholds: Sequence[float] | Tensor,
    kind: str = "half",
    norm: str = "l2",
    metric: Tensor | None = None,
    *,
    squared: Sequence[float] | Tensor | None = None,
    first: str = "auto",
) -> Tensor:
    """Return how far ``result`` is from satisfying the optimality conditions of the prox, relative to ``weight``.

    The residual is the distance of ``d*(weight - result)`` from the penalty's subdifferential at ``result``, divided by
    the norm of ``d*weight``. It is 0 if ``result`` is the optimum that :func:`ring_prox` computes. It does not depend
    on how the result was found, so it can judge the result of any method.

    Args:
        weight, thresholds, kind, norm, metric, squared, first: as for :func:`ring_prox`.
        result: a tensor of weight's shape.

    Returns:
        float64 ``(C_out,)``. ``norm="l2"`` measures in the Euclidean norm, ``"linf"`` in its dual, the sum of absolute
        values.

    Raises:
        TypeError, ValueError: as for :func:`ring_prox`; ``result`` has another shape.

    Example:
        >>> import torch
        >>> from loco_ext import sparsity
        >>> weight, thresholds = torch.randn(4, 8, 3, 3, dtype=torch.float64), [0.5, 0.1, 0.2]
        >>> result = sparsity.ring_prox(weight, thresholds)
        >>> bool((sparsity.kkt_residual(weight, result, thresholds) < 1e-12).all())
        True
    """
    filters = conv_filters(weight, kind, first)
    rings, count = filters.rings, filters.count
    check_choice("norm", norm, NORMS)
    check_metric(metric, weight)
    check_tensor("result", result)
    if result.shape != weight.shape:
        raise ValueError(f"result: expected weight's shape {tuple(weight.shape)}, got {tuple(result.shape)}")
    t = _thresholds("thresholds", thresholds, count, weight)
    index = torch.tensor(rings, device=weight.device)
    u, x = (tensor.detach().double().flatten(2) for tensor in (weight, result))
    d = torch.ones_like(u) if metric is None else metric.detach().double().flatten(2)
    # Scaling each filter by powers of two keeps all squares within float64 and changes no quotient of forces.
    of_weight, of_metric = power_of_two(u.abs().amax((1, 2))), power_of_two(d.amax((1, 2)))
    u, x, d = u * of_weight[:, None, None], x * of_weight[:, None, None], d * of_metric[:, None, None]
    groups = torch.stack([_group_norm(x, index <= n, norm) for n in range(count)], 1)  # [C_out, groups]
    t = t.expand_as(groups)
    if squared is not None:
        q = _thresholds("squared", squared, count, weight)
        t = t + 2 * (q * (groups / of_weight[:, None])).sum(1, keepdim=True) * q
    t = t * of_weight[:, None] * of_metric[:, None]
    forces = d * (u - x)  # must be the sum of one subgradient of each group
    distance = (_distance_l2 if norm == "l2" else _distance_linf)(forces, x, index, t, groups)
    size = (d * u).flatten(1).norm(dim=1) if norm == "l2" else (d * u).abs().sum((1, 2))
    return torch.where(distance == 0, 0.0, distance / size)


def _thresholds(name: str, values: Sequence[float] | Tensor, count: int, weight: Tensor) -> Tensor:
    t = thresholds_of(name, values, count, len(weight))
    check_thresholds(name, t, weight)
    return t.to(weight.device)


def _group_norm(x: Tensor, taps: Tensor, norm: str) -> Tensor:
    part = x[:, :, taps].flatten(1)
    return part.abs().amax(1) if norm == "linf" else torch.linalg.vector_norm(part, dim=1)


def _distance_l2(forces: Tensor, x: Tensor, index: Tensor, t: Tensor, groups: Tensor) -> Tensor:
    """Return the distance for ``norm="l2"``, ``(C_out,)``.

    A non-zero group has the single subgradient ``t x / ||x||``; a zero group has all vectors of norm up to t. The sum
    of these sets is what the prox subtracts, so its result is the distance.
    """
    live = groups > 0
    pull = torch.where(live, t / torch.where(live, groups, 1.0), 0.0)
    of_ring = pull.flip(1).cumsum(1).flip(1)  # ring r is in all groups from r on
    rest = forces - of_ring[:, None, index] * x
    dead = ~live[:, None, index]  # rings of groups that are zero
    kept = torch.where(live, 0.0, t)
    inside = reference_prox(torch.where(dead, rest, 0.0), index.tolist(), kept, None, None, False)
    outside = torch.where(dead, 0.0, rest)
    return torch.hypot(inside.flatten(1).norm(dim=1), outside.flatten(1).norm(dim=1))


def _distance_linf(forces: Tensor, x: Tensor, index: Tensor, t: Tensor, groups: Tensor) -> Tensor:
    """Return the distance for ``norm="linf"``, ``(C_out,)``.

    Group n pulls its largest weights towards 0 with forces of sum ``t_n``; groups with the same largest weight form a
    plateau. The largest weights of ring r can be pulled by the plateau's groups from r on. The forces they take must
    not exceed those available, and all forces of the plateau must be used unless it is at 0.
    """
    count = t.shape[1]
    size, sign = x.abs(), torch.where(x == 0, forces.sign(), x.sign())
    along = forces * sign  # it is at least 0 where the weight is pulled towards 0
    at_top = size >= groups[:, None, index]
    tops = along.clamp(min=0) * at_top
    taken = torch.zeros_like(t).index_add_(1, index, tops.sum(1))  # force taken by each ring
    wrong = (along.clamp(max=0).abs() + along.clamp(min=0) * ~at_top).sum((1, 2))
    # Forces taken must not exceed those available, from the last group of each plateau to its first.
    surplus = torch.zeros_like(wrong)
    for n in range(count - 1, -1, -1):
        if n + 1 < count:
            begins = groups[:, n] < groups[:, n + 1]  # another plateau begins
            unused = torch.where(begins & (groups[:, n + 1] > 0), surplus, 0.0)
            wrong = wrong + unused
            surplus = torch.where(begins, 0.0, surplus)
        surplus = surplus + t[:, n] - taken[:, n]
        wrong = wrong + (-surplus).clamp(min=0)
        surplus = surplus.clamp(min=0)
    return wrong + torch.where(groups[:, 0] > 0, surplus, 0.0)
