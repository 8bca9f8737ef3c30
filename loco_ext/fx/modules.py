"""Submodules of a model by their dotted names, and what several modules of this package ask of one."""

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree

Pads = tuple[tuple[int, int], ...]


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than compute its result."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks may replace the module's arguments or result."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile, of data parallelism and of averaged weights.

    A call of a wrapper would compile a graph that cannot be differentiated twice, or start the wrapper's own
    bookkeeping of one forward pass for each backward pass.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | AveragedModel):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return model if inner is None else unwrapped(inner)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy; computed tensors, such as weights set by hooks, are copied without their history."""
    return copy.deepcopy(model, computed_tensors(model))


def computed_tensors(model: nn.Module) -> dict[int, Any]:
    """Return copies of the computed tensors that modules hold, without their history, as a memo for a deep copy."""
    attributes = (x for module in model.modules() for x in _pytree.tree_leaves(vars(module)))
    return {id(x): x.detach().clone() for x in attributes if isinstance(x, Tensor) and not x.is_leaf}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def count_owners(model: nn.Module) -> Counter[int]:
    """Return how many modules own each parameter, by the parameter's id."""
    return Counter(id(p) for module in {*model.modules()} for p in module.parameters(recurse=False))


def unused_name(owner: nn.Module, name: str) -> str:
    """Return the dotted name, lengthened until the owner has nothing else of that name."""
    path, _, last = name.rpartition(".")
    while hasattr(owner.get_submodule(path), last):
        last += "_"
    return f"{path}.{last}" if path else last


def bias_trains(layer: Any) -> bool:
    """Return whether the bias of a layer that replaces this one requires a gradient: as its own, or else its weight."""
    return (layer.weight if layer.bias is None else layer.bias).requires_grad


def per_axis(option: Any, axes: int) -> tuple[Any, ...]:
    """Return an option of a convolution or a pooling for each axis, given for each axis or once for all of them."""
    values = tuple(option) if isinstance(option, tuple | list) else (option,)
    return values if len(values) == axes else values * axes


def paddings(module: Any) -> Pads:
    """Return the padding of a convolution module, (before, after) for each axis."""
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in module.padding)
