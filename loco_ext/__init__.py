"""Locality as something you can turn, for people who train convolutional networks."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from loco_ext import geometry, nn, ops, optim, sparsity
from loco_ext.ops import backend
from loco_ext.version import __version__

if TYPE_CHECKING:
    from loco_ext import analysis

__all__ = ["__version__", "analysis", "backend", "geometry", "nn", "ops", "optim", "sparsity"]


def __getattr__(name: str) -> ModuleType:
    """Import a module of ``__all__`` when it is first asked for: training does without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
