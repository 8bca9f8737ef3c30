"""Checks of hyper-parameters, most of which torch.optim does not check, or not in all groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

_AT_LEAST_ZERO = ("lr", "momentum", "weight_decay", "eps")


def check_hyper(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a hyper-parameter among ``options`` is unusable; missing ones are skipped.

    Tensors and arrays of one element count as numbers, as in torch.optim.
    """
    for name in _AT_LEAST_ZERO:
        if name in options and not 0 <= _number(name, options[name]) < math.inf:
            raise ValueError(f"{name}: expected a finite number of at least 0, got {options[name]!r}")
    if "dampening" in options and not math.isfinite(_number("dampening", options["dampening"])):
        raise ValueError(f"dampening: expected a finite number, got {options['dampening']!r}")
    if "betas" in options:
        _check_betas(options["betas"])


def is_zero(weight_decay: float | Tensor) -> bool:
    """Return whether a weight decay is 0 for good; a tensor never is, as it can be changed in place."""
    return not isinstance(weight_decay, Tensor) and weight_decay == 0


def _check_betas(betas: Any) -> None:
    try:
        pair = tuple(betas)
    except TypeError:
        raise TypeError(f"betas: expected a pair of numbers, got {betas!r}") from None
    if len(pair) != 2:
        raise ValueError(f"betas: expected a pair of numbers, got {len(pair)} of them: {betas!r}")
    for i, beta in enumerate(pair):
        if not 0 <= _number(f"betas[{i}]", beta) < 1:
            raise ValueError(f"betas[{i}]: expected a number of at least 0 and less than 1, got {beta!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor | np.ndarray):
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name}: expected a number, got a tensor of shape {tuple(value.shape)}")
        value = value.item()
    if value is True or not isinstance(value, Real):  # False is 0, as in torch.optim
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return float(value)
