"""The choice of sizes against brute force over all sizes, for small chains and residual networks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from loco_ext.sparsity.budget import choose
from loco_ext.sparsity.budget.choose import improved, within
from loco_ext.sparsity.budget.layer_time import LayerTime
from loco_ext.sparsity.budget.size_problem import LayerChoices, SizeProblem, Sizes
from loco_ext.sparsity.compaction.constants import Floats
from tests.covering import slow

RNG = np.random.default_rng
TAPS = np.asarray([9, 4, 1, 0])


def lost(rng: np.random.Generator, filters: int) -> Floats:
    """Return random importance that grows with what a filter loses."""
    rings = rng.gamma(1.0, 1.0, (filters, 3)) * rng.uniform(0.3, 3)
    return np.concatenate([np.zeros((filters, 1)), rings.cumsum(1)], 1)


def chain(seed: int) -> SizeProblem:
    """Return three layers, each of which reads the one before; the first reads an image of three channels."""
    rng, layers, reads = RNG(seed), [], np.arange(3)
    for depth, filters in enumerate((2, 2, 2)):
        writes = np.arange(filters) + reads[-1] + 1
        layers.append(LayerChoices(rng.uniform(0.2, 1) * 4.0 ** -(depth // 2), TAPS, lost(rng, filters), writes, reads))
        reads = writes
    return SizeProblem(layers, np.arange(9) < 3, np.zeros(9))


def residual(seed: int) -> SizeProblem:
    """Return a stem, a block that adds to its channels, and a head with a fixed output; classes have a cost."""
    rng = RNG(seed)
    image, stream, inner, output = np.asarray([0, 1]), np.asarray([2, 3]), np.asarray([4, 5]), np.asarray([6])
    head = np.asarray([[0.0, np.inf]])
    layers = [
        LayerChoices(1.0, TAPS, lost(rng, 2), stream, image),
        LayerChoices(1.0, TAPS, lost(rng, 2), inner, stream),
        LayerChoices(1.0, TAPS, lost(rng, 2), stream, inner),
        LayerChoices(0.5, np.asarray([1, 0]), head, output, stream),
    ]
    return SizeProblem(layers, np.isin(np.arange(7), [0, 1, 6]), rng.uniform(0, 0.3, 7))


def depthwise(seed: int) -> SizeProblem:
    """Return a layer, a depthwise one behind it and a pointwise one that reads both sizes of its channels."""
    rng = RNG(seed)
    image, inner, output = np.asarray([0]), np.asarray([1, 2]), np.asarray([3, 4])
    points = lost(rng, 2)[:, [0, 3]]
    layers = [
        LayerChoices(1.0, TAPS, lost(rng, 2), inner, image),
        LayerChoices(1.0, TAPS, lost(rng, 2), inner, None),
        LayerChoices(1.0, np.asarray([1, 0]), points, output, inner),
    ]
    return SizeProblem(layers, np.arange(5) == 0, np.zeros(5))


def pairs(seed: int) -> SizeProblem:
    """Return a chain of whole filters with a residual sum, whose numbers of channels are even, or all of five."""
    rng, taps = RNG(seed), TAPS[[0, 3]]
    image, stream, inner, output = np.asarray([0]), np.arange(1, 6), np.arange(6, 10), np.arange(10, 12)
    edges = [(1.0, stream, image), (0.5, inner, stream), (0.5, stream, inner), (0.2, output, stream)]
    layers = [LayerChoices(unit, taps, lost(rng, len(own))[:, [0, 3]], own, reads) for unit, own, reads in edges]
    return SizeProblem(layers, np.arange(12) == 0, np.zeros(12), round_to=2)


def steps(seed: int) -> SizeProblem:
    """Return the chain with a residual sum of :func:`pairs` with times, in which filters run by twos."""
    plain = pairs(seed)
    layers = [replace(a, time=time_of(a.unit, len(a.reads), len(a.writes)), least=1) for a in plain.layers]
    return SizeProblem(layers, plain.fixed, plain.class_costs)


def time_of(unit: float, width: int, count: int) -> LayerTime:
    """Return times in proportion to one more than the input channels, and to pairs of filters."""
    inputs, filters = np.linspace(1, width, 4), np.minimum(2 * np.arange(1, 9), count)
    return LayerTime(inputs, filters, unit * (inputs[:, None] + 1.0) * ((filters + 1) // 2))


def every(problem: SizeProblem) -> Iterator[Sizes]:
    """Yield all sizes with which the filters of one class stay or go together."""
    free = np.flatnonzero(~problem.fixed)
    for some in itertools.product((False, True), repeat=len(free)):
        stays = problem.fixed.copy()
        stays[free] = some
        alive = [stays[layer.writes] for layer in problem.layers]
        if not all(each.all() or each.sum() % problem.round_to == 0 for each in alive):
            continue
        pairs = zip(problem.layers, alive, strict=True)
        choices = [[range(layer.gone) if one else [layer.gone] for one in each] for layer, each in pairs]
        for chosen in itertools.product(*itertools.chain(*choices)):
            yield np.split(np.asarray(chosen), np.cumsum([len(each) for each in alive])[:-1])


def by_hand(problem: SizeProblem, sizes: Sizes) -> float:
    """Return the cost, summed filter by filter."""
    stays = set(np.flatnonzero(problem.fixed))
    for layer, chosen in zip(problem.layers, sizes, strict=True):
        stays |= {int(c) for c, choice in zip(layer.writes, chosen, strict=True) if choice != layer.gone}
    total = sum(problem.class_costs[c] for c in stays)
    for layer, chosen in zip(problem.layers, sizes, strict=True):
        width = 1 if layer.reads is None else sum(int(c) in stays for c in layer.reads)
        total += sum(layer.unit * width * layer.taps[choice] for choice in chosen)
    return float(total)


@pytest.mark.parametrize("seed", range(6))
def test_no_channel_that_comes_or_goes_is_worth_its_time(seed: int) -> None:
    """All channels of a block cost the same, so that one more or less is a step that its decision has weighed."""
    problem = steps(seed)

    def value(sizes: Sizes, price: float) -> float:
        return problem.lost(sizes) + price * problem.cost(sizes)

    for price in 10 ** RNG(seed).uniform(-2, 0, 8):
        found = improved(problem, problem.whole(), price)
        stays = problem.stays(found)
        for changed in np.flatnonzero(~problem.fixed):
            after = stays ^ (np.arange(len(stays)) == changed)
            sizes = [np.where(after[layer.writes], 0, layer.gone) for layer in problem.layers]
            if all((chosen == 0).any() for chosen in sizes):
                assert value(sizes, price) >= value(found, price) - 1e-9


@pytest.mark.parametrize("make", [chain, residual, depthwise, pairs])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_the_best_sizes_for_a_price_are_found_with_their_cost_as_budget(
    make: Callable[[int], SizeProblem], seed: int
) -> None:
    problem = make(seed)
    all_sizes = list(every(problem))
    costs = np.asarray([problem.cost(sizes) for sizes in all_sizes])
    losses = np.asarray([problem.lost(sizes) for sizes in all_sizes])
    for price in 10 ** RNG(seed).uniform(-2.5, 0.3, 8):
        best = (losses + price * costs).argmin()
        found = within(problem, costs[best])
        assert by_hand(problem, found) == pytest.approx(problem.cost(found), rel=1e-12)
        assert problem.cost(found) <= costs[best]
        assert problem.lost(found) == pytest.approx(losses[best])


@pytest.mark.parametrize("make", [chain, residual, depthwise])
def test_a_budget_is_met_and_no_filter_that_is_gone_still_fits(make: Callable[[int], SizeProblem]) -> None:
    problems = [make(seed) for seed in range(4)]
    for problem, share in itertools.product(problems, (0.3, 0.6, 0.9)):
        budget = share * problem.whole_cost
        found = within(problem, budget)
        assert problem.cost(found) <= budget
        stays = problem.stays(found)
        for i, layer in enumerate(problem.layers):
            for j in np.flatnonzero((found[i] > 0) & stays[layer.writes]):
                more = [chosen.copy() for chosen in found]
                more[i][j] -= 1
                worth = layer.lost[j, found[i][j]] > layer.lost[j, more[i][j]]
                assert not worth or problem.cost(more) > budget


def test_the_whole_filters_for_a_budget_are_those_of_brute_force() -> None:
    for seed, share in ((0, 0.5), (1, 0.5), (2, 0.3)):
        plain = pairs(seed)
        problem = SizeProblem(plain.layers, plain.fixed, plain.class_costs)
        budget = share * problem.whole_cost
        found = within(problem, budget)
        assert problem.cost(found) <= budget
        least = min(problem.lost(sizes) for sizes in every(problem) if problem.cost(sizes) <= budget)
        assert problem.lost(found) == pytest.approx(least)


def test_a_single_filter_has_the_rings_that_fit() -> None:
    """No block has another option then."""
    one, reads = np.ones(1, np.int64), np.zeros(1, np.int64)
    layer = LayerChoices(1.0, np.asarray((9, 1, 0)), np.asarray([[0.0, 0.0, 1.0]]), one, reads, least=1)
    problem = SizeProblem([layer], np.arange(2) < 1, np.zeros(2))
    assert within(problem, 5.0)[0].tolist() == [1]


@pytest.mark.slow
def test_networks_with_many_pairs_of_blocks_have_small_integer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads all before it, as in DenseNets."""
    rng, layers, width, count = RNG(0), [], 32, 40
    for i in range(count):
        writes = np.arange(width * (i + 1), width * (i + 2))
        layers.append(LayerChoices(1.0, TAPS, lost(rng, width), writes, np.arange(width * (i + 1)), least=1))
    classes = np.arange(width * (count + 1))
    problem = SizeProblem(layers, classes < width, np.zeros(len(classes)))
    variables, milp = [], optimize.milp

    def solve(objective: np.ndarray, **options: Any) -> Any:
        variables.append(len(objective))
        assert len(objective) < 10_000
        return milp(objective, **options)

    monkeypatch.setattr(optimize, "milp", solve)
    budget = 0.5 * problem.whole_cost
    assert 0.999 * budget < problem.cost(within(problem, budget)) <= budget
    assert variables


def at_least_lost(problem: SizeProblem, budget: float, counts: np.ndarray) -> float:
    """Return a bound, from below, on what a chain of layers loses within a budget: the best one for any price of cost.

    Args:
        counts: numbers of filters of the layers, of which one column is the best, ``[layers, ...]``.
    """
    prices, bounds = np.geomspace(1e-4, 1, 200)[:, None], []
    for numbers in counts.T.tolist():
        bound, inputs = -prices[:, 0] * budget, 3
        for layer, number in zip(problem.layers, numbers, strict=True):
            values = layer.lost + (prices * layer.unit * inputs * layer.taps)[:, None]  # [prices, C_out, choices]
            bound += values[:, :, -1].sum(1)
            bound += np.sort(values[:, :, :-1].min(2) - values[:, :, -1])[:, :number].sum(1)
            inputs = number
        bounds.append(bound.max())
    return min(bounds)


@pytest.mark.parametrize(("rings", "round_to"), [slow((False, 1)), (False, 4), (True, 1)])
def test_exchanges_find_the_best_sizes_of_narrow_layers(
    rings: bool, round_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of whole filters are tried, of which the best of each layer stay; with rings, less is lost."""
    won, tried = 0, list(itertools.product(range(3), (0.15, 0.3, 0.5)))
    for seed, share in tried:
        rng, layers, reads, taps = RNG(seed), [], np.arange(3), TAPS if rings else TAPS[[0, 3]]
        widths = np.asarray((6, 8, 10)) * min(round_to, 2)
        for unit, width in zip((4.0, 2.0, 1.0), widths, strict=True):
            writes, loses = np.arange(width) + reads[-1] + 1, lost(rng, width)
            layers.append(LayerChoices(unit, taps, loses if rings else loses[:, [0, 3]], writes, reads, least=2))
            reads = writes
        classes = np.arange(3 + widths.sum())
        problem = SizeProblem(layers, classes < 3, np.zeros(len(classes)), round_to=round_to)
        budget = share * problem.whole_cost
        found = within(problem, budget)
        assert problem.cost(found) <= budget
        assert all((chosen != layer.gone).sum() >= 2 for layer, chosen in zip(layers, found, strict=True))
        with monkeypatch.context() as context:
            context.setattr(choose, "exchanged", lambda problem, sizes, *_: sizes)
            without = problem.lost(within(problem, budget))
        won += problem.lost(found) < without * (1 - 1e-3)
        allowed = [[n for n in range(2, width + 1) if n % round_to == 0 or n == width] for width in widths]
        counts = np.asarray(list(itertools.product(*allowed))).T
        costs = 9 * (12 * counts[0] + 2 * counts[0] * counts[1] + counts[1] * counts[2])
        falls = [np.concatenate([[0], np.sort(layer.lost[:, -1]).cumsum()]) for layer in layers]
        losses = sum(fall[len(fall) - 1 - count] for fall, count in zip(falls, counts, strict=True))
        assert problem.lost(found) <= min(losses[costs <= budget].min(), without) * (1 + 1e-9)
        if rings:
            assert problem.lost(found) <= 1.06 * at_least_lost(problem, budget, counts)
    assert won >= 2


def test_numbers_of_channels_are_rounded_and_no_exchange_between_layers_is_better() -> None:
    """Choosing other channels without changing their numbers is no better, either, and the budget is filled."""

    def counts(sizes: Sizes) -> np.ndarray:
        return np.asarray([(chosen != 1).sum() for chosen in sizes])[[0, 1, 3]]  # the third adds to the first's

    best, tried = 0, list(itertools.product(range(3), (0.3, 0.7)))
    for seed, share in tried:
        problem = pairs(seed)
        budget = share * problem.whole_cost
        all_sizes = [(problem.cost(sizes), sizes) for sizes in every(problem)]
        found, allowed = within(problem, budget), [sizes for cost, sizes in all_sizes if cost <= budget]
        assert problem.cost(found) <= budget
        assert problem.cost(found) in {cost for cost, _ in all_sizes}  # the cost is that of sizes with rounded numbers
        for i in (1, 3):  # layers that share their channels with no other
            for two in itertools.combinations(np.flatnonzero(found[i] == problem.layers[i].gone), 2):
                more = [chosen.copy() for chosen in found]
                more[i][list(two)] = 0
                assert problem.cost(more) > budget
        near = [s for s in allowed if sorted(np.sign(counts(s) - counts(found))) in ([-1, 0, 1], [0, 0, 0])]
        near = [s for s in near if np.abs(counts(s) - counts(found)).max() <= 2 and counts(s).min() > 0]
        least = problem.lost(found) * (1 - 1e-9)
        assert all(problem.lost(s) >= least for s in near)
        best += all(problem.lost(s) >= least for s in allowed)
    assert best >= len(tried) - 1


def test_a_budget_of_time_is_met_by_numbers_of_channels_that_run_together() -> None:
    """The numbers of channels lose little more than the best ones, which are found by trying all."""
    best, tried = 0, list(itertools.product(range(3), (0.3, 0.5, 0.7)))
    for seed, share in tried:
        problem = steps(seed)
        units = [layer.unit for layer in problem.layers]

        def cost(stream: int, inner: int, output: int, units: list[float] = units) -> float:
            edges = ((stream, 1), (inner, stream), (stream, inner), (output, stream))
            return sum(u * (inputs + 1) * -(-count // 2) for u, (count, inputs) in zip(units, edges, strict=True))

        def counts(sizes: Sizes) -> list[int]:
            return [int((sizes[i] == 0).sum()) for i in (0, 1, 3)]

        budget = share * cost(5, 4, 2)
        least = np.inf
        for some in itertools.product(range(1, 6), range(1, 5), range(1, 3)):
            sizes = problem.whole()
            for blocks, count in zip(((0, 2), (1,), (3,)), some, strict=True):
                values = sum(problem.layers[i].lost[:, 1] for i in blocks)
                for i in blocks:
                    sizes[i][np.argsort(-values)[count:]] = 1
            assert problem.cost(sizes) == pytest.approx(cost(*some))
            least = problem.lost(sizes) if cost(*some) <= budget and problem.lost(sizes) < least else least
        found = within(problem, budget)
        assert cost(*counts(found)) <= budget
        assert problem.lost(found) <= 1.2 * least
        best += problem.lost(found) <= least * (1 + 1e-9)
    assert best > len(tried) / 2


def test_a_budget_of_everything_removes_nothing() -> None:
    problem = chain(0)
    assert all((chosen == 0).all() for chosen in within(problem, problem.whole_cost))


def test_the_sizes_for_a_budget_do_not_depend_on_the_budgets_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges and the filling would hide small differences."""
    monkeypatch.setattr(choose, "exchanged", lambda problem, sizes, *_: sizes)
    monkeypatch.setattr(choose, "filled", lambda problem, sizes, _: sizes)
    for seed in range(3):
        problem = residual(seed)
        for share in (0.1, 0.9, 0.5):
            found, alone = (within(each, share * each.whole_cost) for each in (problem, residual(seed)))
            assert all(map(np.array_equal, found, alone))


def test_importance_on_any_scale_gives_the_same_sizes() -> None:
    for factor in (1e-30, 1e30):
        problem = chain(1)
        layers = [LayerChoices(a.unit, a.taps, a.lost * factor, a.writes, a.reads) for a in problem.layers]
        scaled = SizeProblem(layers, problem.fixed, problem.class_costs)
        budget = 0.5 * problem.whole_cost
        assert all(map(np.array_equal, within(problem, budget), within(scaled, budget)))


def test_the_cheapest_sizes_are_found_where_none_cost_as_little() -> None:
    plain = chain(2)
    layers = [LayerChoices(a.unit, a.taps, a.lost, a.writes, a.reads, least=1) for a in plain.layers]
    problem = SizeProblem(layers, plain.fixed, plain.class_costs)
    least = sum(unit * width for unit, width in zip((a.unit for a in layers), (3, 1, 1), strict=True))
    for budget in (0.0, 0.99 * least, 1.01 * least):
        assert problem.cost(within(problem, budget)) == pytest.approx(least)
