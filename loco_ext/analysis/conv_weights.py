"""Collect the weights of a model's convolutions, in order."""

import reprlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from loco_ext import compiler
from loco_ext.fx.modules import device_of, unwrapped
from loco_ext.nn.computed import weight_of
from loco_ext.regularizers.evaluation import measuring

Model = nn.Module | Mapping[str, Any]
Inputs = Tensor | tuple[Tensor, ...]

LARGEST_KERNEL = 15


def conv_weights(model: Model, example_inputs: Inputs | None = None) -> dict[str, Tensor]:
    """Return the weights of a model's convolutions that have distance classes to compare.

    These are weights of more than one spatial tap whose spatial sizes are all odd and at most 15. A weight that several
    modules share appears once, with the first of them, as in :func:`loco_ext.optim.parameter_groups`.

    Args:
        model: a module, whose Conv and ConvTranspose modules count; or a mapping of names to tensors, such as a state
            dict, whose floating-point tensors of 3 to 5 dimensions named ``weight`` or ``*.weight`` count. Other
            entries of a mapping are ignored.
        example_inputs: with None, modules come in the order of registration. With a tensor or a tuple of tensors, the
            arguments of the module's forward, they come in the order of their first call in one forward pass in eval
            mode, without modules that are not called. The mode of every module and the RNG are restored.

    Returns:
        Detached float64 CPU tensors by module name, such as "features.0", in order. They have the stored layout,
        ``(C_out, C_in / groups, *kernel)``, or ``(C_in, C_out / groups, *kernel)`` for transposed convolutions.

    Raises:
        TypeError: ``model`` or ``example_inputs`` has another type, or a mapping comes with inputs.
        ValueError: there is no such weight, one is lazy and has no shape yet, one is on the meta device and has no
            values, or one contains NaN or inf.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, (1, 7)))
    >>> {name: tuple(weight.shape) for name, weight in conv_weights(model).items()}
    {'0': (8, 3, 3, 3), '3': (4, 8, 1, 7)}
    """
    if isinstance(model, nn.Module):
        candidates = _of_module(model, example_inputs)
    elif isinstance(model, Mapping) and all(isinstance(key, str) for key in model):
        if example_inputs is not None:
            raise TypeError("example_inputs: expected None, for a mapping cannot be run, got inputs")
        candidates = _of_mapping(model)
    else:
        raise TypeError(f"model: expected a module or a mapping of names to tensors, got {type(model).__name__}")
    weights = {name: weight for name, weight in candidates.items() if _has_classes(weight)}
    _check_values(weights)
    found = {name: weight.detach().to(device="cpu", dtype=torch.float64) for name, weight in weights.items()}
    if not found:
        raise ValueError(
            "model: expected a floating-point convolution weight of more than one tap and of odd spatial sizes up to "
            f"{LARGEST_KERNEL}, found none among {reprlib.repr(list(candidates))}"
        )
    for name, weight in found.items():
        if not weight.isfinite().all():
            raise ValueError(f"model: expected finite weights, got NaN or inf in layer {name!r}")
    return found


def _of_module(model: nn.Module, example_inputs: Inputs | None) -> dict[str, Tensor]:
    owners: dict[Tensor, str] = {}
    convolutions = {module: name for name, module in model.named_modules() if isinstance(module, _ConvNd)}
    weights = {module: weight_of(module) for module in convolutions}
    names = {module: owners.setdefault(weights[module], name) for module, name in convolutions.items()}
    if example_inputs is not None:
        _check_values({names[module]: weights[module] for module in names})
    modules = list(names) if example_inputs is None else _in_order_of_call(model, list(names), example_inputs)
    lazy = [names[module] for module in modules if is_lazy(weights[module])]
    if lazy:
        raise ValueError(f"model: expected initialised weights, those of {lazy} are lazy; run the model once")
    return {names[module]: weights[module] for module in modules}


def _check_values(weights: Mapping[str, Tensor]) -> None:
    if empty := [name for name, weight in weights.items() if weight.is_meta]:
        raise ValueError(f"model: expected weights with values, those of {empty} are on the meta device")


@compiler.disable
def _in_order_of_call(model: nn.Module, modules: list[_ConvNd], example_inputs: Inputs) -> list[_ConvNd]:
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(inputs, tuple) or not all(isinstance(entry, Tensor) for entry in inputs):
        raise TypeError(
            f"example_inputs: expected None, a tensor or a tuple of tensors, got {type(example_inputs).__name__}"
        )
    called: dict[_ConvNd, None] = {}
    with ExitStack() as hooks, measuring(model, device_of(model)), torch.no_grad():
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(lambda module, _: called.setdefault(module)))
        unwrapped(model)(*(entry.clone() for entry in inputs))  # the model may write to its inputs
    return list(called)


def _of_mapping(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        key.removesuffix("weight").removesuffix("."): value
        for key, value in model.items()
        if key == "weight" or key.endswith(".weight")
        if isinstance(value, Tensor) and 3 <= value.dim() <= 5
        if key.removesuffix("weight") + "crow_indices" not in model  # the blocks of a locally connected layer
    }


def _has_classes(weight: Tensor) -> bool:
    sizes = weight.shape[2:]
    return (
        weight.is_floating_point()
        and weight.numel() > 0
        and max(sizes) > 1
        and all(size % 2 == 1 and size <= LARGEST_KERNEL for size in sizes)
    )
