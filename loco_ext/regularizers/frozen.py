"""A piecewise linear network around the samples of a batch: its bends, and derivatives of all of them at once.

One pass through the graph computes the values. Later passes propagate tangents of many directions together: the network
is affine around each sample, so a tangent is exact, and nothing has to be differentiated unit by unit.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from loco_ext.fx.branches import length
from loco_ext.fx.in_place import read_results_of_writes
from loco_ext.fx.modules import is_hooked, unwrapped
from loco_ext.fx.operations import ARITHMETIC, argument, module_of, operation
from loco_ext.fx.results import agree
from loco_ext.fx.trace import UntraceableError, trace, tracing_compiled_parts
from loco_ext.ops import transforms
from loco_ext.regularizers.affine import AffineCall, AffineRule, NotPiecewiseLinearError, Pass, affine_rule
from loco_ext.regularizers.bends import Bend, BendingRule, bending_rule

Read = Callable[[fx.Node, Tensor], object]
_COMPARED = WeakSet[nn.Module]()  # models whose graph has been compared with them
_LEAST_DIRECTIONS = 32  # from so many on, selecting the live units of each sample saves time
_SHAPES = ("shape", "ndim", "dtype", "device")
_SIZES = ("size", "dim", "ndimension", "numel")


class BendingOperation(NamedTuple):
    """An operation that bends: its name in the model, and which of several calls of that name it is."""

    node: fx.Node
    module: str
    call: int


class FrozenNetwork:
    """The graph of a model with the rule of each operation, all found before anything runs.

    Attributes:
        input: node of the model's input.
        nodes: nodes whose results depend on the input, in the order of the graph, without the input itself.
        before_bends: those of them that bend or lead to one that does.
        bending_operations: the operations that bend, in that order.

    Raises:
        NotPiecewiseLinearError: the model cannot be traced, or has an operation that is not supported.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        model = unwrapped(model)
        if is_hooked(model):
            raise NotPiecewiseLinearError("model: expected modules without hooks, got some at the model itself")
        _check_parametrizations(model)
        self._unchecked: tuple[nn.Module, bool] | None = (model, torch.is_grad_enabled())
        try:
            with _kept_as_it_is(model), tracing_compiled_parts():
                self.graph = trace(model, _is_leaf, _defaults(model), (x,))
            read_results_of_writes(self.graph)
        except UntraceableError as error:
            raise NotPiecewiseLinearError(str(error)) from error
        inputs = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        self.input = inputs[0]
        self.nodes = list(_depending(self.graph.graph, self.input))
        depending = {self.input, *self.nodes}
        self.bending: dict[fx.Node, BendingRule] = {}
        self.affine: dict[fx.Node, AffineRule] = {}
        for node in self.nodes:
            self._add_rule(node, depending)
        self.before_bends = _leading_to(self.nodes, set(self.bending))
        names: Counter[str] = Counter()
        self.bending_operations = []
        for node in self.bending:
            name = _name(node)
            self.bending_operations.append(BendingOperation(node, name, names[name]))
            names[name] += 1

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return those of ``nodes`` that read a node."""
        return [user for user in node.users if user in self.bending or user in self.affine]

    def check_result(self, x: Tensor) -> None:
        """Compare the graph with the model at the first call, in case tracing has changed what the model's code does.

        Models that cannot be called with these samples, or that return other numbers each time, are not compared.
        """
        if self._unchecked is None or transforms.are_active():
            return
        (model, with_gradients), self._unchecked = self._unchecked, None
        results = []
        with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(with_gradients):
            for call in (fx.Interpreter(self.graph).run, model, model):
                with _kept_as_it_is(model):
                    try:
                        results.append(call(x.detach().clone()))  # operations in place may write to it
                    except Exception:  # the model's own code may raise anything
                        return
                if len(results) == 2 and agree(*results):
                    return
        if agree(*results[1:]):
            raise NotPiecewiseLinearError(
                f"model: expected one that torch.fx can trace, got {type(model).__name__}, whose graph returns other "
                "numbers; its code may ask whether a value is a tensor"
            )

    def check_result_once(self, x: Tensor) -> None:
        """Do as :meth:`check_result`, unless a graph of the model has been compared before."""
        model = None if self._unchecked is None else self._unchecked[0]
        if model is None or model in _COMPARED or not len(x):
            return
        self.check_result(x)
        if self._unchecked is None:
            _COMPARED.add(model)

    def _add_rule(self, node: fx.Node, depending: set[fx.Node]) -> None:
        bending, affine = bending_rule(node), affine_rule(node)
        call = AffineCall(node, node.args, dict(node.kwargs), (), Pass.VALUE)
        if call.module is not None and is_hooked(call.module):
            raise NotPiecewiseLinearError(f"model: expected modules without hooks, got some at {node.target}")
        if call.module is not None and "forward" in vars(call.module):
            raise call.refuse(f"{call.description} whose forward is replaced")
        if bending is None and affine is None:
            raise call.refuse()
        lists = [arg for arg in node.args if isinstance(arg, list | tuple)]
        mixed = any(part in depending for parts in lists for part in parts if isinstance(part, fx.Node))
        if mixed and not all(part in depending for parts in lists for part in parts):
            raise call.refuse()
        if not depending.isdisjoint(_nodes(node.kwargs)):
            raise call.refuse(f"an input passed by keyword: {call.description}")
        if operation(node) not in ARITHMETIC and not depending.isdisjoint(_nodes(node.args[1:])):
            raise call.refuse(f"a weight or an option that depends on the input: {call.description}")
        if bending is not None:
            self.bending[node] = bending
        elif affine is not None:
            self.affine[node] = affine


@contextmanager
def _kept_as_it_is(model: nn.Module) -> Iterator[None]:
    """Restore on exit the random state, and the buffers to which the model's own code has written."""
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


def _check_parametrizations(model: nn.Module) -> None:
    """Raise NotPiecewiseLinearError for parametrizations that may change buffers, as spectral norms in training do."""
    for name, module in model.named_modules():
        parts = module.named_children() if isinstance(module, ParametrizationList) else ()
        for place, part in parts:
            if part.training and next(part.buffers(), None) is not None:
                raise NotPiecewiseLinearError(
                    "model: expected parametrizations with buffers in evaluation mode, got "
                    f"{type(part).__name__} at {name}.{place}; call eval() on it"
                )


def _is_leaf(module: nn.Module) -> bool | None:
    """Return False for layers whose weight is computed, so that it is computed once."""
    return False if is_parametrized(module) else None


def _nodes(argument: Any) -> set[fx.Node]:
    """Return the nodes in an argument, also those in lists of it."""
    found: set[fx.Node] = set()
    fx.map_arg(argument, found.add)
    return found


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Return the defaults of the arguments of the model behind the first.

    Raises:
        NotPiecewiseLinearError: the model does not take one input.
    """
    first, *others = inspect.signature(model.forward).parameters.values()
    if first.kind in (first.VAR_KEYWORD, first.KEYWORD_ONLY, first.VAR_POSITIONAL):
        raise NotPiecewiseLinearError(f"model: expected one that takes one input, got {type(model).__name__}")
    required = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required:
        raise NotPiecewiseLinearError(f"model: expected one that takes one input, got one that needs {required[0]}")
    return {p.name: p.default for p in others if p.default is not p.empty}


def _depending(graph: fx.Graph, first: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose results depend on the numbers in the input, beyond its shape, except the model's result."""
    found = {first}
    for node in graph.nodes:
        if node.op == "output" or is_dataclass(node.target) or found.isdisjoint(node.all_input_nodes):
            continue
        of_shape = node.target is length or (node.op == "call_method" and node.target in _SIZES)
        if not of_shape and not (node.target is getattr and node.args[1] in _SHAPES):
            found.add(node)
            yield node


def _leading_to(nodes: list[fx.Node], ends: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes, in order, that are in ``ends`` or whose results are used for one of them."""
    found = set(ends)
    for node in reversed(nodes):
        if not found.isdisjoint(node.users):
            found.add(node)
    return [node for node in nodes if node in found]


def _name(node: fx.Node) -> str:
    """Return the name of a module; that of a function with the module whose code calls it, if that is known."""
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    function = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", node.name)
    return ".".join([*([stack[-1][0]] if stack else []), f"{function}()"])


class Frozen:
    """A network around a batch: each operation that bends is replaced by the linear one that it is there.

    Args:
        network: the graph.
        x: inputs ``[N, ...]``.

    Attributes:
        bends: :class:`Bend` of each operation that bends, by its node.
        shapes: shape of each result without its axis of samples; of each part for an operation that returns several.
        elements: numbers per sample that the pass stores or needs at once.
    """

    def __init__(self, network: FrozenNetwork, x: Tensor) -> None:
        self.network, self.batch = network, len(x)
        self.bends: dict[fx.Node, Bend] = {}
        self.shapes: dict[fx.Node, Any] = {network.input: x.shape[1:]}
        self._constants: dict[fx.Node, Any] = {}
        self._depending = {network.input, *network.nodes}
        self._last_use = {source: node for node in network.before_bends for source in node.all_input_nodes}
        interpreter = fx.Interpreter(network.graph, garbage_collect_values=False)
        values = interpreter.env
        values[network.input] = x
        for node in network.nodes:
            self._find_constants(node, interpreter)
            values[node] = self._value(node, values)
            self.shapes[node] = _map_parts(lambda value: value.shape[1:], values[node])
        bends = [bend.distances[:1].numel() for bend in self.bends.values()]
        self.elements = (
            sum(_count(self.shapes[node]) for node in network.nodes) + 2 * sum(bends) + 3 * max(bends, default=0)
        )

    def _find_constants(self, node: fx.Node, interpreter: fx.Interpreter) -> None:
        """Compute what the node reads that does not depend on the numbers in the input."""
        for source in node.all_input_nodes:
            if source in self._depending or source in self._constants:
                continue
            if source.op == "placeholder":
                raise NotPiecewiseLinearError(f"model: expected one that takes one input, got one that reads {source}")
            self._find_constants(source, interpreter)
            self._constants[source] = interpreter.env[source] = interpreter.run_node(source)

    def _call(self, node: fx.Node, kind: Pass, value: Callable[[fx.Node], Any]) -> AffineCall:
        def find(source: fx.Node) -> Any:
            return value(source) if source in self._depending else self._constants[source]

        args, kwargs = fx.map_arg((node.args, node.kwargs), find)
        depends = tuple(isinstance(arg, fx.Node) and arg in self._depending for arg in node.args)
        return AffineCall(node, tuple(args), dict(kwargs), depends, kind, self.shapes.get(node))

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        call = self._call(node, Pass.VALUE, values.__getitem__)
        if node in self.network.bending:
            self.bends[node] = bend = self.network.bending[node](call)
            return bend.result
        result = self.network.affine[node](call)
        for part in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(part, Tensor) or part.shape[:1] != (self.batch,):
                raise call.refuse_axis()
        return result

    def linear_weight(self, node: fx.Node) -> Tensor:
        """Return the weight of a linear layer."""
        if node.op == "call_module":
            return module_of(node).weight
        return self._constants[argument(node, 1, "weight")]

    def tangents(self, starts: Mapping[fx.Node, Tensor], read: Read) -> None:
        """Propagate tangents from the results of some nodes, and read those of all bends behind them.

        Args:
            starts: tangents ``[K, N, ...]`` of results, or ``[K, 1, ...]`` if they are the same for all samples. All
                paths from the input lead through these nodes.
            read: is called with the node and the tangents ``[K, N or 1, ...]`` of each operation that bends.
        """
        found = dict(starts)
        for node in self._behind(starts):
            sources = [source for source in node.all_input_nodes if source in self._depending]
            if node in self.bends:
                tangent = self.bends[node].tangents(found[sources[0]])
                read(node, tangent.bends())
                found[node] = tangent.result
            else:
                found[node] = self._affine_tangent(node, found, sources)
            for source in sources:
                if self._last_use[source] is node:
                    del found[source]

    def _affine_tangent(self, node: fx.Node, found: Mapping[fx.Node, Any], sources: list[fx.Node]) -> Any:
        if self._selects_live_units(node, sources[0], found[sources[0]]):
            return self._linear_of_live_units(node, sources[0], found[sources[0]])
        firsts = [_first(found[source]) for source in sources]
        count, samples = firsts[0].shape[0], max(first.shape[1] for first in firsts)

        def rows(source: fx.Node) -> Any:
            return _map_parts(lambda t: t.expand(-1, samples, *t.shape[2:]).flatten(0, 1), found[source])

        result = self.network.affine[node](self._call(node, Pass.TANGENT, rows))
        return _map_parts(lambda t: t.unflatten(0, (count, samples)), result)

    def _selects_live_units(self, node: fx.Node, source: fx.Node, tangents: Any) -> bool:
        """Return whether to compute a linear layer behind a ReLU from the positive units of each sample alone."""
        names = operation(node), operation(source)
        if torch.is_grad_enabled() or names != ("linear", "relu"):
            return False
        if tangents.device.type != "cpu" or len(tangents) < _LEAST_DIRECTIONS:  # a GPU would wait for each sample
            return False
        return tangents.dim() == 3 and tangents.shape[1] == self.batch

    def _linear_of_live_units(self, node: fx.Node, source: fx.Node, tangents: Tensor) -> Tensor:
        """Return the tangents of a linear layer, from those of only the units that are positive for each sample."""
        weight = self.linear_weight(node)
        result = tangents.new_empty(*tangents.shape[:2], len(weight))
        for sample, sides in enumerate(self.bends[source].sides):
            live = sides.nonzero().flatten()
            torch.mm(tangents[:, sample].index_select(1, live), weight.index_select(1, live).mT, out=result[:, sample])
        return result

    def dependences(self, pixels: Tensor) -> Iterator[tuple[fx.Node, Tensor]]:
        """Yield which units depend on which sets of pixels.

        Args:
            pixels: sets of the input's numbers, as zeros and ones ``[sets, ...]``.

        Yields:
            Each operation that bends, with zeros and ones ``[sets, ...]`` for its results, whatever the weights are.
        """
        found: dict[fx.Node, Any] = {self.network.input: pixels}
        for node in self.network.before_bends:
            sources = [source for source in node.all_input_nodes if source in self._depending]
            if node in self.bends:
                found[node] = self.bends[node].dependence(found[sources[0]])
                yield node, found[node]
            else:
                call = self._call(node, Pass.DEPENDENCE, found.__getitem__)
                found[node] = _map_parts(lambda t: (t > 0).to(pixels.dtype), self.network.affine[node](call))
            for source in sources:
                if self._last_use[source] is node:
                    del found[source]

    def most_tangents(self, starts: Mapping[fx.Node, Tensor]) -> int:
        """Return how many numbers of tangents exist at once for each direction and sample, at most."""
        alive = {node: _count(self.shapes[node]) for node in starts}
        most = sum(alive.values())
        for node in self._behind(starts):
            bend = self.bends.get(node)
            alive[node] = _count(self.shapes[node])
            # The operation itself and the norms of its tangents need memory beside what is kept.
            beside = 2 * alive[node] if bend is None else 4 * bend.distances[:1].numel()
            most = max(most, sum(alive.values()) + beside)
            for source in node.all_input_nodes:
                if self._last_use.get(source) is node:
                    alive.pop(source, None)
        return most

    def _behind(self, starts: Mapping[fx.Node, Tensor]) -> list[fx.Node]:
        """Return the nodes that the results of ``starts`` lead to."""
        reached = set(starts)
        for node in self.network.before_bends:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        return [node for node in self.network.before_bends if node in reached and node not in starts]


def _map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the result of an operation: to a tensor, or to each part of a tuple of them."""
    return tuple(map(function, value)) if type(value) in (tuple, list) else function(value)


def _first(value: Any) -> Tensor:
    return value[0] if type(value) in (tuple, list) else value


def _count(shape: Any) -> int:
    """Return the number of elements of a shape, or of several shapes together."""
    return shape.numel() if isinstance(shape, torch.Size) else sum(each.numel() for each in shape)
