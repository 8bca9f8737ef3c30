"""Checks of a caller's arguments; messages name the argument, what was expected and what came."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_SIZE = 2**31 - 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def is_int(value: object) -> bool:
    """Return whether the value is an integer; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, smallest: int = 0) -> int:
    """Return the value as an int; raise TypeError or ValueError unless it is one of at least ``smallest``."""
    if not is_int(value):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < smallest:
        raise ValueError(f"{name}: expected at least {smallest}, got {value}")
    return int(value)


def check_seed(seed: Any) -> int:
    """Return the seed as an int; raise TypeError or ValueError unless it is one of 64 bits."""
    if not is_int(seed):
        raise TypeError(f"seed: expected an int, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected an int of 64 bits, got {seed}")
    return int(seed)


def check_ints(name: str, value: Any, axes: int | None = None, smallest: int = 1) -> tuple[int, ...]:
    """Return one int for each axis, each from ``smallest`` to ``LARGEST_SIZE``, or raise TypeError or ValueError.

    Args:
        value: an int for all axes, or a sequence of one for each.
        axes: the number of axes; None accepts one to three, and an int for one axis.
    """
    each = " or one to three ints" if axes is None else f", or one for each of {axes} axes" if axes > 1 else ""
    expected = f"{name}: expected an int{each}, got {value!r}"
    values = (value,) * (axes or 1) if is_int(value) else value
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not all(map(is_int, values)):
        raise TypeError(expected)
    if len(values) not in (range(1, 4) if axes is None else (axes,)):
        raise ValueError(expected)
    if not all(smallest <= item <= LARGEST_SIZE for item in values):
        raise ValueError(f"{name}: expected at least {smallest} and at most {LARGEST_SIZE}, got {value!r}")
    return tuple(map(int, values))


def check_number(name: str, value: Any) -> float:
    """Return the value as a float; raise TypeError or ValueError unless it is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):  # type: ignore[operator]
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise ValueError unless the value is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_module(name: str, value: object) -> None:
    """Raise TypeError unless the value is an nn.Module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: expected a module, got {type(value).__name__}")


def check_tensor(name: str, value: object, floating: bool = False) -> None:
    """Raise TypeError unless the value is a tensor and, if ``floating``, of a floating-point dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if floating and not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {value.dtype}")


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the tensor is dense and of one of the dtypes that the kernels know."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {tensor.dtype}")
