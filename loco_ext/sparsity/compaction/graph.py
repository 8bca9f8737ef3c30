"""The graph that compaction works on: every value is one node, and every node knows its tensor's shape."""

import copy
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from loco_ext.errors import first_line
from loco_ext.fx.branches import length, same_as_on_example
from loco_ext.fx.in_place import read_results_of_writes
from loco_ext.fx.modules import has_forward_hooks, is_hooked
from loco_ext.fx.operations import module_of, places, stored_tensor
from loco_ext.fx.sizes import Inference, Size
from loco_ext.fx.trace import UntraceableError, trace
from loco_ext.ops.memory_format import is_channels_last
from loco_ext.sparsity.compaction.layers import as_layers
from loco_ext.sparsity.compaction.spellings import spell_out_operations
from loco_ext.sparsity.compaction.views import spell_out_views

_READING = (getattr, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_OF_NUMBERS = (*_READING[1:], operator.and_, operator.or_, operator.not_, operator.mod)
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.neg)
MODULE = "module"  # key in the meta of a call that replaces one of a module: its name
_PADDING_MODES = {
    nn.modules.padding._ConstantPadNd: "constant",
    nn.modules.padding._ReflectionPadNd: "reflect",
    nn.modules.padding._ReplicationPadNd: "replicate",
    nn.modules.padding._CircularPadNd: "circular",
}
_CHECKING = (torch._assert, *_READING, *_OF_NUMBERS, *_ARITHMETIC, operator.getitem, length, "size", "dim", "numel")


def annotated_graph(model: nn.Module, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph of a copy of the model in eval mode, with the shape of every node on the example.

    After an operation has changed a value in place, readers of the value read that operation's result. Arguments that
    the example omits keep their defaults; defaults that are None, bool or str become constants.

    Raises:
        UntraceableError: the model's forward depends on values, the model has hooks, or it changes a view in place.
    """
    if has_forward_hooks(model):
        raise UntraceableError("the model has forward hooks")
    root = copy.deepcopy(model).eval()
    if type(root).__module__.startswith("torch.nn") and not isinstance(root, nn.Sequential):
        root = nn.Sequential(root)  # torch.fx would trace inside a single layer
    constants = _constants(root, len(example_inputs))
    graph = trace(root, lambda module: has_forward_hooks(module) or None, constants, example_inputs)
    _remove_checks(graph)
    _remove_identities(graph)
    _pad_by_functions(graph)
    read_results_of_writes(graph)
    try:
        _fold_kernel_sizes(graph)
        record(graph, example_inputs)
        as_layers(graph, root)
        spell_out_operations(graph)
        spell_out_views(graph)
        _remove_checks(graph)
        _remove_constant_branches(graph)
    except Exception as error:  # the graph lacks choices of the model's own code and may raise anything
        raise UntraceableError(f"the graph that torch.fx makes of it does not run: {first_line(error)}") from error
    return graph


class _Recorder(fx.Interpreter):
    """Interpreter that runs the graph once and records the kind of each node's tensor in its meta."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta.update(kind_of(result))
        return result


def record(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Record in every node's meta the kind of tensor that it gives on the example."""
    with torch.no_grad():
        _Recorder(graph).run(*copies(example_inputs))


def kind_of(x: Tensor) -> dict[str, Any]:
    """Return the properties of a tensor that determine the speed of operations on it, for a node's meta."""
    return {"shape": tuple(x.shape), "dtype": x.dtype, "device": x.device, "channels_last": is_channels_last(x)}


def copies(inputs: Sequence[Any]) -> list[Any]:
    """Return the arguments with tensors cloned, because a model may write to its inputs."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def _constants(root: nn.Module, given: int) -> dict[str, Any]:
    """Return the defaults, on which code may branch, of arguments that the example omits."""
    try:
        parameters = list(inspect.signature(root.forward).parameters.values())[given:]
    except (ValueError, TypeError) as error:  # code that is not Python's
        raise UntraceableError(f"torch.fx cannot trace it: {first_line(error)}") from error
    return {p.name: p.default for p in parameters if p.default is None or isinstance(p.default, bool | str)}


def _remove_checks(graph: fx.GraphModule) -> None:
    """Remove assertions and their inputs that nothing else reads: they change no result, but read sizes."""
    for node in reversed(graph.graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target in _CHECKING):
            graph.graph.erase_node(node)
    graph.recompile()


def _fold_kernel_sizes(graph: fx.GraphModule) -> None:
    """Make numbers of the sizes of kernels that code reads from a weight, so that only layers read the weight."""
    sizes: dict[fx.Node, Any] = {}
    for node in list(graph.graph.nodes):
        first: Any = node.args[0] if node.args else None
        whole = node.args[1:] == (("shape",) if node.target is getattr else ()) and node.target in (getattr, "size")
        if whole and first.op == "get_attr":
            shape = stored_tensor(first).shape
            read = [user.args[1] for user in node.users if user.target is operator.getitem]
            if len(read) == len(node.users) and all(min(places(index, len(shape)), default=0) > 1 for index in read):
                sizes[node] = shape
        elif node.target is operator.getitem and first in sizes and not isinstance(node.args[1], fx.Node):
            sizes[node] = sizes[first][node.args[1]]
        else:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: sizes.get(x, x))
    for node in reversed(sizes):
        graph.graph.erase_node(node)
    _remove_checks(graph)


def checks_that_may_fail(graph: fx.GraphModule, requirements: bool) -> list[fx.Node]:
    """Return the checks of branches whose number may be another for inputs of other sizes.

    Args:
        graph: graph whose nodes have the shapes of their results in their meta.
        requirements: whether inputs have the sizes that layers require.
    """
    integers, numbers = Inference(graph, requirements).integers, dict[fx.Node, Any]()
    for node in graph.graph.nodes:
        size, function = integers.get(node), node.target if node.op == "call_function" else None
        if isinstance(size, Size) and size.number is not None:
            numbers[node] = size.number
        elif function in _OF_NUMBERS and all(x in numbers for x in node.all_input_nodes):
            numbers[node] = function(*(numbers.get(x, x) for x in node.args))
    checks = graph.graph.find_nodes(op="call_function", target=same_as_on_example)
    return [node for node in checks if node.args[0] not in numbers]


def _remove_constant_branches(graph: fx.GraphModule) -> None:
    """Remove checks of branches that no input with as many axes as the example's can change, but check these.

    Sizes that a layer requires are checked nevertheless: inputs of other sizes may take branches without that layer.
    """
    checks = graph.graph.find_nodes(op="call_function", target=same_as_on_example)
    if not checks:
        return
    changing = checks_that_may_fail(graph, requirements=False)
    constant = [node for node in checks if node not in changing]
    for node in constant:
        graph.graph.erase_node(node)
    tensors = [node for node in graph.graph.find_nodes(op="placeholder") if constant and "shape" in node.meta]
    with graph.graph.inserting_before(next(node for node in graph.graph.nodes if node.op != "placeholder")):
        for node in tensors:
            axes = graph.graph.call_method("dim", (node,))
            graph.graph.call_function(same_as_on_example, (axes, len(node.meta["shape"]), "the model"))
    _remove_checks(graph)


def _remove_identities(graph: fx.GraphModule) -> None:
    """Remove nodes that return their argument, so that the layers and ReLUs around them are adjacent.

    Functions of other packages, which torch.fx does not trace, are among them: an example is one that drops whole
    samples in training and does nothing in eval mode.
    """
    for node in list(graph.graph.nodes):
        module, given = module_of(node), None
        if type(module) is nn.Identity and not is_hooked(module) and len(node.args) == 1 and not node.kwargs:
            given = node.args[0]
        elif node.op == "call_function" and _is_foreign(node.target):
            given = _returned(node)
        if given is not None:
            node.replace_all_uses_with(given)
            graph.graph.erase_node(node)
    graph.recompile()


def _pad_by_functions(graph: fx.GraphModule) -> None:
    """Replace padding layers by calls of torch.nn.functional.pad, so that the same rules hold for both."""
    for node in graph.graph.nodes:
        module = module_of(node)
        mode = next((mode for kind, mode in _PADDING_MODES.items() if isinstance(module, kind)), None)
        if mode is not None and not is_hooked(module) and len(node.args) == 1 and not node.kwargs:
            target, node.target = node.target, F.pad
            node.op, node.args = "call_function", (*node.args, list(module.padding))
            node.kwargs = {"value": module.value} if mode == "constant" else {"mode": mode}
            node.meta[MODULE] = str(target)
    graph.recompile()


def _is_foreign(function: Any) -> bool:
    """Return whether this is a Python function that belongs to neither torch nor this package."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return inspect.isfunction(function) and package not in ("torch", "loco_ext")


def _returned(node: fx.Node) -> fx.Node | None:
    """Return the argument that the node's function returns unchanged; None if it does something else."""
    scratch = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(scratch)
    proxies: dict[fx.Node, Any] = {x: fx.Proxy(scratch.placeholder(x.name), tracer) for x in node.all_input_nodes}
    function: Any = node.target
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
        result = function(*args, **kwargs)
    except Exception:  # it may raise anything when it is given proxies
        return None
    made_nothing = len(scratch.nodes) == len(proxies)
    return next((x for x, proxy in proxies.items() if result is proxy and made_nothing), None)
