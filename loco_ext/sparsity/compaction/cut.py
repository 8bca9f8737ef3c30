"""Weights between the channels that the smaller network keeps, with constants of the others folded into biases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from loco_ext.fx.modules import paddings
from loco_ext.sparsity.compaction.channels import Channels
from loco_ext.sparsity.compaction.constants import Floats, sums_of_taps
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED, filter_weights


class Cut(NamedTuple):
    """Weight and bias of the remaining filters, and the map ``(1, C_out, *output_size)`` to add to the result."""

    weight: Tensor
    bias: Tensor | None
    border: Tensor | None


def cut(channels: Channels, node: fx.Node, source: fx.Node, outputs: list[int], inputs: list[int]) -> Cut:
    """Return the weights of a layer between these channels of its result and of its source.

    The remaining groups of a layer have equal numbers of channels and are concatenated.
    """
    layer = channels.layers[node]
    height, width = len(layer.live) // layer.groups, layer.live.shape[1]
    parts = []
    for group in dict.fromkeys(k // height for k in outputs):
        rows = [k for k in outputs if k // height == group]
        columns = [c - group * width for c in inputs if c // width == group]
        parts.append(_cut_group(channels, node, source, rows, columns, slice(group * width, (group + 1) * width)))
    weights, biases, borders = zip(*parts, strict=True)
    rows = [len(weight) for weight in weights]
    return Cut(torch.cat(weights), _concatenated(biases, rows, 0), _concatenated(borders, rows, 1))


def _cut_group(
    channels: Channels, node: fx.Node, source: fx.Node, outputs: list[int], inputs: list[int], group: slice
) -> Cut:
    """Return the weights of one group; ``inputs`` are counted from the beginning of the group."""
    layer = channels.layers[node]
    needed, read = channels.needed(node)[outputs], channels.needed(source)[group][inputs]
    whole = filter_weights(layer.module).detach()[outputs]
    whole[~torch.from_numpy(needed)] = 0
    bias = _bias(channels, node, outputs)
    weight = whole[:, inputs]
    weight[:, ~torch.from_numpy(read)] = 0
    constants = layer.source.constants[group]
    live = layer.live[outputs][needed].any(0) & (constants != 0)
    gone = np.setdiff1d(np.flatnonzero(live), np.array(inputs)[read])
    if not len(gone):
        return Cut(weight, bias, None)
    foldable = layer.foldable[outputs][needed][:, gone].all(0)
    if foldable.any():
        numbers = torch.from_numpy(constants[gone[foldable]]).to(whole.device)
        folded = sums_of_taps(whole[:, gone[foldable]]) @ numbers
        bias = (folded if bias is None else folded + bias.double()).to(whole.dtype)
    seen = gone[~foldable]
    if not len(seen):
        return Cut(weight, bias, None)
    if channels.fixed_size and type(layer.module) not in TRANSPOSED:
        return Cut(weight, bias, _border(layer.module, whole[:, seen], constants[seen], source.meta["shape"]))
    representative = int(np.abs(np.nan_to_num(constants[inputs]) * read).argmax())
    factors = torch.from_numpy(constants[seen] / constants[inputs[representative]]).to(whole.device)
    merged = torch.einsum("oi...,i->o...", whole[:, seen].double(), factors)
    weight[:, representative] = (weight[:, representative].double() + merged).to(whole.dtype)
    return Cut(weight, bias, None)


def _bias(channels: Channels, node: fx.Node, outputs: list[int]) -> Tensor | None:
    """Return the bias of these filters; for those that do not matter, it is their supposed constant output."""
    module = channels.layers[node].module
    fillers = ~channels.needed(node)[outputs]
    constants = np.where(fillers, np.nan_to_num(channels.values[node].constants[outputs]), 0.0)
    if module.bias is None and not constants.any():
        return None
    bias = module.weight.new_zeros(len(outputs)) if module.bias is None else module.bias.detach()[outputs]
    numbers = torch.from_numpy(constants).to(bias.device, bias.dtype)
    return torch.where(torch.from_numpy(fillers).to(bias.device), numbers, bias)


def _concatenated(parts: Sequence[Tensor | None], rows: Sequence[int], axis: int) -> Tensor | None:
    """Concatenate the groups' biases or maps along an axis; groups that have none get zeros, as many as ``rows``."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    shapes = [[count if a == axis else size for a, size in enumerate(some.shape)] for count in rows]
    return torch.cat(
        [some.new_zeros(shape) if part is None else part for part, shape in zip(parts, shapes, strict=True)], axis
    )


def _border(module: Any, weight: Tensor, constants: Floats, shape: tuple[int, ...]) -> Tensor:
    """Return the outputs for images of these constants, behind the module's padding, ``(1, C_out, *output_size)``."""
    axes = len(shape) - 2
    image = torch.from_numpy(constants).to(weight.device).reshape(1, -1, *[1] * axes).expand(1, -1, *shape[2:])
    pads = [p for axis in reversed(paddings(module)) for p in axis]
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    return convolve(F.pad(image, pads), weight.double(), None, module.stride, 0, module.dilation).to(weight.dtype)
