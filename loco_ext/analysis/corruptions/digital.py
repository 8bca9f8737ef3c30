"""Digital corruptions: less contrast, an elastic transform, coarser pixels, and JPEG's compression."""

import math

import torch
from torch import Tensor

from loco_ext.analysis.corruptions.draws import Draws
from loco_ext.analysis.corruptions.jpeg import compressed
from loco_ext.analysis.corruptions.resampling import displaced, gaussian_blur, unit

ELASTIC_SIGMA = 1.5  # pixels over which displacements are smooth


def contrast(images: Tensor, _: Draws, factor: float) -> Tensor:
    """Scale the differences from each channel's mean."""
    means = images.mean((2, 3), keepdim=True)
    return means + factor * (images - means)


def elastic(images: Tensor, draws: Draws, distance: float) -> Tensor:
    """Displace pixels by a smooth random field, by ``distance`` in the root mean square of each axis."""
    count, _, height, width = images.shape
    sigma = ELASTIC_SIGMA * unit(images)
    field = gaussian_blur(draws.normal(count, 2, height, width), sigma)
    # A Gaussian filter of white noise leaves 1 / (4 pi sigma^2) of its variance.
    field = field * (distance * unit(images) * sigma * math.sqrt(4 * math.pi))
    return displaced(images, field[:, 0], field[:, 1])


def pixelate(images: Tensor, _: Draws, share: float) -> Tensor:
    """Resize to a share of the height and width by box averages, and back."""
    for axis in (-2, -1):
        size = images.shape[axis]
        smaller = max(1, int(share * size))
        there, back = _box(size, smaller), _box(smaller, size)
        images = torch.tensordot(images, (back @ there).to(images), ([axis], [1])).movedim(-1, axis)
    return images


def jpeg(images: Tensor, _: Draws, quality: float) -> Tensor:
    """Compress and decompress."""
    return compressed(images, int(quality))


def _box(old: int, new: int) -> Tensor:
    """Return the matrix [new, old] that averages the old pixels whose centres are within each new pixel.

    A new pixel smaller than an old one takes the value of the old pixel at its centre.
    """
    scale = old / new
    centres = (torch.arange(new, dtype=torch.float64, device="cpu") + 0.5) * scale
    distances = (torch.arange(old, dtype=torch.float64, device="cpu") + 0.5) - centres[:, None]
    half = max(scale, 1.0) / 2
    weights = ((distances > -half) & (distances <= half)).double()
    return weights / weights.sum(1, keepdim=True)
