"""Random convolutions and locally connected layers, and what their taps read."""

import random
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from loco_ext.nn.locally_connected import LocallyConnectedNd
from tests.geometry.pattern_cases import Case, random_case, read_pixels

LAYERS = (LocallyConnected1d, LocallyConnected2d, LocallyConnected3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def random_conv(generator: random.Random, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Case]:
    """Return a convolution module and its geometry; the padding is symmetric or "same"."""
    case = random_case(generator, symmetric=True)
    groups, bias = generator.choice((1, 1, 2, 3)), generator.random() < 0.7
    depth, width = generator.randint(1, 3), generator.randint(1, 3)
    padding: Any = tuple(before for before, _ in case.padding)
    if set(case.stride) == {1} and case.padding_mode == "zeros" and generator.random() < 0.3:
        padding = "same"
    conv = CONVOLUTIONS[len(case.input_size) - 1](
        *(groups * depth, groups * width, case.kernel_size, case.stride, padding, case.dilation, groups, bias),
        padding_mode=case.padding_mode,
        dtype=dtype,
    )
    return conv, case


def layer_class(case: Case) -> type[LocallyConnectedNd]:
    return LAYERS[len(case.input_size) - 1]


def random_layer(generator: random.Random, dtype: torch.dtype = torch.float64) -> tuple[LocallyConnectedNd, Case]:
    """Return a layer with random blocks and biases, and its geometry, whose padding may be asymmetric."""
    case = random_case(generator)
    groups, bias = generator.choice((1, 1, 2, 3)), generator.random() < 0.7
    layer = layer_class(case)(
        *(groups * generator.randint(1, 3), groups * generator.randint(1, 3), case.kernel_size, case.stride),
        *(case.padding, case.dilation, groups, bias, case.padding_mode),
        dtype=dtype,
        input_size=case.input_size,
    )
    return layer, case


def windows(x: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the values that each tap of each output pixel reads from a batch, ``[N, C, n_out, n_taps]``."""
    pads = [side for pair in reversed(case.padding) for side in pair]
    x = functional.pad(x, pads, mode="constant" if case.padding_mode == "zeros" else case.padding_mode)
    for axis, (taps, step, gap) in enumerate(zip(case.kernel_size, case.stride, case.dilation, strict=True)):
        x = x.unfold(axis + 2, gap * (taps - 1) + 1, step)[..., ::gap]
    axes = len(case.input_size)
    return x.flatten(2 + axes).flatten(2, 1 + axes)


def block_of_taps(layer: LocallyConnectedNd, case: Case) -> torch.Tensor:
    """Return the block that holds the weights of each tap of each output pixel, or -1: int64 ``[n_out, n_taps]``."""
    crow, col = layer.crow_indices.tolist(), layer.col_indices.tolist()
    places = [{pixel: first + i for i, pixel in enumerate(col[first:last])} for first, last in pairwise(crow)]
    reads = read_pixels(case)
    return torch.tensor([[row.get(p, -1) for p in pixels] for row, pixels in zip(places, reads.tolist(), strict=True)])
