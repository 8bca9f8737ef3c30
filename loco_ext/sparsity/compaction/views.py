"""Views, spelled so that they say which axes they leave alone.

Code such as ``gate.view(n, c, 1, 1)`` and ``x * gate.expand_as(x)`` names the number of channels without need, so that
none could be removed.
"""

import operator
from typing import Any

import torch
from torch import fx

from loco_ext.fx.operations import ARITHMETIC, operation
from loco_ext.fx.sizes import Inference, asked_sizes, unchanged_axes


def spell_out_views(graph: fx.GraphModule) -> None:
    """Replace views by functions that add, join or split axes, and what arithmetic would broadcast by itself.

    Args:
        graph: graph whose nodes have the shapes of their results in their meta.
    """
    for node in graph.graph.find_nodes(op="call_function", target=operator.getitem):
        _add_axes(graph, node, _added_by_index(node))
    modules, sizes = dict(graph.named_modules()), Inference(graph)
    for node in list(graph.graph.nodes):
        name = operation(node, modules)
        if name in ("view", "unflatten") and node.args[:1] and node.args[0] in sizes.sizes:
            _spell_out(graph, node, sizes, name)
        elif name in ARITHMETIC:
            for x in node.all_input_nodes:
                others = [y for y in node.all_input_nodes if y is not x and y in sizes.sizes]
                is_expanded = operation(x, modules) in ("expand", "expandas")
                if is_expanded and any(sizes.same(x, y) for y in others):
                    node.replace_input_with(x, x.args[0])
                    if not x.users:
                        graph.graph.erase_node(x)
    graph.recompile()


def _spell_out(graph: fx.GraphModule, node: fx.Node, inference: Inference, name: str) -> None:
    """Replace a view by the function that adds, joins or splits its axes, if it does one of these at all sizes."""
    source: Any = node.args[0]
    old, new = inference.of(source), inference.of(node)
    start, behind = unchanged_axes(old, new)
    joined, split = len(old) - start - behind, len(new) - start - behind
    if joined == 0 and all(size.number == 1 for size in new[start : start + split]):
        _add_axes(graph, node, list(range(start, start + split)))
    elif name == "view" and split == 0 < start:  # all that are joined are 1
        _become(node, torch.flatten, source, start - 1, start + joined - 1)
    elif name == "view" and split == 1 and joined > 1:
        _become(node, torch.flatten, source, start, start + joined - 1)
    elif name == "view" and joined == 1 and split > 1 and len(asked := asked_sizes(node.args[1:])) == len(new):
        _become(node, torch.unflatten, source, start, tuple(asked[start : start + split]))


def _added_by_index(node: fx.Node) -> list[int]:
    """Return the axes of length 1 that the index adds to the whole tensor; [] if it does anything else."""
    source: Any = node.args[0]
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if "shape" not in source.meta or not all(part in (None, ..., slice(None)) for part in index):
        return []
    axis, added = 0, []
    for part in index:
        if part is None:
            added.append(axis)
        axis += 1 if part is not ... else len(source.meta["shape"]) - index.count(slice(None))
    return added


def _add_axes(graph: fx.GraphModule, node: fx.Node, axes: list[int]) -> None:
    """Make the node add these axes of length 1 to its first argument, given in ascending order, if there are any."""
    for axis in axes[:-1]:
        source: Any = node.args[0]
        shape = source.meta["shape"]
        with graph.graph.inserting_before(node):
            longer = graph.graph.call_function(torch.unsqueeze, (source, axis))
        longer.meta = {**node.meta, "shape": (*shape[:axis], 1, *shape[axis:])}
        node.args = longer, *node.args[1:]
    if axes:
        _become(node, torch.unsqueeze, node.args[0], axes[-1])


def _become(node: fx.Node, function: Any, *args: Any) -> None:
    node.op, node.target, node.args, node.kwargs = "call_function", function, args, {}
