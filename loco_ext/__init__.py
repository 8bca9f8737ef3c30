"""Locality as something you can turn up or down, for people who train convolutional networks."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loco_ext.version import __version__

if TYPE_CHECKING:
    from loco_ext import analysis, regularizers

__all__ = ["__version__", "analysis", "backend", "geometry", "nn", "ops", "optim", "regularizers", "sparsity"]


def __getattr__(name: str) -> Any:
    """Import a submodule at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "backend":
        return importlib.import_module("loco_ext.ops").backend
    return importlib.import_module(f"loco_ext.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_command() -> bool:
    """Return whether this process is the command line.

    The command line imports what it needs itself: importing torch takes seconds, help does not need it, and an
    interrupt has to be caught from the start.
    """
    return Path("".join(sys.argv[:1])).stem == "loco-ext" or sys.orig_argv[1:3] == ["-m", "loco_ext.cli"]


if not _is_command():
    from loco_ext import geometry, nn, ops, optim, sparsity
    from loco_ext.ops import backend
