"""Construction of the smaller network's graph from the analysis of the model's graph."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from loco_ext.fx.modules import unused_name
from loco_ext.fx.operations import module_of, owner_of, stored_tensor
from loco_ext.fx.trace import ResultTracer
from loco_ext.ops.channels import take_channels
from loco_ext.sparsity.compaction.channels import Channels
from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution, channel_order, emit, inverse_order, join
from loco_ext.sparsity.compaction.cut import cut
from loco_ext.sparsity.compaction.overwrite import MATCHING_TERMS, finish
from loco_ext.sparsity.compaction.roles import (
    CONVOLUTIONS,
    NORMS,
    Role,
    added_channels,
    arithmetic,
    buffer_of,
    is_depthwise,
    stored,
)
from loco_ext.sparsity.compaction.whole_filters import has_whole_filters, with_filters

# Chooses buckets, given a convolution, the meta of its input and whether its filters may come in any order.
Choose = Callable[[Convolution, Mapping[str, Any], bool], Sequence[Bucket]]


class Rewriter:
    """Builder of the network that has only the channels and taps that :class:`Channels` found to be needed.

    Args:
        channels: analysis of the model's graph.
        choose: function that chooses how to compute a convolution.
    """

    def __init__(self, channels: Channels, choose: Choose) -> None:
        self._channels, self._choose, graph = channels, choose, channels.graph
        self._owner = copy.deepcopy(graph, {id(x): x for x in (*graph.parameters(), *graph.buffers())})
        constructs = any(isinstance(node.target, type) for node in graph.graph.nodes)
        self._graph = fx.Graph(tracer_cls=ResultTracer if constructs else None)  # it traces again what is unpickled
        self._new: dict[fx.Node, fx.Node] = {}
        self._kept: dict[fx.Node, list[int]] = {}  # kept channels of each result in their new order
        self.layers: dict[str, tuple[Tensor, Sequence[Bucket]]] = {}  # remaining weights and buckets, by module name
        self.left: set[fx.Node] = set()  # nodes of the graph whose results the network computes

    def build(self) -> fx.GraphModule:
        """Return the smaller network, after the last pass over it."""
        for node in self._channels.graph.graph.nodes:
            self._add(node)
        network = fx.GraphModule(self._owner, self._graph)
        network.graph.eliminate_dead_code()
        left = {*network.graph.nodes}
        self.left = {node for node, new in self._new.items() if new in left}
        finish(network)
        network.graph.lint()
        return self._without_unused(network)

    def _without_unused(self, network: fx.GraphModule) -> fx.GraphModule:
        """Return the network with only what the graph uses; layers whose weights the graph reads remain layers."""
        result = fx.GraphModule(network, network.graph)
        for node in network.graph.nodes:
            layer = owner_of(node)
            if node.op == "get_attr" and layer and type(self._owner.get_submodule(layer)) in CONVOLUTIONS:
                result.set_submodule(layer, self._owner.get_submodule(layer))
        return result

    def _add(self, node: fx.Node) -> None:
        role, sources = self._channels.role(node), self._channels.sources(node)
        if node in self._channels.values:
            self._kept[node] = self._channels.kept(node).tolist()
            if not self._kept[node]:
                return
        if role is Role.PARTS:
            return
        if role in (Role.OTHER, Role.SIZE):
            buffer = buffer_of(node)
            if buffer is not None and node in self._kept and self._kept[node] != list(range(buffer.numel())):
                kept = torch.tensor(self._kept[node], device=buffer.device)
                self._new[node] = self._constant(node, "vector", buffer.index_select(self._axis(node), kept))
            elif all(source in self._new for source in node.all_input_nodes):
                self._new[node] = self._graph.node_copy(node, self._new.__getitem__)
            return
        add = {
            Role.CONVOLUTION: self._convolution,
            Role.PER_CHANNEL: self._per_channel,
            Role.JOIN: self._join,
            Role.CAT: self._cat,
            Role.TAKE: self._take,
            Role.WIDEN: self._widen,
            Role.MOVE: self._per_channel,
            Role.FLATTEN: self._split,
            Role.SHUFFLE: self._shuffle,
            Role.UNSHUFFLE: self._split,
            Role.MEAN: self._mean,
            Role.GATE: self._copy,
        }[role]
        self._new[node] = add(node, sources)

    def _convolution(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        layer, source = self._channels.layers[node], sources[0]
        outputs, inputs = self._kept[node], self._kept[source]
        weight, bias, border = cut(self._channels, node, source, outputs, inputs)
        if has_whole_filters(layer.module):
            self._owner.set_submodule(str(node.target), with_filters(layer.module, weight, bias))
            self.layers[str(node.target)] = weight, [Bucket.whole(weight)]
            result = self._graph.call_module(str(node.target), (self._new[source],))
        else:
            free = self._channels.free(node)
            convolution = Convolution(layer.module, weight, bias, len(inputs), node.meta["channels_last"])
            result, order = self._emit(node, source, convolution, free)
            self._kept[node] = [outputs[k] for k in order]
            border = border if border is None else border[:, order]
        if border is None:
            return result
        return self._graph.call_function(torch.add, (result, self._constant(node, "border", border)))

    def _emit(self, node: fx.Node, source: fx.Node, convolution: Convolution, free: bool) -> tuple[fx.Node, list[int]]:
        """Return the node of the convolution's result, and the order of its filters."""
        name = str(node.target)
        if name in self.layers:
            buckets = self.layers[name][1]
        else:
            as_one = self._channels.info.is_called_again(node)
            buckets = self._choose(convolution, source.meta, free and not as_one)
            buckets = [join(buckets)] if as_one else buckets
        self.layers[name] = convolution.weight, buckets
        order = channel_order(buckets)
        back = None if free else inverse_order(buckets, convolution.weight.device)
        index = None if back is None else self._constant(node, "order", back)
        result = emit(self._owner, self._graph, self._new[source], name, convolution, buckets, index)
        return result, order if index is None else sorted(order)

    def _per_channel(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        kept = self._kept[node] = self._kept[sources[0]]
        module = module_of(node)
        if module is None:
            cut = {x: self._cut_operand(x, kept) for x in self._channels.info.by_channel(node)}
            return self._graph.node_copy(node, lambda x: cut[x] if x in cut else self._new[x])
        if is_depthwise(module):
            bias = None if module.bias is None else module.bias.detach()[kept]
            weight = module.weight.detach()[kept]
            convolution = Convolution(module, weight, bias, len(kept), node.meta["channels_last"])
            return self._emit(node, sources[0], convolution, free=False)[0]
        if type(module) in NORMS or (isinstance(module, nn.PReLU) and module.num_parameters > 1):
            self._owner.set_submodule(str(node.target), _cut_by_channel(module, kept))
        return self._graph.call_module(str(node.target), (self._new[sources[0]],))

    def _cut_operand(self, operand: fx.Node, kept: list[int]) -> fx.Node:
        """Return the numbers of these channels of a module's tensor, in the axes of the operand, a view of it."""
        read: Any = stored(operand)
        whole = stored_tensor(read)
        part = whole.detach().index_select(_long_axis(whole.shape), torch.tensor(kept, device=whole.device))
        if isinstance(whole, nn.Parameter):
            part = nn.Parameter(part, whole.requires_grad)
        setattr(self._owner.get_submodule(owner_of(read)), read.target.rpartition(".")[2], part)
        result, shape = self._graph.get_attr(str(read.target)), operand.meta["shape"]
        sizes = [-1 if axis == _long_axis(shape) else 1 for axis in range(len(shape))]
        return result if operand is read else self._graph.call_method("view", (result, *sizes))

    def _join(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        constant = self._channels.constant_operand(node)
        if constant is not None:
            return self._join_constant(node, sources, constant)
        if node.name in self._channels.scatter:
            operand = self._channels.scatter[node.name]
            return self._join_scattered(node, sources[1 - operand], sources[operand])
        kept, others = self._kept[sources[0]], self._kept[sources[1]]
        self._kept[node] = kept
        terms = {x: self._new[x] for x in node.all_input_nodes}
        if kept != others:
            places = [others.index(c) for c in kept]
            terms[sources[1]] = self._take_channels(node, "order", node, terms[sources[1]], places)
        result = self._graph.node_copy(node, terms.__getitem__)
        alike = self._channels.same_size(*sources) and sources[0].meta["dtype"] == sources[1].meta["dtype"]
        result.meta[MATCHING_TERMS] = (0, 1) if alike else ()
        return result

    def _join_scattered(self, node: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        """Add the remaining channels of ``part``, and its constants, to those of ``whole``."""
        kept = self._kept[node] = self._kept[whole]
        constants, needed = self._channels.values[part].constants, self._channels.needed(node)
        rest = np.where(needed, np.nan_to_num(constants), 0.0)[kept]
        result = self._new[whole]
        if set(self._kept[part]) & set(kept):
            addend, rest = self._spread(node, part, kept, rest)
            result = self._graph.call_function(torch.add, (result, addend))
            result.meta[MATCHING_TERMS] = (0, 1) if whole.meta["dtype"] == part.meta["dtype"] else ()
        if rest.any():
            result = self._graph.call_function(torch.add, (result, self._vector(node, whole, rest)))
            result.meta[MATCHING_TERMS] = (0,) if node.meta["dtype"] == whole.meta["dtype"] else ()
        return result

    def _spread(self, node: fx.Node, part: fx.Node, kept: list[int], rest: Floats) -> tuple[fx.Node, Floats]:
        """Return ``part`` arranged by the channels ``kept``, and what its removed constants still lack there."""
        present, constants = self._kept[part], self._channels.values[part].constants
        result = self._new[part]
        known = [c for c in present if np.isfinite(constants[c])]
        missing = ~np.isin(kept, present)
        if missing.any() and not known:
            behind = len(part.meta["shape"]) - 1 - self._axis(part)
            result = self._graph.call_function(F.pad, (result, [0] * (2 * behind) + [0, 1]))
        places = {constants[c]: present.index(c) for c in known} or {0.0: len(present)}
        default = next(iter(places))
        found = [constants[c] if constants[c] in places else default for c in kept]
        index = [places[k] if gone else present.index(c) for c, k, gone in zip(kept, found, missing, strict=True)]
        if index != list(range(len(present))):
            result = self._take_channels(node, "which", part, result, index)
        return result, np.where(missing, rest - np.array(found), 0.0)

    def _join_constant(self, node: fx.Node, sources: Sequence[fx.Node], constant: int) -> fx.Node:
        kept = self._kept[node] = self._kept[sources[1 - constant]]
        numbers = self._channels.values[sources[constant]].constants[kept]
        other = self._new[sources[1 - constant]]
        if not numbers.any() and arithmetic(node) == "add":
            return other
        vector = self._vector(node, sources[1 - constant], numbers)
        masks = [self._new[x] for x in self._channels.info.read_whole(node)]
        operands = (*masks, vector, other) if constant == 0 else (*masks, other, vector)
        return self._graph.call_function(getattr(torch, str(arithmetic(node))), operands)

    def _cat(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        parts, kept, offset, axis = [], [], 0, self._axis(node)
        for part in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(part, fx.Node)
            kept += [offset + c for c in self._kept[part]]
            offset += part.meta["shape"][axis]
            if self._kept[part]:
                parts.append(self._new[part])
        self._kept[node] = kept
        return parts[0] if len(parts) == 1 else self._graph.call_function(torch.cat, (parts, axis))

    def _widen(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        """Add the channels of zeros that are kept."""
        (source,) = sources
        first, _ = added_channels(node) or (0, 0)
        past = first + source.meta["shape"][1]
        ahead, behind = ([c for c in self._kept[node] if c < first], [c for c in self._kept[node] if c >= past])
        self._kept[node] = [*ahead, *(first + c for c in self._kept[source]), *behind]
        if not ahead and not behind:
            return self._new[source]
        pads = [*[0] * (2 * len(source.meta["shape"]) - 4), len(ahead), len(behind)]
        return self._graph.call_function(F.pad, (self._new[source], pads))

    def _take(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        taken: Any = self._channels.info.taken(node)
        (source,) = sources
        places = [self._kept[source].index(taken[c]) for c in self._kept[node]]
        first, past = places[0], places[0] + len(places)
        if places != list(range(first, past)):
            return self._take_channels(node, "index", source, self._new[source], places)
        if len(places) == len(self._kept[source]):
            return self._new[source]
        index = (*[slice(None)] * self._axis(source), slice(first, past))
        return self._graph.call_function(operator.getitem, (self._new[source], index))

    def _take_channels(self, node: fx.Node, what: str, like: fx.Node, source: fx.Node, places: list[int]) -> fx.Node:
        """Return the node of these channels of ``source``, which are along the axis of those of ``like``."""
        index = self._constant(node, what, torch.tensor(places, device=like.meta["device"]))
        axis = self._axis(like)
        return self._graph.call_function(take_channels, (source, index) if axis == 1 else (source, index, axis))

    def _axis(self, node: fx.Node) -> int:
        return self._channels.info.axis(node)

    def _shuffle(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        parts = sources[0].meta["shape"][1] // node.meta["shape"][1]
        self._kept[node] = [c // parts for c in self._kept[sources[0]][::parts]]
        return self._copy(node, sources)

    def _split(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        """Copy the node, which makes several channels from the pixels of each."""
        parts = node.meta["shape"][1] // sources[0].meta["shape"][1]
        self._kept[node] = [c * parts + p for c in self._kept[sources[0]] for p in range(parts)]
        return self._copy(node, sources)

    def _mean(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        """Take the mean of the channels that are needed, and correct it for the constants of all others."""
        (source,) = sources
        kept, constants = self._kept[source], self._channels.values[source].constants
        needed = self._channels.needed(source)
        read, parts = self._new[source], [place for place, c in enumerate(kept) if needed[c]]
        parts = parts or list(range(len(kept)))  # for a mean that only fills a group
        if len(parts) < len(kept):
            read = self._take_channels(node, "index", source, read, parts)
        result = self._graph.node_copy(node, {source: read}.__getitem__)
        if len(parts) < len(needed):
            result = self._graph.call_function(torch.mul, (result, len(parts) / len(needed)))
        if rest := float(np.nan_to_num(constants[~needed]).sum()) / len(needed):
            result = self._graph.call_function(torch.add, (result, rest))
        return result

    def _copy(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        """Copy the node, whose channels are recorded."""
        return self._graph.node_copy(node, self._new.__getitem__)

    def _vector(self, node: fx.Node, like: fx.Node, numbers: Floats) -> fx.Node:
        shape = [1] * len(like.meta["shape"])
        shape[self._axis(like)] = -1
        value = torch.from_numpy(numbers).reshape(shape).to(like.meta["device"], like.meta["dtype"])
        return self._constant(node, "constants", value)

    def _constant(self, node: fx.Node, what: str, value: Tensor) -> fx.Node:
        """Register the value as a buffer of the network and return the node that reads it."""
        name = unused_name(self._owner, f"{node.name}_{what}")
        self._owner.register_buffer(name, value)
        return self._graph.get_attr(name)


def _long_axis(shape: Sequence[int]) -> int:
    """Return the only axis that may be longer than 1."""
    return shape.index(max(shape))


def _cut_by_channel(module: Any, kept: list[int]) -> nn.Module:
    """Return the normalisation or PReLU of only these channels."""
    smaller = copy.deepcopy(module)
    for name in ("num_features", "num_parameters", "num_channels"):
        if hasattr(smaller, name):
            setattr(smaller, name, len(kept))
    if isinstance(module, nn.GroupNorm):  # whose groups stay whole
        smaller.num_groups = module.num_groups * len(kept) // module.num_channels
    for name, parameter in module.named_parameters(recurse=False):
        setattr(smaller, name, nn.Parameter(parameter.detach()[kept].clone(), requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dim():
            setattr(smaller, name, buffer[kept].clone())
    return smaller
