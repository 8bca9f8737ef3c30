"""Choice of the operations of a smaller network that run in place."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.sparsity.compaction.roles import BATCH_NORMS, CONVOLUTIONS
from loco_ext.sparsity.compaction.take import take_channels
from loco_ext.sparsity.compaction.trace import is_hooked, is_in_place, may_alias

_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


# Operations that compute their gradient without their result, so that it can be overwritten.
_LAYERS = (*CONVOLUTIONS, *BATCH_NORMS, nn.Linear)
_FUNCTIONS = (operator.add, operator.iadd, torch.add, torch.cat, take_channels, mixed_conv2d)


HOLDERS = "holders"  # key in a sum's meta: positions of the terms that have its shape and dtype


def own_what_is_written(network: fx.GraphModule) -> None:
    """Make in-place operations out-of-place if something else may read, or own, the memory that they write to."""
    modules = dict(network.named_modules())
    for node in network.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or not is_in_place(node, modules):
            continue
        if _owns(node, modules):
            continue
        if node.op == "call_module":
            module: Any = copy.copy(modules[str(node.target)])
            module.inplace = False
            node.target = f"{str(node.target).replace('.', '_')}_{node.name}"
            network.add_module(node.target, module)
        elif node.op == "call_method":
            node.target = str(node.target)[:-1]
        elif node.target in _OUT_OF_PLACE:
            node.target = _OUT_OF_PLACE[node.target]
        elif node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        else:
            node.target = getattr(torch, node.target.__name__[:-1])


def _owns(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether nothing else reads the memory that the node writes to."""
    source = node.args[0]
    while isinstance(source, fx.Node) and len(source.users) == 1 and source.op not in ("placeholder", "get_attr"):
        if not (may_alias(source, modules) or is_in_place(source, modules)):
            return True
        source = source.args[0]
    return False


def overwrite(network: fx.GraphModule) -> None:
    """Make sums and ReLUs overwrite the results of layers and sums that have no other reader.

    Most of their time goes into fresh memory, which is not in the processor's caches and may not even be mapped yet.
    """
    modules = dict(network.named_modules())
    calls: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in network.graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        if node.target in (operator.add, torch.add) and len(node.args) == 2 and not node.kwargs:
            _add_in_place(node, modules)
        elif type(module) is nn.ReLU and not is_hooked(module):
            calls[module].append(node)
        elif _is_relu(node) and _is_free(node.args[0], modules):
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu_, node.args[:1], {}
    for module, nodes in calls.items():
        module.inplace = module.inplace or all(_is_free(node.args[0], modules) for node in nodes)


def _add_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Make the sum overwrite a term that can hold it, if one may be overwritten."""
    place = next((place for place in node.meta.get(HOLDERS, ()) if _is_free(node.args[place], modules)), None)
    if place is not None:
        node.target, node.args = operator.iadd, (node.args[place], node.args[1 - place])


def _is_relu(node: fx.Node) -> bool:
    """Return whether the node calls a ReLU that is not a module and is out-of-place."""
    known = node.target in (F.relu, torch.relu) or (node.op == "call_method" and node.target == "relu")
    return known and len(node.args) == 1 and not node.kwargs.get("inplace")


def _is_free(source: Any, modules: dict[str, nn.Module]) -> bool:
    """Return whether the node's only reader may overwrite its result."""
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return False
    if source.op == "call_module":
        module = modules[str(source.target)]
        return type(module) in _LAYERS and not is_hooked(module)
    return source.target in _FUNCTIONS and not source.kwargs.get("relu")
