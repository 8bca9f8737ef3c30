"""Effects of a graph's nodes on channels."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from loco_ext.sparsity.compaction.layer_norm import layer_norm_with_constants
from loco_ext.sparsity.compaction.sizes import Inference
from loco_ext.sparsity.compaction.take import take_channels


class Role(Enum):
    """Effect of a node on the channels of its argument: axis 1, or the last axis for linear layers."""

    CONVOLUTION = "convolution"  # includes linear layers, whose channels are features
    PER_CHANNEL = "per channel"  # channel i of the result depends only on channel i
    JOIN = "join"  # sums and products of several tensors of the same shape, channel by channel
    CAT = "cat"
    TAKE = "take"  # selects some channels, or all in another order
    PARTS = "parts"  # a tuple of such selections; taking one out of it is TAKE
    PERMUTE = "permute"  # moves channels to another axis
    FLATTEN = "flatten"  # turns each channel into as many features as it has pixels
    SIZE = "size"  # reads sizes of other axes
    OTHER = "other"  # nothing is known about the channels


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_POINTWISE_MODULES = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink),
    *(nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
}
_MAX_POOLS = {
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
}
_AVERAGE_POOLS = {nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d}
_ADAPTIVE_AVERAGE_POOLS = {nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d}
_POOLS = _MAX_POOLS | _AVERAGE_POOLS | _ADAPTIVE_AVERAGE_POOLS

_POINTWISE_NAMES = {
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "sigmoid_"),
    *("tanh", "tanh_", "hardswish", "hardsigmoid", "hardtanh", "softplus", "logsigmoid", "abs", "neg", "square"),
    *("clamp", "clip", "dropout", "dropout2d", "contiguous", "clone", "detach"),
}
_POINTWISE_FUNCTIONS = {
    getattr(library, name): name for library in (torch, F) for name in _POINTWISE_NAMES if hasattr(library, name)
}
_OF_THE_LAST_AXIS = (nn.Linear, nn.LayerNorm)  # for inputs of any rank
_ARITHMETIC: dict[Any, str] = {
    **{operator.add: "add", operator.iadd: "add", torch.add: "add"},
    **{operator.sub: "sub", operator.isub: "sub", torch.sub: "sub"},
    **{operator.mul: "mul", operator.imul: "mul", torch.mul: "mul"},
    **{operator.truediv: "div", operator.itruediv: "div", torch.div: "div"},
}
_ARITHMETIC_METHODS = {name + suffix: name for name in ("add", "sub", "mul", "div") for suffix in ("", "_")}
_POOL_FUNCTIONS = {  # numbers of spatial axes
    **{F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3},
    **{F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3},
}


@dataclass(frozen=True)
class Reading:
    """A node's role, and the nodes whose channels it reads."""

    role: Role
    sources: tuple[fx.Node, ...]


class Reader:
    """The roles of all nodes of a graph made by :func:`trace`."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.modules = dict(traced.named_modules())
        self.sizes = Inference(traced)
        self._root = traced
        nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
        self._calls = Counter(id(self.modules[str(node.target)]) for node in nodes)
        owners = Counter(id(p) for m in set(self.modules.values()) for p in m.parameters(recurse=False))
        self._shared = {parameter for parameter, count in owners.items() if count > 1}
        self._read = {
            id(self.modules[owner])
            for node in traced.graph.nodes
            if node.op == "get_attr" and (owner := str(node.target).rpartition(".")[0]) in self.modules
        }
        self._axes: dict[fx.Node, int] = {}
        for node in traced.graph.nodes:
            if "shape" in node.meta:
                self._axes[node] = self._result_axis(node, self.read(node))

    def axis(self, node: fx.Node) -> int:
        """Return the axis of a tensor's channels."""
        return self._axes[node]

    def channels(self, node: fx.Node) -> int | None:
        """Return the number of a tensor's channels; None if it depends on the inputs' sizes."""
        return self.sizes.number(node, self._axes[node]) if node in self._axes else None

    def module(self, node: fx.Node) -> Any:
        """Return the module that the node calls, or None."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def why_opaque(self, node: fx.Node) -> str | None:
        """Return why a module cannot be changed; None if it can, or if the node calls no module."""
        module = self.module(node)
        if module is None:
            return None
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return "it has hooks"
        if not any(True for _ in (*module.parameters(), *module.buffers())):
            return None
        if self._calls[id(module)] > 1:
            return "it is called more than once"
        if any(id(parameter) in self._shared for parameter in module.parameters()):
            return "it shares parameters with another module"
        if id(module) in self._read:
            return "its weights are read outside it"
        return None

    def why_kept(self, node: fx.Node) -> str:
        """Return why nothing is removed from the inputs and the result of a node with the role OTHER."""
        module = self.module(node)
        sizes = (len(source.meta["shape"]) for source in node.all_input_nodes if "shape" in source.meta)
        if type(module) in CONVOLUTIONS and module.weight.dim() - 1 in sizes:
            return "what it reads has no batch"
        return self.why_opaque(node) or "nothing is known of what it does to channels"

    def read(self, node: fx.Node) -> Reading:
        """Return the node's role and sources; OTHER unless another role is known at every size of the inputs."""
        sources = tuple(source for source in node.all_input_nodes if "shape" in source.meta)
        opaque = self.why_opaque(node) is not None
        if not opaque and self.taken(node) is not None:
            return Reading(Role.TAKE, (_taken_from(node),))
        if not sources or opaque:
            return Reading(Role.OTHER, sources)
        if self._splits_channels(node) and all(self.taken(user) is not None for user in node.users):
            return Reading(Role.PARTS, sources)
        if "shape" not in node.meta:
            return Reading(Role.SIZE if self._reads_other_sizes(node) else Role.OTHER, sources)
        if any(self.channels(source) is None for source in sources):
            return Reading(Role.OTHER, sources)
        role = self._role_of_module(node, sources[0]) if node.op == "call_module" else self._role_of_call(node)
        reading = Reading(role, sources)
        known = self.sizes.number(node, self._result_axis(node, reading)) is not None
        return reading if known else Reading(Role.OTHER, sources)

    def _result_axis(self, node: fx.Node, reading: Reading) -> int:
        """Return the axis of the result's channels; if nothing is known, the one that its readers require."""
        dims = len(node.meta["shape"])
        if self._is_of_last_axis(node):
            return dims - 1
        if reading.role is Role.PERMUTE:
            return _axes_in_order(node).index(self._axes[reading.sources[0]])
        if reading.role is Role.JOIN:
            return max(self._axes[source] - len(source.meta["shape"]) for source in reading.sources) + dims
        if node.op == "get_attr":
            return next((axis for axis, size in enumerate(node.meta["shape"]) if size != 1), min(1, dims - 1))
        if reading.role is not Role.OTHER:
            return self._axes[reading.sources[0]]
        last = bool(node.users) and all(map(self._is_of_last_axis, node.users))
        return dims - 1 if dims == 1 or last or self.sizes.number(node, 1) is None else 1

    def _is_of_last_axis(self, node: fx.Node) -> bool:
        return node.target is layer_norm_with_constants or type(self.module(node)) in _OF_THE_LAST_AXIS

    def _role_of_module(self, node: fx.Node, source: fx.Node) -> Role:
        module, dims = self.module(node), len(source.meta["shape"])
        kind = type(module)
        if len(node.args) != 1 or node.kwargs:
            return Role.OTHER
        if kind is nn.Linear and self.axis(source) == dims - 1:
            return Role.CONVOLUTION
        if kind in _POINTWISE_MODULES and dims >= 2:
            return Role.PER_CHANNEL
        if self.axis(source) != 1:
            return Role.OTHER
        if kind in CONVOLUTIONS and dims == module.weight.dim():
            return Role.PER_CHANNEL if is_depthwise(module) else Role.CONVOLUTION
        if kind in BATCH_NORMS or (kind is nn.PReLU and dims >= 2):
            return Role.PER_CHANNEL
        if kind in _POOLS and not getattr(module, "return_indices", False):
            return Role.PER_CHANNEL if dims == _spatial_axes(module) + 2 else Role.OTHER
        if kind is nn.Upsample and module.mode in ("nearest", "linear", "bilinear", "trilinear"):
            return Role.PER_CHANNEL
        if kind is nn.Flatten and self._flattens(node, source):
            return Role.FLATTEN
        return Role.OTHER

    def _role_of_call(self, node: fx.Node) -> Role:
        if node.op == "get_attr" or len(node.meta["shape"]) < 2:
            return Role.OTHER
        if arithmetic(node):
            return self._role_of_arithmetic(node)
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target in (torch.cat, torch.concat):
            along_1 = all(self.axis(source) == 1 for source in node.all_input_nodes if "shape" in source.meta)
            return Role.CAT if is_cat_of_channels(node) and along_1 else Role.OTHER
        if first is None or any(x is not first and "shape" in x.meta for x in node.all_input_nodes):
            return Role.OTHER
        if _axes_in_order(node):
            return Role.PERMUTE
        named = node.target if node.op == "call_method" else _POINTWISE_FUNCTIONS.get(node.target)
        if named in _POINTWISE_NAMES and not _trains(node) and len(node.all_input_nodes) == 1:
            return Role.PER_CHANNEL
        if self.axis(first) != 1:
            return Role.OTHER
        if _name_of(node) in ("flatten", "view", "reshape") and self._flattens(node, first):
            return Role.FLATTEN
        if len(node.all_input_nodes) > 1:
            return Role.OTHER
        if _is_crop(node) or is_padding(node):
            return Role.PER_CHANNEL
        if node.target in _POOL_FUNCTIONS:
            batched = len(first.meta["shape"]) == _POOL_FUNCTIONS[node.target] + 2
            return Role.PER_CHANNEL if batched else Role.OTHER
        return Role.PER_CHANNEL if is_spatial_mean(node, first) else Role.OTHER

    def taken(self, node: fx.Node) -> NDArray[np.int64] | None:
        """Return which channels of its source the node selects; None if it does something else."""
        source = node.args[0] if node.args else None
        if "shape" not in node.meta or not isinstance(source, fx.Node):
            return None
        if node.target is operator.getitem and isinstance(node.args[1], int) and self._splits_channels(source):
            whole: Any = source.args[0]
            split = getattr(torch, _name_of(source))
            parts = split(torch.arange(whole.meta["shape"][1]), *source.args[1:2])
            return np.asarray(parts[node.args[1]])
        count = self.channels(source)
        if count is None or len(node.meta["shape"]) != len(source.meta["shape"]):
            return None
        channels = np.arange(count)
        if node.target is operator.getitem:
            return _sliced(channels, node.args[1]) if self.axis(source) == 1 else None
        if node.target is take_channels and isinstance(node.args[1], fx.Node):
            axis: Any = node.args[2] if len(node.args) > 2 else 1
            index = self.buffer(node.args[1]) if axis % len(node.meta["shape"]) == self.axis(source) else None
            return None if index is None else channels[index.cpu().numpy()]
        shuffles = isinstance(self.module(node), nn.ChannelShuffle) and self.axis(source) == 1
        groups = self.module(node).groups if shuffles else None
        return None if groups is None else channels.reshape(groups, -1).T.reshape(-1)

    def buffer(self, node: fx.Node) -> Tensor | None:
        """Return the buffer that the node reads; None if it does something else."""
        return dict(self._root.named_buffers()).get(str(node.target)) if node.op == "get_attr" else None

    def _flattens(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the result of a view is one row of features per sample, channel by channel."""
        return self.sizes.of(node) == self.sizes.flattened(source)

    def _reads_other_sizes(self, node: fx.Node) -> bool:
        """Return whether the node reads sizes of its argument, none of them being its number of channels."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or "shape" not in source.meta:
            return False
        dims, axis = len(source.meta["shape"]), self.axis(source)
        if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
            return isinstance(node.args[1], int) and node.args[1] % dims != axis
        if (node.op == "call_method" and node.target == "size") or (node.target is getattr and node.args[1] == "shape"):
            picked = [user.args[1] for user in node.users if user.target is operator.getitem]
            return len(picked) == len(node.users) and all(isinstance(i, int) and i % dims != axis for i in picked)
        return False

    def _splits_channels(self, node: fx.Node) -> bool:
        """Return whether the node splits the channels into a tuple of contiguous parts."""
        source: Any = node.args[0] if node.args else None
        if _name_of(node) not in ("chunk", "split") or node.all_input_nodes != [source]:
            return False
        dims = len(source.meta.get("shape", ()))
        axis = node.args[2] if len(node.args) == 3 else node.kwargs.get("dim", 0)
        plain = len(node.args) > 1 and set(node.kwargs) <= {"dim"}
        along_1 = dims > 1 and self.axis(source) == 1
        return plain and along_1 and self.channels(source) is not None and axis in (1, 1 - dims)

    def _role_of_arithmetic(self, node: fx.Node) -> Role:
        tensors = [x for x in node.args if isinstance(x, fx.Node)]
        if not all(isinstance(x, fx.Node | Real) and (x not in tensors or "shape" in x.meta) for x in node.args):
            return Role.OTHER
        if len(tensors) == 1:
            return Role.PER_CHANNEL
        ranks = {len(x.meta["shape"]) for x in tensors}
        places = {self.axis(x) - len(x.meta["shape"]) for x in tensors}
        counts = {self.channels(x) for x in tensors}
        alike = len(ranks) == len(places) == len(counts) == 1 and tensors[0] is not tensors[1]
        return Role.JOIN if alike else Role.OTHER


def _name_of(node: fx.Node) -> str:
    """Return the name of a method, or of a function of torch; "" for any other function."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if getattr(torch, name, None) is node.target else ""


def is_depthwise(module: Any) -> bool:
    """Return whether each channel has a kernel of its own."""
    return type(module) in CONVOLUTIONS and 1 < module.groups == module.in_channels == module.out_channels


def is_cat_of_channels(node: fx.Node) -> bool:
    """Return whether the node concatenates tensors along axis 1."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dims, parts = len(node.meta["shape"]), node.args[0] if node.args else None
    if dim not in (1, 1 - dims) or not isinstance(parts, list | tuple):
        return False
    return all(isinstance(part, fx.Node) and len(part.meta["shape"]) == dims for part in parts)


def arithmetic(node: fx.Node) -> str | None:
    """Return "add", "sub", "mul" or "div" for an operation on two tensors or a tensor and a number, else None."""
    if node.kwargs or len(node.args) != 2:
        return None
    if node.op == "call_method":
        return _ARITHMETIC_METHODS.get(str(node.target))
    return _ARITHMETIC.get(node.target) if node.op == "call_function" else None


def _axes_in_order(node: fx.Node) -> list[int]:
    """Return the source's axis for each axis of a permutation's result; [] for any other node."""
    name, args = _name_of(node), node.args[1:]
    given: Any = args[0] if len(args) == 1 else args
    if name not in ("permute", "transpose") or node.kwargs or not isinstance(given, list | tuple):
        return []
    dims = len(node.meta["shape"])
    if not all(isinstance(axis, int) for axis in given):
        return []
    axes = [axis % dims for axis in given]
    if name == "permute":
        return axes
    order = list(range(dims))
    order[axes[0]], order[axes[1]] = axes[1], axes[0]
    return order


def _taken_from(node: fx.Node) -> fx.Node:
    source: Any = node.args[0]
    return source if "shape" in source.meta else source.args[0]


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
    dims, place = len(node.args[0].meta["shape"]), node.args[1]  # type: ignore[union-attr]
    if place[:1] == (...,):
        return len(place) <= dims - 1 and all(isinstance(part, slice) for part in place[1:])
    return place[:2] == (slice(None), slice(None)) and all(isinstance(part, slice) for part in place)


def is_padding(node: fx.Node) -> bool:
    """Return whether the node pads only spatial axes, with zeros or with values of the tensor."""
    if node.target is not F.pad or len(node.args) != 2 or not set(node.kwargs) <= {"mode", "value"}:
        return False
    if node.kwargs.get("value"):
        return False
    pads: Any = node.args[1]
    spatial = len(node.meta["shape"]) - 2
    return isinstance(pads, list | tuple) and len(pads) <= 2 * spatial and all(isinstance(p, int) for p in pads)


def is_spatial_mean(node: fx.Node, source: fx.Node) -> bool:
    """Return whether the node takes the mean over exactly the spatial axes."""
    if node.target is not torch.mean and not (node.op == "call_method" and node.target == "mean"):
        return False
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims: int = len(source.meta["shape"])
    axes = [axes] if isinstance(axes, int) else axes
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
        return False
    return dims > 2 and sorted(axis % dims for axis in axes) == list(range(2, dims))


def keeps_constants(module: Any) -> bool:
    """Return whether a pooling preserves every constant channel.

    Padding that counts as zeros reduces the values at the borders; then only 0 is preserved.
    """
    if module is None:
        return True
    if type(module) in _AVERAGE_POOLS:
        padded = any(torch.tensor(module.padding).flatten().tolist())
        plain = not padded or not module.count_include_pad
        return plain and getattr(module, "divisor_override", None) is None
    return True


def is_resampling(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether the node pools or upsamples, which does nothing to a constant channel."""
    if module is not None:
        return type(module) in _POOLS or type(module) is nn.Upsample
    return (
        node.target in _POOL_FUNCTIONS
        or (node.op == "call_method" and node.target == "mean")
        or (node.target is torch.mean)
    )


def _spatial_axes(module: nn.Module) -> int:
    return int(type(module).__name__[-2])


def _trains(node: fx.Node) -> bool:
    return bool(node.kwargs.get("training", "dropout" in getattr(node.target, "__name__", "")))
