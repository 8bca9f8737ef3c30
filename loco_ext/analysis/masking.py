"""Mask the blocks inside or outside of the kernels' receptive fields to see what the others do alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from loco_ext.argument_checks import check_choice, check_module
from loco_ext.geometry import BlockPattern


def layers_of_blocks(model: nn.Module) -> dict[str, Any]:
    """Return the modules that have a pattern of blocks, by name: locally connected layers, and a user's own."""
    modules = dict(model.named_modules())
    return {name: m for name, m in modules.items() if isinstance(getattr(m, "pattern", None), BlockPattern)}


@contextmanager
def only_blocks(model: nn.Module, kept: str) -> Iterator[None]:
    """Zero all blocks but those ``kept`` in all locally connected layers inside the ``with`` block, then restore them.

    Args:
        model: a locally connected layer, or a model that contains some. Biases and all other layers are unchanged.
        kept: ``"local"`` keeps the blocks inside of the kernels' receptive fields, ``"off-local"`` those outside.

    Raises:
        TypeError: ``model`` is not a module, or computes the weight of such a layer.
        ValueError: ``kept`` is unknown, or the model has no such layers.
        RuntimeError: on exit, if a layer was grown or pruned inside; its masked blocks are lost.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 4.4.

    Example:
        >>> import torch
        >>> from loco_ext import analysis, nn
        >>> layer = nn.LocallyConnected2d(1, 1, 3, padding=1, bias=False, input_size=(4, 4)).grow(4)
        >>> with analysis.only_blocks(layer, "off-local"):
        ...     layer(torch.randn(1, 1, 4, 4)).abs().sum().item()
        0.0
    """
    check_module("model", model)
    check_choice("kept", kept, ("local", "off-local"))
    layers = list(layers_of_blocks(model).values())
    if not layers:
        raise ValueError("model: expected locally connected layers in it, got none")
    for layer in layers:
        if not isinstance(layer.weight, nn.Parameter):
            raise TypeError(f"model: expected layers whose weight is a parameter, got a {type(layer.weight).__name__}")
    masked = []
    for layer in layers:
        pattern, values = layer.pattern.to("cpu"), layer.weight.detach()
        local = pattern.local_mask().to(values.device)
        places = (~local if kept == "local" else local).nonzero().flatten()
        masked.append((layer, pattern, places, values[places]))
    try:
        for layer, _, places, _ in masked:
            layer.weight.detach().index_fill_(0, places, 0)
        yield
    finally:
        resized = False
        for layer, pattern, places, blocks in masked:
            values = layer.weight.detach()  # the dtype or device may have changed inside
            if layer.pattern.to("cpu") is pattern:
                values.index_copy_(0, places.to(values.device), blocks.to(values))
            else:
                resized = True
        if resized:
            raise RuntimeError(
                "model: expected layers of the same blocks until the end, got one grown or pruned inside"
            )
