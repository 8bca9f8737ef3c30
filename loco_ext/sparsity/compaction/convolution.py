"""A convolution with smaller filters: the taps that are left, and the graph that gives the same outputs.

A filter's *box* is the smallest block of taps that holds all of its non-zero weights, as (first, past the last) along
each axis. Filters with the same box become one convolution. Its padding shrinks by the cropped taps; it may differ
between the sides of an axis, and may be negative.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from loco_ext.fx.modules import Pads, paddings, unused_name
from loco_ext.ops.channels import take_channels
from loco_ext.ops.mixed_conv import mixed_conv2d
from loco_ext.sparsity.compaction.whole_filters import layer_like

Box = tuple[tuple[int, int], ...]
VECTOR = 16  # channels that processors compute at once


@dataclass(frozen=True)
class Convolution:
    """The convolution of a module with these filters, which may be fewer and have fewer channels each.

    Args:
        module: the module, which has the other parameters.
        weight: the filters, ``(C_out, C_in/groups, *kernel_size)``.
        bias: their biases, if any.
        channels: number of input channels, over all groups.
        channels_last: memory format of the module's result, which strides hide if image and kernel have size 1.
    """

    module: Any
    weight: Tensor
    bias: Tensor | None
    channels: int
    channels_last: bool

    @property
    def axes(self) -> int:
        return self.weight.dim() - 2

    @property
    def groups(self) -> int:
        return self.channels // self.weight.shape[1]


@dataclass(frozen=True)
class Bucket:
    """Filters that are computed together, with the taps of ``box``."""

    filters: tuple[int, ...]
    box: Box
    mixed: bool = False  # whether one :func:`loco_ext.ops.mixed_conv2d` computes all filters of the layer

    @classmethod
    def whole(cls, weight: Tensor) -> "Bucket":
        """Return all filters with all their taps."""
        return cls(tuple(range(len(weight))), tuple((0, size) for size in weight.shape[2:]))


def boxes(weight: Tensor) -> list[Box | None]:
    """Return the box of each filter; None if all its weights are zero."""
    live = (weight.detach() != 0).any(1).cpu()  # [C_out, *kernel_size]
    spans = []
    for axis in range(live.dim() - 1):
        others = [1 + other for other in range(live.dim() - 1) if other != axis]
        along = live.amax(others) if others else live  # [C_out, taps]
        first = along.int().argmax(1)
        past = along.shape[1] - along.flip(1).int().argmax(1)
        spans.append(list(zip(first.tolist(), past.tolist(), strict=True)))
    alive = live.flatten(1).any(1).tolist()
    return [tuple(span[k] for span in spans) if alive[k] else None for k in range(len(weight))]


def taps(box: Box) -> int:
    """Return the number of taps in the box."""
    return prod(b - a for a, b in box)


def pads_of(box: Box, convolution: Convolution) -> Pads:
    """Return the padding, (before, after) for each axis, that the cropped filters need."""
    sizes, module = convolution.weight.shape[2:], convolution.module
    return tuple(
        (lower - a * step, upper - (size - b) * step)
        for (a, b), size, (lower, upper), step in zip(box, sizes, paddings(module), module.dilation, strict=True)
    )


def is_even(pads: Pads) -> bool:
    """Return whether a convolution module supports this padding: equal on both sides of each axis and at least 0."""
    return all(lower == upper >= 0 for lower, upper in pads)


def by_size(convolution: Convolution, most: int | None = None, dead_apart: bool = False) -> list[Bucket]:
    """Return the filters of each size in ascending order; all together if the convolution is grouped.

    Filters without a non-zero weight join the smallest size, or have one tap of their own if ``dead_apart``. If there
    are more than ``most`` sizes, the rarest are joined with the next.
    """
    filters: dict[Box, list[int]] = {}
    dead: list[int] = []
    for number, box in enumerate(boxes(convolution.weight)):
        (dead if box is None else filters.setdefault(box, [])).append(number)
    middle: Box = tuple((size // 2, size // 2 + 1) for size in convolution.weight.shape[2:])
    ranked = sorted(filters.items(), key=lambda item: (taps(item[0]), item[0]))
    buckets = [Bucket(tuple(some), box) for box, some in ranked]
    if dead and (not buckets or (dead_apart and taps(buckets[0].box) > 1)):
        buckets.insert(0, Bucket(tuple(dead), middle))
    elif dead:
        buckets[0] = join([Bucket(tuple(dead), buckets[0].box), buckets[0]])
    if convolution.groups > 1:
        return [join(buckets)]
    while most is not None and len(buckets) > most:
        rarest = min(range(len(buckets) - 1), key=lambda i: len(buckets[i].filters))
        buckets[rarest : rarest + 2] = [join(buckets[rarest : rarest + 2])]
    return buckets


def join(buckets: Sequence[Bucket]) -> Bucket:
    """Return all filters of the buckets in order, with the smallest box that holds all of theirs."""
    spans = zip(*(bucket.box for bucket in buckets), strict=True)
    box = tuple((min(a for a, _ in axis), max(b for _, b in axis)) for axis in spans)
    return Bucket(tuple(sorted(channel_order(buckets))), box)


def emit(
    owner: nn.Module,
    graph: fx.Graph,
    source: fx.Node,
    name: str,
    convolution: Convolution,
    buckets: Sequence[Bucket],
    order: fx.Node | None,
) -> fx.Node:
    """Add nodes that compute the buckets, concatenated along the channels, from ``source``, and return the result.

    Modules are added to ``owner`` under ``name``, with a number appended if there are several buckets.

    Args:
        order: indices that reorder the channels, as :func:`inverse_order` returns them; None if they stay in order.
    """
    several = len(buckets) > 1
    targets = [unused_name(owner, f"{name}_{number}") if several else name for number in range(len(buckets))]
    if not any(bucket.mixed for bucket in buckets):
        result = _emit_each(owner, graph, source, targets, convolution, buckets)
        return result if order is None else graph.call_function(take_channels, (result, order, -1 - convolution.axes))
    around = [pads_of(bucket.box, convolution) for bucket in buckets]
    for target, bucket, pads in zip(targets, buckets, around, strict=True):
        of_layer = pads if is_even(pads) else ((0, 0), (0, 0))
        owner.set_submodule(target, _module(convolution, bucket, of_layer, convolution.module.stride))
    weights = [graph.get_attr(f"{target}.weight") for target in targets]
    biases = [] if convolution.bias is None else [graph.get_attr(f"{target}.bias") for target in targets]
    numbers = [tuple(p for axis in pads for p in axis) for pads in around]
    options: Any = {"stride": convolution.module.stride, "dilation": convolution.module.dilation}
    return graph.call_function(mixed_conv2d, (source, weights, biases, numbers, order), options)


def is_narrow_and_strided(bucket: Bucket, convolution: Convolution) -> bool:
    """Return whether the bucket's filters have one tap, a stride, and fewer input channels than :data:`VECTOR`.

    The backward pass of oneDNN for such a convolution on channels_last images writes out of bounds
    (uxlfoundation/oneDNN#6035).
    """
    strided = any(step > 1 for step in convolution.module.stride)
    return strided and taps(bucket.box) == 1 and convolution.weight.shape[1] < VECTOR


def _emit_each(
    owner: nn.Module,
    graph: fx.Graph,
    source: fx.Node,
    targets: Sequence[str],
    layer: Convolution,
    buckets: Sequence[Bucket],
) -> fx.Node:
    parts = []
    padded: dict[Pads, fx.Node] = {}
    for target, bucket in zip(targets, buckets, strict=True):
        pads, read, stride = pads_of(bucket.box, layer), source, layer.module.stride
        apart = is_narrow_and_strided(bucket, layer)
        if apart or not is_even(pads):
            if pads not in padded:
                padded[pads] = pad(graph, source, pads, layer.module.padding_mode)
            read, pads = padded[pads], ((0, 0),) * layer.axes
        if apart:
            every: Any = (..., *(slice(None, None, step) for step in stride))
            read, stride = graph.call_function(operator.getitem, (read, every)), (1,) * layer.axes
        owner.set_submodule(target, _module(layer, bucket, pads, stride))
        parts.append(graph.call_module(target, (read,)))
    return parts[0] if len(parts) == 1 else graph.call_function(torch.cat, (parts, -1 - layer.axes))


def standalone(convolution: Convolution, buckets: Sequence[Bucket], free: bool = False) -> fx.GraphModule:
    """Return a network of only these buckets; its channels are in the filters' order unless they are ``free``."""
    owner, graph = nn.Module(), fx.Graph()
    source, order = graph.placeholder("x"), None
    back = None if free else inverse_order(buckets, convolution.weight.device)
    if back is not None:
        owner.register_buffer("order", back)
        order = graph.get_attr("order")
    graph.output(emit(owner, graph, source, "convolution", convolution, buckets, order))
    return fx.GraphModule(owner, graph)


def channel_order(buckets: Sequence[Bucket]) -> list[int]:
    """Return the filters in the order of the computed channels."""
    return [k for bucket in buckets for k in bucket.filters]


def inverse_order(buckets: Sequence[Bucket], device: torch.device) -> Tensor | None:
    """Return the indices that restore the order of the buckets' filters; None if they are in order."""
    back = torch.tensor(channel_order(buckets), device=device).argsort()
    return None if torch.equal(back, torch.arange(len(back), device=device)) else back


def _module(convolution: Convolution, bucket: Bucket, pads: Pads, stride: tuple[int, ...]) -> nn.Module:
    """Return the layer of the bucket's filters; its padding is equal on both sides of each axis."""
    whole, filters, padding = convolution.module, list(bucket.filters), tuple(before for before, _ in pads)
    place: Any = (filters, slice(None), *(slice(a, b) for a, b in bucket.box))
    weight = convolution.weight[place].detach()
    return layer_like(
        whole,
        weight,
        None if convolution.bias is None else convolution.bias[filters].detach(),
        channels_last=convolution.channels_last and not bucket.mixed,
        kernel_size=tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        dilation=whole.dilation,
        groups=convolution.groups,
        padding_mode=whole.padding_mode if any(padding) else "zeros",
    )


def pad(graph: fx.Graph, source: fx.Node, pads: Pads, mode: str) -> fx.Node:
    """Add nodes that pad, then crop where a pad is negative; this order is right in every mode and for small inputs."""
    outward = [max(p, 0) for axis in reversed(pads) for p in axis]
    if any(outward):
        source = graph.call_function(F.pad, (source, outward), {"mode": "constant" if mode == "zeros" else mode})
    if any(p < 0 for axis in pads for p in axis):
        spans = [slice(max(-lower, 0) or None, min(upper, 0) or None) for lower, upper in pads]
        place: Any = (..., *spans)
        source = graph.call_function(operator.getitem, (source, place))  # a view
    return source
