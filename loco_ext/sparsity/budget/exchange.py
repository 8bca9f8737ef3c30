"""Exchanges of channels between blocks of layers: all blocks choose together among sizes near theirs.

Blocks that decide one by one at a price miss sizes that are better together, and what they leave of a budget may be
less than a channel costs. An integer program finds, for few options of each block, the best that fit into the budget:

    minimise  sum over blocks of the importance that the chosen option loses
    subject to  sum over blocks of its cost + sum over pairs of blocks of the cost of their options together <= budget.

A variable for each option is 1 if it is chosen, and one for each pair of options of two blocks if both are.
"""

import itertools
from collections import defaultdict

import numpy as np

from loco_ext.sparsity.budget.ranking import ranked
from loco_ext.sparsity.budget.size_problem import Block, SizeProblem, Sizes, State
from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.disjoint_set import Integers

# A block's options: for a factor on the price, at which its filters choose their rings, the numbers of channels that
# it gains or gives up, in units of ``round_to``. Networks get the second list if the first has more than _MOST_PAIRS
# pairs of options, as for DenseNet-121.
_NEAR = ((1.0, (-8, -4, -2, -1, 0, 1, 2, 4, 8)), (0.8, (-1, 0, 1)), (1.25, (-1, 0, 1)))
_FEW = ((1.0, (-1, 0, 1)),)
_MOST_PAIRS = 20_000
_LEAST_GAIN = 1e-3  # the search goes on from new sizes if they save this fraction of the importance lost
_REWARD = 1e-5  # the objective rewards cost by this, so that channels without importance fill the budget, too
_SOLVER = {"mip_rel_gap": 1e-3, "node_limit": 200}  # no limit of time, so that the same sizes are found again

Near = tuple[tuple[float, tuple[int, ...]], ...]  # as _NEAR
Options = list[list[Integers]]  # of a block: sizes of each of its layers
Tables = dict[tuple[int, int], Floats]  # costs of the options of two blocks together


def exchanged(problem: SizeProblem, sizes: Sizes, budget: float, price: float) -> Sizes:
    """Return sizes within the budget that lose less importance, if any near these do."""
    while True:
        now, before, spent = problem.state(list(sizes)), problem.lost(sizes), problem.cost(sizes)
        for near in (_NEAR, _FEW):
            options = [_options(problem, block, now, price, near) for block in problem.blocks]
            lost_with, costs, tables = _effects(problem, options, now)
            if sum(table.size for table in tables.values()) <= _MOST_PAIRS:
                break
        chosen = _solved(lost_with, costs, tables, budget - spent)
        after = list(sizes)
        for block, each, place in zip(problem.blocks, options, chosen, strict=True):
            for i, new in zip(block.layers, each[place], strict=True):
                after[i] = new
        lost, cost = problem.lost(after), problem.cost(after)
        if cost > budget or (lost, -cost) >= (before, -spent):
            return sizes
        sizes = after
        if lost >= (1 - _LEAST_GAIN) * before:  # also if nothing is lost, so that nothing is to gain
            return sizes


def _options(problem: SizeProblem, block: Block, now: State, price: float, near: Near) -> Options:
    """Return different sizes of a block, first those of now."""
    found = [[now.sizes[i] for i in block.layers]]
    count = int(now.stays[block.written].sum())
    for factor, steps in near:
        ranking = ranked(problem, block, now, factor * price)
        places = np.searchsorted(ranking.counts, count) + np.asarray(steps)
        counts = np.unique(ranking.counts[places.clip(0, len(ranking.counts) - 1)])
        found += [ranking.sizes(problem, block, ranking.stays(each)) for each in counts]
    return list({np.concatenate(each).tobytes(): each for each in found}.values())


def _effects(problem: SizeProblem, options: list[Options], now: State) -> tuple[list[Floats], list[Floats], Tables]:
    """Return the importance that each block loses with its options, and what they cost more than those of now.

    Layers that read several blocks and cost time cost more or less than this if several of the blocks change.
    """
    tables: Tables = defaultdict(lambda: np.zeros(1))
    lost, costs, inputs = [], [], []
    own = np.zeros((2, len(problem.layers), max(map(len, options))))  # filters and taps
    for block, sizes in zip(problem.blocks, options, strict=True):
        stays = np.repeat(problem.fixed[None, block.written], len(sizes), 0)
        lost.append(np.zeros(len(sizes)))
        for place, (i, each) in enumerate(zip(block.layers, map(np.stack, zip(*sizes, strict=True)), strict=True)):
            layer, there = problem.layers[i], each != problem.layers[i].gone
            own[:, i, : len(sizes)] = there.sum(1), layer.taps[each].sum(1)
            lost[-1] += np.asarray([layer.lost_with(chosen).sum() for chosen in each])
            for row, alive in zip(stays, there, strict=True):
                row[block.writes[place][alive]] = True
        costs.append((stays * 1.0 - now.stays[block.written]) @ problem.class_costs[block.written])
        inputs.append(np.zeros((len(problem.layers), len(sizes))))
        inputs[-1][block.affected] = block.reads @ (stays * 1.0 - now.stays[block.written]).T
    for n, block in enumerate(problem.blocks):
        for i in block.layers:
            at, (filters, taps) = np.asarray([i]), own[:, i, : len(options[n])]
            alone = problem.costs((now.counts[0, i] + inputs[n][i], filters, taps), at)
            costs[n] += alone - alone[0]
            for m in range(len(options)):
                if m != n and inputs[m][i].any():
                    read = now.counts[0, i] + inputs[n][i] + inputs[m][i][:, None]
                    both = problem.costs((read, filters[None], taps[None]), at) - alone
                    tables[min(m, n), max(m, n)] = tables[min(m, n), max(m, n)] + (both if m < n else both.T)
    return lost, costs, tables


def _solved(lost: list[Floats], costs: list[Floats], tables: Tables, budget: float) -> list[int]:
    """Return the number of the option of each block that the integer program chooses; 0 for all if it finds none."""
    from scipy import optimize, sparse  # which take longer than all of loco_ext

    starts = np.cumsum([0, *map(len, lost)])
    option = sparse.eye_array(starts[-1], format="csr")
    of_blocks = [option[first:last] for first, last in itertools.pairwise(starts)]
    # One option of each block is chosen; an option's variable is the sum over another block's of those of the pairs.
    equal = [sparse.csr_array(each.sum(0)[None]) for each in of_blocks]
    pairs = [sparse.csr_array((len(lost), 0))]
    for (m, n), table in tables.items():
        first, second = (sparse.eye_array(size) for size in table.shape)
        every_first, every_second = (np.ones((1, size)) for size in table.shape)
        pairs.append(-sparse.vstack([sparse.kron(first, every_second), sparse.kron(every_first, second)]))
        equal += [of_blocks[m], of_blocks[n]]
    matrix = sparse.hstack([sparse.vstack(equal), sparse.block_diag(pairs)], format="csr")
    right = (np.arange(matrix.shape[0]) < len(lost)) * 1.0
    cost, loss = np.concatenate([*costs, *map(np.ravel, tables.values())]), np.concatenate(lost)
    unit = float(np.abs(cost).max()) or 1.0  # all costs are 0 if each block has one option
    before = float(sum(each[0] for each in lost))  # no better sizes have an option that loses more
    loss = np.asarray(np.minimum(loss, 2 * before) / before if before else loss > 0, np.float64)
    result = optimize.milp(
        np.pad(loss, (0, len(cost) - len(loss))) - _REWARD * cost / unit,
        integrality=np.arange(len(cost)) < len(loss),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(matrix, right, right),
            optimize.LinearConstraint(cost[None] / unit, ub=budget / unit),
        ],
        options=_SOLVER,
    )
    if result.x is None:
        return [0] * len(lost)
    return [int(result.x[first:last].argmax()) for first, last in itertools.pairwise(starts)]
