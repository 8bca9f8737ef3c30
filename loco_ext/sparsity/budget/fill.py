"""Filling of a budget: what fits into the rest of it, the most importance for its cost first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, Sizes, State
from loco_ext.sparsity.compaction.constants import Floats

Change = tuple[int, int, int]  # layer, filter, choice
Addition = tuple[float, list[Change]]  # the importance won for each unit of cost, and the changes of sizes

_MOST_FAILED = 64  # additions that did not fit, one by one, after which no more are tried


def filled(problem: SizeProblem, sizes: Sizes, budget: float, price: float, unchanged: Block | None = None) -> Sizes:
    """Return the sizes with rings and channels added, as long as any fit into the budget, to all but one block."""
    after = _filled_once(problem, sizes, budget, price, unchanged)
    while not all(map(np.array_equal, after, sizes)):
        sizes, after = after, _filled_once(problem, after, budget, price, unchanged)
    return after


def _filled_once(problem: SizeProblem, sizes: Sizes, budget: float, price: float, unchanged: Block | None) -> Sizes:
    """Return the sizes with additions in order, several at a time, without those that do not fit."""
    now = problem.state([chosen.copy() for chosen in sizes])
    additions = _more_rings(problem, now) + _more_channels(problem, now, price)
    if unchanged is not None:
        additions = [each for each in additions if each[1][0][0] not in unchanged.layers]
    additions.sort(key=lambda addition: -addition[0])
    sizes, place, several, failed = now.sizes, 0, len(additions), 0
    while place < len(additions) and failed < _MOST_FAILED:
        several = min(several, len(additions) - place)
        changes = [change for _, changes in additions[place : place + several] for change in changes]
        before = [(i, j, sizes[i][j]) for i, j, _ in changes]
        for i, j, choice in changes:
            sizes[i][j] = min(choice, sizes[i][j])
        if problem.cost(sizes) <= budget:
            place, several = place + several, 2 * several
            continue
        for i, j, old in reversed(before):
            sizes[i][j] = old
        place, failed, several = (place + 1, failed + 1, 1) if several == 1 else (place, failed, several // 2)
    return sizes


def _more_rings(problem: SizeProblem, now: State) -> list[Addition]:
    """Return an addition for each larger choice of each filter whose channel stays."""
    found: list[Addition] = []
    for i, (layer, rate, chosen) in enumerate(zip(problem.layers, problem.rates(now), now.sizes, strict=True)):
        some = np.flatnonzero(now.stays[layer.writes])
        present, choices = chosen[some, None], np.arange(len(layer.taps))
        won = layer.lost[some, present[:, 0], None] - layer.lost[some]
        spent = rate * (layer.taps - layer.taps[present])
        places, more = np.nonzero((choices < present) & np.isfinite(won))
        gains = (won[places, more] / spent[places, more]).tolist()
        changes = zip(gains, some[places].tolist(), more.tolist(), strict=True)
        found += [(gain, [(i, j, choice)]) for gain, j, choice in changes]
    return found


def _more_channels(problem: SizeProblem, now: State, price: float) -> list[Addition]:
    """Return additions of ``round_to`` classes each for each block of layers.

    If that is 1, there are two for each class, with the best choice of each of its filters and with the smallest.
    """
    reading, rates = problem.prices_of_classes(now.counts), problem.rates(now)
    parts: dict[int, list[tuple[Floats, Floats, int, int]]] = defaultdict(list)  # won, spent, layer, filter; by class
    for i, layer in enumerate(problem.layers):
        for j in np.flatnonzero(~now.stays[layer.writes]).tolist():
            gone = now.sizes[i][j]
            won, spent = layer.lost[j, gone] - layer.lost[j, :gone], rates[i] * (layer.taps[:gone] - layer.taps[gone])
            if np.isfinite(won).all():
                parts[int(layer.writes[j])].append((won, spent, i, j))

    def addition(one: int, choice: Callable[[Floats, Floats], int]) -> Addition:
        chosen = [(won[n := choice(won, spent)], spent[n], (i, j, n)) for won, spent, i, j in parts[one]]
        cost = reading[one] + sum(spent for _, spent, _ in chosen)
        return float(sum(won for won, _, _ in chosen) / cost), [change for _, _, change in chosen]

    found: list[Addition] = []
    for block in problem.blocks:
        missing = [one for one in block.written.tolist() if one in parts]
        best = [addition(one, lambda won, spent: int((won - price * spent).argmax())) for one in missing]
        if problem.round_to > 1:
            found += _several(best, problem.round_to)
            continue
        for one, each in zip(missing, best, strict=True):
            found += [each, addition(one, lambda won, spent: len(won) - 1)]
    return found


def _several(additions: list[Addition], count: int) -> list[Addition]:
    """Return additions of ``count`` classes at a time, the most important classes first; fewer if there are fewer."""
    best = sorted(additions, key=lambda addition: -addition[0])
    most = len(best) - len(best) % count or len(best)
    groups = [best[i : i + count] for i in range(0, most, count)]
    changes = [[change for _, changes in group for change in changes] for group in groups]
    return [(sum(gain for gain, _ in group) / len(group), each) for group, each in zip(groups, changes, strict=True)]
