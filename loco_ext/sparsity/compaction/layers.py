"""Replacement of calls of torch's functions with a module's own weights by the corresponding layers.

Subclasses of torch's layers, such as a batch normalisation with an activation inside, are traced through: torch.fx only
sees a function and the weights that it is given.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from loco_ext.sparsity.compaction.places import put, unused

_CONVOLUTIONS: dict[Any, type[nn.Module]] = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_AVERAGE_POOLS: dict[Any, type[nn.Module]] = {
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
}
_CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_POOL_NAMES = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_NORM_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_LINEAR_NAMES = ("input", "weight", "bias")
_LAYER_NORM_NAMES = ("input", "normalized_shape", "weight", "bias", "eps")


def without_checks(traced: fx.GraphModule) -> None:
    """Remove assertions and their inputs that nothing else reads: they change no result, but read sizes."""
    for node in reversed(traced.graph.nodes):
        checks = node.op == "call_function" and node.target is torch._assert
        pure = node.op == "call_function" and node.target in (getattr, operator.eq, operator.ne, *_COMPARISONS)
        if not node.users and (checks or pure):
            traced.graph.erase_node(node)
    traced.recompile()


_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_, operator.not_)


def skip_foreign_identities(traced: fx.GraphModule) -> None:
    """Remove functions from other packages, which torch.fx does not trace, if they return their argument.

    An example is a function that drops whole samples in training and does nothing in eval mode.
    """
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and _is_foreign(node.target):
            given = _returned(node)
            if given is not None:
                node.replace_all_uses_with(given)
                traced.graph.erase_node(node)
    traced.recompile()


def _is_foreign(function: Any) -> bool:
    """Return whether this is a Python function that belongs to neither torch nor this package."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return inspect.isfunction(function) and package not in ("torch", "loco_ext")


def _returned(node: fx.Node) -> fx.Node | None:
    """Return the argument that the node's function returns unchanged; None if it does something else."""
    scratch = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(scratch)
    proxies: dict[fx.Node, Any] = {x: fx.Proxy(scratch.placeholder(x.name), tracer) for x in node.all_input_nodes}
    function: Any = node.target
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
        result = function(*args, **kwargs)
    except Exception:  # it may raise anything when it is given proxies
        return None
    made_nothing = len(scratch.nodes) == len(proxies)
    return next((x for x, proxy in proxies.items() if result is proxy and made_nothing), None)


def as_layers(traced: fx.GraphModule, model: nn.Module) -> None:
    """Replace each function that is the only reader of a module's own weights, or that pools, by a layer.

    A batch normalisation only replaces the function of a module that normalises by its batch in training, as subclasses
    of torch's batch normalisations do.

    Args:
        traced: graph whose nodes have the shapes of their results in their meta.
        model: the model that the graph belongs to.
    """
    readers = Counter(
        str(read.target) for node in traced.graph.nodes for read in node.all_input_nodes if read.op == "get_attr"
    )
    owners = Counter(id(p) for m in set(traced.modules()) for p in m.parameters(recurse=False))
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or "shape" not in node.meta:
            continue
        layer = _layer(traced, node)
        if isinstance(layer, _BatchNorm) and not _normalises(model, node):
            continue
        read = [x for x in node.all_input_nodes if x.op == "get_attr"]
        alone = all(readers[str(x.target)] == 1 == len(x.users) for x in read)
        single = layer is not None and all(owners[id(p)] == 1 for p in layer.parameters())
        if layer is None or not alone or not single:
            continue
        owner = str(read[0].target).rpartition(".")[0] if read else ""
        calls = {str(x.target).rpartition(".")[0] for x in traced.graph.nodes if x.op == "call_module"}
        inside = any(f"{call}.".startswith(f"{owner}.") for call in calls)
        name = unused(traced, f"{owner}.layer" if owner else node.name) if inside or not owner else owner
        for x in read:
            place, _, attribute = str(x.target).rpartition(".")
            delattr(traced.get_submodule(place), attribute)
        put(traced, name, layer.eval())
        source = node.kwargs.get("input", node.args[0] if node.args else None)
        with traced.graph.inserting_before(node):
            called = traced.graph.call_module(name, (source,))
        called.meta = dict(node.meta)
        node.replace_all_uses_with(called)
        traced.graph.erase_node(node)
        for x in read:
            traced.graph.erase_node(x)
    traced.recompile()


def _normalises(model: nn.Module, node: fx.Node) -> bool:
    """Return whether all weights that the node reads belong to batch normalisations."""
    owners = {str(x.target).rpartition(".")[0] for x in node.all_input_nodes if x.op == "get_attr"}
    return all(isinstance(model.get_submodule(owner), _BatchNorm) for owner in owners)


def _layer(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    if node.target in _CONVOLUTIONS:
        return _convolution(traced, node, _CONVOLUTIONS[node.target])
    if node.target is F.batch_norm:
        return _norm(traced, node)
    if node.target is F.linear:
        return _linear(traced, node)
    if node.target is F.layer_norm:
        return _layer_norm(traced, node)
    if node.target in _AVERAGE_POOLS:
        given = _given(node, _POOL_NAMES)
        given.pop("input", None)
        return _AVERAGE_POOLS[node.target](**given) if _is_plain(given) else None
    return None


def _given(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_plain(given: Mapping[str, Any]) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(dict(given), found.append)
    return not found


def _tensor(traced: fx.GraphModule, value: Any) -> Tensor | None:
    """Return the parameter or buffer that the node reads."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    return getattr(traced.get_submodule(owner), name)


def _weights(traced: fx.GraphModule, given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Tensor | None] | None:
    """Remove the arguments of these names from ``given`` and return them; None if one is not a module's own tensor."""
    found: dict[str, Tensor | None] = {}
    for name in names:
        value = given.pop(name, None)
        found[name] = _tensor(traced, value)
        if value is not None and not isinstance(found[name], Tensor):
            return None
    return found


def _convolution(traced: fx.GraphModule, node: fx.Node, kind: Callable[..., nn.Module]) -> nn.Module | None:
    given = _given(node, _CONVOLUTION_NAMES)
    weights = _weights(traced, given, ("weight", "bias"))
    given.pop("input", None)
    if weights is None or not isinstance(weights["weight"], nn.Parameter) or not _is_plain(given):
        return None
    out, width, *size = weights["weight"].shape
    groups = given.pop("groups", 1)
    layer = nn.utils.skip_init(kind, width * groups, out, tuple(size), groups=groups, bias=False, **given)
    return _with(layer, weights)


def _linear(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    given = _given(node, _LINEAR_NAMES)
    weights = _weights(traced, given, ("weight", "bias"))
    if weights is None or not isinstance(weights["weight"], nn.Parameter) or weights["weight"].dim() != 2:
        return None
    out, width = weights["weight"].shape
    return _with(nn.utils.skip_init(nn.Linear, width, out, bias=False), weights)


def _layer_norm(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    given = _given(node, _LAYER_NORM_NAMES)
    weights = _weights(traced, given, ("weight", "bias"))
    given.pop("input", None)
    if weights is None or (weights["weight"] is None and weights["bias"] is not None) or not _is_plain(given):
        return None
    if not all(value is None or isinstance(value, nn.Parameter) for value in weights.values()):
        return None
    affine, bias = weights["weight"] is not None, weights["bias"] is not None
    layer = nn.LayerNorm(given["normalized_shape"], given.get("eps", 1e-5), elementwise_affine=affine, bias=bias)
    return _with(layer, weights)


def _norm(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    given = _given(node, _NORM_NAMES)
    weights = _weights(traced, given, ("running_mean", "running_var", "weight", "bias"))
    given.pop("input", None)
    if weights is None or weights["running_mean"] is None or weights["running_var"] is None:
        return None
    if given.pop("training", False) is not False or not _is_plain(given) or len(node.meta["shape"]) not in _NORMS:
        return None
    if (weights["weight"] is None) != (weights["bias"] is None):
        return None
    affine = weights["weight"] is not None
    momentum, eps = given.get("momentum", 0.1), given.get("eps", 1e-5)
    if not all(isinstance(x, float | int) and math.isfinite(x) for x in (momentum, eps)):
        return None
    kind = _NORMS[len(node.meta["shape"])]
    layer = kind(len(weights["running_mean"]), eps=eps, momentum=momentum, affine=affine)
    return _with(layer, weights)


def _with(layer: Any, weights: Mapping[str, Tensor | None]) -> nn.Module:
    for name, value in weights.items():
        if value is not None:
            setattr(layer, name, value)
    return layer
