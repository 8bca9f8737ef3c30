"""Random convolutions, and the locally connected layers of the same geometry."""

import random
from typing import Any

import torch
from pattern_cases import Case, random_case
from torch import nn

from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from loco_ext.nn.locally_connected import LocallyConnectedNd

LAYERS = (LocallyConnected1d, LocallyConnected2d, LocallyConnected3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def random_conv(generator: random.Random, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Case]:
    """A convolution module, and its geometry; padding is the same before and after, or "same" or "valid"."""
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
