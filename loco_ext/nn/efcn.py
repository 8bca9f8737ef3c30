"""Replacement of a network's convolutions by locally connected layers: the network's eFCN."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from loco_ext.geometry import ConvGeometry, values_bytes
from loco_ext.nn.convolutions import Call, find_convolutions
from loco_ext.nn.locally_connected import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d, LocallyConnectedNd
from loco_ext.nn.memory import free_memory

_LAYERS: dict[type[nn.Module], Any] = {
    nn.Conv1d: LocallyConnected1d,
    nn.Conv2d: LocallyConnected2d,
    nn.Conv3d: LocallyConnected3d,
}
_SHOWN = 8  # layers listed in an error message


def to_efcn(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    relax: str | int = "sharing",
    layers: Sequence[str] | None = None,
    *,
    memory_limit: int | None = None,
) -> nn.Module:
    """Return a copy of the network with locally connected layers in place of its convolutions and the same outputs.

    The copy accepts only images of the example's size. All other modules, and how the model calls them, stay the same.
    The new layers, :class:`LocallyConnected2d` and so on, can be trained, grown and converted back one by one.

    Args:
        model: a model that torch.fx can trace, whose chosen convolutions are ``nn.Conv1d``, ``nn.Conv2d`` or
            ``nn.Conv3d``. It is not changed.
        example_inputs: a batch, or a sequence of the model's positional arguments. Only their spatial sizes matter; the
            batch size may be 1.
        relax: ``"sharing"`` gives each position weights of its own for the pixels that the convolution reads (LCN);
            ``"all"`` gives it weights for all pixels, the additional ones being zero at first (eFCN); an int extends
            the receptive field by that many pixels on each side, as :meth:`LocallyConnected2d.grow` does.
        layers: names of convolutions, or of modules all of whose convolutions are selected; None selects all.
        memory_limit: bytes that the weights and biases of the new layers may take; None: half of the free memory on
            their device. Gradients take as much again, and an optimizer's state one or two times that.
    Returns:
        The copy, in the model's training mode, with each parameter's ``requires_grad``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: torch.fx cannot trace the model, or a name does not exist; a convolution, which the message names,
            is called with inputs of several sizes or not at all, shares its weight, has hooks or a parametrization, or
            is a module of another class than those three; a convolution is called outside of such modules.
        MemoryError: the layers would exceed the limit; the message has the forecast for each layer.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 2.

    Example:
        >>> import torch
        >>> from torch import nn as modules
        >>> from loco_ext import nn
        >>> cnn = modules.Sequential(modules.Conv2d(3, 8, 3, padding=1), modules.ReLU(), modules.Flatten(),
        ...                          modules.Linear(8 * 6 * 6, 10))
        >>> x = torch.randn(4, 3, 6, 6)
        >>> efcn = nn.to_efcn(cnn, x)
        >>> torch.allclose(efcn(x), cnn(x), atol=1e-5), efcn[0].values.shape
        (True, torch.Size([256, 1, 3, 8]))
    """
    _check_arguments(model, relax, memory_limit)
    calls = find_convolutions(model, example_inputs, layers)
    for name, call in calls.items():
        if type(call.module) not in _LAYERS:
            raise ValueError(
                f"layers: expected nn.Conv1d, nn.Conv2d or nn.Conv3d modules, got {name or 'the model'}, "
                f"a {type(call.module).__name__}"
            )
    geometries = {name: _geometry(call) for name, call in calls.items()}
    _check_memory(_forecast(calls, geometries, relax), calls, memory_limit)
    result = copy.deepcopy(model)
    for name, geometry in geometries.items():
        conv = result.get_submodule(name)
        layer = _relaxed(conv, geometry, relax)
        if conv is result:
            return layer
        for place, module in list(result.named_modules(remove_duplicate=False)):
            if module is conv:
                _set_submodule(result, place, layer)
    return result


def _check_arguments(model: object, relax: object, memory_limit: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(relax, bool) or not isinstance(relax, str | int):
        raise TypeError(f'relax: expected "sharing", "all" or an int, got {relax!r}')
    if relax not in ("sharing", "all") if isinstance(relax, str) else relax < 0:
        raise ValueError(f'relax: expected "sharing", "all" or an int, at least 0, got {relax!r}')
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise TypeError(f"memory_limit: expected an int or None, got {memory_limit!r}")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit: expected at least 0, got {memory_limit}")


def _geometry(call: Call) -> ConvGeometry:
    conv = call.module
    return ConvGeometry(call.input_size, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode)


def _radius(geometry: ConvGeometry, relax: str | int) -> int:
    """Return by how many pixels the receptive field grows on each side; with ``"all"``, the largest image size."""
    if isinstance(relax, int):
        return relax
    return 0 if relax == "sharing" else max(geometry.input_size)


def _relaxed(conv: nn.Module, geometry: ConvGeometry, relax: str | int) -> nn.Module:
    layer: LocallyConnectedNd = _LAYERS[type(conv)].from_conv(conv, geometry.input_size)
    radius = _radius(geometry, relax)
    return layer.grow(radius) if radius else layer


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _forecast(calls: dict[str, Call], geometries: dict[str, ConvGeometry], relax: str | int) -> dict[str, int]:
    """Return the bytes of each layer's weights and biases."""
    layers = {}
    for name, geometry in geometries.items():
        conv = calls[name].module
        blocks = geometry.count_blocks(_radius(geometry, relax))
        values = values_bytes(blocks, conv.in_channels, conv.out_channels, conv.groups, conv.weight.dtype)
        bias = 0 if conv.bias is None else geometry.n_out * conv.out_channels * conv.bias.element_size()
        layers[name] = values + bias
    return layers


def _check_memory(forecast: dict[str, int], calls: dict[str, Call], limit: int | None) -> None:
    total = sum(forecast.values())
    if limit is None:
        free = [free_memory(device) for device in {call.module.weight.device for call in calls.values()}]
        limit = min((size // 2 for size in free if size is not None), default=total)
    if total <= limit:
        return
    largest = sorted(forecast.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name or 'the model'} {_text(size)}" for name, size in largest[:_SHOWN])
    more = f" and {len(largest) - _SHOWN} more" if len(largest) > _SHOWN else ""
    raise MemoryError(
        f"relax: expected layers of at most {_text(limit)} in all, got {_text(total)}: {shown}{more}; "
        "choose fewer of them by layers, a smaller relax, or another memory_limit"
    )


def _text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
