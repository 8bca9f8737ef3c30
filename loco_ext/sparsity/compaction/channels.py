"""The channels of each value in a graph: which vary, which are constant everywhere, and which are needed.

Channels that must be kept or removed together are one class of a disjoint-set structure: the operands of a sum, the two
sides of a depthwise convolution. A class is needed if a reader of one of its channels uses more of it than a constant
that the reader can fold into its own bias.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from loco_ext.fx.operations import module_of
from loco_ext.sparsity.compaction.constants import (
    Booleans,
    Floats,
    after_arithmetic,
    after_channel_operation,
    after_layer,
)
from loco_ext.sparsity.compaction.disjoint_set import DisjointSet, Integers
from loco_ext.sparsity.compaction.roles import GraphInfo, Role, added_channels, arithmetic, buffer_of
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED

_LARGE_ENOUGH = 1e-3  # a kept constant channel stands for all that are larger by at most the inverse of this


@dataclass
class Value:
    """The channels of a node's result: their numbers in the disjoint sets, and their constants (NaN if they vary)."""

    ids: Integers
    constants: Floats

    @property
    def varies(self) -> Booleans:
        return np.isnan(self.constants)


@dataclass
class LayerChannels:
    """A convolution or linear layer as numbers."""

    node: fx.Node
    module: Any
    source: Value  # what it reads; constants are those of all calls
    live: Booleans  # [C_out, C_in/groups]: any weight is not zero
    foldable: Booleans  # same shape: the channel is constant despite padding, so that a bias can replace it
    drops: Booleans  # same shape: the smaller network does not read the channel

    @property
    def groups(self) -> int:
        return getattr(self.module, "groups", 1)

    def wanted(self, present: Booleans) -> Booleans:
        """Return, as [C_in], the channels that a present filter reads and that are not folded into its bias."""
        reads = self.live & ~self.drops & present[:, None]
        return reads.reshape(self.groups, -1, reads.shape[1]).any(1).reshape(-1)


class Channels:
    """The channels of all values in one graph, after :func:`analyse`.

    Args:
        graph: a result of :func:`loco_ext.sparsity.compaction.graph.annotated_graph`.
        scatter: for names of sums, the operand (0 or 1) that is added into the other, so that its constant channels can
            be removed.
        fixed_size: constants are folded into a map of biases where zero padding makes them visible.
        keep_all: every channel is kept.
    """

    def __init__(self, graph: fx.GraphModule, scatter: Mapping[str, int], fixed_size: bool, keep_all: bool) -> None:
        self.graph, self.info = graph, GraphInfo(graph)
        self.scatter, self.fixed_size, self.keep_all = scatter, fixed_size, keep_all
        self.constants_read: dict[Any, Floats] = {}  # by modules that are called more than once: equal in all calls
        self.clear()

    def clear(self) -> None:
        """Forget all but the constants that modules read that are called more than once."""
        self.sets = DisjointSet()
        self.values: dict[fx.Node, Value] = {}
        self.layers: dict[fx.Node, LayerChannels] = {}
        self.first_calls: dict[Any, tuple[Value, Value]] = {}  # sources and results of modules with several calls

    def role(self, node: fx.Node) -> Role:
        return self.info.nodes[node].role

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self.info.nodes[node].sources

    def kept(self, node: fx.Node) -> Integers:
        """Return the indices of the channels of the node's result that the smaller network keeps."""
        return np.flatnonzero(self.sets.kept(self.values[node].ids))

    def needed(self, node: fx.Node) -> Booleans:
        """Return which channels of the result matter; others that are kept have zero weights on both sides."""
        return self.sets.needed(self.values[node].ids)

    def constant_operand(self, node: fx.Node) -> int | None:
        """Return which operand of a JOIN is constant, so that a vector can replace it; None if neither or both are.

        None too if that operand might have more samples or pixels than the other.
        """
        if self.role(node) is not Role.JOIN:
            return None
        sources = self.sources(node)
        constant = [not self.values[source].varies.any() for source in sources]
        if self.keep_all or sum(constant) != 1 or not self.same_size(sources[constant.index(False)], node):
            return None
        return constant.index(True)

    def same_size(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two values have the same shape for all sizes of the inputs."""
        return self.info.sizes.same(one, other)

    def free(self, node: fx.Node) -> bool:
        """Return whether the channels may have any order, because all readers are rewritten along with the node."""
        ids = self.values[node].ids
        return self.sets.alone(ids) and self.sets.ordered.isdisjoint(ids.tolist())

    def _added(self, node: fx.Node) -> int:
        """Return how many channels of zeros the node adds."""
        return sum(added_channels(node) or ()) if self.role(node) is Role.WIDEN else 0

    def scatterable(self) -> dict[str, int]:
        """Return names of sums with an operand that has constant channels and no other reader, and the operand.

        Channels of zeros that the operand adds to others do not count: they can be added to those that are left.
        """
        found = {}
        for node in self.info.nodes:
            role, sources = self.role(node), self.sources(node)
            if role is not Role.JOIN or arithmetic(node) != "add" or self.constant_operand(node) is not None:
                continue
            constant = [int((~self.values[source].varies).sum()) - self._added(source) for source in sources]
            whole = all(self.same_size(source, node) for source in sources)
            operand = 0 if constant[0] > constant[1] else 1
            if whole and constant[operand] and len(sources[operand].users) == 1:
                found[node.name] = operand
        return found


def analyse(
    graph: fx.GraphModule,
    scatter: Mapping[str, int] | None = None,
    fixed_size: bool = False,
    keep_all: bool = False,
) -> Channels:
    """Return the channels of the graph's values; for the arguments, see :class:`Channels`."""
    channels = classes_of_channels(Channels(graph, scatter or {}, fixed_size, keep_all))
    while any([_need(channels, node) for node in reversed(channels.values)]):
        pass
    _even_out(channels)
    return channels


# Forward: classes and constants.


def classes_of_channels(channels: Channels) -> Channels:
    """Find the classes and the constants of all channels, and need those that must stay whatever the weights are."""
    while True:
        before = dict(channels.constants_read)
        for node in channels.graph.graph.nodes:
            value = _value(channels, node)
            if value is not None:
                channels.values[node] = value
                if channels.keep_all:
                    channels.sets.need(value.ids, "all stay")
        if all(np.array_equal(before.get(k, ()), now, equal_nan=True) for k, now in channels.constants_read.items()):
            return channels
        channels.clear()


def _value(channels: Channels, node: fx.Node) -> Value | None:
    info, role = channels.info, channels.role(node)
    if role is Role.SIZE:
        _keep_for_size(channels, node)
        return None
    if role is Role.PARTS:
        return None
    sources = [channels.values[source] for source in channels.sources(node) if source in channels.values]
    if role is Role.OTHER:
        _need_in_order(channels, node, sources)
        return _unknown(channels, node)
    if role is Role.CAT:
        parts = [channels.values[part] for part in node.args[0]]  # type: ignore[union-attr,index]
        return Value(np.concatenate([p.ids for p in parts]), np.concatenate([p.constants for p in parts]))
    if role in (Role.JOIN, Role.PER_CHANNEL):
        _need_in_order(channels, node, [channels.values[x] for x in info.read_whole(node) if x in channels.values])
    if role is Role.JOIN:
        return _join(channels, node, *sources)
    (source,) = sources
    if info.is_called_again(node):
        return _of_all_calls(channels, node, source)
    return _of_one_source(channels, node, source)


def _of_all_calls(channels: Channels, node: fx.Node, source: Value) -> Value:
    """Return the channels of a module's result, which are kept or removed together in all of its calls."""
    module = module_of(node)
    if channels.role(node) is Role.CONVOLUTION:
        before = channels.constants_read.get(module, source.constants)
        source = Value(source.ids, np.where(before == source.constants, before, np.nan))
        channels.constants_read[module] = source.constants
    result = _of_one_source(channels, node, source)
    for first, value in zip(channels.first_calls.setdefault(module, (source, result)), (source, result), strict=True):
        channels.sets.unite(first.ids, value.ids)
        channels.sets.ordered.update(value.ids.tolist())  # calls may read the same channels along different ways
    return result


def _of_one_source(channels: Channels, node: fx.Node, source: Value) -> Value:
    info, role = channels.info, channels.role(node)
    if role is Role.CONVOLUTION:
        return _convolution(channels, node, source)
    if role is Role.PER_CHANNEL:
        if type(norm := module_of(node)) is nn.GroupNorm:
            unite_groups(channels, source.ids.reshape(norm.num_groups, -1))
        return Value(source.ids, after_channel_operation(info, node, source.constants))
    if role is Role.TAKE:
        taken = info.taken(node)
        return Value(source.ids[taken], source.constants[taken])
    if role is Role.MOVE:
        return source
    if role is Role.WIDEN:
        ahead, behind = added_channels(node) or (0, 0)
        numbers = np.concatenate([channels.sets.new(ahead), source.ids, channels.sets.new(behind)])
        return Value(numbers, np.pad(source.constants, (ahead, behind)))
    if role is Role.MEAN:
        return Value(channels.sets.new(1), np.full(1, np.nan))
    if role is Role.GATE:
        ids, (gated, gates) = source.ids.reshape(2, -1), source.constants.reshape(2, -1)
        unite_groups(channels, ids.T)
        channels.sets.ordered.update(source.ids.tolist())  # each has its place in a half
        return Value(ids[0], after_arithmetic("mul", gated, torch.from_numpy(gates).sigmoid().numpy()))
    before, after = channels.sources(node)[0].meta["shape"][1], node.meta["shape"][1]
    if role is Role.SHUFFLE:
        ids, constants = source.ids.reshape(after, -1), source.constants.reshape(after, -1)
        unite_groups(channels, ids)
        return Value(ids[:, 0], np.where((constants == constants[:, :1]).all(1), constants[:, 0], np.nan))
    return Value(np.repeat(source.ids, after // before), np.repeat(source.constants, after // before))


def unite_groups(channels: Channels, ids: Integers) -> None:
    """Keep or remove each group together; ``ids`` are the channels, [groups, channels of a group]."""
    channels.sets.unite(np.repeat(ids[:, 0], ids.shape[1]), ids.reshape(-1))


def _need_in_order(channels: Channels, node: fx.Node, values: Sequence[Value]) -> None:
    """Need all channels of values that the node reads whole, in their order."""
    for value in values:
        reason = "the network's output" if node.op == "output" else f"read by {node.name}"
        channels.sets.need(value.ids, reason)
        channels.sets.ordered.update(value.ids.tolist())


def _keep_for_size(channels: Channels, node: fx.Node) -> None:
    """Keep at least one channel if anything reads the size, except for a flattening, which is rewritten."""
    users = [reader for user in node.users for reader in (user.users if user.target is operator.getitem else [user])]
    source = channels.values.get(channels.sources(node)[0])
    if source is not None and any(channels.role(user) is not Role.FLATTEN for user in users):
        kept = source.ids[np.argsort(~source.varies, kind="stable")[:1]]  # one that varies, if any does
        channels.sets.need(kept, f"{node.name} asks for its size")


def _unknown(channels: Channels, node: fx.Node) -> Value | None:
    count, sets = channels.info.channels(node), channels.sets
    if count is None:  # the number may depend on the inputs' sizes
        return None
    vector = buffer_of(node)
    if vector is not None and vector.numel() == count and vector.isfinite().all():
        return Value(sets.new(count), vector.double().cpu().numpy().reshape(-1))
    value = Value(sets.new(count), np.full(count, np.nan))
    sets.need(value.ids, f"made by {node.name}")
    sets.ordered.update(value.ids.tolist())
    return value


def _convolution(channels: Channels, node: fx.Node, source: Value) -> Value:
    module = module_of(node)
    live, known, foldable, constants = after_layer(module, source.constants)
    drops = known if channels.fixed_size and type(module) not in TRANSPOSED else foldable
    layer = channels.layers[node] = LayerChannels(node, module, source, live, foldable, drops)
    value = Value(channels.sets.new(len(constants)), constants)
    if layer.groups > 1:  # a channel has to stay in its group
        channels.sets.ordered.update(source.ids.tolist(), value.ids.tolist())
    return value


def _join(channels: Channels, node: fx.Node, one: Value, other: Value) -> Value:
    constants = after_arithmetic(str(arithmetic(node)), one.constants, other.constants)
    replaced = channels.constant_operand(node)
    if replaced is None:
        replaced = channels.scatter.get(node.name)
    if replaced is not None:
        return Value((other, one)[replaced].ids, constants)
    channels.sets.unite(one.ids, other.ids)
    return Value(one.ids, constants)


# Backward: needed channels.


def _need(channels: Channels, node: fx.Node) -> bool:
    """Mark the channels that the node must read of its sources and return whether any was new."""
    sets, sources = channels.sets, channels.sources(node)
    if channels.role(node) is Role.JOIN and node.name in channels.scatter and channels.constant_operand(node) is None:
        other = channels.values[sources[channels.scatter[node.name]]]
        wanted = channels.needed(node) & other.varies
        return sets.need(other.ids[wanted], f"read by {node.name}")
    if channels.role(node) is Role.MEAN and channels.needed(node).any():
        read = channels.values[sources[0]]
        return sets.need(read.ids[read.varies if read.varies.any() else [0]], f"read by {node.name}")
    layer = channels.layers.get(node)
    if layer is None:
        return False
    source, present = layer.source, channels.needed(node)
    wanted = layer.wanted(present)
    changed = sets.need(source.ids[wanted & source.varies], f"read by {node.target}")
    changed |= _need_constant(channels, layer, wanted & ~source.varies)
    if present.any() and not sets.needed(source.ids).any():
        changed |= sets.need(source.ids[:1], f"{node.target} needs one channel at least")
    return changed


def _need_constant(channels: Channels, layer: LayerChannels, wanted: Booleans) -> bool:
    """Keep one constant channel for all of each group: behind the same padding, they differ only by factors."""
    changed, source = False, layer.source
    sizes = np.abs(np.nan_to_num(source.constants))
    needed = channels.sets.needed(source.ids)
    for group in np.split(np.arange(len(wanted)), layer.groups):
        some = group[wanted[group]]
        if len(some):
            largest = some[sizes[some].argmax()]
            if not (needed[group] & (sizes[group] >= _LARGE_ENOUGH * sizes[largest])).any():
                why = f"a constant that the padding of {layer.node.target} makes visible"
                changed |= channels.sets.need(source.ids[[largest]], why)
    return changed


# Channels that nothing needs, kept because the groups of a layer have equal numbers.


def _even_out(channels: Channels) -> None:
    """Keep more channels until all remaining groups of each layer have the same number, and no layer reads none."""
    grouped = [node for node, layer in channels.layers.items() if layer.groups > 1]
    reading = [node for node in channels.values if channels.role(node) in (Role.CONVOLUTION, Role.WIDEN, Role.MEAN)]
    while any([_even_out_layer(channels, node) for node in grouped] + [_read_one(channels, node) for node in reading]):
        pass


def _even_out_layer(channels: Channels, node: fx.Node) -> bool:
    """Return whether any channels were added."""
    if not len(channels.kept(node)):  # the smaller network does not compute the layer
        return False
    (source,) = channels.sources(node)
    groups = channels.layers[node].groups
    sides = [channels.values[x].ids.reshape(groups, -1) for x in (source, node)]
    kept = [channels.sets.kept(ids.reshape(-1)).reshape(ids.shape) for ids in sides]
    alive = kept[0].any(1) | kept[1].any(1)
    fillers: list[int] = []
    for ids, there in zip(sides, kept, strict=True):
        most = int(there.sum(1).max(initial=1))
        for group in np.flatnonzero(alive):
            fillers += ids[group, ~there[group]][: most - there[group].sum()].tolist()
    channels.sets.fill(fillers)
    return bool(fillers)


def _read_one(channels: Channels, node: fx.Node) -> bool:
    """Keep a channel that the node reads if it has none, but channels of its result are kept; return whether it did."""
    read = channels.values[channels.sources(node)[0]].ids
    if not len(channels.kept(node)) or channels.sets.kept(read).any():
        return False
    channels.sets.fill(read[:1])
    return True
