"""Blurs: of a lens out of focus, of frosted glass, of a camera in motion, and of one that approaches."""

import math

import torch
from torch import Tensor

from loco_ext.analysis.corruptions.draws import Draws
from loco_ext.analysis.corruptions.resampling import (
    convolve,
    displaced,
    gaussian_kernel,
    streak,
    unit,
    zoom,
)

ZOOM_STEP = 0.01


def defocus(images: Tensor, _: Draws, radius: float, sigma: float) -> Tensor:
    """Convolve with a disk, whose edge is smoothed by three taps of a Gaussian."""
    radius, sigma = radius * unit(images), sigma * unit(images)
    reach = math.ceil(radius)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    disk = (offsets[:, None].square() + offsets.square() <= radius**2).double()
    smooth = gaussian_kernel(sigma, 1)
    return convolve(convolve(convolve(images, disk / disk.sum()), smooth[None]), smooth[:, None])


def glass(images: Tensor, draws: Draws, distance: float) -> Tensor:
    """Displace each pixel by itself, by up to ``distance`` along each axis."""
    count, _, height, width = images.shape
    down, right = (2 * draws.uniform(2, count, height, width) - 1) * (distance * unit(images))
    return displaced(images, down, right)


def motion(images: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """Blur along a line within 45 degrees of the horizontal."""
    angles = (draws.uniform(len(images)) - 0.5) * (math.pi / 2)
    return streak(images, angles, radius * unit(images), sigma * unit(images))


def zoomed(images: Tensor, _: Draws, largest: float) -> Tensor:
    """Average the image and enlarged ones."""
    factors = torch.arange(1, largest + ZOOM_STEP / 2, ZOOM_STEP, dtype=torch.float64, device="cpu").tolist()
    total = images.clone()
    for factor in factors:
        total += zoom(images, factor)
    return total / (len(factors) + 1)
