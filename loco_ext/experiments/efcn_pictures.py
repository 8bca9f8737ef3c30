"""Pictures of a lifted network's first layer as plain numbers: one filter, and a corner of its weight matrix."""

import torch
from torch import Tensor, nn

from loco_ext.experiments.records import rounded
from loco_ext.nn import LocallyConnected2d

EXACT, ROUGH = 9, 3  # significant digits: a float32 whose changes matter, and one that is only drawn
CORNER = 200  # rows and columns of the weight matrix (eFCN, figure 8)


def first_layer(model: nn.Module) -> LocallyConnected2d:
    """Return the first locally connected layer."""
    return next(module for module in model.modules() if isinstance(module, LocallyConnected2d))


def filter_of(model: nn.Module) -> list[list[float]]:
    """Return all weights of one output pixel of the first layer, in the shape of the image; first channels only.

    The pixel is the first whose whole receptive field is in the image (eFCN, section 4.4: at the top left).
    """
    layer = first_layer(model)
    pattern = layer.pattern.to("cpu")
    inputs = pattern.row_indices[pattern.local_mask()]
    local = torch.bincount(inputs, minlength=pattern.n_out)  # inputs in the receptive field of each output
    return rounded(_matrix(layer)[local.argmax()].view(layer.input_size), EXACT)


def corner_of(model: nn.Module) -> list[list[float]]:
    """Return the first rows and columns of the first layer's weight matrix; first channels only."""
    return rounded(_matrix(first_layer(model))[:CORNER, :CORNER], ROUGH)


def _matrix(layer: LocallyConnected2d) -> Tensor:
    """Return the weight matrix from the first input to the first output channel, [n_out, n_in]."""
    pattern = layer.pattern.to("cpu")
    matrix = torch.zeros(pattern.n_out, pattern.n_in)
    matrix[pattern.row_indices, pattern.col_indices] = layer.weight.detach()[:, 0, 0, 0].cpu().float()
    return matrix
