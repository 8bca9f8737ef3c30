"""Tracing of models with torch.fx."""

import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import BuiltinFunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.modules.module import _has_any_global_hook

from loco_ext.errors import first_line
from loco_ext.fx.branches import NumberProxy, ValuesOnExample, length, same_as_on_example
from loco_ext.fx.modules import is_hooked
from loco_ext.geometry import BlockPattern

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # names that torch's own functions take too


class UntraceableError(ValueError):
    """No graph equivalent to the model could be made; the message says why."""


class ResultTracer(fx.Tracer):
    """Tracer that keeps the class of results that are dicts and dataclasses, of which torch.fx makes plain dicts."""

    def create_arg(self, a: Any) -> Any:
        if dataclasses.is_dataclass(a) and isinstance(a, dict):
            return self.create_node("call_function", type(a), (), {key: self.create_arg(x) for key, x in a.items()})
        return super().create_arg(a)


class _Tracer(ResultTracer):
    """Tracer that lets the caller decide which modules it traces inside.

    If there is an example, branches on sizes are those of the example, and the graph raises where others would differ.
    """

    def __init__(
        self,
        is_leaf: Callable[[nn.Module], bool | None],
        constants: Mapping[str, Any] | None,
        example_inputs: Sequence[Any] | None,
    ) -> None:
        super().__init__()
        self._is_leaf, self._constants, self._example = is_leaf, constants, example_inputs
        self._values: ValuesOnExample | None = None
        self._required: set[tuple[fx.Node, type]] = set()
        self.failed_in = ""  # name and class of the innermost module whose forward has raised

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        if self._example is not None:
            self._values = ValuesOnExample(self.root, self.graph, self._example)
        if self._constants is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        return self._call_with_constants(root_fn), []

    def _call_with_constants(self, forward: Callable[..., Any]) -> Callable[[], Any]:
        """Return the call of the model with constants, and with inputs of the graph for all other arguments."""
        assert self._constants is not None
        signature = inspect.signature(forward)
        _, *parameters = signature.parameters.values()
        call = signature.bind_partial(self.root)
        for parameter in parameters:
            name, default = parameter.name, () if parameter.default is parameter.empty else (parameter.default,)
            if parameter.kind is parameter.VAR_POSITIONAL:
                call.arguments[name] = self.create_proxy("placeholder", f"*{name}", (), {})
            elif name in self._constants:
                call.arguments[name] = self._constants[name]
            elif parameter.kind is not parameter.VAR_KEYWORD:
                call.arguments[name] = self.create_proxy("placeholder", name, default, {})
        return lambda: forward(*call.args, **call.kwargs)

    def create_node(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *names: Any, **type_expr: Any
    ) -> fx.Node:
        if kind == "call_method" or isinstance(target, BuiltinFunctionType):
            kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
        return super().create_node(kind, target, args, kwargs, *names, **type_expr)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return super().proxy(node) if self._values is None else NumberProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return super().to_bool(obj) if self._values is None else bool(self.number(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        if self._values is None:
            return super().iter(obj)
        return iter([obj[i] for i in range(self.length(obj))])  # type: ignore[index]

    def length(self, obj: fx.Proxy) -> int:
        """Return the length of a value for the example, and require the same of other inputs."""
        return int(self.number(length(obj), int))

    def value(self, obj: Any) -> Any:
        """Return what a value is for the example."""
        assert self._values is not None
        return self._values.of(obj.node)

    def number(self, obj: Any, kind: type) -> Any:
        """Return the number that a value is for the example, and require the same of other inputs."""
        try:
            value = self.value(obj)
        except DataDependentOutputException:
            value = None
        if value is None or isinstance(value, Tensor):
            raise fx.proxy.TraceError("its code depends on numbers of tensors, which differ from input to input")
        example, where = kind(value), self.scope.module_path or "the model"
        if (obj.node, kind) not in self._required:
            self._required.add((obj.node, kind))
            self.create_proxy("call_function", same_as_on_example, (obj, example, where), {})
        return example

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._values is not None and self._values.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = self._is_leaf(m)
        return super().is_leaf_module(m, module_qualified_name) if leaf is None else leaf

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._values is not None and self._values.running:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or f", in its {self.path_of_module(m)} ({type(m).__name__})"
            raise


@functools.cache
def tracing_compiled_parts() -> AbstractContextManager[None]:
    """Return the context in which torch.fx traces inside parts of a model that are compiled, which then run eagerly.

    It can be entered many times. There is one for all calls, because torch keeps something of each that it makes.
    """
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


def trace(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool | None] = lambda module: None,
    constants: Mapping[str, Any] | None = None,
    example_inputs: Sequence[Any] | None = None,
) -> fx.GraphModule:
    """Return the model's graph, which uses the model's own modules.

    Its code is compiled by the first call. torch.fx keeps the source of all code that it compiles until the process
    ends, so a caller that makes a graph in each training step runs it by torch.fx.Interpreter.

    Args:
        model: the model, which is not run.
        is_leaf: says which modules stay one call in the graph, as locally connected layers do; None for what torch.fx
            does, which traces inside all modules but those of torch.nn. If the model itself is to stay one, its name in
            the graph is "the model".
        constants: arguments of the model that become constants, by name; the graph has no such inputs.
        example_inputs: arguments of a call. If the model cannot be traced without, as its code branches on sizes, the
            graph takes the branches of this call, and raises :class:`BranchError` for inputs that would take others.

    Raises:
        UntraceableError: torch.fx cannot trace the model, or would trace another forward than the one that is called.
    """
    if "forward" in vars(model):
        raise UntraceableError(
            f"model: expected the forward of its class, which torch.fx traces, got another one set on the "
            f"{type(model).__name__} itself"
        )

    def stays_one(module: nn.Module) -> bool | None:
        return True if isinstance(getattr(module, "pattern", None), BlockPattern) else is_leaf(module)

    if stays_one(model):
        model = nn.Sequential(OrderedDict({"the model": model}))
    before, tracer = set(vars(model)), _Tracer(stays_one, constants, None)
    if not constants and (graph := _graph_of_sequential(model, tracer)) is not None:
        return _LazyGraphModule(model, graph)
    try:
        if example_inputs is not None:
            with suppress(Exception):
                return _LazyGraphModule(model, tracer.trace(model))
            tracer = _Tracer(stays_one, constants, example_inputs)
        return _LazyGraphModule(model, tracer.trace(model))
    except Exception as error:  # the model's own code may raise anything when it is given proxies
        place = f"{type(error).__name__} in {type(model).__name__}{tracer.failed_in}"
        raise UntraceableError(
            f"model: expected one that torch.fx can trace, got {place}: {first_line(error)}"
        ) from error
    finally:
        for name in set(vars(model)) - before:  # tensors that the model has made, which torch.fx attaches to it
            if name.startswith("_tensor_constant"):
                delattr(model, name)


def _graph_of_sequential(model: nn.Module, tracer: _Tracer) -> fx.Graph | None:
    """Return the graph that tracing would find for a Sequential, whose code is known; it takes a tenth of the time.

    None if anything but a Sequential in it has code to be traced, or if there are hooks that tracing would run.
    """
    if not _is_plain_sequential(model) or _has_any_global_hook():
        return None
    names = {module: name for name, module in model.named_modules()}  # a module in several places has its first name
    modules = list(_in_order(model))
    if not all(tracer.is_leaf_module(module, names[module]) for module in modules):
        return None
    graph = fx.Graph()
    value = graph.placeholder("input")
    for module in modules:
        value = graph.call_module(names[module], (value,))
    graph.output(value)
    return graph


def _is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a call of the module calls the modules in it in turn, and does nothing else."""
    return type(module) is nn.Sequential and not is_hooked(module) and "forward" not in vars(module)


def _in_order(sequential: nn.Sequential) -> Iterator[nn.Module]:
    """Yield the modules in a Sequential, and in those in it, in the order of their calls."""
    for module in sequential:
        if _is_plain_sequential(module):
            yield from _in_order(module)
        else:
            yield module
