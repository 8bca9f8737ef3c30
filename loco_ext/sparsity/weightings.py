"""What the norms of nested groups are multiplied by, and thresholds made of it."""

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
    """``w_n`` of each group of kernels of so many channels, whose taps are in these of ``count`` rings."""
    taps = itertools.accumulate(rings.count(n) for n in range(count))
    exponent = 2 * WEIGHTINGS[weighting]
    return [math.sqrt(channels * number) ** exponent for number in taps]  # torch's powers of 1/2 to the last bit


def as_thresholds(numbers: Sequence[float], weight: Tensor) -> Tensor:
    """The numbers, float64 on the CPU, for a call with this weight. To be read only: plain tensors share them.

    Amid other work, making so small a tensor anew takes a part of the time of a large prox that can be seen.
    """
    key = tuple(numbers)
    if torch.compiler.is_compiling() or type(weight) not in (Tensor, nn.Parameter):
        return torch.tensor(key, dtype=torch.float64, device="cpu")
    if (kept := _kept.get(key)) is not None:
        return kept
    made = torch.tensor(key, dtype=torch.float64, device="cpu")
    if type(made) is Tensor and not made.is_inference():
        if len(_kept) >= _MOST_KEPT:  # strengths that change with every step
            _kept.clear()
        _kept[key] = made
    return made
