"""Argument checks shared by several functions of this package."""

import math
from numbers import Real


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_number(name: str, value: float) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a real number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
