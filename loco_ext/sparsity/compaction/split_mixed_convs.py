"""Conversion of the mixed-size layers of an earlier compaction back to torch's convolutions."""

import copy
from typing import Any

import torch
from torch import fx, nn

from loco_ext.fx.modules import paddings
from loco_ext.fx.operations import owner_of
from loco_ext.ops.channels import take_channels
from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.sparsity.compaction.convolution import pad
from loco_ext.sparsity.compaction.roles import CONVOLUTIONS


def split_mixed_convs(model: nn.Module) -> nn.Module:
    """Return a copy in which one convolution per part replaces every ``mixed_conv2d`` that reads layers' weights."""
    result = copy.deepcopy(model)
    for module in result.modules():
        if isinstance(module, fx.GraphModule):
            _split(module)
    return result


def _split(network: fx.GraphModule) -> None:
    for node in list(network.graph.nodes):
        layers = _layers(network, node) if node.target is mixed_conv2d else None
        if layers is not None:
            with network.graph.inserting_before(node):
                node.replace_all_uses_with(_parts(network, node, layers))
    network.graph.eliminate_dead_code()
    network.recompile()


def _layers(root: nn.Module, node: fx.Node) -> list[str] | None:
    """Return the names of the layers whose weights and biases the call reads; None if it reads other tensors."""
    weights: Any = node.args[1]
    names = [owner_of(weight) for weight in weights]
    layers: list[Any] = [root.get_submodule(name) for name in names]
    if any(type(layer) not in CONVOLUTIONS for layer in layers):
        return None
    biases: Any = node.args[2]
    read = [f"{name}.bias" for name, layer in zip(names, layers, strict=True) if layer.bias is not None]
    return names if read == [bias.target for bias in biases] else None


def _parts(root: nn.Module, node: fx.Node, layers: list[str]) -> fx.Node:
    graph = node.graph
    arguments: Any = node.args
    source, _, _, pads, order = arguments
    parts = []
    for name, (top, bottom, left, right) in zip(layers, pads, strict=True):
        around, layer = ((top, bottom), (left, right)), root.get_submodule(name)
        seen = source if around == paddings(layer) else pad(graph, source, around, "zeros")
        parts.append(graph.call_module(name, (seen,)))
    result = parts[0] if len(parts) == 1 else graph.call_function(torch.cat, (parts, 1))
    if order is not None:
        result = graph.call_function(take_channels, (result, order))
    if node.kwargs.get("add") is not None:
        result = graph.call_function(torch.add, (result, node.kwargs["add"]))
    return graph.call_function(torch.relu, (result,)) if node.kwargs.get("relu") else result
