"""The cheapest sizes of all filters: a nested l0 problem, solved for a price of cost, and the price for a budget.

Minimise, over the size of every filter,

    sum over the filters of the importance lost  +  price * cost.

Given all other layers, the classes that a block of layers writes decide exactly; blocks take turns while the price
rises slowly from 0, since a layer that decides at a high price while all others are still whole would lose more than
its share.
"""

from __future__ import annotations

import numpy as np

from loco_ext.sparsity.budget.exchange import exchanged
from loco_ext.sparsity.budget.fill import filled
from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, Sizes, State
from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.disjoint_set import Integers

_FIRST_PRICE = 1e-6  # first price to try, as a fraction of the price at which everything would be removed
_RISE = 1.25  # factor between one price and the next
_FALLS, _FALL = 6, 1e3  # while the first price already meets the budget, it is divided by _FALL, at most _FALLS times
_BISECTIONS, _MOST_ROUNDS = 16, 20


def within(problem: SizeProblem, budget: float) -> Sizes:
    """Return sizes that cost at most ``budget``, losing as little importance as is found.

    If none are found that cost as little, return the cheapest.
    """
    sizes = problem.whole()
    if problem.cost(sizes) <= budget:
        return sizes
    price, end = _prices(problem)
    for _ in range(_FALLS):
        if problem.cost(improved(problem, sizes, price, most_rounds=1)) > budget:
            break
        price /= _FALL
    below = sizes
    while problem.cost(below) > budget:
        if price > end:
            return below
        sizes, price = below, price * _RISE
        below = improved(problem, sizes, price, most_rounds=1)
    low, high = price / _RISE, price
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        found = improved(problem, sizes, middle)
        if problem.cost(found) <= budget:
            below, high = found, middle
        else:
            sizes, low = found, middle
    return exchanged(problem, filled(problem, below, budget, high), budget, high)


def improved(problem: SizeProblem, sizes: Sizes, price: float, most_rounds: int = _MOST_ROUNDS) -> Sizes:
    """Return sizes that are at least as good at this price; blocks of layers take turns until none changes."""
    now = problem.state(list(sizes))
    for _ in range(most_rounds):
        # any() gets a list, because every block has to decide even after one has changed.
        if not any([_decide(problem, block, now, price) for block in problem.blocks]):
            break
    return now.sizes


def _prices(problem: SizeProblem) -> tuple[float, float]:
    """Return a price at which nearly nothing goes, and one beyond which nothing changes."""
    finite = [layer.lost[np.isfinite(layer.lost)] for layer in problem.layers]
    total = float(sum(each.sum() for each in finite)) or 1.0
    inputs, filters, _ = np.maximum(problem.state(problem.whole()).counts, 1.0)
    least = float((problem.costs((inputs, filters, 1.0)) / inputs).min())
    return _FIRST_PRICE * total / problem.whole_cost, _RISE * total / least


def _decide(problem: SizeProblem, block: Block, now: State, price: float) -> bool:
    """Choose the sizes of a block, all others being given, and return whether any has changed."""
    keep, lost = price * problem.prices_of_classes(now.counts, block), np.zeros(len(block.written))
    inputs, filters, _ = now.counts[:, block.layers]
    rates, best = problem.costs((inputs, np.maximum(filters, 1.0), 1.0), np.asarray(block.layers)), []
    for place, (i, rate) in enumerate(zip(block.layers, rates, strict=True)):
        layer = problem.layers[i]
        values = layer.lost[:, :-1] + price * rate * layer.taps[:-1]
        chosen = values.argmin(1)
        at = np.arange(len(chosen)), chosen
        keep += block.summed(place, values[at])
        lost += block.summed(place, layer.lost[at])
        best.append(chosen)
    order, forced = _order(problem, block, block.gone - keep)
    gone = np.where(np.isfinite(block.gone), block.gone, 0.0)  # those that must stay are before all that may go
    if problem.is_timed:
        objectives = _objectives(problem, block, order, best, lost - gone, now, price)
    else:
        objectives = _sums(keep[order] - gone[order])
    counts = np.arange(len(order) + 1)
    allowed = (counts >= forced) & ((counts % problem.round_to == 0) | (counts == len(order)))
    count = counts[allowed][objectives[allowed].argmin()]
    stays = np.zeros(len(order), bool)
    stays[order[:count]] = True
    now.counts[0, block.affected] += block.reads @ (stays * 1.0 - now.stays[block.written])
    now.stays[block.written] = stays
    changed = False
    for i, writes, chosen in zip(block.layers, block.writes, best, strict=True):
        layer, before = problem.layers[i], now.sizes[i]
        now.sizes[i] = np.where(stays[writes], chosen, layer.gone)
        now.counts[1:, i] = (now.sizes[i] != layer.gone).sum(), layer.taps[now.sizes[i]].sum()
        changed |= not np.array_equal(before, now.sizes[i])
    return changed


def _order(problem: SizeProblem, block: Block, gains: Floats) -> tuple[Integers, int]:
    """Return the places of a block's classes, those that gain the most if they stay first, and how many must stay.

    Those that must stay are before all others: fixed ones, and the best of each layer that keeps so many filters.
    """
    forced = problem.fixed[block.written] | np.isinf(gains)
    for i, writes, writers in zip(block.layers, block.writes, block.writers, strict=True):
        missing = problem.layers[i].least - int(forced[writes].sum())
        if missing > 0:
            free = np.flatnonzero(~forced & (writers > 0))
            forced[free[np.argsort(-gains[free], kind="stable")[:missing]]] = True
    return np.lexsort((-gains, ~forced)), int(forced.sum())


def _objectives(
    problem: SizeProblem, block: Block, order: Integers, best: list[Integers], lost: Floats, now: State, price: float
) -> Floats:
    """Return the objective of keeping the first so many classes of a block, ``[w + 1]``, but for a constant.

    Args:
        order: places of the classes.
        best: choices of the layers' filters that stay.
        lost: importance lost with each class that stays, less that which is lost if it goes.
    """
    inputs, filters, taps = np.repeat(now.counts[:, block.affected, None], len(order) + 1, 2)
    inputs += _sums(block.reads[:, order]) - (block.reads @ now.stays[block.written])[:, None]
    for place, (own, i) in enumerate(zip(block.own, block.layers, strict=True)):
        filters[own] = _sums(block.writers[place, order])
        taps[own] = _sums(block.summed(place, problem.layers[i].taps[best[place]])[order])
    costs = problem.costs((inputs, filters, taps), block.affected[:, None]).sum(0)
    costs += _sums(problem.class_costs[block.written[order]])
    return _sums(lost[order]) + price * costs


def _sums(values: Floats) -> Floats:
    """Return the sums of the first values of each row, of none to all."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)
