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
Move = tuple[int, dict[int, Integers]]  # number of a block of layers, and the new sizes of some of them
Steps = tuple[int, ...]
Addition = tuple[float, list[Change]]  # the importance won for each unit of cost, and the changes of sizes
Sizes = list[Integers]  # for each layer, the choice of each filter: a column of LayerChoices.taps; the last is no taps

_FIRST_PRICE = 1e-6  # first price to try, as a fraction of the price at which everything would be removed
_RISE = 1.25  # factor between one price and the next
_RAMP = 40  # number of prices to pass through on the way up or down to the wanted price
_FALLS, _FALL = 6, 1e3  # while the first price already meets the budget, it is divided by _FALL, at most _FALLS times
_LEAST_GAIN = 1e-9  # an exchange must save at least this fraction of the importance lost
# Numbers of channels or rings by which a block of layers shrinks or grows, and of blocks that change together.
_ONE: Steps = (1,)
_EXCHANGES: tuple[tuple[Steps, int], ...] = ((_ONE, 2), ((1, 2, 8), 2), ((1, 2, 8), 3))
_MOST_EXCHANGES, _TOGETHER = 300_000, 4096  # exchanges that are tried, and those whose costs are computed together
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


@dataclass(frozen=True)
class _Block:
    """Layers that write the same classes of channels, and decide together.

    Attributes:
        layers: the layers, by index, ``[n]``.
        written: the classes that they write, ascending, ``[w]``.
        writes: for each of the layers, the place in ``written`` of each filter's class, ``[C_out]``.
        writers: how many filters of each layer write each class, ``[n, w]``.
        gone: importance that is lost with each class, ``[w]``.
        concerned: these layers and those that read the classes, by index, ascending, ``[c]``.
        own: places of ``layers`` in ``concerned``, ``[n]``.
        reads: how many input channels of each layer that is concerned are of each class, ``[c, w]``.
    """

    layers: list[int]
    written: Integers
    writes: list[Integers]
    writers: Floats
    gone: Floats
    concerned: Integers
    own: Integers
    reads: Floats

    def summed(self, place: int, values: Floats | Integers) -> Floats:
        """Return the sums of the values of one layer's filters over each class."""
        return np.asarray(np.bincount(self.writes[place], values, len(self.written)), np.float64)


@dataclass
class _State:
    """Sizes, and what follows from them.

    Attributes:
        sizes: for each layer, the choice of each filter.
        stays: the classes that stay, ``[classes]``.
        counts: number of input channels, of filters and of the filters' taps of each layer, ``[3, layers]``.
    """

    sizes: Sizes
    stays: Booleans
    counts: Floats


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
        self._readers, self._read = np.nonzero(self._reads)
        self._times_read = self._reads[self._readers, self._read]
        self._all = np.arange(len(layers))
        self._alone = np.asarray([layer.reads is None for layer in layers])
        self._units = np.asarray([layer.unit for layer in layers])
        self._whole = np.asarray([layer.taps[0] for layer in layers])
        self._widths = np.where(self._alone, 1.0, self._reads.sum(1))
        times = [layer.time for layer in layers if layer.time is not None]
        self._times = LayerTimes(times) if times else None
        self._passed: dict[tuple[float, float], Sizes] = {}  # sizes at rising prices, by the first price and this one
        self._blocks = [self._block(each) for each in _layers_that_share_classes(layers, count)]

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
        now = self._state(sizes)
        return float(self._costs(self._all, *now.counts).sum() + self.class_costs[now.stays].sum()) + self.rest

    def share(self, sizes: Sizes) -> float:
        """Return the cost of these sizes as a share of that of whole filters."""
        return self.cost(sizes) / self.cost(self.whole())

    def filter_costs(self) -> list[float]:
        """Return the mean cost of a whole filter of each layer: its taps, and its part of what reads its channel.

        The filters that write one channel share what the layers cost that read it.
        """
        counts = self._state(self.whole()).counts
        writers = sum(np.bincount(layer.writes, minlength=len(self.fixed)) for layer in self.layers)
        reading = self._prices_of_classes(counts) / np.maximum(writers, 1)
        own = self._costs(self._all, *counts) / counts[1]
        return [float(cost + reading[layer.writes].mean()) for layer, cost in zip(self.layers, own, strict=True)]

    def lost(self, sizes: Sizes) -> float:
        """Return the importance that is lost with these sizes."""
        pairs = zip(self.layers, sizes, strict=True)
        return float(sum(layer.lost[np.arange(len(chosen)), chosen].sum() for layer, chosen in pairs))

    def improve(self, sizes: Sizes, price: float, most_rounds: int = _MOST_ROUNDS) -> Sizes:
        """Return sizes that are at least as good at this price; layers take turns until none changes."""
        now = self._state(list(sizes))
        for _ in range(most_rounds):
            # any() gets a list, because every block has to decide even after one has changed.
            if not any([self._decide(block, now, price) for block in self._blocks]):
                break
        return now.sizes

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
        first, below = price, sizes
        while self.cost(below) > budget:
            if price > end:
                return [chosen.copy() for chosen in below]
            sizes, price = below, price * _RISE
            if (first, price) not in self._passed:
                self._passed[first, price] = self.improve(sizes, price, most_rounds=1)
            below = self._passed[first, price]
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
        inputs, filters, _ = np.maximum(self._state(whole).counts, 1.0)
        least = float((self._costs(self._all, inputs, filters, 1.0) / inputs).min())
        return _FIRST_PRICE * total / self.cost(whole), _RISE * total / least

    def _block(self, layers: list[int]) -> _Block:
        """Return what the decision of layers depends on that write the same classes."""
        writes = [self.layers[i].writes for i in layers]
        written = np.unique(np.concatenate(writes))
        places = [np.searchsorted(written, each) for each in writes]
        writers = np.asarray([np.bincount(each, minlength=len(written)) for each in places], np.float64)
        lost = zip(places, (self.layers[i].lost[:, -1] for i in layers), strict=True)
        gone = np.sum([np.bincount(each, values, len(written)) for each, values in lost], 0)
        concerned = np.union1d(layers, np.flatnonzero(self._reads[:, written].any(1)))
        own, reads = np.searchsorted(concerned, layers), self._reads[np.ix_(concerned, written)]
        return _Block(layers, written, places, writers, gone, concerned, own, reads)

    def _state(self, sizes: Sizes) -> _State:
        """Return the sizes with what follows from them."""
        stays, pairs = self.stays(sizes), list(zip(self.layers, sizes, strict=True))
        read = np.bincount(self._readers, self._times_read * stays[self._read], minlength=len(self.layers))
        filters = [(chosen != layer.gone).sum() for layer, chosen in pairs]
        taps = [layer.taps[chosen].sum() for layer, chosen in pairs]
        return _State(sizes, stays, np.asarray([np.where(self._alone, 1.0, read), filters, taps], np.float64))

    def _costs(self, layers: Integers, inputs: Floats, filters: Floats, taps: Floats | float) -> Floats:
        """Return what layers, given by index, cost with numbers of input channels, filters, and taps of all filters.

        Filters without rings take time in proportion to their taps.
        """
        if self._times is None:
            return self._units[layers] * inputs * taps
        return self._times(layers, inputs, filters) * taps / (self._whole[layers] * np.maximum(filters, 1.0))

    def _prices_of_classes(self, counts: Floats, block: _Block | None = None) -> Floats:
        """Return the mean cost of each class beside its filters' taps: its own, and that of the taps that read it.

        Args:
            counts: numbers of input channels, filters and taps, ``[3, layers]``.
            block: only the classes that it writes; by default all.
        """
        layers, reads = (self._all, self._reads) if block is None else (block.concerned, block.reads)
        own = self.class_costs if block is None else self.class_costs[block.written]
        _, filters, taps = counts[:, layers]
        if self._times is None:
            reading = self._units[layers] * taps
        else:
            widths = self._widths[layers]
            all_and_none = self._costs(layers, np.stack([widths, np.zeros(len(widths))]), filters, taps)
            reading = np.subtract(*all_and_none) / np.maximum(widths, 1.0)
        return own + reading @ reads

    def _decide(self, block: _Block, now: _State, price: float) -> bool:
        """Choose the sizes of a block, all others being given, and return whether any has changed."""
        keep, lost = price * self._prices_of_classes(now.counts, block), np.zeros(len(block.written))
        inputs, filters, _ = now.counts[:, block.layers]
        rates, best = self._costs(np.asarray(block.layers), inputs, np.maximum(filters, 1.0), 1.0), []
        for place, (i, rate) in enumerate(zip(block.layers, rates, strict=True)):
            layer = self.layers[i]
            values = layer.lost[:, :-1] + price * rate * layer.taps[:-1]
            chosen = values.argmin(1)
            at = np.arange(len(chosen)), chosen
            keep += block.summed(place, values[at])
            lost += block.summed(place, layer.lost[at])
            best.append(chosen)
        order, forced = self._order(block, block.gone - keep)
        gone = np.where(np.isfinite(block.gone), block.gone, 0.0)  # those that must stay are before all that may go
        if self._times is not None:
            objectives = self._objectives(block, order, best, lost - gone, now, price)
        else:
            objectives = _sums(keep[order] - gone[order])
        counts = np.arange(len(order) + 1)
        allowed = (counts >= forced) & ((counts % self.round_to == 0) | (counts == len(order)))
        count = counts[allowed][objectives[allowed].argmin()]
        stays = np.zeros(len(order), bool)
        stays[order[:count]] = True
        now.counts[0, block.concerned] += block.reads @ (stays * 1.0 - now.stays[block.written])
        now.stays[block.written] = stays
        changed = False
        for i, writes, chosen in zip(block.layers, block.writes, best, strict=True):
            layer, before = self.layers[i], now.sizes[i]
            now.sizes[i] = np.where(stays[writes], chosen, layer.gone)
            now.counts[1:, i] = (now.sizes[i] != layer.gone).sum(), layer.taps[now.sizes[i]].sum()
            changed |= not np.array_equal(before, now.sizes[i])
        return changed

    def _order(self, block: _Block, gains: Floats) -> tuple[Integers, int]:
        """Return the places of a block's classes, those that gain the most if they stay first, and how many must stay.

        Those that must stay are before all others: fixed ones, and the best of each layer that keeps so many filters.
        """
        forced = self.fixed[block.written] | np.isinf(gains)
        for i, writes, writers in zip(block.layers, block.writes, block.writers, strict=True):
            missing = self.layers[i].least - int(forced[writes].sum())
            if missing > 0:
                free = np.flatnonzero(~forced & (writers > 0))
                forced[free[np.argsort(-gains[free], kind="stable")[:missing]]] = True
        return np.lexsort((-gains, ~forced)), int(forced.sum())

    def _objectives(
        self, block: _Block, order: Integers, best: list[Integers], lost: Floats, now: _State, price: float
    ) -> Floats:
        """Return the objective of keeping the first so many classes of a block, ``[w + 1]``, but for a constant.

        Args:
            order: places of the classes.
            best: choices of the layers' filters that stay.
            lost: importance lost with each class that stays, less that which is lost if it goes.
        """
        inputs, filters, taps = np.repeat(now.counts[:, block.concerned, None], len(order) + 1, 2)
        inputs += _sums(block.reads[:, order]) - (block.reads @ now.stays[block.written])[:, None]
        for place, (own, i) in enumerate(zip(block.own, block.layers, strict=True)):
            filters[own] = _sums(block.writers[place, order])
            taps[own] = _sums(block.summed(place, self.layers[i].taps[best[place]])[order])
        costs = self._costs(block.concerned[:, None], inputs, filters, taps).sum(0)
        costs += _sums(self.class_costs[block.written[order]])
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
        """Return sizes that no exchange of few channels or rings between two or three blocks of layers improves.

        Layers that decide one by one miss sizes that are better together, and what they leave of the budget may be less
        than a channel costs.
        """
        for steps, blocks in _EXCHANGES[self.round_to == 1 :]:
            before = sizes
            while (better := self._exchanged_once(sizes, budget, price, steps, blocks)) is not None:
                sizes = self._filled(better, budget, price) if steps == _ONE else better
            if steps != _ONE and sizes is not before:
                sizes = self._filled(sizes, budget, price)
        return sizes

    def _exchanged_once(self, sizes: Sizes, budget: float, price: float, steps: Steps, blocks: int) -> Sizes | None:
        """Return the sizes that lose the least after one exchange; None if all lose more or cost too much.

        Args:
            steps: numbers of channels, in units of ``round_to``, or of rings that a block loses or wins.
            blocks: number of blocks that change, 2 or 3. With 3, nothing is tried if there are too many exchanges.
        """
        fewer, more = self._moves(sizes, price, steps)
        moves: list[Move] = [(-1, {}), *fewer, *more]  # the first changes nothing
        first, third = int(steps == _ONE), len(moves) if blocks == 3 else 1
        i, j, k = np.ogrid[first : len(fewer) + 1, len(fewer) + 1 : len(moves), :third]
        if not 0 < i.size * j.size * k.size <= _MOST_EXCHANGES:
            return None
        now = self._state(sizes)
        effects = np.stack([self._effect(now, changed) for _, changed in moves])
        of, lost = np.asarray([block for block, _ in moves]), effects[:, 0, -1]
        apart = (of[i] != of[j]) & (of[j] != of[k]) & ((of[i] != of[k]) | (k == 0))
        once = (k == 0) | (k > j) | ((k > i) & (k <= len(fewer)))
        together = lost[i] + lost[j] + lost[k]
        places = np.nonzero(apart & once & (together < -_LEAST_GAIN * self.lost(sizes)))
        chosen = np.stack(places, 1)[np.argsort(together[places], kind="stable")] + [first, len(fewer) + 1, 0]
        for start in range(0, len(chosen), _TOGETHER):
            some = chosen[start : start + _TOGETHER]
            change = effects[some].sum(1)
            in_layers = self._costs(self._all, *(now.counts + change[:, :, :-1]).swapaxes(0, 1)).sum(1)
            costs = in_layers + change[:, 1, -1] + self.class_costs[now.stays].sum() + self.rest
            for three in some[costs <= budget]:
                new = {layer: each for move in three for layer, each in moves[move][1].items()}
                changed = [new.get(layer, each) for layer, each in enumerate(sizes)]
                if self.cost(changed) <= budget:  # which it is but for rounding
                    return changed
        return None

    def _moves(self, sizes: Sizes, price: float, steps: Steps) -> tuple[list[Move], list[Move]]:
        """Return the ways to shrink and to grow one block of layers each.

        They are numbers of channels, of which the least important go and those that win the most for their cost come,
        and a ring of each of such numbers of filters of a layer. One step is of channels only.
        """
        fewer: list[Move] = []
        more: list[Move] = []
        now, rates = self._state(sizes), self._rates(sizes)
        for number, block in enumerate(self._blocks):
            lost, won = np.zeros((2, len(block.written)))
            spent, best = self._prices_of_classes(now.counts, block), []
            for place, i in enumerate(block.layers):
                layer, every = self.layers[i], np.arange(len(sizes[i]))
                best.append((layer.lost + price * rates[i] * layer.taps)[:, :-1].argmin(1))
                lost += block.summed(place, layer.lost[:, -1] - layer.lost[every, sizes[i]])
                won += block.summed(place, layer.lost[:, -1] - layer.lost[every, best[place]])
                spent += block.summed(place, rates[i] * layer.taps[best[place]])
                if steps != _ONE:
                    fewer += [(number, {i: chosen}) for chosen in self._other_rings(layer, sizes[i], 1, steps)]
                    more += [(number, {i: chosen}) for chosen in self._other_rings(layer, sizes[i], -1, steps)]
            stays = now.stays[block.written]
            free = np.flatnonzero(stays & ~self.fixed[block.written] & np.isfinite(lost))
            free = free[np.argsort(lost[free], kind="stable")]
            gone = np.flatnonzero(~stays)
            gone = gone[np.argsort(-won[gone] / spent[gone], kind="stable")]
            every = np.arange(len(stays))
            odd = (int(stays.sum()) - 1) % self.round_to + 1
            for count in (odd + (n - 1) * self.round_to for n in steps):
                if count > len(free):
                    break
                goes, changed = np.isin(every, free[:count]), {}
                for i, writes in zip(block.layers, block.writes, strict=True):
                    changed[i] = np.where(goes[writes], self.layers[i].gone, sizes[i])
                if all((changed[i] != self.layers[i].gone).sum() >= max(self.layers[i].least, 1) for i in block.layers):
                    fewer.append((number, changed))
            for count in sorted({min(n * self.round_to, len(gone)) for n in steps} - {0}):
                comes, places = np.isin(every, gone[:count]), zip(block.layers, block.writes, best, strict=True)
                more.append((number, {i: np.where(comes[writes], new, sizes[i]) for i, writes, new in places}))
        return fewer, more

    @staticmethod
    def _other_rings(layer: LayerChoices, chosen: Integers, step: int, steps: Steps) -> list[Integers]:
        """Return sizes of a layer with a ring less (``step`` 1) or more (-1) of numbers of filters that stay."""
        other = chosen + step
        able = np.flatnonzero((chosen != layer.gone) & (other >= 0) & (other < layer.gone))
        lost = layer.lost[able, other[able]] - layer.lost[able, chosen[able]]
        order = able[np.argsort(lost, kind="stable")[: np.isfinite(lost).sum()]]
        return [np.where(np.isin(np.arange(len(chosen)), order[:n]), other, chosen) for n in steps if n <= len(order)]

    def _effect(self, now: _State, changed: dict[int, Integers]) -> Floats:
        """Return what new sizes of the layers of a block change, ``[3, layers + 1]``.

        The rows are the input channels, filters and taps of each layer; the last column begins with the importance lost
        and the cost of classes. The effects of several blocks add up.
        """
        effect, after = np.zeros((3, len(self.layers) + 1)), now.stays.copy()
        for i, new in changed.items():
            layer, old = self.layers[i], now.sizes[i]
            every = np.flatnonzero(new != old)
            effect[0, -1] += (layer.lost[every, new[every]] - layer.lost[every, old[every]]).sum()
            effect[1:, i] = (new != layer.gone).sum(), layer.taps[new].sum()
            effect[1:, i] -= now.counts[1:, i]
            after[layer.writes[every]] = new[every] != layer.gone
        others = np.flatnonzero(after != now.stays)
        signs = np.where(after[others], 1.0, -1.0)
        effect[1, -1] = self.class_costs[others] @ signs
        effect[0, :-1] = self._reads[:, others] @ signs
        return effect

    def _additions(self, sizes: Sizes, price: float) -> list[Addition]:
        """Return the possible additions: rings of filters that are not removed, and channels."""
        stays, rates = self.stays(sizes), self._rates(sizes)
        found: list[Addition] = []
        for i, (layer, chosen) in enumerate(zip(self.layers, sizes, strict=True)):
            some = np.flatnonzero(stays[layer.writes])
            now, choices = chosen[some, None], np.arange(len(layer.taps))
            won, spent = layer.lost[some, now[:, 0], None] - layer.lost[some], rates[i] * (layer.taps - layer.taps[now])
            places, more = np.nonzero((choices < now) & np.isfinite(won))
            gains = (won[places, more] / spent[places, more]).tolist()
            changes = zip(gains, some[places].tolist(), more.tolist(), strict=True)
            found += [(gain, [(i, j, choice)]) for gain, j, choice in changes]
        return found + [addition for additions in self._more_channels(sizes, price) for addition in additions]

    def _more_channels(self, sizes: Sizes, price: float) -> list[list[Addition]]:
        """Return, for each block of layers, additions of ``round_to`` classes each, the most important first."""
        now, rates = self._state(sizes), self._rates(sizes)
        stays, reading = now.stays, self._prices_of_classes(now.counts)
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
        missing = [[whole[one] for one in block.written.tolist() if one in whole] for block in self._blocks]
        return [_several(each, self.round_to) for each in missing]

    def _rates(self, sizes: Sizes) -> Floats:
        """Return what a tap of each layer's filters costs, for one input channel at least."""
        inputs, filters, _ = np.maximum(self._state(sizes).counts, 1.0)
        return self._costs(self._all, inputs, filters, 1.0)

    @staticmethod
    def _won_and_spent(layer: LayerChoices, rate: float, now: int, j: int) -> tuple[Floats, Floats]:
        """Return the importance that a filter wins by each choice before its present one, and what it then costs."""
        return layer.lost[j, now] - layer.lost[j, :now], rate * (layer.taps[:now] - layer.taps[now])


def _sums(values: Floats) -> Floats:
    """Return the sums of the first values of each row, of none to all."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)


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


def _layers_that_share_classes(layers: list[LayerChoices], count: int) -> list[list[int]]:
    """Return the layers in groups, such that no class is written by layers of two groups."""
    sets = DisjointSet()
    sets.new(count)
    for layer in layers:
        sets.unite(layer.writes[:-1], layer.writes[1:])
    blocks = defaultdict(list)
    for i, layer in enumerate(layers):
        blocks[tuple(sets.roots(layer.writes[:1]))].append(i)
    return list(blocks.values())
