"""Fusion of sums and ReLUs into the convolutions of mixed sizes before them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from loco_ext.fx.modules import is_hooked
from loco_ext.fx.operations import is_sum, only_user, operation
from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.sparsity.compaction.roles import CONVOLUTIONS

MATCHING_TERMS = "matching_terms"  # key in a sum's meta: positions of the terms that have its shape and dtype


@dataclass(frozen=True)
class Epilogue:
    """The only readers of a convolution's result: a sum with a tensor like it, a ReLU, or a ReLU after the sum."""

    sum: bool = False
    relu: bool = False


def epilogue_of(layer: fx.Node, modules: dict[str, nn.Module]) -> Epilogue:
    """Return the operations that follow the layer in a traced graph; if two layers are added, the first has the sum."""
    user = only_user(layer)
    added = user is not None and is_sum(user, modules) and _are_alike(user.args)
    if user is not None and added:
        if next((term for term in user.args if _is_layer(term, modules)), None) is not layer:
            return Epilogue()
        user = only_user(user)
    return Epilogue(added, user is not None and is_relu(user, modules))


def append(network: fx.GraphModule, epilogue: Epilogue) -> None:
    """Append the epilogue to the network's only result, that of a convolution; a sum adds a second argument."""
    graph = network.graph
    output = next(node for node in graph.nodes if node.op == "output")
    result: Any = output.args[0]
    with graph.inserting_before(output):
        if epilogue.sum:
            with graph.inserting_before(next(iter(graph.nodes)).next):
                other = graph.placeholder("other")
            result = graph.call_function(torch.add, (result, other))
            result.meta[MATCHING_TERMS] = (0, 1)
        if epilogue.relu:
            result = graph.call_function(torch.relu, (result,))
    output.args = (result,)


def fuse(network: fx.GraphModule) -> None:
    """Fuse what follows convolutions of mixed sizes into them."""
    modules = dict(network.named_modules())
    for node in list(network.graph.nodes):
        if is_sum(node, modules) and node.meta.get(MATCHING_TERMS) == (0, 1) and node.args[0] is not node.args[1]:
            _fuse_sum(node)
    for node in list(network.graph.nodes):
        user = only_user(node)
        if node.target is mixed_conv2d and user is not None and is_relu(user, modules):
            node.kwargs = {**node.kwargs, "relu": True}
            user.replace_all_uses_with(node)
            network.graph.erase_node(user)


def _fuse_sum(node: fx.Node) -> None:
    """Fuse a sum into a layer that is one of its terms, at the place of the sum, where the other term is available."""
    place = next((place for place in (0, 1) if _can_add(node.args[place])), None)
    if place is None:
        return
    layer: Any = node.args[place]
    node.prepend(layer)
    layer.kwargs = {**layer.kwargs, "add": node.args[1 - place]}
    node.replace_all_uses_with(layer)
    node.graph.erase_node(node)


def _can_add(layer: Any) -> bool:
    """Return whether this is a convolution without an epilogue yet, and with a single reader."""
    if not isinstance(layer, fx.Node) or layer.target is not mixed_conv2d or only_user(layer) is None:
        return False
    return layer.kwargs.get("add") is None and not layer.kwargs.get("relu")


def _are_alike(terms: tuple[Any, ...]) -> bool:
    """Return whether all terms are tensors of one shape and dtype."""
    kinds = {(term.meta.get("shape"), term.meta.get("dtype")) if isinstance(term, fx.Node) else None for term in terms}
    return len(kinds) == 1 and None not in kinds


def _is_layer(node: Any, modules: dict[str, nn.Module]) -> bool:
    """Return whether this is a convolution whose result has a single reader."""
    return node.op == "call_module" and type(modules[str(node.target)]) in CONVOLUTIONS and len(node.users) == 1


def is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the node only computes a ReLU, in place or not."""
    if operation(node, modules) != "relu" or len(node.args) != 1:
        return False
    return node.op != "call_module" or not is_hooked(modules[str(node.target)])
