"""Exchanges of channels between blocks of layers, which narrow networks need to fill their budget.

Layers that decide one by one miss sizes that are better together, and what they leave of a budget may be less than a
channel costs.
"""

from __future__ import annotations

import numpy as np

from loco_ext.sparsity.budget.fill import filled
from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, Sizes

_STEPS = 1, 2, 4  # numbers of channels, in units of ``round_to``, that a block gives up
_LEAST_GAIN = 1e-9  # an exchange must save at least this fraction of the importance lost
# In networks of more channels, times ``round_to``, so few are too small a part of the budget to matter; beyond the
# largest ``round_to``, the search would take too long.
_MOST_CLASSES, _LARGEST_UNIT = 200, 8


def exchanged(problem: SizeProblem, sizes: Sizes, budget: float, price: float) -> Sizes:
    """Return sizes that lose less importance: a block gives up channels, and others add what fits, while that helps."""
    if len(problem.fixed) > _MOST_CLASSES * min(problem.round_to, _LARGEST_UNIT):
        return sizes
    helped = True
    while helped:
        helped = False
        for block in problem.blocks:
            for step in _STEPS:
                fewer = _fewer_channels(problem, block, sizes, step)
                if fewer is None:
                    break
                after = filled(problem, filled(problem, fewer, budget, price, block), budget, price)
                if problem.lost(after) < (1 - _LEAST_GAIN) * problem.lost(sizes):
                    sizes, helped = after, True
    return sizes


def _fewer_channels(problem: SizeProblem, block: Block, sizes: Sizes, step: int) -> Sizes | None:
    """Return the sizes without the least important channels of a block; None if so many have to stay."""
    lost = np.zeros(len(block.written))
    for place, i in enumerate(block.layers):
        layer = problem.layers[i]
        lost += block.summed(place, layer.lost[:, -1] - layer.lost_with(sizes[i]))
    stays = problem.stays(sizes)[block.written]
    free = np.flatnonzero(stays & ~problem.fixed[block.written] & np.isfinite(lost))
    count = (int(stays.sum()) - 1) % problem.round_to + 1 + (step - 1) * problem.round_to  # down to a multiple of it
    if count > len(free):
        return None
    gone, fewer = free[np.argsort(lost[free], kind="stable")[:count]], list(sizes)
    for i, writes in zip(block.layers, block.writes, strict=True):
        layer = problem.layers[i]
        fewer[i] = np.where(np.isin(writes, gone), layer.gone, sizes[i])
        if (fewer[i] != layer.gone).sum() < max(layer.least, 1):
            return None
    return fewer
