"""Search for the convolutions that a model calls, and for the sizes of their inputs, by one run on an example."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from loco_ext.fx.modules import copied, is_hooked

_FUNCTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"}


def find_convolutions(
    model: nn.Module, example_inputs: Tensor | Sequence[Any], layers: Sequence[str] | None
) -> dict[str, tuple[int, ...]]:
    """Return the spatial size of the inputs of each chosen convolution by name; a shared module has its first name.

    Args:
        model: the model, which is not changed: a copy in eval mode is run on the example.
        example_inputs: a tensor or a sequence of positional arguments.
        layers: names of convolutions and of modules that contain some; None selects all.

    Raises:
        TypeError, ValueError: as for :func:`to_efcn`.
    """
    if not isinstance(example_inputs, Tensor | Sequence) or isinstance(example_inputs, str):
        raise TypeError(f"example_inputs: expected a tensor or a sequence, got {type(example_inputs).__name__}")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    chosen = _chosen(model, layers)
    for name, module in chosen.items():
        _check(name, module)
    _check_sharing(model, chosen)
    run = _Run(copied(model).eval(), list(chosen))
    run(inputs)
    if layers is None and run.functions:
        function, caller = run.functions[0]
        raise ValueError(f"model: expected convolutions that are modules, got {function} called by {_text(caller)}")
    if run.used:
        raise ValueError(f"model: expected convolutions that are only called, got {run.used[0]} in use")
    for name, sizes in run.sizes.items():
        if len(sizes) != 1:
            got = f"calls with {' and '.join(map(str, sorted(sizes)))}" if sizes else "no call of it"
            raise ValueError(f"example_inputs: expected one input size of {_text(name)}, got {got}")
    return {name: sizes.pop() for name, sizes in run.sizes.items()}


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
    if is_hooked(module):
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


class _Run(TorchFunctionMode):
    """A run of a model that records how it uses the convolutions of the given names.

    Attributes:
        sizes: the spatial sizes of the inputs of each convolution.
        functions: convolutions called as functions, each with the name of the module that calls it.
        used: parameters of the convolutions that the model uses itself.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.sizes: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
        self.functions: list[tuple[str, str]] = []
        self.used: list[str] = []
        self._running: list[tuple[str, nn.Module]] = []  # the modules whose forward is running, the innermost last
        self._parameters = {
            id(parameter): f"{own} of {_text(name)}"
            for name in names
            for own, parameter in model.get_submodule(name).named_parameters()
        }
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._begin, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Run the model once.

        Raises:
            ValueError: the model does not run on the inputs.
        """
        try:
            with self, torch.no_grad(), torch.compiler.set_stance("force_eager"):
                outputs = self.model(*[x.clone() if isinstance(x, Tensor) else x for x in inputs])
        except Exception as error:  # the model's own code may raise anything
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"example_inputs: expected what the model runs on, got {text}") from error
        self._note_parameters(outputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller, module = self._running[-1] if self._running else ("", None)
        result = func(*args, **kwargs or {})
        if not isinstance(module, _ConvNd):
            if (name := getattr(func, "__name__", "")) in _FUNCTIONS:
                self.functions.append((name, caller))
            if not isinstance(result, torch.dtype | torch.device | bool):  # in these, the new layer's are the same
                self._note_parameters((args, kwargs))
        return result

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.sizes:
            x = args[0] if args else kwargs["input"]
            self.sizes[name].add(tuple(x.shape[-len(module.kernel_size) :]))  # type: ignore[arg-type]
        self._running.append((name, module))

    def _note_parameters(self, tree: Any) -> None:
        self.used += [self._parameters[id(leaf)] for leaf in tree_leaves(tree) if id(leaf) in self._parameters]


def _text(name: str) -> str:
    return name or "the model"
