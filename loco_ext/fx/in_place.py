"""Operations that write to their first argument: which they are, and graphs that stay right without them."""

import copy
import operator

import torch
from torch import fx, nn

from loco_ext.fx.operations import RETURNING_NEW, module_of, operation, reads_numbers
from loco_ext.fx.trace import UntraceableError

_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_NAMED_LIKE_WRITES = (operator.and_, operator.or_, operator.not_, operator.is_)
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)  # in eval mode


def is_in_place(node: fx.Node) -> bool:
    """Return whether the node writes to its first argument."""
    if node.op not in ("call_method", "call_function"):
        return bool(getattr(module_of(node), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__") and node.target not in _NAMED_LIKE_WRITES
    return named or (node.op == "call_function" and (node.target in _OUT_OF_PLACE or bool(node.kwargs.get("inplace"))))


def may_alias(node: fx.Node) -> bool:
    """Return whether the node may return its first argument or a view of it."""
    if node.op not in ("call_method", "call_function"):
        return isinstance(module_of(node), (*_IDENTITIES, nn.Flatten, nn.Unflatten))
    return is_in_place(node) or operation(node) not in RETURNING_NEW


def read_results_of_writes(graph: fx.GraphModule) -> None:
    """Make readers of a value after an in-place operation on it read the result of that operation.

    Raises:
        UntraceableError: an operation writes to something else, or to what may be a view of a value that is read later.
    """
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    sharing: dict[fx.Node, list[fx.Node]] = {}  # nodes that may share memory with each node, including itself
    for node in graph.graph.nodes:
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = is_in_place(node)
        if node.kwargs.get("out") is not None:
            raise UntraceableError(f"{node.name} writes to its argument `out`")
        if first is None or not (writes or may_alias(node)):
            if writes:
                raise UntraceableError(f"{node.name} writes to something that is not its first argument")
            sharing[node] = [node]
            continue
        if writes:
            for other in sharing[first]:
                later = [user for user in other.users if order[user] > order[node] and reads_numbers(user)]
                if later and _origin(other) is not _origin(first):
                    raise UntraceableError(
                        f"{node.name} changes {first.name} in place, which may be a view of {other.name}, read later"
                    )
                for user in later:
                    user.replace_input_with(other, node)
        sharing[first].append(node)
        sharing[node] = sharing[first]


def _origin(node: fx.Node) -> fx.Node:
    """Return the node whose whole result this one returns, perhaps after writing to it."""
    while _returns_argument(node) or is_in_place(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _returns_argument(node: fx.Node) -> bool:
    if node.op == "call_function":
        return getattr(node.target, "__name__", "").endswith("dropout")
    return isinstance(module_of(node), _IDENTITIES) or (node.op == "call_method" and node.target == "detach")


def make_out_of_place(graph: fx.GraphModule) -> None:
    """Replace in-place operations whose memory something else may read, or own, by those that return a new tensor."""
    for node in graph.graph.nodes:
        if not is_in_place(node) or _owns_memory(node):
            continue
        if node.op == "call_module":
            module = copy.copy(module_of(node))
            module.inplace = False
            node.target = f"{str(node.target).replace('.', '_')}_{node.name}"
            graph.add_module(node.target, module)
        elif node.op == "call_method":
            node.target = str(node.target)[:-1]
        elif node.target in _OUT_OF_PLACE:
            node.target = _OUT_OF_PLACE[node.target]
        elif node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        else:
            name = node.target.__name__[:-1]
            node.target = getattr(torch, name, None) or getattr(nn.functional, name)


def _owns_memory(node: fx.Node) -> bool:
    """Return whether nothing else reads the memory that the node writes to."""
    source = node.args[0]
    while isinstance(source, fx.Node) and len(source.users) == 1 and source.op not in ("placeholder", "get_attr"):
        if not (may_alias(source) or is_in_place(source)):
            return True
        source = source.args[0]
    return False
