"""Warnings attributed to the line that calls this package, from any depth inside this package or torch."""

import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, Path(torch.__file__).parent))


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the innermost line that belongs neither to this package nor to torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
