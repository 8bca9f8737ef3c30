"""Places of submodules in a network, by their dotted names."""

from __future__ import annotations

from torch import nn


def unused(owner: nn.Module, name: str) -> str:
    """Return the dotted name, lengthened until the owner has nothing else of that name."""
    path, _, last = name.rpartition(".")
    while hasattr(owner.get_submodule(path), last):
        last += "_"
    return f"{path}.{last}" if path else last


def put(owner: nn.Module, target: str, module: nn.Module) -> None:
    """Set a submodule of the owner by its dotted name."""
    *path, name = target.split(".")
    for step in path:
        owner = getattr(owner, step)
    setattr(owner, name, module)
