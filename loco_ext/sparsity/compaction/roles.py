"""The role of each node of a graph: its effect on channels."""

import math
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from loco_ext.fx.modules import count_owners, is_hooked
from loco_ext.fx.operations import (
    ADAPTIVE_POOLS,
    ARITHMETIC,
    CASTS,
    POINTWISE,
    POOLS,
    REDUCTIONS,
    argument,
    axes_in_order,
    module_of,
    numbered_axes,
    only_user,
    operation,
    owner_of,
    places,
    reads_numbers,
    stored_tensor,
)
from loco_ext.fx.sizes import Inference, unchanged_axes
from loco_ext.ops.channels import layer_norm_with_constants, take_channels
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED


class Role(Enum):
    """Effect of a node on the channels of its argument: axis 1, or the last axis for linear layers."""

    CONVOLUTION = "convolution"  # includes transposed ones and linear layers, whose channels are features
    PER_CHANNEL = "per channel"  # channel i of the result depends only on channel i, or on those of its group
    JOIN = "join"  # sums, products and maxima of several tensors of the same shape, channel by channel
    CAT = "cat"
    TAKE = "take"  # selects some channels, or all in another order
    PARTS = "parts"  # a tuple of such selections; taking one out of it is TAKE
    WIDEN = "widen"  # adds channels of zeros
    MOVE = "move"  # moves channels to another axis, or adds, removes, joins or splits others
    FLATTEN = "flatten"  # turns each channel into as many features as it has pixels
    SHUFFLE = "shuffle"  # makes the pixels of each channel from those of several
    UNSHUFFLE = "unshuffle"  # makes several channels from the pixels of each
    MEAN = "mean"  # makes one channel, the mean of all
    GATE = "gate"  # multiplies each channel of the first half by the sigmoid of one of the second
    SIZE = "size"  # reads sizes of other axes, or what does not depend on channels
    OTHER = "other"  # nothing is known about the channels


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}  # ranks of batches
NORMS = (*BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_AVERAGES = ("mean", "amax", "amin")  # reductions that return the number if all are equal
_POOLS = {**POOLS, **ADAPTIVE_POOLS}
_WITHOUT_OVERSHOOT = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area")
_VIEWS = ("unsqueeze", "squeeze", "flatten", "unflatten")  # none of these is given a number of channels
_OF_THE_LAST_AXIS = (nn.Linear, nn.LayerNorm)  # for inputs of any rank


@dataclass(frozen=True)
class NodeInfo:
    """A node's role, and the nodes whose channels it reads."""

    role: Role
    sources: tuple[fx.Node, ...]


class GraphInfo:
    """The role of each node, and the axis and number of each tensor's channels.

    Args:
        graph: a result of :func:`loco_ext.sparsity.compaction.graph.annotated_graph`.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.sizes, self._graph = Inference(graph), graph.graph
        self._calls = defaultdict[Any, list[fx.Node]](list)  # by the name of the module
        for node in graph.graph.find_nodes(op="call_module"):
            self._calls[node.target].append(node)
        self._shared = {parameter for parameter, count in count_owners(graph).items() if count > 1}
        self._read = {owner_of(node) for node in graph.graph.find_nodes(op="get_attr")}  # names of modules
        reads = ((read, user) for node in graph.graph.nodes if (read := stored(node)) for user in node.users)
        # By the name of a module's tensor: the number of nodes that read it, or a view of it, and are no views of it.
        self._readers = Counter(read.target for read, user in reads if stored(user) is None)
        self._refused: set[Any] = set()  # modules that are called more than once, once at least with the role OTHER
        self._axes: dict[fx.Node, int] = {}
        self.nodes: dict[fx.Node, NodeInfo] = {}
        refused = -1
        while refused < len(self._refused):
            refused = len(self._refused)
            self._annotate()

    def _annotate(self) -> None:
        for node in self._graph.nodes:
            if "shape" in node.meta:
                self._axes[node] = self._result_axis(node, self._info(node))
        for node in self._graph.nodes:
            self.nodes[node] = self._info(node)
            if self.is_called_again(node) and self.nodes[node].role is Role.OTHER:
                self._refused.add(node.target)

    def is_called_again(self, node: fx.Node) -> bool:
        """Return whether the node calls a module that is called more than once and has something for each channel."""
        module = module_of(node)
        return module is not None and len(self._calls[node.target]) > 1 and has_channels(module)

    def axis(self, node: fx.Node) -> int:
        """Return the axis of a tensor's channels."""
        return self._axes[node]

    def channels(self, node: fx.Node) -> int | None:
        """Return the number of a tensor's channels; None if it depends on the inputs' sizes."""
        return self.sizes.number(node, self._axes[node]) if node in self._axes else None

    def numbers_of(self, operand: Any, source: fx.Node) -> NDArray[np.float64]:
        """Return the number, or those for the channels of ``source``, that a tensor of a module has; NaN for others."""
        read = stored(operand)
        if read is None or not (math.prod(operand.meta["shape"]) == 1 or self._is_by_channel(operand, source)):
            return np.asarray(math.nan)
        return stored_tensor(read).detach().double().cpu().numpy().reshape(-1)

    def by_channel(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of arithmetic that are tensors of a module, or views of them, cut with the channels."""
        return [x for x in self.read_whole(node) if self._is_by_channel(x, self.nodes[node].sources[0])]

    def is_masked(self, node: fx.Node) -> bool:
        """Return whether arithmetic has an operand that is a buffer with a number for each channel."""
        return any(read and buffer_of(read) is not None for read in map(stored, self.by_channel(node)))

    def _is_by_channel(self, operand: fx.Node, source: fx.Node) -> bool:
        """Return whether an operand is a tensor that has one number for each channel and that nothing else reads."""
        read, shape = stored(operand), operand.meta["shape"]
        place, count = self.axis(source) - rank(source) + len(shape), self.channels(source)
        if read is None or not 0 <= place < len(shape) or not shape[place] == math.prod(shape) == count:
            return False
        whole = stored_tensor(read)
        shared = owner_of(read) in self._calls or id(whole) in self._shared or self._readers[read.target] > 1
        return not shared and count == max(whole.shape, default=0)

    def is_norm(self, node: fx.Node) -> bool:
        """Return whether the node normalises channels, each alone or in groups."""
        return type(module_of(node)) in NORMS and self.nodes[node].role is Role.PER_CHANNEL

    def norms_behind(self, node: fx.Node) -> list[fx.Node]:
        """Return the only readers of a layer's results in all of its calls if they are normalisations of channels.

        The list has one call of each normalisation. It is empty if other layers share one that has something for each
        channel.
        """
        readers = [only_user(call) for call in self._calls[node.target]]
        found: dict[Any, fx.Node] = {}
        for reader in readers:
            if reader is None or not self.is_norm(reader):
                return []
            found.setdefault(reader.target, reader)
        shared = (call for norm in found for call in self._calls[norm] if has_channels(module_of(call)))
        return list(found.values()) if all(call in readers for call in shared) else []

    def why_opaque(self, node: fx.Node) -> str | None:
        """Return why a module cannot be changed; None if it can, or if the node calls no module."""
        module = module_of(node)
        if module is None:
            return None
        if is_hooked(module):
            return "it has hooks"
        if not has_channels(module):
            return None
        if node.target in self._refused or (self.is_called_again(node) and not _may_be_called_again(module)):
            return "it is called more than once"
        if any(id(parameter) in self._shared for parameter in module.parameters()):
            return "it shares parameters with another module"
        return "its weights are read outside it" if node.target in self._read else None

    def why_kept(self, node: fx.Node) -> str:
        """Return why nothing is removed from the inputs and the result of a node with the role OTHER."""
        module = module_of(node)
        sizes = (rank(source) for source in node.all_input_nodes if "shape" in source.meta)
        if type(module) in (*CONVOLUTIONS, *TRANSPOSED) and module.weight.dim() - 1 in sizes:
            return "what it reads has no batch"
        return self.why_opaque(node) or "nothing is known of what it does to channels"

    def _info(self, node: fx.Node) -> NodeInfo:
        """Return the node's role and sources; OTHER unless another role is known at every size of the inputs."""
        sources = tuple(source for source in node.all_input_nodes if "shape" in source.meta)
        opaque = self.why_opaque(node) is not None
        if not opaque and self.taken(node) is not None:
            taken_from: Any = node.args[0]
            return NodeInfo(Role.TAKE, (taken_from if "shape" in taken_from.meta else taken_from.args[0],))
        if not sources or opaque:
            return NodeInfo(Role.OTHER, sources)
        if self._splits_channels(node) and all(self.taken(user) is not None for user in node.users):
            return NodeInfo(Role.PARTS, sources)
        if "shape" not in node.meta:
            return NodeInfo(Role.SIZE if self._reads_other_sizes(node) else Role.OTHER, sources)
        if arithmetic(node) == "where":
            chosen = tuple(x for x in sources if x is not node.args[0])
            if chosen and all(self._has_no_channels(node.args[0], x) for x in chosen):
                sources = chosen
        whole = self._only_with_channels(node, sources)
        read = sources if whole is None else (whole,)
        if any(self.channels(source) is None for source in read):
            return NodeInfo(Role.OTHER, sources)
        info = NodeInfo(self._role(node, read), read)
        known = self.sizes.number(node, self._result_axis(node, info)) is not None
        return info if known else NodeInfo(Role.OTHER, sources)

    def _result_axis(self, node: fx.Node, info: NodeInfo) -> int:
        """Return the axis of the result's channels; if nothing is known, the one that its readers require."""
        dims = rank(node)
        if self._is_of_last_axis(node):
            return dims - 1
        if info.role in (Role.MOVE, Role.PER_CHANNEL) and (moved := self._moved(node, info.sources[0])) is not None:
            return moved
        if info.role is Role.JOIN:
            return max(self._axes[source] - rank(source) for source in info.sources) + dims
        if node.op == "get_attr":
            return next((axis for axis, size in enumerate(node.meta["shape"]) if size != 1), min(1, dims - 1))
        if info.role is not Role.OTHER:
            return self._axes[info.sources[0]]
        last = bool(node.users) and all(map(self._is_of_last_axis, node.users))
        return dims - 1 if dims == 1 or last or self.sizes.number(node, 1) is None else 1

    def _is_of_last_axis(self, node: fx.Node) -> bool:
        return node.target is layer_norm_with_constants or type(module_of(node)) in _OF_THE_LAST_AXIS

    def _role(self, node: fx.Node, sources: tuple[fx.Node, ...]) -> Role:
        """Return the role of a node that reads tensors whose numbers of channels are known, and returns one."""
        module, name, source = module_of(node), operation(node), sources[0]
        dims = rank(source)
        if node.op == "get_attr" or (module is not None and (len(node.args) != 1 or node.kwargs)):
            return Role.OTHER
        if name == "linear" and module is not None:
            return Role.CONVOLUTION if self.axis(source) == dims - 1 else Role.OTHER
        if rank(node) < 2:
            return Role.OTHER
        if arithmetic(node):
            return self._role_of_arithmetic(node, sources)
        if name == "cat":
            return Role.CAT if all(_is_cat_along(node, self.axis(x)) for x in sources) else Role.OTHER
        if not node.args or node.args[0] is not source or len(sources) > 1:
            return Role.OTHER
        if self._moved(node, source) is not None:
            return Role.PER_CHANNEL if name in REDUCTIONS else Role.MOVE
        if _is_mean_of_channels(node, name, self.axis(source)):
            return Role.MEAN
        if name in POINTWISE and not _trains(node) and len(node.all_input_nodes) == 1 and not _is_root(node, name):
            return Role.PER_CHANNEL
        if name in CASTS and node.meta["dtype"].is_floating_point:  # to a dtype that may be read from another tensor
            return Role.PER_CHANNEL
        if name == "glu":
            halved = argument(node, 1, "dim", -1) if module is None else module.dim
            return Role.GATE if halved in (self.axis(source), self.axis(source) - dims) else Role.OTHER
        if self.axis(source) != 1:
            return Role.OTHER
        if name == "flatten" and self.sizes.sizes[node] == self.sizes.unknowns.flat(self.sizes.sizes[source], 1, -1):
            return Role.FLATTEN
        if added_channels(node) is not None:
            return Role.WIDEN
        # By numbers that may be computed from sizes.
        if is_padding(node) or is_interpolation(node, name) or _is_pool(node, name):
            return Role.PER_CHANNEL
        if len(node.all_input_nodes) > 1:
            return Role.OTHER
        if type(module) in CONVOLUTIONS and dims == module.weight.dim():
            return Role.PER_CHANNEL if is_depthwise(module) else Role.CONVOLUTION
        if type(module) in TRANSPOSED and dims == module.weight.dim() and module.groups == 1:
            return Role.CONVOLUTION
        if name in ("pixelshuffle", "pixelunshuffle"):
            plain = dims == 4 and self.channels(node) is not None
            return (Role.SHUFFLE if name == "pixelshuffle" else Role.UNSHUFFLE) if plain else Role.OTHER
        alone = _POOLS.get(name) == dims - 2 or self._is_per_channel(node, module, source)
        return Role.PER_CHANNEL if alone and (module is not None or not name.startswith("avgpool")) else Role.OTHER

    def _is_per_channel(self, node: fx.Node, module: Any, source: fx.Node) -> bool:
        """Return whether the node treats each channel, or each group, separately, though not each of its pixels."""
        if type(module) is nn.GroupNorm and module.num_channels != self.channels(source):
            return False  # one without weights takes any number
        if type(module) in (*NORMS, nn.PReLU):
            return _INSTANCE_NORMS.get(type(module), rank(source)) == rank(source)
        if type(module) is nn.Upsample:
            return module.mode in _WITHOUT_OVERSHOOT
        return _is_crop(node)

    def _moved(self, node: fx.Node, source: fx.Node) -> int | None:
        """Return the axis of the channels after a node that changes axes, but not theirs; None for any other node."""
        axis, added = self.axis(source), rank(node) - rank(source)
        if order := axes_in_order(node):
            return order.index(axis)
        name = operation(node)
        given = numbered_axes(argument(node, REDUCTIONS.get(name, (1,))[0], "dim"), rank(source)) or set()
        if name in REDUCTIONS and given and axis not in given:
            return axis if added == 0 else axis - sum(other < axis for other in given)
        if name not in _VIEWS or (name == "squeeze" and axis in given):  # which would go if one channel is left
            return None
        before, behind = unchanged_axes(self.sizes.sizes[source], self.sizes.sizes[node])
        return axis if axis < before else axis + added if axis >= rank(source) - behind else None

    def _only_with_channels(self, node: fx.Node, operands: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the operand of arithmetic that alone has channels; None if there is none.

        The other is broadcast along them, or is a tensor of a module with one number for each. Also None where a
        channel of zeros would depend on the input afterwards: only factors and divisors may be other than such numbers.
        """
        name, found = arithmetic(node), []
        for one, other in (operands, operands[::-1]) if len(operands) == 2 and name is not None else ():
            alone = self._has_no_channels(other, one) or self._is_by_channel(other, one)
            fixed = name != "where" and not np.isnan(self.numbers_of(other, one)).any()
            scales = name == "mul" or (name == "div" and node.args[0] is one)
            if rank(one) == rank(node) and alone and (scales or fixed):
                found.append(one)
        return found[0] if len(found) == 1 else None

    def _has_no_channels(self, other: Any, one: fx.Node) -> bool:
        """Return whether a tensor is the same for all channels of another with which it is broadcast."""
        place = self.axis(one) - rank(one) + rank(other)
        return rank(other) <= rank(one) and (place < 0 or self.sizes.number(other, place) == 1)

    def read_whole(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that the node reads whole, not channel by channel."""
        return [x for x in node.all_input_nodes if "shape" in x.meta and x not in self.nodes[node].sources]

    def _role_of_arithmetic(self, node: fx.Node, sources: tuple[fx.Node, ...]) -> Role:
        operands = node.args[-2:]
        tensors = [x for x in operands if isinstance(x, fx.Node)]
        if not all(isinstance(x, fx.Node | Real) and (x not in tensors or "shape" in x.meta) for x in operands):
            return Role.OTHER
        if arithmetic(node) == "where" and (node.args[0] in sources or any(x not in (*tensors, 0) for x in operands)):
            return Role.OTHER  # the mask has channels, or makes something else of channels of zeros
        if len(sources) < len(set(tensors)) or len(set(tensors)) == 1:
            return Role.PER_CHANNEL
        kinds = {(rank(x), self.axis(x), self.channels(x)) for x in tensors}
        return Role.JOIN if len(kinds) == 1 else Role.OTHER

    def taken(self, node: fx.Node) -> NDArray[np.int64] | None:
        """Return which channels of its source the node selects; None if it does something else."""
        source = node.args[0] if node.args else None
        if "shape" not in node.meta or not isinstance(source, fx.Node):
            return None
        if node.target is operator.getitem and isinstance(node.args[1], int) and self._splits_channels(source):
            whole: Any = source.args[0]
            split = getattr(torch, operation(source))
            parts = split(torch.arange(whole.meta["shape"][self.axis(whole)]), *source.args[1:2])
            return np.asarray(parts[node.args[1]])
        count = self.channels(source)
        if count is None or rank(node) != rank(source):
            return None
        channels = np.arange(count)
        if node.target is operator.getitem:
            return _sliced(channels, node.args[1]) if self.axis(source) == 1 else None
        if node.target is take_channels and isinstance(node.args[1], fx.Node):
            axis = argument(node, 2, "axis", 1)
            index = buffer_of(node.args[1]) if axis % rank(node) == self.axis(source) else None
            return None if index is None else channels[index.cpu().numpy()]
        if operation(node) != "channelshuffle" or self.axis(source) != 1:
            return None
        module = module_of(node)
        groups: Any = node.args[1] if module is None else module.groups
        return channels.reshape(groups, -1).T.reshape(-1)

    def _reads_other_sizes(self, node: fx.Node) -> bool:
        """Return whether the node reads sizes of its argument, or its dtype, but no number of channels that changes."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or "shape" not in source.meta or reads_numbers(node):
            return False
        if source.op == "placeholder" or node.target == "dim" or node.args[1:] in (("ndim",), ("dtype",), ("device",)):
            return True
        dims, axis = rank(source), self.axis(source)
        sized = node.op == "call_method" and node.target == "size"
        if sized and len(node.args) == 2:
            return isinstance(node.args[1], int) and node.args[1] % dims != axis
        if sized or (node.target is getattr and node.args[1] == "shape"):
            picked = [user.args[1] for user in node.users if user.target is operator.getitem]
            return len(picked) == len(node.users) and all(axis not in places(i, dims) for i in picked)
        return False

    def _splits_channels(self, node: fx.Node) -> bool:
        """Return whether the node splits the channels into a tuple of contiguous parts."""
        source: Any = node.args[0] if node.args else None
        if operation(node) not in ("chunk", "split") or node.all_input_nodes != [source]:
            return False
        dims, axis = len(source.meta.get("shape", ())), argument(node, 2, "dim", 0)
        plain = len(node.args) > 1 and set(node.kwargs) <= {"dim"} and isinstance(axis, int)
        return plain and dims > 1 and self.channels(source) is not None and axis % dims == self.axis(source)


def rank(node: fx.Node) -> int:
    """Return the number of axes of a tensor."""
    return len(node.meta["shape"])


def buffer_of(node: fx.Node) -> Tensor | None:
    """Return the buffer that the node reads; None if it does something else."""
    found = stored_tensor(node)
    return None if isinstance(found, nn.Parameter) else found


def stored(node: fx.Node) -> fx.Node | None:
    """Return the node that reads the tensor of a module of which the node is a view, or itself; None if neither."""
    if node.op == "get_attr":
        return node
    is_view = operation(node) in ("view", *_VIEWS) and node.all_input_nodes == [*node.args[:1]]
    return stored(node.all_input_nodes[0]) if is_view else None


def arithmetic(node: fx.Node) -> str | None:
    """Return the name of an operation on two tensors, or a tensor and a number, that broadcasts them, else None.

    They are its last arguments; "where" has a mask ahead of them.
    """
    name = operation(node)
    known = name in ARITHMETIC or (name == "where" and node.op == "call_function")
    return name if known and len(node.args) == 2 + (name == "where") and not node.kwargs else None


def is_depthwise(module: Any) -> bool:
    """Return whether each channel has a filter of its own."""
    return type(module) in CONVOLUTIONS and 1 < module.groups == module.in_channels == module.out_channels


def has_channels(module: Any) -> bool:
    """Return whether a module has parameters, buffers or groups for channels."""
    if type(module) is nn.PReLU and module.num_parameters == 1:
        return False
    return isinstance(module, nn.GroupNorm) or any(True for _ in (*module.parameters(), *module.buffers()))


def _may_be_called_again(module: Any) -> bool:
    """Return whether channels may be removed from all calls of a module together."""
    if type(module) in CONVOLUTIONS:
        return module.groups == 1
    return type(module) in (*TRANSPOSED, *NORMS, nn.Linear, nn.PReLU)


def _is_cat_along(node: fx.Node, axis: int) -> bool:
    """Return whether the node concatenates tensors along this axis."""
    dim = argument(node, 1, "dim", 0)
    dims, parts = rank(node), node.args[0] if node.args else None
    if dim not in (axis, axis - dims) or not isinstance(parts, list | tuple):
        return False
    return all(isinstance(part, fx.Node) and rank(part) == dims for part in parts)


def _sliced(channels: NDArray[np.int64], place: Any) -> NDArray[np.int64] | None:
    """Return the channels of ``x[place]``; None if it does more than slice channels."""
    if not isinstance(place, tuple) or place[:1] != (slice(None),) or not isinstance((*place, 0)[1], slice):
        return None
    if any(isinstance(number, fx.Node) for number in (place[1].start, place[1].stop, place[1].step)):
        return None
    return channels[place[1]] if all(part in (slice(None), ...) for part in place[2:]) else None


def _is_crop(node: fx.Node) -> bool:
    """Return whether the node slices only spatial axes."""
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    source: Any = node.args[0]
    place = node.args[1]
    if place[:1] == (...,):
        return len(place) <= rank(source) - 1 and all(isinstance(part, slice) for part in place[1:])
    return place[:2] == (slice(None), slice(None)) and all(isinstance(part, slice) for part in place)


def _is_mean_of_channels(node: fx.Node, name: str, axis: int) -> bool:
    """Return whether the node takes the mean over the channels, and perhaps pixels, and keeps their axes."""
    kept = argument(node, 2, "keepdim") is True and set(node.kwargs) <= {"dim", "keepdim"}
    return name == "mean" and kept and axis in (numbered_axes(argument(node, 1, "dim"), rank(node)) or ())


def is_padding(node: fx.Node) -> bool:
    """Return whether the node pads only spatial axes, with zeros or with values of the tensor."""
    if node.target is not nn.functional.pad or len(node.args) != 2 or not set(node.kwargs) <= {"mode", "value"}:
        return False
    pads: Any = node.args[1]
    plain = isinstance(pads, list | tuple) and all(isinstance(p, int | fx.Node) for p in pads)
    return plain and not node.kwargs.get("value") and len(pads) <= 2 * (rank(node) - 2)


def added_channels(node: fx.Node) -> tuple[int, int] | None:
    """Return how many channels of zeros a padding adds ahead of and behind axis 1; None if the node does more or else.

    Shortcuts of residual networks do this where blocks have more channels (option A of He et al., 2015).
    """
    if node.target is not nn.functional.pad or argument(node, 2, "mode", "constant") != "constant":
        return None
    pads = argument(node, 1, "pad")
    if argument(node, 3, "value") or not isinstance(pads, list | tuple) or len(pads) != 2 * (rank(node) - 1):
        return None
    *others, ahead, behind = pads
    whole = all(isinstance(p, int) for p in pads) and not any(others) and min(ahead, behind) >= 0
    return (ahead, behind) if whole else None


def is_interpolation(node: fx.Node, name: str) -> bool:
    """Return whether the node is a call of torch.nn.functional.interpolate that keeps constant channels."""
    return name == "interpolate" and argument(node, 3, "mode", "nearest") in _WITHOUT_OVERSHOOT


def _is_pool(node: fx.Node, name: str) -> bool:
    """Return whether the node is a call of a function that pools windows of pixels, which keeps constant channels."""
    padded = argument(node, 3, "padding", 0) or argument(node, 6, "divisor_override") is not None
    plain = name.startswith("max") or not padded
    return node.op == "call_function" and POOLS.get(name) == rank(node) - 2 and plain


def has_running_statistics(norm: Any) -> bool:
    """Return whether a normalisation uses running statistics in eval mode."""
    return getattr(norm, "running_mean", None) is not None


def is_resampling(name: str) -> bool:
    """Return whether an operation of this name pools, reduces or upsamples; a channel of zeros remains one."""
    return name in _POOLS or name in ("upsample", "interpolate", *REDUCTIONS)


def keeps_constants(module: Any, name: str) -> bool:
    """Return whether such an operation preserves every constant channel.

    Padding that counts as zeros reduces the values at the borders; then only 0 is preserved.
    """
    if not isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d):
        return name not in REDUCTIONS or name in _AVERAGES
    padded = any(torch.tensor(module.padding).flatten().tolist())
    plain = not padded or not module.count_include_pad
    return plain and getattr(module, "divisor_override", None) is None


def _is_root(node: fx.Node, name: str) -> bool:
    """Return whether the node is a power without a finite derivative at 0, the value of channels that fill groups."""
    exponent = argument(node, 1, "exponent")
    return name == "pow" and not (isinstance(exponent, int | float) and exponent >= 1)


def _trains(node: fx.Node) -> bool:
    return bool(node.kwargs.get("training", "dropout" in getattr(node.target, "__name__", "")))
