"""Noise that is independent from pixel to pixel and from channel to channel."""

import torch
from torch import Tensor

from loco_ext.analysis.corruptions.draws import Draws


def gaussian(images: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Add normal noise."""
    return images + deviation * draws.normal(*images.shape)


def shot(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """Replace each value by a Poisson count over the number of photons that a value of 1 stands for."""
    return draws.poisson(images * photons) / photons


def impulse(images: Tensor, draws: Draws, share: float) -> Tensor:
    """Set a share of the values to 0 or 1, each half of the time."""
    struck = draws.uniform(*images.shape) < share
    return torch.where(struck, (draws.uniform(*images.shape) < 0.5).to(images.dtype), images)
