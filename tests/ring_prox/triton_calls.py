"""Calls of ring_prox for the tests of its Triton kernels: made from a seed, in memory of all kinds, and compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.ring_prox.cases import lie, rings_of
from tests.tolerances import assert_within_ulps, same_bits

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass
class Call:
    """The arguments of ring_prox."""

    weight: Tensor
    rings: Sequence[int]
    thresholds: Tensor
    squared: Tensor | None = None
    metric: Tensor | None = None
    linf: bool = False
    settings: dict = field(default_factory=dict)  # attributes to set in the launcher's module

    def arguments(self) -> tuple:
        return self.weight, self.rings, self.thresholds, self.squared, self.metric, self.linf


def assert_same(actual: Tensor, expected: Tensor, scale: Tensor, ulps: float | None = None) -> None:
    """Assert equality, except for rounding, with zeros, infinities and NaN in the same places."""
    special = (expected == 0) | ~expected.isfinite()
    assert torch.equal(special, (actual == 0) | ~actual.isfinite()), "other weights vanish"
    assert same_bits(actual[special], expected[special])
    assert_within_ulps(actual[~special], expected[~special], ulps, scale[~special])


def make(
    shape: Sequence[int],
    dtype: torch.dtype = F32,
    linf: bool = False,
    squared: bool = False,
    metric: torch.dtype | None = None,
    rings: Sequence[int] | None = None,
    strength: float = 0.5,
    rows: bool = True,
) -> Call:
    """Return a call for which some rings vanish and others do not."""
    rings = rings_of(shape)[0] if rings is None else rings
    count = max(rings) + 1
    channels = shape[1] * len(rings) / count  # weights of a ring, on average
    t = (
        torch.rand((shape[0], count) if rows else (count,), dtype=F64)
        * strength
        * (channels if linf else channels**0.5)
    )
    return Call(
        weight=lie(torch.randn(shape).to(dtype)),
        rings=rings,
        thresholds=t,
        squared=t.flip(-1) * (0.01 if linf else 0.05) if squared else None,
        metric=None if metric is None else lie((torch.rand(shape) + 0.2).to(metric)),
        linf=linf,
    )
