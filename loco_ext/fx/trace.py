"""Tracing of models with torch.fx."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook

from loco_ext.errors import first_line
from loco_ext.fx.modules import is_hooked


class UntraceableError(ValueError):
    """No graph equivalent to the model could be made; the message says why."""


class _Tracer(fx.Tracer):
    """Tracer that lets the caller decide which modules it traces inside."""

    def __init__(self, is_leaf: Callable[[nn.Module], bool | None]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self.failed_in = ""  # name and class of the innermost module whose forward has raised

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = self._is_leaf(m)
        return super().is_leaf_module(m, module_qualified_name) if leaf is None else leaf

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or f", in its {self.path_of_module(m)} ({type(m).__name__})"
            raise


def trace(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool | None] = lambda module: None,
    constants: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Return the model's graph, which uses the model's own modules.

    Args:
        model: the model, which is not run.
        is_leaf: says which modules stay one call in the graph; None for what torch.fx does, which traces inside all
            modules but those of torch.nn. If the model itself is to stay one, its name in the graph is "the model".
        constants: arguments of the model that become constants, by name.

    Raises:
        UntraceableError: torch.fx cannot trace the model, or would trace another forward than the one that is called.
    """
    if "forward" in vars(model):
        raise UntraceableError(
            f"model: expected the forward of its class, which torch.fx traces, got another one set on the "
            f"{type(model).__name__} itself"
        )
    if is_leaf(model):
        model = nn.Sequential(OrderedDict({"the model": model}))
    before, tracer = set(vars(model)), _Tracer(is_leaf)
    if not constants and (graph := _graph_of_sequential(model, tracer)) is not None:
        return fx.GraphModule(model, graph)
    try:
        return fx.GraphModule(model, tracer.trace(model, None if constants is None else dict(constants)))
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
