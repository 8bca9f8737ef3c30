"""Operations that code writes in several ways, in the one that has a role.

For example, ``x.max(2)[0]`` is ``x.amax(2)``, ``torch.stack(images).sum(0)`` adds images, and a concatenation with
zeros is a padding. Numbers of channels that code reads, as in ``F.pad(x, (0, 0, 0, 0, 0, 64 - x.shape[1]))``, are
constants.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from loco_ext.fx.branches import same_as_on_example
from loco_ext.fx.operations import CASTS, argument, become, erase_unread, operation
from loco_ext.fx.sizes import Inference, Size, asked_sizes

_EXTREMA: dict[str, tuple[Any, Any]] = {"max": (torch.amax, torch.maximum), "min": (torch.amin, torch.minimum)}
_OF_STACKED: dict[str, Any] = {"sum": torch.add, "mean": torch.add, "amax": torch.maximum, "amin": torch.minimum}


def spell_out_operations(graph: fx.GraphModule) -> None:
    """Replace operations by others with the same results, and sizes that are the same for every input by numbers.

    Args:
        graph: graph whose nodes have the shapes of their results in their meta.
    """
    _fold_sizes(graph)
    for node in list(graph.graph.nodes):
        name = operation(node)
        if name in _EXTREMA and node.args:
            _spell_extremum(node, *_EXTREMA[name])
            name = operation(node)
        if name in _OF_STACKED:
            _combine_instead(node, name)
        elif name == "cat":
            _pad_instead(node)
        elif name == "maskedfill" and argument(node, 2, "value") == 0 and node.meta["dtype"].is_floating_point:
            become(node, torch.where, argument(node, 1, "mask"), 0, argument(node, 0, "input"))
        elif name == "addcmul" and len(node.args) == 3 and not node.kwargs:
            _multiply_and_add(node)
        elif name == "typeas":
            with graph.graph.inserting_before(node):
                node.args = node.args[0], graph.graph.call_function(getattr, (node.args[1], "dtype"))
            node.target = "to"
        elif name == "type" and (cast := _cast_of_type(node)):
            node.target, node.args, node.kwargs = "to", (node.args[0], *cast), {}
    graph.recompile()


def _fold_sizes(graph: fx.GraphModule) -> None:
    """Replace sizes, and what is computed from them, by numbers where they are the same for every input.

    Checks of branches keep what they compare.
    """
    sizes = Inference(graph, requirements=False).integers
    numbers = {node: size.number for node, size in sizes.items() if isinstance(size, Size) and size.number is not None}
    for user in {user: None for node in numbers for user in node.users}:
        if user.target is not same_as_on_example:
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda x: numbers.get(x, x))


def _spell_extremum(node: fx.Node, along: Any, of_two: Any) -> None:
    """Replace the largest numbers along an axis, if nothing reads their places, and those of two tensors.

    If several are the largest, all get a part of the gradient, and not one of them the whole.
    """
    first, dim, keepdim = node.args[0], argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    other = argument(node, 1, "other")
    if "shape" in node.meta and isinstance(other, fx.Node):
        become(node, of_two, first, other)
    elif isinstance(dim, int) and node.users and all(map(_reads_values, node.users)):
        become(node, along, first, dim, keepdim)
        for user in list(node.users):
            node.meta.update(user.meta)
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)


def _reads_values(user: fx.Node) -> bool:
    """Return whether a reader of a tuple of values and places takes only the values."""
    return user.target in (operator.getitem, getattr) and user.args[1:] in ((0,), ("values",))


def _combine_instead(node: fx.Node, name: str) -> None:
    """Replace the sum, mean or extremum of tensors that are stacked along a new axis by operations on two of them."""
    stacked: Any = node.args[0] if node.args else None
    if not isinstance(stacked, fx.Node) or operation(stacked) != "stack" or not stacked.args:
        return
    axis, gone = argument(stacked, 1, "dim", 0), argument(node, 1, "dim")
    gone = gone[0] if isinstance(gone, list | tuple) and len(gone) == 1 else gone
    shape, parts = stacked.meta["shape"], stacked.args[0]
    plain = isinstance(axis, int) and isinstance(gone, int) and set(node.kwargs) <= {"dim", "keepdim"}
    if not plain or (axis - gone) % len(shape) or argument(node, 2, "keepdim", False):
        return
    if not node.meta["dtype"].is_floating_point or not isinstance(parts, list | tuple) or len(parts) < 2:
        return
    total: Any = parts[0]
    calls = [(_OF_STACKED[name], part) for part in parts[1:]] + ([(torch.div, len(parts))] if name == "mean" else [])
    for function, part in calls:
        with node.graph.inserting_before(node):
            total = node.graph.call_function(function, (total, part))
        total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)
    erase_unread(stacked)


def _multiply_and_add(node: fx.Node) -> None:
    """Replace ``addcmul(total, one, other)`` by ``total + one * other``."""
    total, *factors = node.args
    with node.graph.inserting_before(node):
        product = node.graph.call_function(torch.mul, tuple(factors))
    shapes = (factor.meta["shape"] for factor in factors)  # type: ignore[union-attr]
    product.meta = {**node.meta, "shape": tuple(torch.broadcast_shapes(*shapes))}
    become(node, torch.add, total, product)


def _pad_instead(node: fx.Node) -> None:
    """Replace the concatenation of one tensor and zeros along axis 1 by a padding."""
    rank, parts = len(node.meta["shape"]), argument(node, 0, "tensors")
    if argument(node, 1, "dim", 0) not in (1, 1 - rank) or not isinstance(parts, list | tuple):
        return
    added: list[Any] = [_zeros(part) for part in parts]
    place = added.index(None) if added.count(None) == 1 else None
    if place is not None and parts[place].meta["dtype"] == node.meta["dtype"]:
        pads = [*[0] * (2 * rank - 4), sum(added[:place]), sum(added[place + 1 :])]
        become(node, F.pad, parts[place], pads)
        for part in dict.fromkeys(parts):
            erase_unread(part)


def _zeros(node: fx.Node) -> int | None:
    """Return how many channels of zeros, at axis 1, a node makes; None if it makes anything else."""
    while operation(node) in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    asked = asked_sizes(node.args[1:] if operation(node) == "newzeros" else node.args)
    made = operation(node) in ("newzeros", "zeros") and len(asked) > 1
    return asked[1] if made and isinstance(asked[1], int) else None


def _cast_of_type(node: fx.Node) -> list[Any]:
    """Return the arguments of Tensor.to that do the same as a call of Tensor.type; [] if that is no plain cast."""
    kind: Any = node.args[1] if len(node.args) == 2 else node.kwargs.get("dtype")
    # "torch.FloatTensor" is on the CPU; "torch.cuda.FloatTensor" is on the GPU that the tensor is on, if it is on one.
    if isinstance(kind, str) and kind.count(".") == 1:
        empty = torch.empty(0).type(kind)
        return [empty.device, empty.dtype]
    read = isinstance(kind, fx.Node) and kind.target is getattr and kind.args[1] == "dtype"
    return [kind] if read or isinstance(kind, torch.dtype) else []
