"""Weather: snow, frost, fog, and daylight that is too bright."""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from loco_ext.analysis.corruptions.draws import Draws
from loco_ext.analysis.corruptions.resampling import streak, unit, zoom

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R BT.601)
FROST_ROUGHNESS = 1.5


def snow(
    images: Tensor,
    draws: Draws,
    mean: float,
    deviation: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Tensor:
    """Whiten the image, keeping a share of it, and add flakes: noise above a threshold, enlarged and in motion."""
    count, _, height, width = images.shape
    flakes = zoom(mean + deviation * draws.normal(count, 1, height, width), size)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(max=1)
    angles = math.pi * (0.25 + 0.5 * draws.uniform(count))  # downwards
    flakes = streak(flakes, angles, radius * unit(images), sigma * unit(images))
    white = 1.5 * _luma(images) + 0.5
    whitened = kept * images + (1 - kept) * torch.maximum(images, white)
    return whitened + flakes + flakes.flip(-1, -2)


def frost(images: Tensor, draws: Draws, opacity: float) -> Tensor:
    """Cover the image with white crystals: the ridges of a fractal surface."""
    crystals = 1 - (2 * fractal(images, draws, FROST_ROUGHNESS) - 1).abs()
    return images + opacity * crystals * (1 - images)


def fog(images: Tensor, draws: Draws, density: float, decay: float) -> Tensor:
    """Add a fractal surface, and darken so that the brightest value stays."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    scale = brightest / (brightest + density)
    return (images + density * fractal(images, draws, decay)) * scale


def brightness(images: Tensor, _: Draws, more: float) -> Tensor:
    """Add to the value of hue, saturation and value."""
    value = images.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, images * brighter / value.clamp(min=torch.finfo(images.dtype).tiny), brighter)


def fractal(images: Tensor, draws: Draws, decay: float) -> Tensor:
    """Return a fractal surface for each image, from 0 to 1, [N, 1, H, W].

    From four random corners on, the grid's spacing halves in each round; all points get noise whose amplitude is
    ``decay`` times less than the round before.
    """
    count, _, height, width = images.shape
    surface, amplitude, size = draws.uniform(count, 1, 2, 2) - 0.5, 1.0, 2
    while size < max(height, width):
        size, amplitude = 2 * size - 1, amplitude / decay
        surface = interpolate(surface, size=(size, size), mode="bilinear", align_corners=True)
        surface = surface + amplitude * (draws.uniform(count, 1, size, size) - 0.5)
    surface = surface[..., :height, :width]
    lowest, highest = surface.amin((2, 3), keepdim=True), surface.amax((2, 3), keepdim=True)
    return (surface - lowest) / (highest - lowest).clamp(min=torch.finfo(surface.dtype).tiny)


def _luma(images: Tensor) -> Tensor:
    """Return the grey image, [N, 1, H, W]."""
    if images.shape[1] == 1:
        return images
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
