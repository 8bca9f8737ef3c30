"""Submodules of a model, by their dotted names."""

from torch import nn


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than compute its result."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks may replace the module's arguments or result."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def unused(owner: nn.Module, name: str) -> str:
    """Return the dotted name, lengthened until the owner has nothing else of that name."""
    path, _, last = name.rpartition(".")
    while hasattr(owner.get_submodule(path), last):
        last += "_"
    return f"{path}.{last}" if path else last


def put(owner: nn.Module, target: str, module: nn.Module) -> None:
    """Set a submodule of the owner by its dotted name."""
    path, _, name = target.rpartition(".")
    setattr(owner.get_submodule(path), name, module)
