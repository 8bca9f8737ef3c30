"""Corruptions of images: severity, determinism and range; SciPy, Pillow and matplotlib as references."""

import io
import math

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage
from torch.nn.functional import interpolate

from loco_ext.analysis import CORRUPTIONS, corrupt
from loco_ext.analysis.corruptions import resampling
from loco_ext.analysis.corruptions.draws import Draws
from loco_ext.analysis.corruptions.weather import fractal
from tests.tolerances import OF_THE_LOSS, RESAMPLED, STANDARD_ERRORS

LEVELS = range(1, 6)


def photographs(count=12, channels=3, height=32, width=32):
    """Return random images with details of all sizes, in [0, 1], as multiples of 1/255."""
    generator = torch.Generator().manual_seed(0)
    images = torch.full((count, channels, height, width), 0.5)
    for size in (3, 6, 12, 24):
        coarse = torch.rand(count, channels, size, size, generator=generator) - 0.5
        images += 2 / size * interpolate(coarse, (height, width), mode="bicubic")
    images = images.clamp(0, 1)
    return (255 * images).round() / 255


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_level_is_stronger_than_the_last_and_repeats_to_the_same_bits(name):
    images = photographs()
    before = images.clone()
    random_state = torch.get_rng_state()
    distances = []
    for level in LEVELS:
        corrupted = corrupt(images, name, level, seed=3)
        assert corrupted.dtype == torch.float32
        assert corrupted.shape == images.shape
        assert 0 <= corrupted.min() <= corrupted.max() <= 1
        assert torch.equal(corrupted, corrupt(images, name, level, seed=3))
        distances.append((corrupted - images).square().mean().item())
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert distances[-1] > 1.4 * distances[0]
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    draws = name not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg")
    assert torch.equal(corrupt(images, name, 5, seed=3), corrupt(images, name, 5, seed=4)) is not draws


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_neither_torchs_defaults_nor_the_layout_change_a_pixel(name):
    """Images may have any size and be grey."""
    for shape in ((0, 3, 8, 8), (2, 3, 1, 1), (1, 3, 70, 33), (3, 1, 5, 9)):
        images = torch.rand(*shape, generator=torch.Generator().manual_seed(1))
        expected = corrupt(images, name, 4)
        assert expected.shape == shape
        assert expected.isfinite().all()
        other = corrupt(images.contiguous(memory_format=torch.channels_last), name, 4)
        torch.testing.assert_close(other, expected, rtol=0, atol=RESAMPLED)
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(corrupt(images, name, 4), expected)
    torch.set_default_dtype(torch.float64)
    found = corrupt(images, name, 4)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def assert_mean(values, expected, deviation):
    """Assert that the mean of independent values of a known standard deviation is as expected."""
    assert abs(values.double().mean().item() - expected) < STANDARD_ERRORS * deviation / math.sqrt(values.numel())


def test_noise_has_its_moments():
    grey = torch.full((20, 3, 32, 32), 0.5)
    noise = corrupt(grey, "gaussian_noise", 5) - grey
    assert_mean(noise, 0, 0.1)
    assert_mean(noise.square(), 0.01, 0.01 * math.sqrt(2))
    shots = corrupt(grey, "shot_noise", 5) - grey
    assert_mean(shots, 0, math.sqrt(0.5 / 50))
    assert_mean(shots.square(), 0.5 / 50, math.sqrt(2 + 1 / 25) * 0.5 / 50)  # kurtosis of a Poisson number: 3 + 1/mean
    counts = 50 * corrupt(grey, "shot_noise", 5)
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=RESAMPLED * 50)
    struck = corrupt(grey, "impulse_noise", 5)
    assert_mean((struck != 0.5).double(), 0.07, math.sqrt(0.07 * 0.93))
    assert_mean(struck[struck != 0.5], 0.5, 0.5)
    assert set(struck.unique().tolist()) == {0, 0.5, 1}


def assert_near(found, expected, roundings=1):
    """Assert that filtered images are as expected, which is a NumPy array in float64."""
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=0, atol=roundings * RESAMPLED)


def test_filters_and_displacements_are_scipys():
    images = photographs(2, height=19, width=24)
    exact = images.double().numpy()
    for sigma in (0.4, 1.7):
        expected = ndimage.gaussian_filter(exact, (0, 0, sigma, sigma), mode="nearest", truncate=4)
        assert_near(resampling.gaussian_blur(images, sigma), expected)
    down, right = 6 * torch.rand(2, 2, 19, 24, generator=torch.Generator().manual_seed(2)) - 3
    found = resampling.displaced(images, down, right)
    rows, columns = np.mgrid[:19, :24]
    for i, channel in np.ndindex(2, 3):
        places = [rows + down[i].numpy(), columns + right[i].numpy()]
        assert_near(found[i, channel], ndimage.map_coordinates(exact[i, channel], places, order=1, mode="nearest"), 20)
    weights = np.exp(-0.5 * (np.arange(-4, 5) / 2.0) ** 2) * (np.arange(-4, 5) >= 0)
    for angle, axis in ((0, -1), (math.pi / 2, -2)):
        expected = ndimage.correlate1d(exact, weights / weights.sum(), axis=axis, mode="nearest")
        assert_near(resampling.streak(images, torch.full((2,), angle), 4, 2), expected, 20)
    places = np.meshgrid((np.arange(19) - 9) / 2 + 9, (np.arange(24) - 11.5) / 2 + 11.5, indexing="ij")
    assert_near(resampling.zoom(images, 2)[0, 0], ndimage.map_coordinates(exact[0, 0], places, order=1), 20)


def test_defocus_contrast_and_brightness_by_their_formulas():
    """At the highest level the disk is 3x3 pixels; its edge is smoothed by exp(-50) of the centre's weight."""
    images = photographs(4)
    images[0, :, 0, 0] = 0
    exact = images.double().numpy()
    assert_near(corrupt(images, "defocus_blur", 5), ndimage.uniform_filter(exact, (0, 0, 3, 3), mode="nearest"))
    means = exact.mean((2, 3), keepdims=True)
    assert_near(corrupt(images, "contrast", 2), means + 0.5 * (exact - means))
    hsv = rgb_to_hsv(exact.transpose(0, 2, 3, 1))
    hsv[..., 2] = np.clip(hsv[..., 2] + 0.2, 0, 1)
    assert_near(corrupt(images, "brightness", 4), hsv_to_rgb(hsv).transpose(0, 3, 1, 2))


def by_pillow(image, change):
    """Return an image [C, H, W] after a change of a Pillow image."""
    pixels = (255 * image).round().byte()
    pixels = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    changed = torch.from_numpy(np.array(change(Image.fromarray(pixels.numpy())))).float() / 255
    return changed[None] if changed.dim() == 2 else changed.permute(2, 0, 1)


def test_coarser_pixels_are_pillows():
    def coarser(image):
        smaller = image.resize((int(0.65 * image.width), int(0.65 * image.height)), Image.Resampling.BOX)
        return smaller.resize(image.size, Image.Resampling.BOX)

    for image in photographs(3, height=32, width=41):
        ours = corrupt(image[None], "pixelate", 5)[0]
        torch.testing.assert_close(ours, by_pillow(image, coarser), rtol=0, atol=1.01 / 255)  # Pillow rounds twice


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("level", "quality"), [(1, 80), (5, 40)])
def test_jpeg_is_that_of_pillows_library(channels, level, quality):
    """The library's integer arithmetic now and then rounds a coefficient the other way, by a whole step."""

    def coded(image):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    for height, width in ((32, 32), (37, 42)):
        for image in photographs(4, channels, height, width):
            expected = by_pillow(image, coded)
            error = (corrupt(image[None], "jpeg", level)[0] - expected).abs()
            assert error.mean() < OF_THE_LOSS * (image - expected).abs().mean()


def test_fractals_fill_the_range_and_are_rougher_where_amplitudes_decay_less():
    images = torch.zeros(8, 3, 30, 33)
    rough, smooth = (fractal(images, Draws(0, images.device), decay) for decay in (1.5, 3.0))
    for surface in (rough, smooth):
        assert surface.shape == (8, 1, 30, 33)
        assert torch.equal(surface.amin((2, 3)), torch.zeros(8, 1))
        assert torch.equal(surface.amax((2, 3)), torch.ones(8, 1))
    assert rough.diff().square().mean() > 2 * smooth.diff().square().mean()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"images": torch.zeros(1, 3, 4, 4, dtype=torch.float64)}, TypeError),
        ({"images": torch.zeros(3, 4, 4)}, ValueError),
        ({"images": torch.zeros(1, 2, 4, 4)}, ValueError),
        ({"images": torch.full((1, 3, 4, 4), 1.1)}, ValueError),
        ({"images": torch.full((1, 3, 4, 4), math.nan)}, ValueError),
        ({"name": "rain"}, ValueError),
        ({"level": 6}, ValueError),
        ({"level": 1.0}, TypeError),
        ({"seed": -1}, ValueError),
    ],
    ids=range(9),
)
def test_bad_input_is_named(bad, error):
    arguments = {"images": torch.zeros(1, 3, 4, 4), "name": "fog", "level": 1} | bad
    with pytest.raises(error, match=f"^{next(iter(bad))}: expected .*got"):
        corrupt(**arguments)
