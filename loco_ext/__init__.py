"""Locality as something you can turn, for people who train convolutional networks."""

import importlib
from typing import TYPE_CHECKING, Any

from loco_ext.version import __version__

if TYPE_CHECKING:
    from loco_ext import analysis, geometry, nn, ops, optim, sparsity
    from loco_ext.ops import backend

__all__ = ["__version__", "analysis", "backend", "geometry", "nn", "ops", "optim", "sparsity"]


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for: torch takes seconds, and the command line's help needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "backend":
        return importlib.import_module("loco_ext.ops").backend
    return importlib.import_module(f"loco_ext.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
