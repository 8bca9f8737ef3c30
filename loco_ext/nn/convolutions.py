"""Search for the convolutions that a model runs, and the sizes of their inputs, with torch.fx."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from loco_ext.fx.modules import has_forward_hooks
from loco_ext.fx.trace import first_line, trace

_FUNCTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"}


@dataclass
class Call:
    """A convolution and the spatial size of its inputs."""

    module: Any
    input_size: tuple[int, ...]


def find_convolutions(
    model: nn.Module, example_inputs: Tensor | Sequence[Any], layers: Sequence[str] | None
) -> dict[str, Call]:
    """Return the chosen convolutions by name, each with its input size; a shared module has its first name.

    Args:
        model: the model, which is not changed: it is traced, and a copy in eval mode is run on the example.
        example_inputs: a tensor or a sequence of positional arguments.
        layers: names of convolutions and of modules that contain some; None selects all.

    Raises:
        TypeError, ValueError: as for :func:`to_efcn`.
    """
    inputs = _inputs(example_inputs)
    chosen = _chosen(model, layers)
    for name, module in chosen.items():
        _check(name, module)
    _check_sharing(model, chosen)
    root = copy.deepcopy(model).eval()
    whole = nn.Sequential(root) if isinstance(root, _ConvNd) else root  # torch.fx would trace inside a single layer
    graph = trace(whole, lambda module: isinstance(module, _ConvNd) or has_forward_hooks(module))
    if layers is None:
        _check_functions(graph)
    _check_weights(graph, root, chosen)
    recorder = _record(graph, inputs, {id(root.get_submodule(name)): name for name in chosen})
    if layers is None and recorder.hidden:
        function, place = recorder.hidden[0]
        raise ValueError(f"model: expected convolutions that are modules, got {function} called by {_text(place)}")
    calls = {}
    for name, module in chosen.items():
        found = recorder.sizes.get(name, set())
        if len(found) != 1:
            got = "no call of it" if not found else f"calls with {' and '.join(map(str, sorted(found)))}"
            raise ValueError(f"example_inputs: expected one input size of {_text(name)}, got {got}")
        calls[name] = Call(module, found.pop())
    return calls


def _inputs(example_inputs: object) -> tuple[Any, ...]:
    if isinstance(example_inputs, Tensor):
        return (example_inputs,)
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        raise TypeError(f"example_inputs: expected a tensor or a sequence, got {type(example_inputs).__name__}")
    return tuple(example_inputs)


def _chosen(model: nn.Module, layers: object) -> dict[str, nn.Module]:
    """Return the chosen convolutions by name, without duplicates."""
    convolutions: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, _ConvNd)
    }
    if layers is None:
        return convolutions
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not all(isinstance(x, str) for x in layers):
        raise TypeError(f"layers: expected a sequence of names or None, got {layers!r}")
    names = {}
    first_names = {id(module): name for name, module in convolutions.items()}
    for layer in layers:
        try:
            parent = model.get_submodule(layer)
        except AttributeError:
            raise ValueError(f"layers: expected names of modules, got {layer!r}, which the model has not") from None
        inside = [first_names[id(module)] for module in parent.modules() if id(module) in first_names]
        if not inside:
            raise ValueError(f"layers: expected convolutions or modules that have some, got {_text(layer)}")
        names.update(dict.fromkeys(inside))
    return {name: convolutions[name] for name in names}


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"model: expected parameters with shapes, got none yet in {_text(name)}: run it once")
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        raise ValueError(f"model: expected a weight without a parametrization, got {_text(name)}")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(f"model: expected convolutions without hooks, got {_text(name)}")


def _check_sharing(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    owners: dict[int, list[str]] = {}
    for parent, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{parent}.{own}" if parent else own)
    for module in chosen.values():
        for parameter in module.parameters(recurse=False):
            if len(names := owners[id(parameter)]) > 1:
                raise ValueError(f"model: expected parameters of one module each, got {' is '.join(names)}")


class _Calls(TorchFunctionMode):
    """Mode that records the names of convolutions called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in _FUNCTIONS:
            self.names.append(name)
        return func(*args, **kwargs or {})


class _Recorder(fx.Interpreter):
    """Interpreter that runs the graph and records the spatial sizes of the inputs of the named modules.

    ``names`` maps the id of a module to its name. ``hidden`` lists the convolutions called as functions inside modules
    that the tracer treats as leaves, each with the name of that module.
    """

    def __init__(self, graph: fx.GraphModule, names: dict[int, str]) -> None:
        super().__init__(graph)
        self.names = names
        self.sizes: dict[str, set[tuple[int, ...]]] = {}
        self.hidden: list[tuple[str, str]] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if id(module) in self.names:
            x = args[0] if args else kwargs["input"]
            axes = len(module.kernel_size)
            self.sizes.setdefault(self.names[id(module)], set()).add(tuple(x.shape[-axes:]))
        with _Calls() as calls:
            result = super().call_module(target, args, kwargs)
        if not isinstance(module, _ConvNd):
            self.hidden += [(name, target) for name in calls.names]
        return result


def _record(graph: fx.GraphModule, inputs: tuple[Any, ...], names: dict[int, str]) -> _Recorder:
    recorder = _Recorder(graph, names)
    try:
        with torch.no_grad():
            recorder.run(*[x.clone() if isinstance(x, Tensor) else x for x in inputs])
    except Exception as error:  # the model's own code may raise anything
        raise ValueError(
            f"example_inputs: expected what the model runs on, got {type(error).__name__}: {first_line(error)}"
        ) from error
    return recorder


def _check_weights(graph: fx.GraphModule, root: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Raise ValueError if the model uses anything of the chosen convolutions other than calling them."""
    names = {id(root.get_submodule(name)): name for name in chosen}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            parent, _, own = node.target.rpartition(".")
            if (name := names.get(id(graph.get_submodule(parent)))) is not None:
                raise ValueError(
                    f"model: expected convolutions that are only called, got {own} of {_text(name)} in use"
                )


def _check_functions(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _FUNCTIONS:
            stack = node.meta.get("nn_module_stack") or {}
            owner = next(reversed(stack), "")
            raise ValueError(
                f"model: expected convolutions that are modules, got {node.target.__name__} called by {_text(owner)}"
            )


def _text(name: str) -> str:
    return name or "the model"
