"""Exchanges of few channels or rings between two or three blocks of layers.

Layers that decide one by one miss sizes that are better together, and what they leave of a budget may be less than a
channel costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loco_ext.sparsity.budget.fill import filled
from loco_ext.sparsity.budget.size_problem import Block, LayerChoices, SizeProblem, Sizes, State
from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.disjoint_set import Integers

Steps = tuple[int, ...]
Changed = dict[int, Integers]  # new sizes, by the layer's index
Move = tuple[int, Changed]  # number of a block of layers, and the new sizes of some of them

# Numbers of channels or rings by which a block of layers shrinks or grows, and of blocks that change together.
_ONE: Steps = (1,)
_EXCHANGES: tuple[tuple[Steps, int], ...] = ((_ONE, 2), ((1, 2, 8), 2), ((1, 2, 8), 3))
_LEAST_GAIN = 1e-9  # an exchange must save at least this fraction of the importance lost
_MOST_EXCHANGES, _TOGETHER = 300_000, 4096  # exchanges that are tried, and those whose costs are computed together


def exchanged(problem: SizeProblem, sizes: Sizes, budget: float, price: float) -> Sizes:
    """Return sizes within the budget that no exchange of few channels or rings improves."""
    for steps, blocks in _EXCHANGES[problem.round_to == 1 :]:
        before = sizes
        while (better := _exchanged_once(problem, sizes, budget, price, steps, blocks)) is not None:
            sizes = filled(problem, better, budget, price) if steps == _ONE else better
        if steps != _ONE and sizes is not before:
            sizes = filled(problem, sizes, budget, price)
    return sizes


def _exchanged_once(
    problem: SizeProblem, sizes: Sizes, budget: float, price: float, steps: Steps, blocks: int
) -> Sizes | None:
    """Return the sizes that lose the least after one exchange; None if all lose more or cost too much.

    Args:
        steps: numbers of channels, in units of ``round_to``, or of rings that a block loses or wins.
        blocks: number of blocks that change, 2 or 3. With 3, nothing is tried if there are too many exchanges.
    """
    now = problem.state(sizes)
    fewer, more = _moves(problem, now, price, steps)
    moves: list[Move] = [(-1, {}), *fewer, *more]  # the first changes nothing
    first, third = int(steps == _ONE), len(moves) if blocks == 3 else 1
    i, j, k = np.ogrid[first : len(fewer) + 1, len(fewer) + 1 : len(moves), :third]
    if not 0 < i.size * j.size * k.size <= _MOST_EXCHANGES:
        return None
    effects = np.stack([_effect(problem, now, changed) for _, changed in moves])
    of, lost = np.asarray([block for block, _ in moves]), effects[:, 0, -1]
    apart = (of[i] != of[j]) & (of[j] != of[k]) & ((of[i] != of[k]) | (k == 0))
    once = (k == 0) | (k > j) | ((k > i) & (k <= len(fewer)))
    together = lost[i] + lost[j] + lost[k]
    places = np.nonzero(apart & once & (together < -_LEAST_GAIN * problem.lost(sizes)))
    chosen = np.stack(places, 1)[np.argsort(together[places], kind="stable")] + [first, len(fewer) + 1, 0]
    for start in range(0, len(chosen), _TOGETHER):
        some = chosen[start : start + _TOGETHER]
        change = effects[some].sum(1)
        in_layers = problem.costs((now.counts + change[:, :, :-1]).swapaxes(0, 1)).sum(1)
        costs = in_layers + change[:, 1, -1] + problem.class_costs[now.stays].sum() + problem.rest
        for three in some[costs <= budget]:
            new = {layer: each for move in three for layer, each in moves[move][1].items()}
            changed = [new.get(layer, each) for layer, each in enumerate(sizes)]
            if problem.cost(changed) <= budget:  # which it is but for rounding
                return changed
    return None


def _moves(problem: SizeProblem, now: State, price: float, steps: Steps) -> tuple[list[Move], list[Move]]:
    """Return the ways to shrink and to grow one block of layers each; one step is of channels only."""
    fewer: list[Move] = []
    more: list[Move] = []
    rates = problem.rates(now)
    for number, block in enumerate(problem.blocks):
        for i in block.layers if steps != _ONE else ():
            for moves, step in ((fewer, 1), (more, -1)):
                rings = _other_rings(problem.layers[i], now.sizes[i], step, steps)
                moves += [(number, {i: chosen}) for chosen in rings]
        fewer += [(number, changed) for changed in _fewer_channels(problem, block, now, steps)]
        more += [(number, changed) for changed in _more_channels(problem, block, now, rates, price, steps)]
    return fewer, more


def _other_rings(layer: LayerChoices, chosen: Integers, step: int, steps: Steps) -> list[Integers]:
    """Return sizes of a layer with a ring less (``step`` 1) or more (-1) of numbers of filters that stay."""
    other = chosen + step
    able = np.flatnonzero((chosen != layer.gone) & (other >= 0) & (other < layer.gone))
    lost = layer.lost[able, other[able]] - layer.lost[able, chosen[able]]
    order = able[np.argsort(lost, kind="stable")[: np.isfinite(lost).sum()]]
    return [np.where(np.isin(np.arange(len(chosen)), order[:n]), other, chosen) for n in steps if n <= len(order)]


def _fewer_channels(problem: SizeProblem, block: Block, now: State, steps: Steps) -> Iterator[Changed]:
    """Yield sizes of a block without the least important of its channels, down to multiples of ``round_to``."""
    lost = np.zeros(len(block.written))
    for place, i in enumerate(block.layers):
        layer = problem.layers[i]
        lost += block.summed(place, layer.lost[:, -1] - layer.lost_with(now.sizes[i]))
    stays = now.stays[block.written]
    free = np.flatnonzero(stays & ~problem.fixed[block.written] & np.isfinite(lost))
    free = free[np.argsort(lost[free], kind="stable")]
    odd = (int(stays.sum()) - 1) % problem.round_to + 1
    for count in (odd + (n - 1) * problem.round_to for n in steps):
        if count > len(free):
            break
        changed = {}
        for i, writes in zip(block.layers, block.writes, strict=True):
            changed[i] = np.where(np.isin(writes, free[:count]), problem.layers[i].gone, now.sizes[i])
        if all((new != problem.layers[i].gone).sum() >= max(problem.layers[i].least, 1) for i, new in changed.items()):
            yield changed


def _more_channels(
    problem: SizeProblem, block: Block, now: State, rates: Floats, price: float, steps: Steps
) -> Iterator[Changed]:
    """Yield sizes of a block with those channels that win the most for their cost, with their best choices."""
    won, spent, best = np.zeros(len(block.written)), problem.prices_of_classes(now.counts, block), []
    for place, i in enumerate(block.layers):
        layer = problem.layers[i]
        best.append((layer.lost + price * rates[i] * layer.taps)[:, :-1].argmin(1))
        won += block.summed(place, layer.lost[:, -1] - layer.lost_with(best[place]))
        spent += block.summed(place, rates[i] * layer.taps[best[place]])
    gone = np.flatnonzero(~now.stays[block.written])
    gone = gone[np.argsort(-won[gone] / spent[gone], kind="stable")]
    for count in sorted({min(n * problem.round_to, len(gone)) for n in steps} - {0}):
        places = zip(block.layers, block.writes, best, strict=True)
        yield {i: np.where(np.isin(writes, gone[:count]), new, now.sizes[i]) for i, writes, new in places}


def _effect(problem: SizeProblem, now: State, changed: Changed) -> Floats:
    """Return what new sizes of the layers of a block change, ``[3, layers + 1]``.

    The rows are the input channels, filters and taps of each layer; the last column begins with the importance lost and
    the cost of classes. The effects of several blocks add up.
    """
    effect, after = np.zeros((3, len(problem.layers) + 1)), now.stays.copy()
    for i, new in changed.items():
        layer, old = problem.layers[i], now.sizes[i]
        every = np.flatnonzero(new != old)
        effect[0, -1] += (layer.lost[every, new[every]] - layer.lost[every, old[every]]).sum()
        effect[1:, i] = (new != layer.gone).sum(), layer.taps[new].sum()
        effect[1:, i] -= now.counts[1:, i]
        after[layer.writes[every]] = new[every] != layer.gone
    others = np.flatnonzero(after != now.stays)
    signs = np.where(after[others], 1.0, -1.0)
    effect[1, -1] = problem.class_costs[others] @ signs
    effect[0, :-1] = problem.reads[:, others] @ signs
    return effect
