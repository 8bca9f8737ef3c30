"""Piecewise linear operations: where they bend, and the linear operation that they are around a sample.

A bend is a function of the input whose sign says which side of a boundary the input is on: the pre-activation of a
ReLU, or how much the largest number of a pooling window exceeds another one. Between bends a network is affine.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional

from loco_ext.fx.modules import per_axis
from loco_ext.fx.operations import ADAPTIVE_POOLS, POOLS, operation
from loco_ext.regularizers.affine import AffineCall


class Tangent(NamedTuple):
    """Tangents of an operation's result and, unless they are not asked for, of its bends."""

    result: Tensor
    bends: Callable[[], Tensor]


class Bend(NamedTuple):
    """An operation that bends, around the values of a batch.

    Attributes:
        result: result of the operation, ``[N, ...]``.
        distances: values of the bends, ``[N, ...]``; infinite where there is no boundary.
        sides: integers that say which linear piece each unit is on, ``[N, ...]``.
        exists: which of ``distances`` are those of bends, as many for each sample; None for all.
        tangents: maps the tangents of the operation's input, ``[K, N or 1, ...]``, to those of result and bends.
        dependence: maps the dependences of the input to those of result and bends, ``[rows, ...]``.
    """

    result: Tensor
    distances: Tensor
    sides: Tensor
    exists: Tensor | None
    tangents: Callable[[Tensor], Tangent]
    dependence: Callable[[Tensor], Tensor]


def _scaling(result: Tensor, distances: Tensor, sides: Tensor, factor: Tensor) -> Bend:
    """Return the bends of an operation on each number, which multiplies tangents by a factor."""
    factor = factor.detach()
    return Bend(result, distances, sides, None, lambda t: Tangent(t * factor, lambda: t), lambda t: t)


def _relu(call: AffineCall) -> Bend:
    x = call.args[0]
    return _scaling(x.relu(), x, x > 0, x > 0)


def _leaky_relu(call: AffineCall) -> Bend:
    x, slope = call.args[0], call.option(0, "negative_slope", 0.01)
    factor = torch.where(x > 0, torch.ones_like(x), slope)
    return _scaling(x * factor, x, x > 0, factor)


def _prelu(call: AffineCall) -> Bend:
    x = call.args[0]
    weight = call.option(0, "weight")
    slope = weight.view(-1, *[1] * (x.dim() - 2)) if weight.numel() > 1 else weight
    result, positive = functional.prelu(x, weight), x > 0

    def tangents(t: Tensor) -> Tangent:  # the slope is a parameter, which gets a gradient
        return Tangent(torch.where(positive, t, t * slope), lambda: t)

    return Bend(result, x, positive, None, tangents, lambda t: t)


def _abs(call: AffineCall) -> Bend:
    x = call.args[0]
    return _scaling(x.abs(), x, x > 0, x.sign())


def _clamped(x: Tensor, low: float, high: float) -> Bend:
    """Return the bends of a clamp: of its two boundaries, which have the same gradient, the nearer one."""
    above, below = x - low, x - high
    distances = torch.where(above.abs() <= below.abs(), above, below)
    sides = (x > low).int() + (x > high).int()
    return _scaling(x.clamp(low, high), distances, sides, sides == 1)


def _hardtanh(call: AffineCall) -> Bend:
    low, high = call.option(0, "min_val", -1.0), call.option(1, "max_val", 1.0)
    return _clamped(call.args[0], low, high)


def _clamp(call: AffineCall) -> Bend:
    low, high = call.option(0, "min"), call.option(1, "max")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise call.refuse()
    return _clamped(call.args[0], -math.inf if low is None else low, math.inf if high is None else high)


def _max_pool(call: AffineCall) -> Bend:
    name, x = operation(call.node), call.args[0]
    axes = POOLS[name]
    if call.option(5, "return_indices", False) or x.dim() != axes + 2:
        raise call.refuse()
    kernel = per_axis(call.option(0, "kernel_size"), axes)
    stride = per_axis(call.option(1, "stride") or kernel, axes)
    padding, dilation = per_axis(call.option(2, "padding", 0), axes), per_axis(call.option(3, "dilation", 1), axes)
    ceil = call.option(4, "ceil_mode", False)
    pooled: Any = getattr(functional, f"max_pool{axes}d")
    counts = pooled(x.detach()[:1], kernel, stride, padding, dilation, ceil_mode=ceil).shape[2:]
    return _largest(x, _Windows(kernel, stride, padding, dilation, counts))


def _adaptive_max_pool(call: AffineCall) -> Bend:
    axes = ADAPTIVE_POOLS[operation(call.node)]
    if set(per_axis(call.option(0, "output_size"), axes)) != {1} or call.option(1, "return_indices", False):
        raise call.refuse(f"adaptive max-pooling to more than one pixel at {call.node.target}")
    size = tuple(call.args[0].shape[2:])
    return _largest(call.args[0], _Windows(size, size, (0,) * axes, (1,) * axes, (1,) * axes))


class _Windows(NamedTuple):
    """Geometry of pooling windows, one number for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    counts: tuple[int, ...]

    def of(self, x: Tensor, fill: float) -> Tensor:
        """Return the windows of the last axes, ``[..., *counts, taps]``."""
        axes = len(self.kernel)
        pads: list[int] = []
        for axis, (k, s, p, d, count) in enumerate(zip(*self, strict=True)):
            behind = (count - 1) * s + (k - 1) * d + 1 - p - x.shape[axis - axes]
            pads = [p, behind, *pads]  # negative where the last pixels are in no window
        x, lead = functional.pad(x, pads, value=fill), x.dim() - axes
        for axis, (k, s, _, d, _) in enumerate(zip(*self, strict=True)):
            x = x.unfold(lead + axis, (k - 1) * d + 1, s)[..., ::d]
        return x.flatten(-axes)


def _largest(x: Tensor, windows: _Windows) -> Bend:
    """Return the bends of max-pooling: by how much the largest number of a window exceeds each other one."""
    inside = windows.of(x, -math.inf)
    index = inside.detach().argmax(-1, keepdim=True)  # [N, C, *counts, 1]
    largest = inside.gather(-1, index)
    others = (inside.detach() != -math.inf).scatter(-1, index, False)
    distances = (largest - inside.masked_fill(~others, 0)).masked_fill(~others, math.inf)

    def tangents(t: Tensor) -> Tangent:
        each = windows.of(t, 0.0)
        each = each.expand(-1, len(index), *each.shape[2:])
        chosen = each.gather(-1, index.expand(len(each), *index.shape))
        return Tangent(chosen.squeeze(-1), lambda: torch.where(others, chosen - each, 0.0))

    def dependence(t: Tensor) -> Tensor:
        return windows.of(t, 0.0).amax(-1)

    return Bend(largest.squeeze(-1), distances, index.squeeze(-1), others, tangents, dependence)


BendingRule = Callable[[AffineCall], Bend]
_BENDING: dict[str, BendingRule] = {
    "relu": _relu,
    "leakyrelu": _leaky_relu,
    "prelu": _prelu,
    "abs": _abs,
    "relu6": lambda call: _clamped(call.args[0], 0.0, 6.0),
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    **{name: _max_pool for name in POOLS if name.startswith("max")},
    **{name: _adaptive_max_pool for name in ADAPTIVE_POOLS if "max" in name},
}


def bending_rule(node: fx.Node) -> BendingRule | None:
    """Return the rule of a piecewise linear operation; None for others."""
    return _BENDING.get(operation(node))
