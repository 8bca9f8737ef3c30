"""Replacement of calls of torch's functions with a module's own weights by the corresponding layers.

Subclasses of torch's layers, such as a batch normalisation with an activation inside, are traced through: torch.fx only
sees a function and the weights that it is given.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext.fx.modules import count_owners, unused_name
from loco_ext.fx.operations import argument, owner_of, stored_tensor

COMPUTED = "computed"  # key in the meta of a convolution whose weight the model's code computes


class _Call(NamedTuple):
    """A call of a function: its tensors that belong to modules, its other arguments, and its input's dimensions."""

    weights: dict[str, Tensor | None]
    options: dict[str, Any]
    dims: int


class _Function(NamedTuple):
    """A function: the names of its arguments after the input, those that are weights, and how to build its layer."""

    arguments: tuple[str, ...]
    weights: tuple[str, ...]
    build: Callable[[_Call], nn.Module | None]


def as_layers(graph: fx.GraphModule, model: nn.Module) -> None:
    """Replace each function that pools, or alone reads the weights of a module that is not called, by a layer.

    A batch normalisation only replaces the function of a module that normalises by its batch in training, as subclasses
    of torch's batch normalisations do.

    Args:
        graph: graph whose nodes have the shapes of their results in their meta.
        model: the model that the graph belongs to.
    """
    _store_computed_weights(graph)
    readers = Counter(read.target for read in graph.graph.find_nodes(op="get_attr") for _ in read.users)
    owned, called = count_owners(graph), _called(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _FUNCTIONS or "shape" not in node.meta:
            continue
        layer = _layer(node)
        if isinstance(layer, _BatchNorm) and not _normalises(model, node):
            continue
        read = [x for x in node.all_input_nodes if x.op == "get_attr"]
        alone = all(readers[x.target] == 1 for x in read) and called.isdisjoint(map(owner_of, read))
        if layer is not None and alone and all(owned[id(p)] == 1 for p in layer.parameters()):
            _replace(graph, node, layer.eval(), read)
    graph.recompile()


@torch.no_grad()
def _store_computed_weights(graph: fx.GraphModule) -> None:
    """Make parameters of the weights of convolutions that code computes from parameters, with their present values."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    parts: dict[fx.Node, dict[fx.Node, None]] = {}  # what values that depend on no input come from
    for node in list(graph.graph.nodes):
        read = node.all_input_nodes
        calls = node.op in ("call_function", "call_method") and read
        if node.op == "get_attr" or (calls and parts.keys() >= {*read}):
            parts[node] = {**{part: None for x in read for part in parts[x]}, node: None}
            interpreter.env[node] = interpreter.run_node(node)
        elif node.target in _CONVOLUTIONS:
            weight = argument(node, 1, "weight")
            if weight in parts and weight.op != "get_attr":
                _store_weight(graph, node, weight, interpreter.env[weight], parts[weight])


def _store_weight(
    graph: fx.GraphModule, node: fx.Node, weight: fx.Node, value: Tensor, parts: dict[fx.Node, None]
) -> None:
    """Make a parameter of a convolution's weight if it is computed from one, and erase what nothing reads any more."""
    parameters = [part for part in parts if isinstance(stored_tensor(part), nn.Parameter)]
    if not parameters:
        return
    called = _called(graph)
    # A layer that stays a layer can have no further parameter, with which no file would be read.
    names = (str(part.target) for part in parameters if owner_of(part) not in called)
    name = unused_name(graph, next(names, node.name))
    owner, _, attribute = name.rpartition(".")
    trains = any(stored_tensor(part).requires_grad for part in parameters)
    graph.get_submodule(owner).register_parameter(attribute, nn.Parameter(value.clone(), trains))
    with graph.graph.inserting_before(node):
        stored = graph.graph.get_attr(name)
    stored.meta, node.meta[COMPUTED] = dict(weight.meta), True
    node.replace_input_with(weight, stored)
    for part in reversed(parts):
        if not part.users:
            graph.graph.erase_node(part)


def _replace(graph: fx.GraphModule, node: fx.Node, layer: nn.Module, read: list[fx.Node]) -> None:
    """Replace the node, and the nodes that read its weights, by a call of the layer, named after the weights' owner."""
    owner = owner_of(read[0]) if read else ""
    used = [x for x in graph.graph.nodes if x.op in ("call_module", "get_attr") and x not in read]
    inside = any(f"{owner_of(x)}.".startswith(f"{owner}.") for x in used)
    name = unused_name(graph, f"{owner}.layer" if owner else node.name) if inside or not owner else owner
    for x in read:
        place, _, attribute = str(x.target).rpartition(".")
        delattr(graph.get_submodule(place), attribute)
    graph.set_submodule(name, layer)
    with graph.graph.inserting_before(node):
        called = graph.graph.call_module(name, (node.kwargs.get("input", node.args[0] if node.args else None),))
    called.meta = dict(node.meta)
    node.replace_all_uses_with(called)
    for gone in (node, *read):
        graph.graph.erase_node(gone)


def _called(graph: fx.GraphModule) -> set[str]:
    """Return the names of the modules that the graph calls."""
    return {str(node.target) for node in graph.graph.find_nodes(op="call_module")}


def _normalises(model: nn.Module, node: fx.Node) -> bool:
    """Return whether all weights that the node reads belong to batch normalisations."""
    read = (x for x in node.all_input_nodes if x.op == "get_attr")
    return all(isinstance(model.get_submodule(owner_of(x)), _BatchNorm) for x in read)


def _layer(node: fx.Node) -> nn.Module | None:
    """Return the layer that computes what the node's function does; None if its arguments are computed."""
    function = _FUNCTIONS[node.target]
    options = {**dict(zip(("input", *function.arguments), node.args, strict=False)), **node.kwargs}
    options.pop("input", None)
    given = {name: options.pop(name, None) for name in function.weights}
    computed: list[fx.Node] = []
    fx.node.map_arg(options, computed.append)
    weights = {name: stored_tensor(value) for name, value in given.items()}
    foreign = any(value is not None and not isinstance(weights[name], Tensor) for name, value in given.items())
    return None if computed or foreign else function.build(_Call(weights, options, len(node.meta["shape"])))


def _with(layer: Any, call: _Call) -> nn.Module:
    for name, value in call.weights.items():
        if value is not None:
            setattr(layer, name, value)
    return layer


def _convolution(call: _Call) -> nn.Module | None:
    weight, options = call.weights["weight"], dict(call.options)
    if not isinstance(weight, nn.Parameter):
        return None
    out, width, *size = weight.shape
    groups, kind = options.pop("groups", 1), (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
    layer = nn.utils.skip_init(kind, width * groups, out, tuple(size), groups=groups, bias=False, **options)
    return _with(layer, call)


def _linear(call: _Call) -> nn.Module | None:
    weight = call.weights["weight"]
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return None
    return _with(nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False), call)


def _layer_norm(call: _Call) -> nn.Module | None:
    weight, bias = call.weights["weight"], call.weights["bias"]
    plain = all(value is None or isinstance(value, nn.Parameter) for value in (weight, bias))
    if not plain or (weight is None and bias is not None):
        return None
    affine = {"elementwise_affine": weight is not None, "bias": bias is not None}
    return _with(nn.LayerNorm(call.options["normalized_shape"], call.options.get("eps", 1e-5), **affine), call)


def _group_norm(call: _Call) -> nn.Module | None:
    weight, bias = call.weights["weight"], call.weights["bias"]
    if not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter):
        return None
    return _with(nn.GroupNorm(call.options["num_groups"], len(weight), call.options.get("eps", 1e-5)), call)


def _batch_norm(call: _Call) -> nn.Module | None:
    mean, var, weight, bias = call.weights.values()
    if mean is None or var is None or (weight is None) != (bias is None):
        return None
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(call.dims)
    if kind is None or call.options.get("training", False) is not False:
        return None
    momentum, eps = call.options.get("momentum", 0.1), call.options.get("eps", 1e-5)
    if not all(isinstance(x, float | int) and math.isfinite(x) for x in (momentum, eps)):
        return None
    return _with(kind(len(mean), eps=eps, momentum=momentum, affine=weight is not None), call)


def _prelu(call: _Call) -> nn.Module | None:
    weight = call.weights["weight"]
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    return _with(nn.PReLU(len(weight)), call)


_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_CONVOLUTION = _Function(
    ("weight", "bias", "stride", "padding", "dilation", "groups"), ("weight", "bias"), _convolution
)
_NORM_WEIGHTS = ("running_mean", "running_var", "weight", "bias")
_FUNCTIONS: dict[Any, _Function] = {
    **dict.fromkeys(_CONVOLUTIONS, _CONVOLUTION),
    F.linear: _Function(("weight", "bias"), ("weight", "bias"), _linear),
    F.layer_norm: _Function(("normalized_shape", "weight", "bias", "eps"), ("weight", "bias"), _layer_norm),
    F.prelu: _Function(("weight",), ("weight",), _prelu),
    F.group_norm: _Function(("num_groups", "weight", "bias", "eps"), ("weight", "bias"), _group_norm),
    F.batch_norm: _Function((*_NORM_WEIGHTS, "training", "momentum", "eps"), _NORM_WEIGHTS, _batch_norm),
    F.avg_pool1d: _Function(_POOL, (), lambda call: nn.AvgPool1d(**call.options)),
    F.avg_pool2d: _Function(_POOL, (), lambda call: nn.AvgPool2d(**call.options)),
    F.avg_pool3d: _Function(_POOL, (), lambda call: nn.AvgPool3d(**call.options)),
}
