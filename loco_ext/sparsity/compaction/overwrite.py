"""The last pass over a smaller network: the choice of what runs in place."""

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from loco_ext.fx.in_place import is_in_place, make_out_of_place
from loco_ext.fx.modules import is_hooked
from loco_ext.fx.operations import module_of, operation
from loco_ext.ops.channels import take_channels
from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.sparsity.compaction.roles import BATCH_NORMS, CONVOLUTIONS

MATCHING_TERMS = "matching_terms"  # key in a sum's meta: positions of the terms that have its shape and dtype
# Operations that compute their gradient without their result, so that it can be overwritten.
_LAYERS = (*CONVOLUTIONS, *BATCH_NORMS, nn.Linear)
_FUNCTIONS = (operator.add, operator.iadd, torch.add, torch.cat, take_channels, mixed_conv2d)


def finish(network: fx.GraphModule) -> None:
    """Make sums and ReLUs overwrite the results of layers and sums that have no other reader, and nothing else.

    Most of their time goes into fresh memory, which is not in the processor's caches and may not even be mapped yet.
    """
    make_out_of_place(network)
    calls: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in network.graph.nodes:
        if node.op != "call_module" and is_in_place(node):
            continue
        name = operation(node)
        if node.op == "call_function" and name == "add" and len(node.args) == 2 and not node.kwargs:
            free = [place for place in node.meta.get(MATCHING_TERMS, ()) if _is_free(node.args[place])]
            if free:
                place = free[0]
                node.target, node.args = operator.iadd, (node.args[place], node.args[1 - place])
        elif _is_relu(node) and node.op == "call_module":
            calls[module_of(node)].append(node)
        elif _is_relu(node) and _is_free(node.args[0]):
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu_, node.args[:1], {}
    for module, nodes in calls.items():
        module.inplace = module.inplace or all(_is_free(node.args[0]) for node in nodes)
    network.recompile()


def _is_free(source: Any) -> bool:
    """Return whether the node's only reader may overwrite its result."""
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return False
    if (module := module_of(source)) is not None:
        return type(module) in _LAYERS and not is_hooked(module)
    return source.target in _FUNCTIONS and not source.kwargs.get("relu")


def _is_relu(node: fx.Node) -> bool:
    """Return whether the node only computes a ReLU, in place or not."""
    if operation(node) != "relu" or len(node.args) != 1:
        return False
    return node.op != "call_module" or not is_hooked(module_of(node))
