"""Tracing of a model with torch.fx to a graph in which every value is one node, in-place operations included."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from loco_ext.ops.memory_format import is_channels_last
from loco_ext.sparsity.compaction.layers import as_layers, skip_foreign_identities, without_checks


class UntraceableError(Exception):
    """No graph equivalent to the model could be made; the message says why."""


class _Tracer(fx.Tracer):
    """Tracer that treats modules with hooks as leaves: hooks would be called with proxies, once, and then be lost."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooked = bool(m._forward_hooks or m._forward_pre_hooks)
        return hooked or super().is_leaf_module(m, module_qualified_name)


class _Recorder(fx.Interpreter):
    """Interpreter that runs the graph once and records the kind of each node's tensor in its meta."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta.update(kind_of(result))
        return result


def kind_of(x: Tensor) -> dict[str, Any]:
    """Return the properties of a tensor that determine the speed of operations on it, for a node's meta."""
    return {"shape": tuple(x.shape), "dtype": x.dtype, "device": x.device, "channels_last": is_channels_last(x)}


def trace(model: nn.Module, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph of a copy of the model in eval mode, with the shape of every node on the example.

    After an operation has changed a value in place, readers of the value read that operation's result. Arguments that
    the example omits keep their defaults; defaults that are None, bool or str become constants.

    Raises:
        UntraceableError: the model's forward depends on values, the model has hooks, or it changes a view in place.
    """
    if model._forward_hooks or model._forward_pre_hooks:
        raise UntraceableError("the model has forward hooks")
    root = copy.deepcopy(model).eval()
    if type(root).__module__.startswith("torch.nn") and not isinstance(root, nn.Sequential):
        root = nn.Sequential(root)  # torch.fx would trace inside a single layer
    try:
        defaults = _defaults(root, len(example_inputs))
        traced = fx.GraphModule(root, _Tracer().trace(root, defaults))
    except Exception as error:  # the model's own code may raise anything when it is given proxies
        raise UntraceableError(f"torch.fx cannot trace it: {_first_line(error)}") from error
    _forget(traced, defaults)
    without_checks(traced)
    skip_foreign_identities(traced)
    _skip_identities(traced)
    _see_through_in_place(traced)
    try:
        record(traced, example_inputs)
        as_layers(traced, root)
    except Exception as error:  # the graph lacks choices of the model's own code and may raise anything
        raise UntraceableError(f"the graph that torch.fx makes of it does not run: {_first_line(error)}") from error
    return traced


def record(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Record in every node's meta the kind of tensor that it gives on the example."""
    with torch.no_grad():
        _Recorder(traced).run(*[x.clone() if isinstance(x, Tensor) else x for x in example_inputs])


def _defaults(root: nn.Module, given: int) -> dict[str, Any]:
    """Return the defaults, on which code may branch, of arguments that the example omits."""
    parameters = list(inspect.signature(root.forward).parameters.values())[given:]
    return {p.name: p.default for p in parameters if p.default is None or isinstance(p.default, bool | str)}


def _forget(traced: fx.GraphModule, arguments: Iterable[str]) -> None:
    """Remove arguments that the graph does not read, and the checks that torch.fx adds for their values."""
    names = {f"{name}_1" for name in arguments}
    gone: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        if (node.op == "placeholder" and node.target in names) or any(x in gone for x in node.all_input_nodes):
            gone[node] = None
    for node in reversed(gone):
        traced.graph.erase_node(node)
    traced.recompile()


def _skip_identities(traced: fx.GraphModule) -> None:
    """Remove identities, so that the layers and ReLUs around them are adjacent."""
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        module = modules[str(node.target)] if node.op == "call_module" else None
        if type(module) is nn.Identity and not is_hooked(module) and len(node.args) == 1 and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.recompile()


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than compute its result."""
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or backward)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_IN_PLACE_FUNCTIONS = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_WHOLE_ALIASES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Functions and methods that return new tensors; all others may return their argument or a view of it.
_NEW = {
    *("add", "sub", "mul", "div", "truediv", "cat", "concat", "mean", "sum", "clone", "relu", "relu6", "leaky_relu"),
    *("elu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softmax", "log_softmax", "matmul"),
    *(
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "avg_pool2d",
        "max_pool2d",
        "boolean_dispatch",
    ),
    *(
        "conv1d",
        "conv2d",
        "conv3d",
        "linear",
        "batch_norm",
        "interpolate",
        "pad",
        "index_add",
        "index_select",
        "take_channels",
        "mixed_conv2d",
        "layer_norm_with_constants",
    ),
}


def is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the node writes to its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    return node.target in _IN_PLACE_FUNCTIONS or bool(node.kwargs.get("inplace")) or named


def _see_through_in_place(traced: fx.GraphModule) -> None:
    """Make readers of a value after an in-place operation on it read the result of that operation."""
    modules = dict(traced.named_modules())
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    memory: dict[fx.Node, list[fx.Node]] = {}  # nodes that may share memory with each node, including itself
    for node in traced.graph.nodes:
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = is_in_place(node, modules)
        if node.kwargs.get("out") is not None:
            raise UntraceableError(f"{node.name} writes to its argument `out`")
        if first is None or not (writes or may_alias(node, modules)):
            if writes:
                raise UntraceableError(f"{node.name} writes to something that is not its first argument")
            memory[node] = [node]
            continue
        if writes:
            for other in memory[first]:
                later = [user for user in other.users if order[user] > order[node]]
                if later and not _same_values(other, first, modules):
                    raise UntraceableError(f"{node.name} changes a view of {other.name} in place, which is read later")
                for user in later:
                    user.replace_input_with(other, node)
        memory[first].append(node)
        memory[node] = memory[first]


def may_alias(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the node may return its first argument or a view of it."""
    if node.op == "call_module":
        return _is_whole_alias(node, modules) or isinstance(modules[str(node.target)], nn.Flatten | nn.Unflatten)
    if node.op == "call_method":
        return node.target not in _NEW
    return node.op == "call_function" and getattr(node.target, "__name__", "") not in _NEW


def _is_whole_alias(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the node may return its argument itself."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _WHOLE_ALIASES)
    if node.op == "call_method":
        return node.target in ("contiguous", "detach", "to")
    return node.op == "call_function" and getattr(node.target, "__name__", "").endswith("dropout")


def _same_values(one: fx.Node, other: fx.Node, modules: dict[str, nn.Module]) -> bool:
    def source(node: fx.Node) -> fx.Node:
        while _is_whole_alias(node, modules) or is_in_place(node, modules):
            node = node.args[0]  # type: ignore[assignment]
        return node

    return source(one) is source(other)
