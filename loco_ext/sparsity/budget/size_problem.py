"""The sizes of all filters as an optimisation problem: what sizes cost, and how much importance they lose.

A layer costs ``unit * (input channels that are left) * (taps of its filters that are left)``, or the time that it was
measured to take. A channel costs its taps in all layers that read it, and channels that are kept or removed together
are one class: all filters that write it stay or go with it.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loco_ext.sparsity.budget.layer_time import LayerTime, LayerTimes
from loco_ext.sparsity.compaction.constants import Booleans, Floats
from loco_ext.sparsity.compaction.disjoint_set import DisjointSet, Integers

Sizes = list[Integers]  # for each layer, the choice of each filter: a column of LayerChoices.taps; the last is no taps


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

    def lost_with(self, chosen: Integers) -> Floats:
        """Return the importance that each filter loses with its choice, ``[C_out]``."""
        return self.lost[np.arange(len(chosen)), chosen]


@dataclass(frozen=True)
class Block:
    """Layers that write the same classes of channels, and decide together.

    Attributes:
        layers: the layers, by index, ``[n]``.
        written: the classes that they write, ascending, ``[w]``.
        writes: for each of the layers, the place in ``written`` of each filter's class, ``[C_out]``.
        writers: how many filters of each layer write each class, ``[n, w]``.
        gone: importance that is lost with each class, ``[w]``.
        affected: these layers and those that read the classes, by index, ascending, ``[a]``.
        own: places of ``layers`` in ``affected``, ``[n]``.
        reads: how many input channels of each affected layer are of each class, ``[a, w]``.
    """

    layers: list[int]
    written: Integers
    writes: list[Integers]
    writers: Floats
    gone: Floats
    affected: Integers
    own: Integers
    reads: Floats

    @property
    def widths(self) -> Floats:
        """Return the number of channels of each class in the layer that writes or reads the fewest of it, ``[w]``."""
        counts = np.concatenate([self.writers, self.reads])
        return np.where(counts > 0, counts, np.inf).min(0)

    def summed(self, place: int, values: Floats | Integers) -> Floats:
        """Return the sums of the values of one layer's filters over each class."""
        return np.asarray(np.bincount(self.writes[place], values, len(self.written)), np.float64)


@dataclass
class State:
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
        round_to: layers that share classes write and are read in a multiple of this number of channels, or all of them.

    Attributes:
        reads: how many input channels of each layer are of each class, ``[layers, classes]``.
        blocks: the layers in groups, such that no class is written by layers of two groups.
        paths: by the first price, the sizes found as the price rises, which all budgets share.
    """

    def __init__(
        self, layers: list[LayerChoices], fixed: Booleans, class_costs: Floats, rest: float = 0.0, round_to: int = 1
    ) -> None:
        self.layers, self.fixed, self.class_costs, self.rest = layers, fixed, class_costs, rest
        self.round_to = round_to
        read = [np.zeros(0, np.int64) if layer.reads is None else layer.reads for layer in layers]
        self.reads = np.stack([np.bincount(each, minlength=len(fixed)).astype(np.float64) for each in read])
        self._readers, self._read = np.nonzero(self.reads)
        self._times_read = self.reads[self._readers, self._read]
        self._all = np.arange(len(layers))
        self._alone = np.asarray([layer.reads is None for layer in layers])
        self._units = np.asarray([layer.unit for layer in layers])
        self._whole = np.asarray([layer.taps[0] for layer in layers])
        self._widths = np.where(self._alone, 1.0, self.reads.sum(1))
        times = [layer.time for layer in layers if layer.time is not None]
        self._times = LayerTimes(times) if times else None
        self.blocks = [self._block(each) for each in _layers_that_share_classes(layers, len(fixed))]
        self.paths: dict[float, list[Sizes]] = {}

    @property
    def is_timed(self) -> bool:
        """Return whether layers cost time, so that the cost of a channel depends on how many there are."""
        return self._times is not None

    def whole(self) -> Sizes:
        """Return the first choice for every filter."""
        return [np.zeros(len(layer.writes), np.int64) for layer in self.layers]

    def stays(self, sizes: Sizes) -> Booleans:
        """Return which classes have a filter left, or are fixed."""
        stays = self.fixed.copy()
        for layer, chosen in zip(self.layers, sizes, strict=True):
            stays[layer.writes[chosen != layer.gone]] = True
        return stays

    def state(self, sizes: Sizes) -> State:
        """Return the sizes with what follows from them."""
        stays, pairs = self.stays(sizes), list(zip(self.layers, sizes, strict=True))
        read = np.bincount(self._readers, self._times_read * stays[self._read], minlength=len(self.layers))
        filters = [(chosen != layer.gone).sum() for layer, chosen in pairs]
        taps = [layer.taps[chosen].sum() for layer, chosen in pairs]
        return State(sizes, stays, np.asarray([np.where(self._alone, 1.0, read), filters, taps], np.float64))

    def cost(self, sizes: Sizes) -> float:
        """Return the exact cost of these sizes."""
        now = self.state(sizes)
        return float(self.costs(now.counts).sum() + self.class_costs[now.stays].sum()) + self.rest

    @cached_property
    def whole_cost(self) -> float:
        """The cost of whole filters."""
        return self.cost(self.whole())

    def lost(self, sizes: Sizes) -> float:
        """Return the importance that is lost with these sizes."""
        return float(sum(layer.lost_with(chosen).sum() for layer, chosen in zip(self.layers, sizes, strict=True)))

    def costs(self, counts: Floats | tuple[Floats, Floats, Floats | float], layers: Integers | None = None) -> Floats:
        """Return what layers cost with numbers of input channels, of filters, and of taps of all filters, ``[3, ...]``.

        Filters without rings take time in proportion to their taps.

        Args:
            layers: by index, to broadcast with each of the numbers; None for all of them.
        """
        layers = self._all if layers is None else layers
        inputs, filters, taps = counts
        if self._times is None:
            return self._units[layers] * inputs * taps
        return self._times(layers, inputs, filters) * taps / (self._whole[layers] * np.maximum(filters, 1.0))

    def rates(self, now: State) -> Floats:
        """Return what a tap of each layer's filters costs, for one input channel at least."""
        inputs, filters, _ = np.maximum(now.counts, 1.0)
        return self.costs((inputs, filters, 1.0))

    def filter_costs(self) -> list[float]:
        """Return the mean cost of a whole filter of each layer: its taps, and its part of what reads its channel.

        The filters that write one channel share what the layers cost that read it.
        """
        counts = self.state(self.whole()).counts
        writers = sum(np.bincount(layer.writes, minlength=len(self.fixed)) for layer in self.layers)
        reading = self.prices_of_classes(counts) / np.maximum(writers, 1)
        own = self.costs(counts) / counts[1]
        return [float(cost + reading[layer.writes].mean()) for layer, cost in zip(self.layers, own, strict=True)]

    def prices_of_classes(self, counts: Floats, block: Block | None = None) -> Floats:
        """Return the mean cost of each class beside its filters' taps: its own, and that of the taps that read it.

        Args:
            counts: numbers of input channels, filters and taps, ``[3, layers]``.
            block: only the classes that it writes; by default all.
        """
        layers, reads = (self._all, self.reads) if block is None else (block.affected, block.reads)
        own = self.class_costs if block is None else self.class_costs[block.written]
        _, filters, taps = counts[:, layers]
        if self._times is None:
            reading = self._units[layers] * taps
        else:
            widths = self._widths[layers]
            all_and_none = self.costs((np.stack([widths, np.zeros(len(widths))]), filters, taps), layers)
            reading = np.subtract(*all_and_none) / np.maximum(widths, 1.0)
        return own + reading @ reads

    def _block(self, layers: list[int]) -> Block:
        """Return the block of some layers that write the same classes, and what its decision depends on."""
        writes = [self.layers[i].writes for i in layers]
        written = np.unique(np.concatenate(writes))
        affected = np.union1d(layers, np.flatnonzero(self.reads[:, written].any(1)))
        places = [np.searchsorted(written, each) for each in writes]
        writers = np.asarray([np.bincount(each, minlength=len(written)) for each in places], np.float64)
        lost = zip(places, (self.layers[i].lost[:, -1] for i in layers), strict=True)
        gone = np.sum([np.bincount(each, values, len(written)) for each, values in lost], 0)
        own, reads = np.searchsorted(affected, layers), self.reads[np.ix_(affected, written)]
        return Block(layers, written, places, writers, gone, affected, own, reads)


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
