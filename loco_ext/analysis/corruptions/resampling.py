"""Filters and resampling of images [N, C, H, W], which continue beyond the border with its nearest pixel."""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad


def unit(images: Tensor) -> float:
    """Return the length of a pixel of an image 32 pixels wide, in pixels of these."""
    return min(images.shape[-2:]) / 32


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Correlate every channel with a kernel of odd sizes."""
    rows, columns = (size // 2 for size in kernel.shape)
    channels = images.flatten(0, 1).unsqueeze(1)
    padded = pad(channels, (columns, columns, rows, rows), mode="replicate")
    return conv2d(padded, kernel.to(images)[None, None]).view_as(images)


def gaussian_kernel(sigma: float, radius: int) -> Tensor:
    """Return the normal density at -radius, ..., radius, with sum 1, in float64 on the CPU."""
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-0.5 * (offsets / sigma).square())
    return weights / weights.sum()


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian that is cut off at four standard deviations."""
    kernel = gaussian_kernel(sigma, int(4 * sigma + 0.5))
    return convolve(convolve(images, kernel[None]), kernel[:, None])


def displaced(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return each pixel's value from ``down`` pixels below and ``right`` pixels to the right of it, bilinearly.

    Both displacements broadcast with ``[N, H, W]``.
    """
    count, _, height, width = images.shape
    rows = torch.arange(height, device=images.device)[:, None] + down
    columns = torch.arange(width, device=images.device) + right
    # grid_sample takes positions from -1 to 1, the first and the last pixel's.
    places = 2 * columns / max(width - 1, 1) - 1, 2 * rows / max(height - 1, 1) - 1
    grid = torch.stack([place.to(images.dtype).expand(count, height, width) for place in places], dim=-1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=True)


def zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge images around their centre; what no longer fits is cut off."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2
    columns = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    shrunk = 1 / factor - 1
    return displaced(images, (rows * shrunk)[:, None], columns * shrunk)


def streak(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Blur along a line: average each pixel and those up to ``radius`` pixels away at its image's angle.

    The weights are half of a Gaussian.

    Args:
        angles: radians, [N]; 0 is to the right, a quarter turn down.
    """
    steps = range(math.ceil(radius) + 1)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in steps]
    down, right = torch.sin(angles)[:, None, None], torch.cos(angles)[:, None, None]
    total = torch.zeros_like(images)
    for step, weight in zip(steps, weights, strict=True):
        total += weight / sum(weights) * displaced(images, step * down, step * right)
    return total
