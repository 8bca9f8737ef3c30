"""Conversions of convolutions to locally connected layers, and of those to convolutions and dense layers."""

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from loco_ext.geometry.conv import Ints
from loco_ext.nn.computed import has_foreign_hooks, tensor_of, weight_of
from loco_ext.nn.embedding import embed, kernel_weight, project, weight_by_tap

if TYPE_CHECKING:
    from loco_ext.nn.locally_connected import LocallyConnectedNd

    Layer = TypeVar("Layer", bound=LocallyConnectedNd)

_PADDERS = {"zeros": "ZeroPad", "circular": "CircularPad", "reflect": "ReflectionPad", "replicate": "ReplicationPad"}


@torch.no_grad()
def from_conv(layer_class: "type[Layer]", conv: nn.Module, input_size: Ints) -> "Layer":
    """Implement :meth:`LocallyConnected2d.from_conv`."""
    conv_class = getattr(nn, f"Conv{layer_class.axes}d")
    if not isinstance(conv, conv_class):
        raise TypeError(f"conv: expected an nn.{conv_class.__name__}, got {type(conv).__name__}")
    for name in ("forward", "_conv_forward"):
        if getattr(type(conv), name) is not getattr(conv_class, name) or name in vars(conv):
            raise TypeError(f"conv: expected what computes as nn.{conv_class.__name__}, got {type(conv).__name__}")
    weight, bias = weight_of(conv), tensor_of(conv, "bias")
    if isinstance(weight, UninitializedParameter):
        raise TypeError(f"conv: expected an initialised module, got a {type(conv).__name__} that has not run yet")
    if has_foreign_hooks(conv):
        raise TypeError(f"conv: expected an nn.{conv_class.__name__} without hooks, got one with some")
    layer = nn.utils.skip_init(
        layer_class,
        *(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation),
        *(conv.groups, bias is not None, conv.padding_mode),
        dtype=weight.dtype,
        device=weight.device,
        input_size=input_size,
    )
    layer.weight.copy_(embed(weight_by_tap(weight, conv.groups), layer.pattern))
    layer.weight.requires_grad_(_trains(conv, "weight"))
    if bias is not None:
        layer.bias.copy_(bias.expand_as(layer.bias)).requires_grad_(_trains(conv, "bias"))
    return layer.train(conv.training)


def _trains(module: nn.Module, name: str) -> bool:
    """Return whether a tensor of a module requires a gradient, or a parameter from which it is computed."""
    own = module._parameters.get(name)
    if own is not None:
        return own.requires_grad
    return any(parameter.requires_grad for key, parameter in module.named_parameters() if name in key)


@torch.no_grad()
def to_conv(layer: "LocallyConnectedNd") -> nn.Module:
    """Implement :meth:`LocallyConnected2d.to_conv`."""
    weight, bias, geometry = layer.weight, layer.bias, layer.pattern.conv
    assert geometry is not None
    even = all(before == after for before, after in geometry.padding) or layer.padding == "same"
    conv = nn.utils.skip_init(
        getattr(nn, f"Conv{layer.axes}d"),
        *(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding if even else 0),
        *(layer.dilation, layer.groups, bias is not None, layer.padding_mode if even else "zeros"),
        dtype=weight.dtype,
        device=weight.device,
    )
    conv.weight.copy_(kernel_weight(project(weight, layer.pattern), layer.kernel_size))
    conv.weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        conv.bias.copy_(bias.mean(0, dtype=torch.float64)).requires_grad_(bias.requires_grad)
    if even:
        return conv.train(layer.training)
    pads = tuple(pad for pair in reversed(geometry.padding) for pad in pair)
    padder = getattr(nn, f"{_PADDERS[layer.padding_mode]}{layer.axes}d")(pads)
    return nn.Sequential(padder, conv).train(layer.training)


@torch.no_grad()
def to_dense(layer: "LocallyConnectedNd") -> nn.Linear:
    """Implement :meth:`LocallyConnected2d.to_dense`."""
    weight, bias, pattern = layer.weight, layer.bias, layer.pattern.to(layer.weight.device)
    _, groups, depth, width = weight.shape
    linear = nn.utils.skip_init(
        nn.Linear,
        *(layer.in_channels * pattern.n_in, layer.out_channels * pattern.n_out, bias is not None),
        dtype=weight.dtype,
        device=weight.device,
    )
    matrix = linear.weight.zero_().view(groups, width, pattern.n_out, groups, depth, pattern.n_in)
    for group in range(groups):
        part = matrix[group, :, :, group].permute(1, 3, 2, 0)  # [n_out, n_in, depth, width]
        part[pattern.row_indices, pattern.col_indices] = weight[:, group]
    linear.weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        linear.bias.copy_(bias.t().flatten()).requires_grad_(bias.requires_grad)
    return linear.train(layer.training)
