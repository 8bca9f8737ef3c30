"""The operations in a graph: their names, the same for layers, functions and methods, and what they read and do."""

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

ARITHMETIC = frozenset(["add", "sub", "mul", "div", "maximum", "minimum"])  # of two operands, which are broadcast
# Reductions of some axes, and the places of the arguments "dim" and "keepdim".
REDUCTIONS = {
    **dict.fromkeys(["mean", "sum", "amax", "amin"], (1, 2)),
    **dict.fromkeys(["std", "var"], (1, 3)),
    **dict.fromkeys(["norm", "linalgvectornorm"], (2, 3)),
}
_POINTWISE = (
    "relu relu6 leakyrelu elu selu celu gelu silu mish sigmoid tanh hardswish hardsigmoid hardtanh softplus softsign "
    "logsigmoid tanhshrink softshrink hardshrink threshold abs neg square pow clamp identity contiguous clone "
    "detach zeroslike dropout dropout1d dropout2d dropout3d alphadropout featurealphadropout"
)
_OTHERS_KEEPING_SHAPE = (
    "sqrt exp log prelu rrelu softmax logsoftmax softmin softmax2d batchnorm batchnorm1d batchnorm2d batchnorm3d "
    "syncbatchnorm instancenorm instancenorm1d instancenorm2d instancenorm3d groupnorm layernorm rmsnorm "
    "localresponsenorm normalize channelshuffle flip roll cumsum oneslike bool invert logicalnot"
)
CASTS = frozenset(["float", "double", "half", "bfloat16", "to", "typeas"])
_RETURNING_NEW = (
    "cat mean sum clone relu relu6 leakyrelu elu gelu silu mish sigmoid tanh hardswish hardsigmoid softmax logsoftmax "
    "matmul adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d avgpool1d avgpool2d avgpool3d maxpool2d conv1d "
    "conv2d conv3d linear batchnorm groupnorm instancenorm layernorm rmsnorm stack interpolate pad indexadd "
    "indexselect takechannels mixedconv2d layernormwithconstants amax amin max min std var norm where glu"
)
POINTWISE = frozenset(_POINTWISE.split())  # each number of the result depends on one number of the input
KEEPING_SHAPE = POINTWISE | CASTS | frozenset(_OTHERS_KEEPING_SHAPE.split())
# Functions and methods that return new tensors; all others may return their argument or a view of it.
RETURNING_NEW = ARITHMETIC | frozenset(_RETURNING_NEW.split())
POOLS = {f"{kind}{axes}d": axes for kind in ("maxpool", "avgpool") for axes in (1, 2, 3)}  # numbers of spatial axes
ADAPTIVE_POOLS = {f"adaptive{name}": axes for name, axes in POOLS.items()}
_SYNONYMS = {
    **{"iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div", "itruediv": "div"},
    **{"concat": "cat", "concatenate": "cat", "clip": "clamp", "reshape": "view"},
}


def module_of(node: fx.Node) -> Any:
    """Return the module that a node of a GraphModule's graph calls; None if it calls none."""
    if node.op != "call_module":
        return None
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = module._modules[name]  # get_submodule takes several times as long
    return module


def owner_of(node: fx.Node) -> str:
    """Return the name of the module that holds what a node reads or calls, a tensor or a module."""
    return str(node.target).rpartition(".")[0]


def stored_tensor(node: Any) -> Any:
    """Return the parameter or buffer that a node of a GraphModule's graph reads; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    root: Any = node.graph.owning_module
    return getattr(root.get_submodule(owner_of(node)), str(node.target).rpartition(".")[2])


def operation(node: fx.Node) -> str:
    """Return the name of what the node calls, in lower case and without underscores; "" for code that is not torch's.

    For example, it is "relu" for nn.ReLU, torch.relu and Tensor.relu_.
    """
    if node.op == "call_module":
        kind = type(module_of(node))
        return _plain(kind.__name__) if kind.__module__.startswith("torch.nn.modules.") else ""
    if node.op == "call_method":
        return _plain(str(node.target))
    library = str(getattr(node.target, "__module__", None)).partition(".")[0]
    known = node.op == "call_function" and library in ("None", "_operator", "torch", "loco_ext")
    return _plain(getattr(node.target, "__name__", "")) if known else ""


def _plain(name: str) -> str:
    name = name.lower().replace("_", "")
    return _SYNONYMS.get(name, name)


def reads_numbers(node: fx.Node) -> bool:
    """Return whether the node may read numbers of a tensor, and not only its sizes, dtype or device."""
    if node.op == "call_method":
        return node.target not in ("size", "dim", "numel")
    return node.target is not getattr or node.args[1] not in ("shape", "ndim", "dtype", "device")


def is_constant_slice(index: Any) -> bool:
    """Return whether an index is a slice none of whose limits the network computes."""
    return isinstance(index, slice) and not any(isinstance(x, fx.Node) for x in (index.start, index.stop, index.step))


def places(index: Any, count: int) -> Sequence[int]:
    """Return the places among so many that an index picks; all of them if the network computes it."""
    every = range(count)
    if isinstance(index, int):
        return [every[index]]
    return every[index] if is_constant_slice(index) else every


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node's only reader; None if it has none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of the function or method that the node calls, given by place or by name."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def become(node: fx.Node, function: Any, *args: Any) -> None:
    """Make the node a call of a function with these arguments alone."""
    node.op, node.target, node.args, node.kwargs = "call_function", function, args, {}


def erase_unread(node: fx.Node) -> None:
    """Erase an operation whose result nothing reads, and those whose results it alone has read; layers stay."""
    is_operation = node.op in ("call_function", "call_method") or isinstance(module_of(node), nn.Unflatten)
    if is_operation and not node.users:
        read = node.all_input_nodes
        node.graph.erase_node(node)
        for each in read:
            erase_unread(each)


def numbered_axes(axes: Any, rank: int) -> set[int] | None:
    """Return the axes, among so many, that an argument lists or is; None if they are not numbers."""
    axes = [axes] if isinstance(axes, int) else axes
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
        return None
    return {axis % rank for axis in axes if rank}  # none of a tensor without axes


def axes_in_order(node: fx.Node) -> list[int]:
    """Return the source's axis for each axis of the result of a permutation, whose meta has a shape; [] for others."""
    name, args, rank = operation(node), node.args[1:], len(node.meta["shape"])
    given = args[0] if len(args) == 1 else args
    if name not in ("permute", "transpose") or rank == 0 or node.kwargs or not isinstance(given, list | tuple):
        return []
    axes = [axis % rank for axis in given if isinstance(axis, int)]
    if len(axes) < len(given):  # the network computes some of them
        return []
    if name == "permute":
        return axes
    order = list(range(rank))
    order[axes[0]], order[axes[1]] = axes[1], axes[0]
    return order
