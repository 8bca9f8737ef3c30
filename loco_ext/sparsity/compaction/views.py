"""Views, spelled so that they say which axes they leave alone.

Code such as ``gate.view(n, c, 1, 1)`` and ``x * gate.expand_as(x)`` names the number of channels without need, so that
none could be removed.
"""

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from loco_ext.fx.branches import same_as_on_example
from loco_ext.fx.operations import ARITHMETIC, axes_in_order, become, erase_unread, operation, places
from loco_ext.fx.sizes import Inference, asked_sizes, unchanged_axes

ROWS = "a view by rows"  # of a number of features; its checks name it
_SPLITTING = ("view", "unflatten")


def spell_out_views(graph: fx.GraphModule) -> None:
    """Replace views by functions that add, join or split axes or shuffle channels; remove what arithmetic does itself.

    Args:
        graph: graph whose nodes have the shapes of their results in their meta.
    """
    for node in graph.graph.find_nodes(op="call_function", target=operator.getitem):
        _add_axes(node, _added_by_index(node))
    sizes = Inference(graph)
    for node in list(graph.graph.nodes):
        name = operation(node)
        if name in _SPLITTING and node.args[:1] and node.args[0] in sizes.sizes:
            shuffled, source = _shuffled(node, sizes), node.args[0]
            if shuffled is None:
                _spell_out(node, sizes, name)
                _flatten_as_on_example(node, sizes)
            else:
                become(node, torch.channel_shuffle, *shuffled)
                erase_unread(source)
        elif name in ARITHMETIC:
            for x in node.all_input_nodes:
                others = [y for y in node.all_input_nodes if y is not x and y in sizes.sizes]
                is_expanded = operation(x) in ("expand", "expandas")
                if is_expanded and any(sizes.same(x, y) for y in others):
                    node.replace_input_with(x, x.args[0])
                    erase_unread(x)
    graph.recompile()


def _spell_out(node: fx.Node, inference: Inference, name: str) -> None:
    """Replace a view by the function that adds, joins or splits its axes, if it does one of these at all sizes."""
    source: Any = node.args[0]
    old, new = inference.sizes[source], inference.sizes[node]
    start, behind = unchanged_axes(old, new)
    joined, split = len(old) - start - behind, len(new) - start - behind
    if joined == 0 and all(size.number == 1 for size in new[start : start + split]):
        _add_axes(node, list(range(start, start + split)))
    elif name == "view" and split == 0 < start:  # all that are joined are 1
        become(node, torch.flatten, source, start - 1, start + joined - 1)
    elif name == "view" and split == 1 and joined > 1:
        become(node, torch.flatten, source, start, start + joined - 1)
    elif name == "view" and joined == 1 and split > 1 and len(asked := asked_sizes(node.args[1:])) == len(new):
        become(node, torch.unflatten, source, start, tuple(asked[start : start + split]))


def _flatten_as_on_example(node: fx.Node, sizes: Inference) -> None:
    """Replace a view such as ``images.view(-1, 400)`` by a flattening, if its rows are samples on the example.

    For images of other sizes, rows may be parts of samples, or have several; the graph refuses these images.
    """
    source: Any = node.args[0]
    shape, asked = source.meta["shape"], asked_sizes(node.args[1:])
    flattened = len(shape) > 2 and node.meta["shape"] == (shape[0], prod(shape[1:]))
    if operation(node) != "view" or node.kwargs or not flattened or asked[0] != -1:
        return
    if sizes.number(source, 1) is None:
        return  # axis 1 may not be one of channels, whose number needs no check
    if isinstance(asked[1], fx.Node) and not _is_of_a_sample(asked[1], source):
        return  # another tensor, or the number of samples, may change it
    where = ROWS if isinstance(asked[1], int) else "the model"
    with node.graph.inserting_before(node):
        for axis, number in enumerate(shape[2:], 2):
            size = node.graph.call_method("size", (source, axis))
            node.graph.call_function(same_as_on_example, (size, number, where))
    become(node, torch.flatten, source, 1)


def _is_of_a_sample(number: fx.Node, source: fx.Node) -> bool:
    """Return whether functions compute a number from one tensor alone, but not from how many samples it has."""
    (whole, place, *_), rank = (*number.args, None, None), len(source.meta["shape"])
    if whole is source and number.target == "size":
        return isinstance(place, int) and place % rank != 0
    if whole is source and number.target is operator.getitem:
        return isinstance(place, int)
    sizes = isinstance(whole, fx.Node) and whole.target in ("size", getattr) and whole.args[0] is source
    if sizes and number.target is operator.getitem:
        return 0 not in places(place, rank)
    above = number.all_input_nodes
    return bool(above) and source not in above and all(_is_of_a_sample(x, source) for x in above)


def _shuffled(node: fx.Node, sizes: Inference) -> tuple[fx.Node, int] | None:
    """Return the image whose channels the node shuffles, and in how many groups; None if it does anything else.

    Such code splits the channels in groups, transposes these, and joins the axes again.
    """
    transposed: Any = node.args[0]
    if operation(transposed) == "contiguous":
        transposed = transposed.args[0]
    order = axes_in_order(transposed)
    if order[:3] != [0, 2, 1] or order[3:] != list(range(3, len(order))):
        return None
    split: Any = transposed.args[0]
    image: Any = split.args[0]
    if operation(split) not in _SPLITTING or image not in sizes.sizes or not sizes.same(image, node):
        return None
    (batch, channels, *behind), (_, groups, each, *_) = sizes.sizes[image], sizes.sizes[split]
    if sizes.sizes[split] != (batch, groups, each, *behind) or groups.number is None or each.number is None:
        return None
    return (image, groups.number) if channels.number == groups.number * each.number else None


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


def _add_axes(node: fx.Node, axes: list[int]) -> None:
    """Make the node add these axes of length 1 to its first argument, given in ascending order, if there are any."""
    for axis in axes[:-1]:
        source: Any = node.args[0]
        shape = source.meta["shape"]
        with node.graph.inserting_before(node):
            longer = node.graph.call_function(torch.unsqueeze, (source, axis))
        longer.meta = {**node.meta, "shape": (*shape[:axis], 1, *shape[axis:])}
        node.args = longer, *node.args[1:]
    if axes:
        become(node, torch.unsqueeze, node.args[0], axes[-1])
