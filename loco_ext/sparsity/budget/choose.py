"""The cheapest sizes of all filters: a nested l0 problem, solved for a price of cost, and the price for a budget.

Minimise, over the size of every filter,

    sum over the filters of the importance lost  +  price * cost,

where a layer costs ``unit * (input channels that are left) * (taps of its filters that are left)``. A channel costs
its taps in all layers that read it, and channels that are kept or removed together are one class: all filters that
write it stay or go with it. Given all other layers, each class of a layer decides by itself, and exactly; layers take
turns while the price rises slowly from 0, since a layer that decides at a high price while all others are still whole
would lose more than its share.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

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
    """

    unit: float
    taps: Integers
    lost: Floats
    writes: Integers
    reads: Integers | None
    least: int = 0

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
        self._alone = np.asarray([layer.reads is None for layer in layers])
        self._units = np.asarray([layer.unit for layer in layers])
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
        taps = self._units @ (self._inputs(stays) * self._taps(sizes))
        return float(taps + self.class_costs[stays].sum()) + self.rest

    def share(self, sizes: Sizes) -> float:
        """Return the cost of these sizes as a share of that of whole filters."""
        return self.cost(sizes) / self.cost(self.whole())

    def filter_costs(self) -> list[float]:
        """Return the mean cost of a whole filter of each layer: its taps, and its part of what reads its channel.

        The filters that write one channel share what the layers cost that read it.
        """
        whole = self.whole()
        inputs, writers = self._inputs(self.stays(whole)), sum(self._writers(layer) for layer in self.layers)
        reading = self._prices_of_classes(self._taps(whole)) / np.maximum(writers, 1)
        own = zip(self.layers, inputs, strict=True)
        return [float(layer.unit * count * layer.taps[0] + reading[layer.writes].mean()) for layer, count in own]

    def lost(self, sizes: Sizes) -> float:
        """Return the importance that is lost with these sizes."""
        pairs = zip(self.layers, sizes, strict=True)
        return float(sum(layer.lost[np.arange(len(chosen)), chosen].sum() for layer, chosen in pairs))

    def improve(self, sizes: Sizes, price: float, most_rounds: int = _MOST_ROUNDS) -> Sizes:
        """Return sizes that are at least as good at this price; layers take turns until none changes."""
        sizes = [chosen.copy() for chosen in sizes]
        stays, taps = self.stays(sizes), self._taps(sizes)
        for _ in range(most_rounds):
            # any() gets a list, because every block has to decide even after one has changed.
            if not any([self._decide(block, sizes, stays, taps, price) for block in self._blocks]):
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
        whole, finite = self.cost(self.whole()), [layer.lost[np.isfinite(layer.lost)] for layer in self.layers]
        total = float(sum(each.sum() for each in finite)) or 1.0
        least = min(layer.unit for layer in self.layers)
        return _FIRST_PRICE * total / whole, _RISE * total / least

    def _summed(self, layer: LayerChoices, values: Floats) -> Floats:
        """Return the sums of the values of a layer's filters over each class."""
        return np.bincount(layer.writes, values, minlength=len(self.fixed)).astype(np.float64)

    def _writers(self, layer: LayerChoices) -> Integers:
        """Return how many of a layer's filters write each class."""
        return np.bincount(layer.writes, minlength=len(self.fixed))

    def _inputs(self, stays: Booleans) -> Floats:
        """Return the number of input channels that are left to a filter of each layer."""
        return np.where(self._alone, 1.0, self._reads @ stays)

    def _taps(self, sizes: Sizes) -> Floats:
        """Return the number of taps of each layer's filters."""
        pairs = zip(self.layers, sizes, strict=True)
        return np.asarray([layer.taps[chosen].sum() for layer, chosen in pairs], np.float64)

    def _prices_of_classes(self, taps: Floats) -> Floats:
        """Return the cost of each class beside its filters' taps: its own, and that of the taps that read it."""
        return self.class_costs + (self._units * taps) @ self._reads

    def _decide(self, block: list[int], sizes: Sizes, stays: Booleans, taps: Floats, price: float) -> bool:
        """Choose the sizes of layers that share classes, all others being given, and return whether any has changed.

        Args:
            sizes, stays, taps: sizes, and what follows from them; those of the block are replaced.
        """
        keep, before = price * self._prices_of_classes(taps), [sizes[i] for i in block]
        best, inputs = {}, self._inputs(stays)
        for i in block:
            layer = self.layers[i]
            values = layer.lost + price * layer.unit * inputs[i] * layer.taps
            best[i] = values[:, :-1].argmin(1)
            keep += self._summed(layer, values[np.arange(len(best[i])), best[i]])
        kept = self._chosen(block, self._gone[block[0]] - keep)
        for i in block:
            layer = self.layers[i]
            stays[layer.writes] = kept[layer.writes]
            sizes[i] = np.where(kept[layer.writes], best[i], layer.gone)
            taps[i] = layer.taps[sizes[i]].sum()
        return not all(map(np.array_equal, before, (sizes[i] for i in block)))

    def _chosen(self, block: list[int], gains: Floats) -> Booleans:
        """Return which classes of layers that share classes stay, given what each gains if it does."""
        kept = self.fixed | (gains > 0)
        for layer in (self.layers[i] for i in block):
            missing = layer.least - int(kept[layer.writes].sum())
            if missing > 0:
                gone = np.unique(layer.writes[~kept[layer.writes]])
                kept[gone[np.argsort(-gains[gone], kind="stable")[:missing]]] = True
        if self.round_to == 1:
            return kept
        written = self._written[block[0]]
        count = int(kept[written].sum())
        if above := count % self.round_to:
            spare = written[(kept & ~self.fixed & (gains > 0))[written]]
            spare = spare[np.argsort(gains[spare], kind="stable")[:above]]
            others = written[~kept[written]]
            others = others[np.argsort(-gains[others], kind="stable")[: self.round_to - above]]
            least = max(self.layers[i].least for i in block)
            possible = len(spare) == above and count - above >= least
            if possible and gains[spare].sum() <= -gains[others].sum():
                kept[spare] = False
            else:
                kept[others] = True
        return kept

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
        stays, inputs = self.stays(sizes), self._inputs(self.stays(sizes))
        found: list[Addition] = []
        for i, layer in enumerate(self.layers):
            for j, now in enumerate(sizes[i].tolist()):
                won, spent = self._won_and_spent(layer, inputs[i], j, now)
                if now > 0 and stays[layer.writes[j]] and np.isfinite(won).all():
                    found += [(w / s, [(i, j, n)]) for n, (w, s) in enumerate(zip(won, spent, strict=True))]
        return found + [addition for additions in self._more_channels(sizes, price) for addition in additions]

    def _more_channels(self, sizes: Sizes, price: float) -> list[list[Addition]]:
        """Return, for each block of layers, additions of ``round_to`` classes each, the most important first."""
        stays, reading = self.stays(sizes), self._prices_of_classes(self._taps(sizes))
        inputs = self._inputs(stays)
        classes: dict[int, list[tuple[Floats, Floats, tuple[int, int]]]] = {}
        whole: dict[int, list[Addition]] = {}
        for i, layer in enumerate(self.layers):
            for j in np.flatnonzero(~stays[layer.writes]).tolist():
                won, spent = self._won_and_spent(layer, inputs[i], j, layer.gone)
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

    @staticmethod
    def _won_and_spent(layer: LayerChoices, inputs: float, j: int, now: int) -> tuple[Floats, Floats]:
        """Return the importance that a filter wins by each choice before its present one, and what it then costs."""
        rate = layer.unit * max(inputs, 1.0)
        return layer.lost[j, now] - layer.lost[j, :now], rate * (layer.taps[:now] - layer.taps[now])


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
