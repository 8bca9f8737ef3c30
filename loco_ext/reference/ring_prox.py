"""Ring norms and the exact prox of nested ring penalties, in plain PyTorch and float64.

The functions take the arguments of the operators ``ring_norms`` and ``ring_prox``, described in
:mod:`loco_ext.ops.ring_prox`. Every scalar equation is solved by sorting or by narrowing a
bracket around its root.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from loco_ext.reference.dtypes import compute_dtype

_ROUNDS = 200  # most calls of a function whose root is searched; ten suffice if it is smooth


def ring_norms(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
    """Return the Euclidean norm of each ring of each filter; see :func:`loco_ext.ops.ring_norms`."""
    scale, scaled = _scaled(_by_filter(weight))
    norms = _norms_by_ring(scaled, _index(rings, weight), count) / scale[:, None]
    return norms.to(compute_dtype(weight.dtype))


def ring_prox(
    weight: Tensor,
    rings: Sequence[int],
    thresholds: Tensor,
    squared: Tensor | None,
    metric: Tensor | None,
    linf: bool,
    joint: bool = False,
) -> Tensor:
    """Return the prox of a chain of nested groups; see :func:`loco_ext.ops.ring_prox`."""
    if weight.is_meta:
        return torch.empty_like(weight)
    u, index = _by_filter(weight), _index(rings, weight)
    d = None if metric is None else _by_filter(metric)
    t = thresholds.to(u).expand(len(u), -1)
    q = torch.zeros_like(t) if squared is None else squared.to(u).expand(len(u), -1)

    def solve(factor: Tensor) -> Tensor:
        merged = t + torch.where(q == 0, 0.0, q * factor[:, None])
        if linf:
            return _prox_linf(u, index, merged, d)
        if d is None:
            return u * _prox_l2_factors(u, index, merged)[:, None, index]
        return _prox_l2_metric(u, index, merged, d)

    def twice_the_penalty(x: Tensor) -> Tensor:
        of_filters = 2 * _penalty(x, index, q, linf)
        if not joint:
            return of_filters
        return torch.where(of_filters.isfinite(), of_filters, 0.0).sum().expand_as(of_filters)

    def balance(factor: Tensor) -> Tensor:
        return factor - twice_the_penalty(solve(factor))

    factor = torch.zeros_like(t[:, 0])
    if squared is not None:
        # The plain prox has thresholds t + factor*q; factor is twice the sum of q_n times the norms of its result, and
        # at most that sum for the thresholds t alone. It is 0 where these leave nothing.
        upper = twice_the_penalty(solve(factor))
        factor = torch.where(upper.isinf(), 0.0, _root(balance, upper))  # infinite weights stay
    x = solve(factor).view(weight.shape).to(weight.dtype)
    out = torch.empty_like(weight)
    return x if x.stride() == out.stride() else out.copy_(x)


def power_of_two(sizes: Tensor) -> Tensor:
    """Return the power of two, float64, that brings each size near 1; 1 for 0, infinity and NaN."""
    near = sizes.double().clamp(2.0**-1021, 2.0**1019).where(sizes.isfinite() & (sizes > 0), 0.5)
    return torch.frexp(near).mantissa / near  # inductor's code for ldexp with frexp's exponent does not compile


def _by_filter(weight: Tensor) -> Tensor:
    """Return the weights as float64 ``[C_out, C_in, taps]``."""
    return weight.detach().double().reshape(*weight.shape[:2], weight.shape[2:].numel())


def _index(rings: Sequence[int], weight: Tensor) -> Tensor:
    return torch.tensor(rings, device=weight.device)


def _scaled(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return a power of two per filter that brings its largest weight near 1, and the filters multiplied by it.

    Their squares then neither underflow nor overflow. Filters with infinite or NaN weights stay as they are.
    """
    scale = power_of_two(u.abs().amax((1, 2)))
    return scale, u * scale[:, None, None]


def _norms_by_ring(u: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the norm of each ring, ``[C_out, rings]``."""
    squares = u.square().sum(1)  # [C_out, taps]
    return u.new_zeros(len(u), count).index_add_(1, index, squares).sqrt()


def _group_norms(u: Tensor, index: Tensor, count: int) -> Tensor:
    return _norms_by_ring(u, index, count).square().cumsum(1).sqrt()


def _penalty(x: Tensor, index: Tensor, q: Tensor, linf: bool) -> Tensor:
    """Return ``sum_n q_n ||x(G_n)||`` of each filter, ``[C_out]``."""
    if linf:
        largest = x.abs().amax(1)  # [C_out, taps]
        groups = torch.stack([torch.where(index <= n, largest, 0.0).amax(1) for n in range(q.shape[1])], 1)
    else:
        scale, scaled = _scaled(x)
        groups = _group_norms(scaled, index, q.shape[1]) / scale[:, None]
    return torch.where(q == 0, 0.0, q * groups).sum(1)


def _chain(norms: Tensor, t: Tensor) -> Tensor:
    """Return the factor that shrinks each ring, ``[C_out, rings]``, from the rings' norms alone.

    Groups are shrunk one after the other, smallest first (Jenatton et al. 2010): ring r is in all groups from r on.
    """
    b = torch.zeros_like(norms[:, 0])
    factors = []
    for n in range(norms.shape[1]):
        a, t_n = torch.hypot(b, norms[:, n]), t[:, n]
        dead = (a <= t_n) & (t_n > 0)
        b = torch.where(dead, 0.0, a - t_n)
        factors.append(torch.where((t_n == 0) | a.isinf(), 1.0, torch.where(dead, 0.0, b / a)))
    return torch.stack(factors, 1).flip(1).cumprod(1).flip(1)


def _prox_l2_metric(u: Tensor, index: Tensor, t: Tensor, d: Tensor) -> Tensor:
    """Return the prox in the metric ``d``: ``x = u * d / (d + c_r)`` on the rings that remain.

    There ``c_r - c_(r+1) = t_r / ||x(G_r)||``, and ``c`` is 0 beyond the last ring. The chain without a metric, applied
    to ``d*u``, tells which rings remain.
    """
    scale, scaled = _scaled(u)
    stays = d.isinf()
    weighed = torch.where(stays & (u == 0), 0.0, scaled * d)
    factors = _prox_l2_factors(weighed, index, t * scale[:, None])
    of_metric, d = _scaled(d.masked_fill(stays, 0.0))
    t = t * scale[:, None] * of_metric[:, None]
    alive = factors != 0  # [C_out, rings]; NaN is alive
    # Weights, metric and mask of infinite metrics of each ring: [C_out, C_in, taps of the ring]
    rings = [[each[:, :, index == n] for each in (scaled, d, stays)] for n in range(t.shape[1])]

    def coefficients(first: Tensor) -> tuple[Tensor, Tensor]:
        """Return c of every ring and beyond the last, given c of the first live ring; once negative, it stays so."""
        c, negative = first, torch.zeros_like(first, dtype=torch.bool)
        squares, found = torch.zeros_like(first), []
        for n, (u_of_ring, d_of_ring, stay) in enumerate(rings):
            found.append(c)
            x = u_of_ring * _damping(d_of_ring, stay, c[:, None, None])
            squares = torch.where(alive[:, n], squares + x.square().sum((1, 2)), squares)
            step = torch.where(alive[:, n] & (t[:, n] != 0), t[:, n] / squares.sqrt(), 0.0)
            negative |= c < 0
            c = torch.where(negative, c, c - step)
        return torch.stack(found, 1), c

    upper = torch.where(alive & (t != 0), t / _group_norms(scaled, index, t.shape[1]), 0.0).sum(1)
    for _ in range(2100):
        short = coefficients(upper)[1] < 0
        if not short.any():
            break
        upper = torch.where(short, upper * 2, upper)
    c = coefficients(_root(lambda first: coefficients(first)[1], upper))[0]
    x = u * _damping(d, stays, c[:, None, index])
    return torch.where(alive[:, None, index], torch.where(c[:, None, index] == 0, u, x), u * 0.0)


def _damping(d: Tensor, stays: Tensor, c: Tensor) -> Tensor:
    """Return ``d / (d + c)``, and 1 for the weights that stay."""
    return torch.where(stays, 1.0, d / (d + c))


def _prox_l2_factors(u: Tensor, index: Tensor, t: Tensor) -> Tensor:
    scale, scaled = _scaled(u)
    return _chain(_norms_by_ring(scaled, index, t.shape[1]), t * scale[:, None])


def _prox_linf(u: Tensor, index: Tensor, t: Tensor, d: Tensor | None) -> Tensor:
    """Return the prox for the largest weight of each group, in the metric ``d`` if there is one.

    Group after group, smallest first, is clipped at the level that removes ``t_n`` in total, weighted by ``d``, but not
    below the largest weight whose ``d`` is infinite.
    """
    stays = torch.zeros_like(u, dtype=torch.bool) if d is None else d.isinf()
    of_metric, d = _scaled(torch.ones_like(u) if d is None else d.masked_fill(stays, 0.0))
    scale, scaled = _scaled(u)
    t = t * scale[:, None] * of_metric[:, None]
    sizes, cap = scaled.abs(), torch.full_like(t, torch.inf)
    for n in range(t.shape[1]):
        group = index <= n
        inside = torch.minimum(sizes, cap[:, None, index])[:, :, group]
        # One more weight of 0, which contributes nothing, is appended, as a group may be empty.
        level = _water_level(pad(inside.flatten(1), (0, 1)), pad(d[:, :, group].flatten(1), (0, 1)), t[:, n])
        staying = torch.where(stays & group, sizes, 0.0)
        level = torch.maximum(level, staying.flatten(1).amax(1))
        cap[:, : n + 1] = torch.minimum(cap[:, : n + 1], level[:, None])
    return torch.copysign(torch.minimum(u.abs(), (cap / scale[:, None])[:, None, index]), u)


def _water_level(v: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Return the level at which ``sum d * max(v - level, 0) = t``: 0 if ``sum d * v < t``, inf for t = 0."""
    v, order = v.sort(1, descending=True)
    d = d.gather(1, order)
    levels = ((d * v).cumsum(1) - t[:, None]) / d.cumsum(1)
    count = (v > levels).sum(1, keepdim=True)
    level = levels.gather(1, (count - 1).clamp(min=0)).squeeze(1).clamp(min=0)
    return torch.where((t == 0) | v.isinf().any(1), torch.inf, level)


def _root(rising: Callable[[Tensor], Tensor], upper: Tensor) -> Tensor:
    """Return where an increasing function of each entry becomes positive, between 0 and ``upper``.

    A bracket is narrowed by inverse quadratic interpolation where three points allow it, else by bisection
    (Chandrupatla 1997, Advances in Engineering Software 28). Bisection alone would take several times as many calls,
    squared in a search within a search.
    """
    spacing = torch.finfo(upper.dtype).eps
    # The last point is one end of the bracket and ``other`` is the other; ``third`` was an end before.
    last, other = torch.zeros_like(upper), upper
    of_last, of_other = torch.full_like(upper, -torch.inf), torch.full_like(upper, torch.inf)
    positive = torch.zeros_like(upper, dtype=torch.bool)
    part = torch.ones_like(upper)  # the next point is this part of the way from last to other
    for _ in range(_ROUNDS):
        point = last + part * (other - last)
        value = rising(point)
        same = (value > 0) == positive
        third, of_third = torch.where(same, last, other), torch.where(same, of_last, of_other)
        other, of_other = torch.where(same, other, last), torch.where(same, of_other, of_last)
        last, of_last, positive = point, value, value > 0
        width, least = (other - last).abs(), spacing * last.abs() + spacing / 4096 * upper
        if (~(width > 2 * least)).all():
            break
        place, height = (last - other) / (third - other), (of_last - of_other) / (of_third - of_other)
        smooth = (1 - (1 - place).sqrt() < height) & (height < place.sqrt())
        quadratic = of_last / (of_last - of_other) * (of_third / (of_third - of_other))
        quadratic = quadratic + (third - last) / (other - last) * (of_last / (of_third - of_last)) * (
            of_other / (of_third - of_other)
        )
        part = torch.where(smooth & quadratic.isfinite(), quadratic, 0.5)
        part = torch.minimum(torch.maximum(part, least / width), 1 - least / width)
    return torch.where(positive, last, other)
