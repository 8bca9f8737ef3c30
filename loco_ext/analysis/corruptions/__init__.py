"""Corruptions of images at five levels: noise, blur, weather and digital, to measure how robust a classifier is.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations"
(2019), section 4.1 and the parameters of their CIFAR-10-C. Glass blur and elastic transforms of theirs do not get
stronger from every level to the next, and their frost is made of photographs: those three have formulas of our own. All
run in torch, on batches, so that results are near theirs but not comparable with figures published for CIFAR-10-C.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from loco_ext.analysis.corruptions import blur, digital, noise, weather
from loco_ext.analysis.corruptions.draws import Draws
from loco_ext.argument_checks import check_choice, check_count

LEVELS = 5


class Corruption(NamedTuple):
    """A family, a function of images, draws and parameters, and the parameters of each level, weakest first."""

    family: str
    function: Callable[..., Tensor]
    levels: tuple[tuple[float, ...], ...]


CORRUPTIONS = {
    "gaussian_noise": Corruption("noise", noise.gaussian, ((0.04,), (0.06,), (0.08,), (0.09,), (0.1,))),
    "shot_noise": Corruption("noise", noise.shot, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": Corruption("noise", noise.impulse, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": Corruption("blur", blur.defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": Corruption("blur", blur.glass, ((0.6,), (0.8,), (1.0,), (1.3,), (1.7,))),
    "motion_blur": Corruption("blur", blur.motion, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Corruption("blur", blur.zoomed, ((1.05,), (1.1,), (1.15,), (1.2,), (1.25,))),
    "snow": Corruption(
        "weather",
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Corruption("weather", weather.frost, ((0.2,), (0.3,), (0.4,), (0.5,), (0.6,))),
    "fog": Corruption("weather", weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": Corruption("weather", weather.brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": Corruption("digital", digital.contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic": Corruption("digital", digital.elastic, ((0.5,), (0.75,), (1.0,), (1.4,), (2.0,))),
    "pixelate": Corruption("digital", digital.pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg": Corruption("digital", digital.jpeg, ((80,), (65,), (58,), (50,), (40,))),
}
FAMILIES = tuple(dict.fromkeys(corruption.family for corruption in CORRUPTIONS.values()))


def corrupt(images: Tensor, name: str, level: int, seed: int = 0) -> Tensor:
    """Return the images corrupted at a level, on their device.

    The same seed gives the same random numbers on every device. It gives the same at every level of a corruption if the
    levels draw equally many. Lengths, such as those of blurs, are for images 32 pixels wide and scale with the shorter
    side.

    Args:
        images: float32 of shape ``(N, C, H, W)`` with values in [0, 1]; C is 1 or 3 (red, green, blue).
        name: a key of ``CORRUPTIONS``: "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
            "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast", "elastic", "pixelate" or
            "jpeg".
        level: 1, the weakest, to 5.
        seed: seed of the random numbers, at least 0.

    Returns:
        float32 tensor of the same shape with values in [0, 1].

    Raises:
        TypeError: ``images`` is not a float32 tensor, or ``level`` or ``seed`` is not an int.
        ValueError: ``images`` has another shape or a value outside [0, 1], ``name`` is unknown, ``level`` is not one of
            the five, or ``seed`` is negative.

    >>> corrupt(torch.full((1, 3, 2, 2), 0.5), "brightness", 5)[0, 0]
    tensor([[0.8000, 0.8000],
            [0.8000, 0.8000]])
    """
    _check_images(images)
    check_choice("name", name, tuple(CORRUPTIONS))
    if check_count("level", level, smallest=1) > LEVELS:
        raise ValueError(f"level: expected at most {LEVELS}, got {level}")
    check_count("seed", seed)
    _, function, levels = CORRUPTIONS[name]
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        corrupted: Tensor = function(images, Draws(seed, images.device), *levels[level - 1])
    return corrupted.clamp(0, 1)


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.float32:
        found = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images: expected a float32 tensor, got {found}")
    if images.dim() != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise ValueError(f"images: expected shape (N, 1 or 3, H, W), got {tuple(images.shape)}")
    if not ((images >= 0) & (images <= 1)).all():
        raise ValueError("images: expected values in [0, 1], got others")
