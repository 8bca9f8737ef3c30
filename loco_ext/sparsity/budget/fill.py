"""Filling of a budget: rings that fit into the rest of it, the most importance for its cost first."""

import numpy as np

from loco_ext.sparsity.budget.size_problem import SizeProblem, Sizes, State

Addition = tuple[float, int, int, int]  # the importance won for each unit of cost; layer, filter, new choice

_MOST_FAILED = 64  # additions that did not fit, one by one, after which no more are tried


def filled(problem: SizeProblem, sizes: Sizes, budget: float) -> Sizes:
    """Return the sizes with rings added to filters that stay, as long as any fit into the budget."""
    after = _filled_once(problem, sizes, budget)
    while not all(map(np.array_equal, after, sizes)):
        sizes, after = after, _filled_once(problem, after, budget)
    return after


def _filled_once(problem: SizeProblem, sizes: Sizes, budget: float) -> Sizes:
    """Return the sizes with additions in order, several at a time, without those that do not fit."""
    now = problem.state([chosen.copy() for chosen in sizes])
    additions = sorted(_more_rings(problem, now), key=lambda addition: -addition[0])
    sizes, place, several, failed = now.sizes, 0, len(additions), 0
    while place < len(additions) and failed < _MOST_FAILED:
        several = min(several, len(additions) - place)
        changes = additions[place : place + several]
        before = [(i, j, sizes[i][j]) for _, i, j, _ in changes]
        for _, i, j, choice in changes:
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
        found += [(gain, i, j, choice) for gain, j, choice in changes]
    return found
