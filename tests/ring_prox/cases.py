"""Calls of the prox of nested rings for its tests: made from a seed, and run in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import loco_ext
from loco_ext import geometry, sparsity
from tests.covering import covering

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIBRARIES = ("cpu", "cuda_on_cpu")  # of kernels, for the fixture native
BACKENDS = (*LIBRARIES, "reference")  # for the fixture backend
WEIGHTINGS = {"plain": 0.0, "normalized": -0.5, "scaled": 0.5}  # exponents of a group's number of weights
HALVES = ("top_left", "bottom_right")
LARGEST_SIZE = 11


@dataclass(frozen=True)
class Rings:
    """Division of a kernel of one size into rings."""

    kernel_size: tuple[int, ...]
    kind: str
    first: str

    @property
    def of_taps(self) -> list[int]:
        return geometry.ring_index(self.kernel_size, self.kind, self.first).flatten().tolist()

    @property
    def count(self) -> int:
        return max(self.of_taps) + 1


def rings_of(shape: Sequence[int]) -> tuple[list[int], int]:
    """Return the ring of each tap of a weight, which may have no axes of taps, and the number of rings."""
    index = geometry.ring_index(shape[2:]).flatten().tolist() if len(shape) > 2 else [0]
    return index, max(index) + 1


def square_rings(largest: int = LARGEST_SIZE) -> list[Rings]:
    """Return the rings of all square sizes up to the largest, of both kinds and, for half rings, in both orders."""
    halves = [Rings((s, s), "half", first) for s in range(1, largest + 1) for first in HALVES]
    return halves + [Rings((s, s), "full", "auto") for s in range(1, largest + 1, 2)]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of ``sparsity.ring_prox``."""

    rings: Rings
    weight: Tensor
    thresholds: Tensor
    squared: Tensor | None = None
    metric: Tensor | None = None
    norm: str = "l2"

    def prox(self, backend: str = "native") -> Tensor:
        with loco_ext.backend("reference" if backend == "reference" else "native"):
            return sparsity.ring_prox(
                self.weight,
                self.thresholds,
                self.rings.kind,
                self.norm,
                self.metric,
                squared=self.squared,
                first=self.rings.first,
            )

    def residual(self, result: Tensor) -> Tensor:
        return sparsity.kkt_residual(
            self.weight,
            result,
            self.thresholds,
            self.rings.kind,
            self.norm,
            self.metric,
            squared=self.squared,
            first=self.rings.first,
        )

    def objective(self, x: Tensor) -> Tensor:
        """Return the objective that the prox minimises, for each kernel, float64 ``[C_out]``, by torch alone."""
        d = torch.ones_like(self.weight) if self.metric is None else self.metric
        fit = (d.double() * (x.double() - self.weight.double()).square()).flatten(1).sum(1) / 2
        norms = group_norms(x, self.rings, self.norm)
        value = fit + (self.thresholds * norms).sum(1)
        return value if self.squared is None else value + (self.squared * norms).sum(1).square()

    def sizes_left(self, result: Tensor) -> Tensor:
        return sparsity.kernel_sizes(result, self.rings.kind, first=self.rings.first)

    def to(self, dtype: torch.dtype) -> Case:
        metric = None if self.metric is None else self.metric.to(dtype)
        return replace(self, weight=self.weight.to(dtype), metric=metric)


def lie(tensor: Tensor, order: Sequence[int] | None = None, step: int = 1) -> Tensor:
    """Return a copy amid NaN: axes in ``order`` from slowest to fastest, on every ``step``-th element of each."""
    order = list(range(tensor.dim())) if order is None else order
    sizes = [tensor.shape[d] * step for d in order]
    memory = torch.full((torch.Size(sizes).numel() + 16,), torch.nan, dtype=tensor.dtype)
    view = memory[8:-8].view(sizes)[tuple(slice(None, None, step) for _ in order)]
    return view.permute([order.index(d) for d in range(tensor.dim())]).copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lie,
    "channels_last": lambda t: lie(t, [0, *range(2, t.dim()), 1]),
    "kernels_fastest": lambda t: lie(t, list(range(t.dim()))[::-1]),
    "channels_slowest": lambda t: lie(t, [1, 0, *range(2, t.dim())]),
    "gaps": lambda t: lie(t, step=2),
    "channels_last_gaps": lambda t: lie(t, [0, *range(2, t.dim()), 1], 3),
    "rows_and_columns_swapped": lambda t: lie(t, [*range(t.dim() - 2), t.dim() - 1, t.dim() - 2]),
    "part_of_channels_last": lambda t: lie(torch.cat([t, t + 1], 1), [0, *range(2, t.dim()), 1])[:, : t.shape[1]],
    "off_a_boundary": lambda t: lie(torch.cat([t.flatten()[:3], t.flatten()]))[3:].view(t.shape),
    "negated": lambda t: (
        lie(torch.complex(t.double(), -t.double())).conj().imag if t.dtype == torch.float64 else lie(t)
    ),
}


def group_norms(x: Tensor, rings: Rings, norm: str = "l2") -> Tensor:
    """Return the norm of each group of rings of each kernel, float64 ``[C_out, groups]``."""
    index = torch.tensor(rings.of_taps)
    order = torch.inf if norm == "linf" else 2
    parts = [x.double().flatten(2)[:, :, index <= n].flatten(1) for n in range(rings.count)]
    return torch.stack([torch.linalg.vector_norm(part, order, dim=1) for part in parts], 1)


def group_weights(rings: Rings, channels: int, weighting: str) -> Tensor:
    sizes = torch.bincount(torch.tensor(rings.of_taps)).cumsum(0) * channels
    return sizes.double() ** WEIGHTINGS[weighting]


def make_case(
    rings: Rings,
    kernels: int = 8,
    channels: int = 3,
    *,
    weighting: str = "plain",
    norm: str = "l2",
    metric: bool = False,
    power: str = "plain",
    seed: int = 0,
) -> Case:
    """Return a call with random arguments in float64.

    The magnitudes of kernels and of their rings vary by orders of magnitude, so that anything from none to all of the
    rings vanishes, whatever the thresholds.

    ``power``: "plain" thresholds, "squared" ones or "both".
    """
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(rings.of_taps)

    def powers_of_ten(lowest: float, highest: float, *shape: int) -> Tensor:
        return 10.0 ** (lowest + (highest - lowest) * torch.rand(shape, dtype=torch.float64, generator=generator))

    shape = (kernels, channels, *rings.kernel_size)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator).flatten(2)
    weight *= powers_of_ten(-1.5, 1.5, kernels, 1, 1) * powers_of_ten(-1, 0.5, kernels, 1, rings.count)[:, :, index]
    d = powers_of_ten(-1, 1, *shape) if metric else None
    strengths = group_weights(rings, channels, weighting) * powers_of_ten(-0.5, 0.5, rings.count)
    strengths /= strengths.mean() * rings.count
    # These thresholds are about as large as to take standard normal weights to zero.
    counts = torch.bincount(index).cumsum(0) * channels
    t = strengths * (counts.double() if norm == "linf" else counts.double().sqrt()).mean()
    if power == "plain":
        return Case(rings, weight.view(shape), t, None, d, norm)
    q = strengths.roll(1) * powers_of_ten(-1.5, 1, kernels, 1)
    return Case(rings, weight.view(shape), t.expand_as(q) if power == "both" else torch.zeros_like(q), q, d, norm)


# All combinations of the prox's options.
MODES = [
    {"norm": norm, "metric": metric, "power": power}
    for norm, metric, power in product(("l2", "linf"), (False, True), ("plain", "squared", "both"))
]


def covered_modes(*axes: Iterable[Any]) -> list[Any]:
    """Return parameters of a mode and one value of each axis: every three values of options and axes meet."""
    met = covering(("l2", "linf"), (False, True), ("plain", "squared", "both"), *axes, strength=3)
    options = ("norm", "metric", "power")
    return [pytest.param(dict(zip(options, p.values[:3], strict=True)), *p.values[3:], marks=p.marks) for p in met]


def mode_id(mode: dict[str, object]) -> str:
    return f"{mode['norm']}{'-metric' if mode['metric'] else ''}-{mode['power']}"
