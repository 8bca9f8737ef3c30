"""Tracing of models with torch.fx."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from loco_ext.errors import first_line


class UntraceableError(ValueError):
    """No graph equivalent to the model could be made; the message says why."""


class _Tracer(fx.Tracer):
    """Tracer that lets the caller decide which modules it traces inside."""

    def __init__(self, is_leaf: Callable[[nn.Module], bool | None]) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = self._is_leaf(m)
        return super().is_leaf_module(m, module_qualified_name) if leaf is None else leaf


def trace(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool | None] = lambda module: None,
    constants: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Return the model's graph, which uses the model's own modules.

    Args:
        model: the model, which is not run.
        is_leaf: says which modules stay one call in the graph; None for what torch.fx does, which traces inside all
            modules but those of torch.nn.
        constants: arguments of the model that become constants, by name.

    Raises:
        UntraceableError: torch.fx cannot trace the model.
    """
    before = set(vars(model))
    try:
        return fx.GraphModule(model, _Tracer(is_leaf).trace(model, None if constants is None else dict(constants)))
    except Exception as error:  # the model's own code may raise anything when it is given proxies
        kind = type(error).__name__
        raise UntraceableError(
            f"model: expected one that torch.fx can trace, got {kind} in {type(model).__name__}: {first_line(error)}"
        ) from error
    finally:
        for name in set(vars(model)) - before:  # tensors that the model has made, which torch.fx attaches to it
            if name.startswith("_tensor_constant"):
                delattr(model, name)
