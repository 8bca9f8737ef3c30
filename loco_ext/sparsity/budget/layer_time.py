"""Times of a layer at smaller numbers of channels, measured on this machine."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from loco_ext.sparsity.compaction.constants import Floats
from loco_ext.sparsity.compaction.convolution import Convolution
from loco_ext.sparsity.compaction.cost import seconds_of, seconds_of_layer
from loco_ext.sparsity.compaction.disjoint_set import Integers
from loco_ext.sparsity.compaction.whole_filters import filter_weights, has_whole_filters, with_filters


class LayerTime(NamedTuple):
    """Seconds that a layer takes, by its numbers of input channels and of filters.

    Attributes:
        inputs: numbers of input channels, ascending, ``[4]``; the last may repeat.
        filters: numbers of filters, ascending, ``[8]``; the last may repeat.
        seconds: ``[4, 8]``.
    """

    inputs: Floats
    filters: Floats
    seconds: Floats


class LayerTimes:
    """Times of several layers between the numbers of channels that were timed.

    A time is linear between two numbers of input channels. Fewer filters take as long as the next number that was
    timed, as processors compute several together.
    """

    def __init__(self, times: Sequence[LayerTime]) -> None:
        self._inputs, self._filters, self._seconds = map(np.stack, zip(*times, strict=True))

    def __call__(self, layers: Integers, inputs: Floats, filters: Floats) -> Floats:
        """Return the seconds of layers, given by index, for numbers of channels; the three broadcast."""
        column = (filters[..., None] > self._filters[layers, :-1]).sum(-1)
        row = (inputs[..., None] > self._inputs[layers, 1:-1]).sum(-1)
        first, last = self._inputs[layers, row], self._inputs[layers, row + 1]
        part = (inputs - first) / np.maximum(last - first, 1.0)
        lower, upper = self._seconds[layers, row, column], self._seconds[layers, row + 1, column]
        return np.where(filters > 0, np.maximum(lower + part * (upper - lower), 0.0), 0.0)


@torch.no_grad()
def time_layer(module: Any, kinds: Sequence[Mapping[str, Any]]) -> LayerTime:
    """Return the times of all calls of a convolution, transposed or not, or a linear layer.

    Args:
        module: the layer.
        kinds: shape, dtype, device and memory format of its input in each call.
    """
    weight, bias = filter_weights(module), module.bias
    if bias is None:
        bias = weight.new_zeros(len(weight))  # that of the batch norm behind it, once compacted
    whole, groups = has_whole_filters(module), getattr(module, "groups", 1)
    filters = [len(weight) // groups * count for count in _some(groups, 8)] if groups > 1 else _some(len(weight), 8)
    inputs = [weight.shape[1]] * 4 if groups > 1 else _some(weight.shape[1], 4)

    def seconds(width: int, count: int) -> float:
        some = weight[:count, :width]
        if whole:
            layer = with_filters(module, some, bias[:count])
            return sum(seconds_of_layer(layer, kind) for kind in kinds)
        channels = width * max(1, count * groups // len(weight))
        return sum(
            seconds_of(Convolution(module, some, bias[:count], channels, kind["channels_last"]), kind) for kind in kinds
        )

    table = np.asarray([[seconds(width, count) for count in filters] for width in inputs])
    for axis in (0, 1):  # what is slower than more channels is timing noise, or could be computed with zeros added
        table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return LayerTime(np.asarray(inputs, float), np.asarray(filters, float), table)


def _some(count: int, most: int) -> list[int]:
    """Return numbers up to ``count``, which repeats; their distance is a power of two of at least ``count / most``."""
    step = 2 ** math.ceil(math.log2(max(1.0, count / most)))
    found = [*range(step, count, step), count]
    return found + [count] * (most - len(found))
