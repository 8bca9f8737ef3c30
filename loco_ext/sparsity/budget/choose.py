"""The cheapest sizes of all filters: a nested l0 problem, solved for a price of cost, and the price for a budget.

Minimise, over the size of every filter,

    sum over the filters of the importance lost  +  price * cost,

where a layer costs ``unit * (input channels that are left) * (taps of its filters that are left)``, or the time that
it was measured to take. A channel costs its taps in all layers that read it, and channels that are kept or removed
together are one class: all filters that write it stay or go with it. Given all other layers, the classes of a layer
decide exactly; layers take turns while the price rises slowly from 0, since a layer that decides at a high price while
all others are still whole would lose more than its share.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from loco_ext.sparsity.budget.layer_time import LayerTime, LayerTimes
from loco_ext.sparsity.compaction.constants import Booleans, Floats
from loco_ext.sparsity.compaction.disjoint_set import DisjointSet, Integers

Change = tuple[int, int, int]  # layer, filter, choice
Addition = tuple[float, list[Change]]  # the importance won for each unit of cost, and the changes of sizes
Sizes = list[Integers]  # for each layer, the choice of each filter: a column of LayerChoices.taps; the last is no taps

_FIRST_PRICE = 1e-6  # first price to try, as a fraction of the price at which everything would be removed
_RISE = 1.25  # factor between one price and the next
_RAMP = 40  # number of prices to pass through on the way up or down to the wanted price
_FALLS, _FALL = 6, 1e3  # while the first price already meets the budget, it is divided by _FALL, at most _FALLS times
_LEAST_GAIN = 1e-9  # an exchange must save at least this fraction of the importance lost
_BISECTIONS, _MOST_ROUNDS, _MOST_FAILED = 16, 20, 64


@dataclass(frozen=True)
class LayerChoices:
    """The choices of one layer's filters and what they cost.

    Args:
        unit: cost of one tap of one filter for one input channel.
        taps: number of taps of each choice, ``[choices]``, falling to 0 for a filter that goes.
        lost: importance lost by each choice of each filter, ``[C_out, choices]``; infinite for one that is forbidden.
        writes: class of each filter's channel, ``[C_out]``.
        reads: class of each input channel, ``[C_in]``; None if each filter reads only its own channel.
        least: number of filters that stay at least.
        time: what the layer costs instead, for numbers of input channels and of whole filters.
    """

    unit: float
    taps: Integers
    lost: Floats
    writes: Integers
    reads: Integers | None
    least: int = 0
    time: LayerTime | None = None

    @property
    def gone(self) -> int:
        """The choice of a filter without taps."""
        return len(self.taps) - 1


class SizeProblem:
    """Layers that share classes of channels.

    Args:
        layers: the layers.
        fixed: classes that stay whatever their filters are, ``[classes]``.
        class_costs: cost of each class beside the taps of the layers, ``[classes]``.
        rest: cost of what stays in any case.
        round_to: layers that share classes write a multiple of this number of classes, or all of them.
    """

    def __init__(
        self, layers: list[LayerChoices], fixed: Booleans, class_costs: Floats, rest: float = 0.0, round_to: int = 1
    ) -> None:
        self.layers, self.fixed, self.class_costs, self.rest = layers, fixed, class_costs, rest
        self.round_to = round_to
        count = len(fixed)
        reads = [np.zeros(0, np.int64) if layer.reads is None else layer.reads for layer in layers]
        self._reads = np.stack([np.bincount(each, minlength=count).astype(np.float64) for each in reads])
        self._all = np.arange(len(layers))
        self._alone = np.asarray([layer.reads is None for layer in layers])
        self._units = np.asarray([layer.unit for layer in layers])
        self._whole = np.asarray([layer.taps[0] for layer in layers])
        self._widths = self._inputs(np.ones(count, bool))
        times = [layer.time for layer in layers if layer.time is not None]
        self._times = LayerTimes(times) if times else None
        self._blocks = _blocks_that_share_classes(layers, count)
        # By the first layer of a block: the classes that its layers write, and what is lost with each.
        self._written = {
            block[0]: np.unique(np.concatenate([layers[i].writes for i in block])) for block in self._blocks
        }
        self._gone = {
            block[0]: sum(self._summed(layers[i], layers[i].lost[:, -1]) for i in block) for block in self._blocks
        }

    def whole(self) -> Sizes:
        """Return the first choice for every filter."""
        return [np.zeros(len(layer.writes), np.int64) for layer in self.layers]

    def stays(self, sizes: Sizes) -> Booleans:
        """Return which classes have a filter left, or are fixed."""
        stays = self.fixed.copy()
        for layer, chosen in zip(self.layers, sizes, strict=True):
            stays[layer.writes[chosen != layer.gone]] = True
        return stays

    def cost(self, sizes: Sizes) -> float:
        """Return the exact cost of these sizes."""
        stays = self.stays(sizes)
        in_layers = self._costs(self._all, self._inputs(stays), *self._totals(sizes)).sum()
        return float(in_layers + self.class_costs[stays].sum()) + self.rest

    def share(self, sizes: Sizes) -> float:
        """Return the cost of these sizes as a share of that of whole filters."""
        return self.cost(sizes) / self.cost(self.whole())

    def filter_costs(self) -> list[float]:
        """Return the mean cost of a whole filter of each layer: its taps, and its part of what reads its channel.

        The filters that write one channel share what the layers cost that read it.
        """
        whole = self.whole()
        inputs, writers = self._inputs(self.stays(whole)), sum(self._writers(layer) for layer in self.layers)
        filters, taps = self._totals(whole)
        reading = self._prices_of_classes(filters, taps) / np.maximum(writers, 1)
        own = self._costs(self._all, inputs, filters, taps) / filters
        return [float(cost + reading[layer.writes].mean()) for layer, cost in zip(self.layers, own, strict=True)]

    def lost(self, sizes: Sizes) -> float:
        """Return the importance that is lost with these sizes."""
        pairs = zip(self.layers, sizes, strict=True)
        return float(sum(layer.lost[np.arange(len(chosen)), chosen].sum() for layer, chosen in pairs))

    def improve(self, sizes: Sizes, price: float, most_rounds: int = _MOST_ROUNDS) -> Sizes:
        """Return sizes that are at least as good at this price; layers take turns until none changes."""
        sizes = [chosen.copy() for chosen in sizes]
        stays, totals = self.stays(sizes), self._totals(sizes)
        for _ in range(most_rounds):
            # any() gets a list, because every block has to decide even after one has changed.
            if not any([self._decide(block, sizes, stays, totals, price) for block in self._blocks]):
                break
        return sizes

    def at(self, price: float) -> Sizes:
        """Return the sizes that minimise the importance lost plus price * cost, the best found from several starts."""
        up, down = self.whole(), self.improve(self.whole(), price * _RISE**_RAMP)
        for factor in _RISE ** np.arange(_RAMP, 0, -1):
            up = self.improve(up, price / factor, most_rounds=1)
            down = self.improve(down, price * factor, most_rounds=1)
        found = [self.improve(start, price) for start in (up, down, self.whole())]
        return min(found, key=lambda sizes: self.value(sizes, price))

    def value(self, sizes: Sizes, price: float) -> float:
        """Return the objective that is minimised: the importance lost plus price * cost."""
        return self.lost(sizes) + price * self.cost(sizes)

    def within(self, budget: float) -> Sizes:
        """Return sizes that cost at most ``budget``, losing as little importance as is found.

        If none are found that cost as little, return the cheapest.
        """
        sizes = self.whole()
        if self.cost(sizes) <= budget:
            return sizes
        price, end = self._prices()
        for _ in range(_FALLS):
            if self.cost(self.improve(sizes, price, most_rounds=1)) > budget:
                break
            price /= _FALL
        below = sizes
        while self.cost(below) > budget:
            if price > end:
                return below
            sizes, price = below, price * _RISE
            below = self.improve(sizes, price, most_rounds=1)
        low, high = price / _RISE, price
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            found = self.improve(sizes, middle)
            if self.cost(found) <= budget:
                below, high = found, middle
            else:
                sizes, low = found, middle
        if self.cost(best := self.at(high)) <= budget and self.value(best, high) < self.value(below, high):
            below = best
        return self._exchanged(self._filled(below, budget, high), budget, high)

    def _prices(self) -> tuple[float, float]:
        """Return a price at which nearly nothing goes, and one beyond which nothing changes."""
        whole, finite = self.whole(), [layer.lost[np.isfinite(layer.lost)] for layer in self.layers]
        total = float(sum(each.sum() for each in finite)) or 1.0
        inputs = np.maximum(self._inputs(self.stays(whole)), 1.0)
        least = float((self._costs(self._all, inputs, self._totals(whole)[0], 1.0) / inputs).min())
        return _FIRST_PRICE * total / self.cost(whole), _RISE * total / least

    def _summed(self, layer: LayerChoices, values: Floats) -> Floats:
        """Return the sums of the values of a layer's filters over each class."""
        return np.bincount(layer.writes, values, minlength=len(self.fixed)).astype(np.float64)

    def _writers(self, layer: LayerChoices) -> Integers:
        """Return how many of a layer's filters write each class."""
        return np.bincount(layer.writes, minlength=len(self.fixed))

    def _inputs(self, stays: Booleans) -> Floats:
        """Return the number of input channels that are left to a filter of each layer."""
        return np.where(self._alone, 1.0, self._reads @ stays)

    def _totals(self, sizes: Sizes) -> Floats:
        """Return the numbers of each layer's filters that stay and of their taps, ``[2, layers]``."""
        pairs = list(zip(self.layers, sizes, strict=True))
        filters = [(chosen != layer.gone).sum() for layer, chosen in pairs]
        return np.asarray([filters, [layer.taps[chosen].sum() for layer, chosen in pairs]], np.float64)

    def _costs(self, layers: Integers, inputs: Floats, filters: Floats, taps: Floats | float) -> Floats:
        """Return what layers, given by index, cost with numbers of input channels, filters, and taps of all filters.

        Filters without rings take time in proportion to their taps.
        """
        if self._times is None:
            return self._units[layers] * inputs * taps
        return self._times(layers, inputs, filters) * taps / (self._whole[layers] * np.maximum(filters, 1.0))

    def _prices_of_classes(self, filters: Floats, taps: Floats) -> Floats:
        """Return the mean cost of each class beside its filters' taps: its own, and that of the taps that read it."""
        if self._times is None:
            reading = self._units * taps
        else:
            with_and_without = (self._costs(self._all, n * self._widths, filters, taps) for n in (1.0, 0.0))
            reading = np.subtract(*with_and_without) / np.maximum(self._widths, 1.0)
        return self.class_costs + reading @ self._reads

    def _decide(self, block: list[int], sizes: Sizes, stays: Booleans, totals: Floats, price: float) -> bool:
        """Choose the sizes of layers that share classes, all others being given, and return whether any has changed.

        Args:
            sizes, stays, totals: sizes, and what follows from them; those of the block are replaced.
        """
        keep, before = price * self._prices_of_classes(*totals), [sizes[i] for i in block]
        best, lost = {}, np.zeros(len(self.fixed))
        rates = self._costs(self._all, self._inputs(stays), np.maximum(totals[0], 1.0), 1.0)
        for i in block:
            layer = self.layers[i]
            values = layer.lost + price * rates[i] * layer.taps
            best[i] = values[:, :-1].argmin(1)
            place = np.arange(len(best[i])), best[i]
            keep += self._summed(layer, values[place])
            lost += self._summed(layer, layer.lost[place])
        gone = self._gone[block[0]]
        order, forced = self._order(block, gone - keep)
        gone = np.where(np.isfinite(gone), gone, 0.0)  # those that must stay are before all that may go
        if self._times is not None:
            objectives = self._objectives(block, order, best, lost - gone, stays, totals, price)
        else:
            objectives = _sums(keep[order] - gone[order])
        counts = np.arange(len(order) + 1)
        allowed = (counts >= forced) & ((counts % self.round_to == 0) | (counts == len(order)))
        count = counts[allowed][objectives[allowed].argmin()]
        stays[order[:count]], stays[order[count:]] = True, False
        for i in block:
            layer = self.layers[i]
            sizes[i] = np.where(stays[layer.writes], best[i], layer.gone)
            totals[:, i] = (sizes[i] != layer.gone).sum(), layer.taps[sizes[i]].sum()
        return not all(map(np.array_equal, before, (sizes[i] for i in block)))

    def _order(self, block: list[int], gains: Floats) -> tuple[Integers, int]:
        """Return the classes that a block writes, those that gain the most if they stay first, and how many must stay.

        Those that must stay are before all others: fixed ones, and the best of each layer that keeps so many filters.
        """
        forced = self.fixed | np.isinf(gains)
        for layer in (self.layers[i] for i in block):
            missing = layer.least - int(forced[layer.writes].sum())
            if missing > 0:
                free = np.unique(layer.writes[~forced[layer.writes]])
                forced[free[np.argsort(-gains[free], kind="stable")[:missing]]] = True
        written = self._written[block[0]]
        order = written[np.lexsort((-gains[written], ~forced[written]))]
        return order, int(forced[written].sum())

    def _objectives(
        self,
        block: list[int],
        order: Integers,
        best: dict[int, Integers],
        lost: Floats,
        stays: Booleans,
        totals: Floats,
        price: float,
    ) -> Floats:
        """Return the objective of keeping the first so many classes of an order, ``[classes + 1]``, but for a constant.

        Args:
            block: layers that write the classes.
            best: choices of the layers' filters that stay.
            lost: importance lost with each class that stays, less that which is lost if it goes.
            stays, totals: what follows from the sizes of all layers.
        """
        outside = stays.copy()
        outside[order] = False
        layers = np.union1d(block, np.flatnonzero(self._reads[:, order].any(1)))
        inputs, (filters, taps) = self._inputs(outside)[layers, None], totals[:, layers, None]
        filters, taps = (np.repeat(each, len(order) + 1, 1) for each in (filters, taps))
        for place in np.flatnonzero(np.isin(layers, block)):
            layer, chosen = self.layers[layers[place]], best[layers[place]]
            filters[place] = _sums(self._summed(layer, np.ones(len(chosen)))[order])
            taps[place] = _sums(self._summed(layer, layer.taps[chosen].astype(np.float64))[order])
        costs = self._costs(layers[:, None], inputs + _sums(self._reads[layers][:, order]), filters, taps).sum(0)
        costs += _sums(self.class_costs[order])
        return _sums(lost[order]) + price * costs

    def _filled(self, sizes: Sizes, budget: float, price: float) -> Sizes:
        """Return the sizes with what still fits into the budget, the most importance for its cost first."""
        filled = self._filled_once(sizes, budget, price)
        while not all(map(np.array_equal, filled, sizes)):
            sizes, filled = filled, self._filled_once(filled, budget, price)
        return filled

    def _filled_once(self, sizes: Sizes, budget: float, price: float) -> Sizes:
        """Return the sizes with additions in order, several at a time, without those that do not fit."""
        sizes = [chosen.copy() for chosen in sizes]
        additions = sorted(self._additions(sizes, price), key=lambda addition: -addition[0])
        place, several, failed = 0, len(additions), 0
        while place < len(additions) and failed < _MOST_FAILED:
            several = min(several, len(additions) - place)
            changes = [change for _, changes in additions[place : place + several] for change in changes]
            before = [(i, j, sizes[i][j]) for i, j, _ in changes]
            for i, j, choice in changes:
                sizes[i][j] = min(choice, sizes[i][j])
            if self.cost(sizes) <= budget:
                place, several = place + several, 2 * several
                continue
            for i, j, old in reversed(before):
                sizes[i][j] = old
            place, failed, several = (place + 1, failed + 1, 1) if several == 1 else (place, failed, several // 2)
        return sizes

    def _exchanged(self, sizes: Sizes, budget: float, price: float) -> Sizes:
        """Return sizes that no exchange of ``round_to`` channels between two layers improves.

        With so few possible numbers of channels, layers that decide one by one miss sizes that are better together.
        """
        while self.round_to > 1 and (better := self._exchanged_once(sizes, budget, price)) is not None:
            sizes = self._filled(better, budget, price)
        return sizes

    def _exchanged_once(self, sizes: Sizes, budget: float, price: float) -> Sizes | None:
        """Return the sizes that lose the least after one exchange; None if all lose more or cost too much."""
        fewer = self._fewer_channels(sizes)
        more = [additions[0][1] for additions in self._more_channels(sizes, price) if additions]
        if not (fewer and more):
            return None
        now = self.lost(sizes)
        losses = [[self.lost(_changed(sizes, changes)) - now for changes in ways] for ways in (fewer, more)]
        together = np.add.outer(*map(np.asarray, losses))
        for place in np.argsort(together, axis=None)[: int((together < -_LEAST_GAIN * now).sum())]:
            less, plus = np.unravel_index(place, together.shape)
            changed = _changed(sizes, fewer[less] + more[plus])
            if self.cost(changed) <= budget:
                return changed
        return None

    def _fewer_channels(self, sizes: Sizes) -> list[list[Change]]:
        """Return, for each block of layers, the changes that remove the fewest classes that ``round_to`` allows.

        The least important classes go.
        """
        stays, found = self.stays(sizes), []
        for block in self._blocks:
            lost, written = np.zeros(len(self.fixed)), self._written[block[0]]
            for layer, chosen in ((self.layers[i], sizes[i]) for i in block):
                np.add.at(lost, layer.writes, layer.lost[:, -1] - layer.lost[np.arange(len(chosen)), chosen])
            spare = written[(stays & ~self.fixed)[written]]
            gone = spare[np.argsort(lost[spare], kind="stable")[: (stays[written].sum() - 1) % self.round_to + 1]]
            least = max(self.layers[i].least for i in block)
            if np.isfinite(lost[gone]).all() and max(least, 1) <= stays[written].sum() - len(gone):
                where = [(i, int(j)) for i in block for j in np.flatnonzero(np.isin(self.layers[i].writes, gone))]
                found.append([(i, j, self.layers[i].gone) for i, j in where])
        return found

    def _additions(self, sizes: Sizes, price: float) -> list[Addition]:
        """Return the possible additions: rings of filters that are not removed, and channels."""
        stays, rates = self.stays(sizes), self._rates(sizes)
        found: list[Addition] = []
        for i, layer in enumerate(self.layers):
            for j, now in enumerate(sizes[i].tolist()):
                won, spent = self._won_and_spent(layer, rates[i], now, j)
                if now > 0 and stays[layer.writes[j]] and np.isfinite(won).all():
                    found += [(w / s, [(i, j, n)]) for n, (w, s) in enumerate(zip(won, spent, strict=True))]
        return found + [addition for additions in self._more_channels(sizes, price) for addition in additions]

    def _more_channels(self, sizes: Sizes, price: float) -> list[list[Addition]]:
        """Return, for each block of layers, additions of ``round_to`` classes each, the most important first."""
        stays, reading, rates = self.stays(sizes), self._prices_of_classes(*self._totals(sizes)), self._rates(sizes)
        classes: dict[int, list[tuple[Floats, Floats, tuple[int, int]]]] = {}
        whole: dict[int, list[Addition]] = {}
        for i, layer in enumerate(self.layers):
            for j in np.flatnonzero(~stays[layer.writes]).tolist():
                won, spent = self._won_and_spent(layer, rates[i], sizes[i][j], j)
                if np.isfinite(won).all():
                    classes.setdefault(int(layer.writes[j]), []).append((won, spent, (i, j)))
        for one, parts in classes.items():
            best = [int((won - price * spent).argmax()) for won, spent, _ in parts]
            least = [len(won) - 1 for won, _, _ in parts]
            for choices in (best, least):
                pairs = list(zip(parts, choices, strict=True))
                cost = reading[one] + sum(spent[n] for (_, spent, _), n in pairs)
                gain = sum(won[n] for (won, _, _), n in pairs) / cost
                whole.setdefault(one, []).append((float(gain), [(*place, n) for (_, _, place), n in pairs]))
        missing = [[whole[one] for one in self._written[block[0]] if one in whole] for block in self._blocks]
        return [_several(each, self.round_to) for each in missing]

    def _rates(self, sizes: Sizes) -> Floats:
        """Return what a tap of each layer's filters costs, for one input channel at least."""
        inputs, filters = self._inputs(self.stays(sizes)), self._totals(sizes)[0]
        return self._costs(self._all, np.maximum(inputs, 1.0), np.maximum(filters, 1.0), 1.0)

    @staticmethod
    def _won_and_spent(layer: LayerChoices, rate: float, now: int, j: int) -> tuple[Floats, Floats]:
        """Return the importance that a filter wins by each choice before its present one, and what it then costs."""
        return layer.lost[j, now] - layer.lost[j, :now], rate * (layer.taps[:now] - layer.taps[now])


def _sums(values: Floats) -> Floats:
    """Return the sums of the first values of each row, of none to all."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)


def _changed(sizes: Sizes, changes: list[Change]) -> Sizes:
    sizes = [chosen.copy() for chosen in sizes]
    for i, j, choice in changes:
        sizes[i][j] = choice
    return sizes


def _several(missing: list[list[Addition]], count: int) -> list[Addition]:
    """Return additions of ``count`` classes at a time, the most important classes first.

    If ``count`` is 1, all additions of each class are returned; otherwise only the best of each class is used.

    Args:
        missing: the additions of each class, the best first.
        count: the number of classes.
    """
    if count == 1:
        return [addition for additions in missing for addition in additions]
    best = sorted((additions[0] for additions in missing), key=lambda addition: -addition[0])
    most = len(best) - len(best) % count or len(best)
    groups = [best[i : i + count] for i in range(0, most, count)]
    changes = [[change for _, changes in group for change in changes] for group in groups]
    return [(sum(gain for gain, _ in group) / len(group), each) for group, each in zip(groups, changes, strict=True)]


def _blocks_that_share_classes(layers: list[LayerChoices], count: int) -> list[list[int]]:
    """Return the layers in blocks, such that no class is written by layers of two blocks."""
    sets = DisjointSet()
    sets.new(count)
    for layer in layers:
        sets.unite(layer.writes[:-1], layer.writes[1:])
    blocks = defaultdict(list)
    for i, layer in enumerate(layers):
        blocks[tuple(sets.roots(layer.writes[:1]))].append(i)
    return list(blocks.values())
