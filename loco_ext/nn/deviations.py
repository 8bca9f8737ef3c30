"""Distance of locally connected layers from convolutions."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loco_ext.argument_checks import check_module
from loco_ext.geometry import BlockPattern
from loco_ext.nn.block_norms import block_norms, parts_of
from loco_ext.nn.embedding import embed, project


class Deviation(NamedTuple):
    """Deviations from convolutions as shares of a model's norm, from 0 to 1.

    Attributes:
        delta_locality: norm of the blocks outside of the kernels' receptive fields, divided by the norm of all
            parameters.
        delta_sharing: distance to the nearest convolutions, over all blocks and biases, divided by the same norm. It is
            never less than delta_locality, since the blocks outside of the receptive fields are part of the distance.

    Example:
        >>> from loco_ext import nn
        >>> nn.Deviation(delta_locality=0.0, delta_sharing=0.5).delta_sharing
        0.5
    """

    delta_locality: float
    delta_sharing: float


@torch.no_grad()
def deviation(model: nn.Module) -> Deviation:
    """Return how far a model is from the nearest network of convolutions.

    The norm is taken over the parameters of all layers. Parameters of layers other than locally connected ones, biases
    included, count as local and shared. Biases of locally connected layers count as local, and as shared to the extent
    that they agree at all output pixels. Zero padding does not count, because a full layer has no pixels for it.

    Args:
        model: a locally connected layer, or a model that contains some.

    Raises:
        TypeError: ``model`` is not a module.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 4.3, for
        delta_locality.

    Example:
        >>> import torch
        >>> from loco_ext import nn
        >>> layer = nn.LocallyConnected2d.from_conv(torch.nn.Conv2d(3, 4, 3, padding=1), input_size=(6, 6))
        >>> nn.deviation(layer.grow(6))
        Deviation(delta_locality=0.0, delta_sharing=0.0)
        >>> layer.reset_parameters(like="linear")
        >>> shares = nn.deviation(layer)
        >>> round(shares.delta_locality, 1), round(shares.delta_sharing, 1)
        (0.9, 1.0)
    """
    check_module("model", model)
    total = sum(_square(parameter) for parameter in model.parameters())
    layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "pattern", None), BlockPattern)]
    weights = {weight: layer.pattern for layer in layers for weight in [layer.weight]}  # tied ones count once
    biases = {bias for layer in layers for bias in [layer.bias] if bias is not None}
    squares = [_squares(*each) for each in weights.items()]
    squares += [(0.0, _square(bias.double() - bias.mean(0, dtype=torch.float64))) for bias in biases]
    off_local, unshared = (math.fsum(column) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return Deviation(*(math.sqrt(part / total) if total else 0.0 for part in (off_local, unshared)))


def _squares(weight: Tensor, pattern: BlockPattern) -> tuple[float, float]:
    """Return the squares of the norm of blocks outside of receptive fields and of the distance to a convolution."""
    assert pattern.conv is not None
    local = pattern.local_mask().to(weight.device)
    kernel = project(weight, pattern).to(torch.promote_types(weight.dtype, torch.float32))
    whole = BlockPattern.of_geometry(pattern.conv).to(weight.device)
    distances = embed(kernel, whole)  # blocks that have been pruned are zeros in the layer
    united, own, its = pattern.union(whole)
    present = torch.zeros(united.nnz, dtype=torch.bool, device="cpu").index_fill_(0, own, True)
    distances[present[its]] -= weight[local]
    off_local = block_norms(weight)[~local].square().sum().item()
    return off_local, off_local + _square(distances)


def _square(tensor: Tensor) -> float:
    return math.fsum(torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2 for part in parts_of(tensor))
