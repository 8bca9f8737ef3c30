"""The cheapest sizes of all filters: a nested l0 problem, solved for a price of cost, and the price for a budget.

Minimise, over the size of every filter,

    sum over the filters of the importance lost  +  price * cost.

Given all other layers, the classes that a block of layers writes decide exactly; blocks take turns while the price
rises slowly from 0, since a layer that decides at a high price while all others are still whole would lose more than
its share.
"""

import numpy as np

from loco_ext.sparsity.budget.exchange import exchanged
from loco_ext.sparsity.budget.fill import filled
from loco_ext.sparsity.budget.ranking import Ranking, ranked
from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, Sizes, State
from loco_ext.sparsity.compaction.constants import Floats

_FIRST_PRICE = 1e-6  # first price to try, as a fraction of the price at which everything would be removed
_RISE = 1.25  # factor between one price and the next
_FALLS, _FALL = 6, 1e3  # while the first price already meets the budget, it is divided by _FALL, at most _FALLS times
_BISECTIONS, _MOST_ROUNDS = 8, 20


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
    path = problem.paths.setdefault(price, [sizes])
    step = 0
    while problem.cost(path[step]) > budget:
        if price > end:
            return path[step]
        price, step = price * _RISE, step + 1
        if step == len(path):
            path.append(improved(problem, path[-1], price, most_rounds=1))
    sizes, below = path[step - 1 : step + 1]
    low, high = price / _RISE, price
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        found = improved(problem, sizes, middle)
        if problem.cost(found) <= budget:
            below, high = found, middle
        else:
            sizes, low = found, middle
    return filled(problem, exchanged(problem, filled(problem, below, budget), budget, high), budget)


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
    ranking = ranked(problem, block, now, price)
    if problem.is_timed:
        objectives = _objectives(problem, block, ranking, now, price)
    else:
        objectives = _sums(ranking.value[ranking.order])
    stays = ranking.stays(ranking.counts[objectives[ranking.counts].argmin()])
    now.counts[0, block.affected] += block.reads @ (stays * 1.0 - now.stays[block.written])
    now.stays[block.written] = stays
    changed = False
    for i, chosen in zip(block.layers, ranking.sizes(problem, block, stays), strict=True):
        layer, before = problem.layers[i], now.sizes[i]
        now.sizes[i] = chosen
        now.counts[1:, i] = (chosen != layer.gone).sum(), layer.taps[chosen].sum()
        changed |= not np.array_equal(before, chosen)
    return changed


def _objectives(problem: SizeProblem, block: Block, ranking: Ranking, now: State, price: float) -> Floats:
    """Return the objective of keeping the first so many classes of a block, ``[w + 1]``, but for a constant."""
    order = ranking.order
    inputs, filters, taps = np.repeat(now.counts[:, block.affected, None], len(order) + 1, 2)
    inputs += _sums(block.reads[:, order]) - (block.reads @ now.stays[block.written])[:, None]
    for place, (own, i) in enumerate(zip(block.own, block.layers, strict=True)):
        filters[own] = _sums(block.writers[place, order])
        taps[own] = _sums(block.summed(place, problem.layers[i].taps[ranking.best[place]])[order])
    costs = problem.costs((inputs, filters, taps), block.affected[:, None]).sum(0)
    costs += _sums(problem.class_costs[block.written[order]])
    return _sums(ranking.lost[order]) + price * costs


def _sums(values: Floats) -> Floats:
    """Return the sums of the first values of each row, of none to all."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)
