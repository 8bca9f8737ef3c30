"""Replacement of a network's convolutions by locally connected layers: the network's eFCN."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from loco_ext.argument_checks import check_choice, check_count, check_module
from loco_ext.fx.modules import copied
from loco_ext.geometry import ConvGeometry, values_bytes
from loco_ext.nn.find_convolutions import find_convolutions
from loco_ext.nn.free_memory import free_memory
from loco_ext.nn.locally_connected import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d, LocallyConnectedNd

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
        model: a model whose chosen convolutions are ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``. It is not changed:
            a copy is run once to learn the sizes of the convolutions' inputs.
        example_inputs: a batch, or a sequence of the model's positional arguments. The batch size may be 1.
        relax: ``"sharing"`` gives each position weights of its own for the pixels that the convolution reads (LCN);
            ``"all"`` gives it weights for all pixels, where the additional ones are zero at first (eFCN); an int
            extends the receptive field by that many pixels on each side, as :meth:`LocallyConnected2d.grow` does.
        layers: names of convolutions, or of modules all of whose convolutions are selected; None selects all.
        memory_limit: bytes that the weights and biases of the new layers may take; None: half of the free memory on
            their device. Gradients take as much again, and an optimizer's state one or two times that.

    Returns:
        The copy, in the model's training mode, with each parameter's ``requires_grad``.

    Raises:
        TypeError: an argument has a wrong type; the model is inside of DistributedDataParallel.
        ValueError: the model does not run on the example, or a name does not exist. A convolution, which the message
            names, is called with inputs of several sizes or not at all, shares its weight, is used in other ways than
            by calling it, has hooks or a parametrization, or is a module of another class than those three. A
            convolution is called outside of such modules.
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
        >>> torch.allclose(efcn(x), cnn(x), atol=1e-5), efcn[0].weight.shape
        (True, torch.Size([256, 1, 3, 8]))
    """
    check_module("model", model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model: expected one outside of DistributedDataParallel, which would not average the gradients of new "
            "layers; convert its module, and wrap the result"
        )
    if isinstance(relax, str):
        check_choice("relax", relax, ("sharing", "all"))
    else:
        relax = check_count("relax", relax)
    if memory_limit is not None:
        check_count("memory_limit", memory_limit)
    geometries = {}
    for name, size in find_convolutions(model, example_inputs, layers).items():
        conv: Any = model.get_submodule(name)
        if type(conv) not in _LAYERS:
            raise ValueError(
                f"layers: expected nn.Conv1d, nn.Conv2d or nn.Conv3d modules, got {name or 'the model'}, "
                f"a {type(conv).__name__}"
            )
        geometries[name] = ConvGeometry(
            size, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode
        )
    _check_memory(model, geometries, relax, memory_limit)
    result = copied(model)
    _check_references(result, list(geometries))
    for name, geometry in geometries.items():
        conv = result.get_submodule(name)
        layer: LocallyConnectedNd = _LAYERS[type(conv)].from_conv(conv, geometry.input_size)
        if radius := _radius(geometry, relax):
            layer.grow(radius)
        if conv is result:
            return layer
        for place, module in list(result.named_modules(remove_duplicate=False)):
            if module is conv:
                result.set_submodule(place, layer)
    return result


def _check_references(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError if a module also reaches one of the convolutions by an attribute, such as a list."""
    convolutions = {id(model.get_submodule(name)): name for name in names}
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            leaves = [] if attribute == "_modules" else tree_leaves(value)
            if found := [convolutions[id(leaf)] for leaf in leaves if id(leaf) in convolutions]:
                raise ValueError(
                    f"model: expected convolutions that are reached as modules alone, got {found[0] or 'the model'} in "
                    f"{owner + '.' if owner else ''}{attribute}; use an nn.ModuleList"
                )


def _radius(geometry: ConvGeometry, relax: str | int) -> int:
    """Return by how many pixels the receptive field grows on each side; with ``"all"``, the largest image size."""
    if isinstance(relax, int):
        return relax
    return 0 if relax == "sharing" else max(geometry.input_size)


def _check_memory(model: nn.Module, geometries: dict[str, ConvGeometry], relax: str | int, limit: int | None) -> None:
    """Raise MemoryError if the weights and biases of the new layers would take more bytes than the limit."""
    forecast, devices = {}, set()
    for name, geometry in geometries.items():
        conv: Any = model.get_submodule(name)
        blocks = geometry.count_blocks(_radius(geometry, relax))
        weight = values_bytes(blocks, conv.in_channels, conv.out_channels, conv.groups, conv.weight.dtype)
        bias = 0 if conv.bias is None else geometry.n_out * conv.out_channels * conv.bias.element_size()
        forecast[name] = weight + bias
        devices.add(conv.weight.device)
    total = sum(forecast.values())
    if limit is None:
        free = [size for size in map(free_memory, devices) if size is not None]
        limit = min(free) // 2 if free else total
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
