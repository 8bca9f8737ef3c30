"""Penalties on the square of a sum over all filters of a layer: the factor they share, only in torch's operators."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from loco_ext.reference.ring_prox import power_of_two

ROUNDS = 80  # a fixed count if the host must not wait: checking for convergence would need a sync
MOST_ROUNDS = 200  # limit if the host checks for convergence
FAR = 64  # the upper end is divided by this if the root is estimated to be even farther below it

RingNorms = Callable[[Tensor, Sequence[int], int], Tensor]


def group_norms_by(ring_norms: RingNorms, weight: Tensor, rings: Sequence[int], count: int, linf: bool) -> Tensor:
    """Return ``||k(G_n)||`` of each group of each filter: float64, differentiable, ``(C_out, groups)``.

    The host reads no value from the device.
    """
    if linf:
        return _largest_in_groups(weight, rings, count)
    norms = ring_norms(weight, rings, count).double()
    inside = torch.ones(count, count, dtype=torch.bool, device=weight.device).tril()
    scale = power_of_two(norms.detach().amax(1))[:, None]  # one per filter, so that squares stay within float64
    return torch.linalg.vector_norm((norms * scale)[:, None, :].where(inside, 0.0), dim=2) / scale


def _largest_in_groups(weight: Tensor, rings: Sequence[int], count: int) -> Tensor:
    sizes = weight.abs().reshape(*weight.shape[:2], weight.shape[2:].numel()).amax(1)  # [C_out, taps]
    of_taps = [[sizes[:, k] for k, ring in enumerate(rings) if ring == n] for n in range(count)]
    nothing = torch.zeros_like(sizes[:, 0])
    of_ring = [torch.stack(taps, 1).amax(1) if taps else nothing for taps in of_taps]
    return torch.stack(of_ring, 1).double().cummax(1).values


def shared_factor(
    prox: Callable[[Tensor], Tensor],
    norms_of: Callable[[Tensor], Tensor],
    weight: Tensor,
    q: Tensor,
    plain: bool,
    waits: bool,
) -> Tensor:
    """Return ``f`` for which the joint penalty's prox is that of the penalty without q and with thresholds ``t + f q``.

    Args:
        prox: returns the weights shrunk by thresholds ``t + f q``, given ``f``, a float64 scalar on their device.
        norms_of: returns the groups' norms of such weights, float64 ``(C_out, groups)``.
        weight: the weights in the compute dtype.
        q: float64 ``(C_out, groups)``, on the weights' device.
        plain: whether norms are Euclidean, there is no metric, and t is 0.
        waits: as for :func:`factor_of_sums`.
    """
    if plain and q.shape[1] == 1:
        return factor_of_norms(norms_of(weight).squeeze(1), q.squeeze(1))
    return factor_of_sums(lambda factor: layer_sum(norms_of(prox(factor)), q), weight, waits)


def layer_sum(norms: Tensor, q: Tensor) -> Tensor:
    """Return ``sum of q_n ||k(G_n)||`` over the filters where it is finite; the others do not count."""
    of_filters = torch.where(q == 0, 0.0, q * norms).sum(1)
    return torch.where(of_filters.isfinite(), of_filters, 0.0).sum()


def factor_of_norms(norms: Tensor, q: Tensor) -> Tensor:
    """Solve ``f = 2 sum_j q_j max(n_j - q_j f, 0)`` for filters of one group each: those with ``n_j / q_j > f`` remain.

    Args:
        norms, q: float64 ``(C_out,)``.
    """
    counts = (q > 0) & norms.isfinite()
    q, norms = torch.where(counts, q, 0.0), torch.where(counts, norms, 0.0)
    ratios, order = torch.where(counts, norms / q, -1.0).sort(descending=True)
    q, norms = q[order], norms[order]
    factors = 2 * (q * norms).cumsum(0) / (1 + 2 * q.square().cumsum(0))
    # The strongest filter always remains, though rounding may hide how little it exceeds a factor of large q.
    remain = (ratios > factors).sum().clamp(min=min(1, len(q)))
    return pad(factors, (1, 0)).gather(0, remain.view(1)).squeeze(0)


def factor_of_sums(sum_at: Callable[[Tensor], Tensor], like: Tensor, waits: bool) -> Tensor:
    """Solve ``f = 2 sum_at(f)`` by false position with the Illinois rule: an end kept twice has its value halved.

    If rounding leaves no such point between the ends, it bisects; if the root is far below, it takes a large step down.

    Args:
        sum_at: the layer's sum after its filters are shrunk by thresholds ``t + f q``; a decreasing function of f.
        like: the weights, in the compute dtype.
        waits: whether the host may read values from the device, to stop once no more rounds are needed.
    """
    precision = torch.finfo(like.dtype).eps
    lower = best = torch.zeros((), dtype=torch.float64, device=like.device)
    above = upper = 2 * sum_at(lower)
    below = 2 * sum_at(upper) - upper
    least, before = torch.full_like(lower, torch.inf), lower
    for _ in range(MOST_ROUNDS if waits else ROUNDS):
        at = lower + (upper - lower) * (above / (above - below))
        at = torch.where((lower == 0) & (FAR * (upper + below) < upper), upper / FAR, at)
        at = torch.where((lower < at) & (at < upper), at, lower + (upper - lower) / 2)
        if waits and not lower < at < upper:
            break
        excess = 2 * sum_at(at) - at
        better = (excess.abs() < least) & (at + excess > 0)  # at + excess is 0 if all groups vanish
        best, least = torch.where(better, at, best), torch.where(better, excess.abs(), least)
        if waits and bool(least <= precision * best):
            break
        side = torch.where(excess > 0, 1.0, -1.0)
        again = torch.where(side == before, 0.5, 1.0)
        above, below = torch.where(side > 0, excess, above * again), torch.where(side > 0, below * again, excess)
        lower, upper = torch.where(side > 0, at, lower), torch.where(side > 0, upper, at)
        before = side
    return best
