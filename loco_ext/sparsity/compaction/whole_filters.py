"""Weights of layers by filter, and layers with other filters; of those that are made anew, some keep their size."""

from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.fx.modules import bias_trains
from loco_ext.ops.memory_format import FORMATS, is_channels_last

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def filters_first(module: Any, numbers: Tensor) -> Tensor:
    """Return a view of numbers for each weight of the module, ``(C_out, C_in/groups, *kernel_size)``.

    A transposed convolution has its input channels first; the view of its weight serves for one without groups.
    """
    return numbers.transpose(0, 1) if type(module) in TRANSPOSED else numbers


def filter_weights(module: Any) -> Tensor:
    """Return the weight of a layer, or a view of it, ``(C_out, C_in/groups, *kernel_size)``."""
    return filters_first(module, module.weight)


def by_taps(numbers: Tensor) -> Tensor:
    """Return numbers for each weight of a layer as ``(C_out, C_in/groups, taps)``; a linear layer has one tap."""
    return numbers.reshape(*numbers.shape[:2], -1)


def has_whole_filters(module: Any) -> bool:
    """Return whether the module is a linear layer or a transposed convolution."""
    return isinstance(module, nn.Linear) or type(module) in TRANSPOSED


def with_filters(module: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """Return a layer like the module with these filters, ``(C_out, C_in, *kernel_size)``, and biases."""
    names = ("kernel_size", "stride", "padding", "output_padding", "dilation") if type(module) in TRANSPOSED else ()
    return layer_like(module, weight, bias, is_channels_last(module.weight), **{n: getattr(module, n) for n in names})


def layer_like(module: Any, weight: Tensor, bias: Tensor | None, channels_last: bool, **options: Any) -> Any:
    """Return a layer of the module's class with these filters, ``(C_out, C_in/groups, *kernel_size)``, and biases.

    Args:
        channels_last: memory format of the weight.
        options: further arguments of the class.
    """
    width, kind = weight.shape[1] * options.get("groups", 1), {"device": weight.device, "dtype": weight.dtype}
    layer: Any = nn.utils.skip_init(type(module), width, len(weight), bias=bias is not None, **options, **kind)
    memory_format = FORMATS[weight.dim()] if channels_last else torch.contiguous_format
    own = filters_first(module, weight).clone(memory_format=memory_format)
    layer.weight = nn.Parameter(own, requires_grad=module.weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone(), requires_grad=bias_trains(module))
    return layer
