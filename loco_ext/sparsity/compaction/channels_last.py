"""Conversion of images to channels_last memory format inside a network, whatever the format of its inputs."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from loco_ext.ops.memory_format import FORMATS
from loco_ext.sparsity.compaction.graph import record
from loco_ext.sparsity.compaction.roles import GraphInfo, Role


def in_channels_last(model: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule | None:
    """Return a copy of the graph that converts images once at the input; None if no image needs a conversion.

    Operations that are not known to support every memory format, and the caller, get images in their original format.
    An image with one channel is converted where an operation produces more channels from it, since earlier operations
    may lose the format.
    """
    result = copy.deepcopy(model)
    info = GraphInfo(result)
    strict = (Role.OTHER, Role.FLATTEN)  # these include views
    known = {
        node: info.nodes[node].role not in strict and "memory_format" not in node.kwargs for node in result.graph.nodes
    }
    images = [
        node
        for node in known
        if len(node.meta.get("shape", ())) in FORMATS and node.op != "get_attr" and info.axis(node) == 1
    ]
    converted = False
    for node in images:
        single = node.meta["shape"][1] == 1
        if (single or not known[node]) and not node.meta["channels_last"]:
            several = [user for user in node.users if not (single and user.meta.get("shape", ())[1:2] == (1,))]
            users = [user for user in several if known[user]]
            converted |= _convert(node, users, FORMATS[len(node.meta["shape"])])
    if not converted:
        return None
    for node in images:
        if known[node] and not node.meta["channels_last"]:
            _convert(node, [user for user in node.users if not known.get(user, True)], torch.contiguous_format)
    result.recompile()
    record(result, example_inputs)
    return result


def _convert(node: fx.Node, users: Sequence[fx.Node], memory_format: torch.memory_format) -> bool:
    """Make these users of the node read it in another format; return whether there are any."""
    if users:
        with node.graph.inserting_after(node):
            # clone() also converts tensors with one channel or one pixel, whose strides .contiguous() keeps.
            converted = node.graph.call_method("clone", (node,), {"memory_format": memory_format})
        for user in users:
            user.replace_input_with(node, converted)
    return bool(users)
