"""Factors of the norms of nested groups, and thresholds computed from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WEIGHTINGS = {"plain": 0.0, "normalized": -0.5, "scaled": 0.5}  # exponents of a group's number of weights
_MOST_KEPT = 1024
_kept: dict[tuple[float, ...], Tensor] = {}


def group_weights(rings: Sequence[int], count: int, channels: int, weighting: str) -> list[float]:
    """Return ``w_n`` for each of ``count`` nested groups of a kernel with these channels and this ring for each tap."""
    taps = itertools.accumulate(rings.count(n) for n in range(count))
    exponent = 2 * WEIGHTINGS[weighting]
    return [math.sqrt(channels * number) ** exponent for number in taps]  # equals torch's powers of 1/2 to the last bit


def as_thresholds(numbers: Sequence[float], weight: Tensor) -> Tensor:
    """Return the numbers as float64 on the CPU, for a call with this weight. Do not modify: plain tensors are cached.

    Creating such a small tensor each time takes a noticeable part of the time of a large prox.
    """
    key = tuple(numbers)
    if torch.compiler.is_compiling() or type(weight) not in (Tensor, nn.Parameter):
        return torch.tensor(key, dtype=torch.float64, device="cpu")
    if (kept := _kept.get(key)) is not None:
        return kept
    made = torch.tensor(key, dtype=torch.float64, device="cpu")
    if type(made) is Tensor and not made.is_inference():
        if len(_kept) >= _MOST_KEPT:  # reached by strengths that change with every step
            _kept.clear()
        _kept[key] = made
    return made
