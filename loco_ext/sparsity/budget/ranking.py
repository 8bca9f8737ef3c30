"""The order in which the classes of a block of layers go, and the sizes of their filters, for a price of cost."""

from typing import NamedTuple

import numpy as np

from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, State
from loco_ext.sparsity.compaction.constants import Booleans, Floats
from loco_ext.sparsity.compaction.disjoint_set import Integers


class Ranking(NamedTuple):
    """The decision of a block, all others being given, but for the number of classes that stay.

    Attributes:
        order: places of the classes, those that gain the most if they stay first, ``[w]``.
        counts: numbers of classes that may stay, ascending.
        best: for each layer, the choice of each filter if it stays, ``[C_out]``.
        lost: importance lost with each class that stays, less that which is lost if it goes, ``[w]``.
        value: the same plus price * the mean cost of the class, ``[w]``.
    """

    order: Integers
    counts: Integers
    best: list[Integers]
    lost: Floats
    value: Floats

    def stays(self, count: int) -> Booleans:
        """Return which classes stay if so many do, ``[w]``."""
        stays = np.zeros(len(self.order), bool)
        stays[self.order[:count]] = True
        return stays

    def sizes(self, problem: SizeProblem, block: Block, stays: Booleans) -> list[Integers]:
        """Return the choices of the filters of each layer of the block if these classes stay."""
        layers = zip(block.layers, block.writes, self.best, strict=True)
        return [np.where(stays[writes], best, problem.layers[i].gone) for i, writes, best in layers]


def ranked(problem: SizeProblem, block: Block, now: State, price: float) -> Ranking:
    """Return the ranking of a block at a price."""
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
    counts = np.arange(forced, len(order) + 1)
    channels = np.concatenate([[0.0], block.widths[order].cumsum()])[counts]
    counts = counts[(channels % problem.round_to == 0) | (counts == len(order))]
    return Ranking(order, counts, best, lost - gone, keep - gone)


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
