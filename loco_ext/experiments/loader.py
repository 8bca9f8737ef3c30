"""Batches of an in-memory data set, randomly cropped and flipped, normalised, on the training device.

All randomness is drawn on the CPU and depends only on (seed, epoch), so that a resumed run and another device see the
same images in the same order, and several processes share the batches of a single one. Crops are read on the device
through a view of all windows of the padded images and of their mirror images: one ``index_select`` per batch, which on
the CPU copies whole rows at once where a gather would copy single bytes.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from loco_ext.experiments.samples import Samples

PADDING = 4  # LOCO-REG, section 7: random cropping by up to 8 pixels


class Normalization:
    """Per-channel ``(x - mean) / deviation``, moments over all pixels of ``samples``; for images of equal width."""

    def __init__(self, samples: Samples) -> None:
        pixels = samples.images.transpose(0, 1).flatten(1)  # [channels, pixels]
        count = pixels.shape[1]
        means, scales = [], []
        for channel in pixels:
            total, squares = 0.0, 0.0
            for part in channel.split(1 << 22):  # float64 of all pixels at once would take eight times the data
                values = part.double()
                total += values.sum().item()
                squares += values.square().sum().item()
            mean = total / count
            deviation = max(squares / count - mean**2, 0.0) ** 0.5
            means.append(mean)
            scales.append(1 / deviation if deviation > 0 else 1.0)
        # Expanded to a whole row, so that the arithmetic vectorises along rows instead of three channels at a time.
        width = samples.images.shape[-1]
        self.shift = torch.tensor([-mean * scale for mean, scale in zip(means, scales, strict=True)]).repeat(width)
        self.scale = torch.tensor(scales).repeat(width)

    def to(self, device: torch.device) -> "Normalization":
        self.shift, self.scale = self.shift.to(device), self.scale.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise images [N, C, H, W] of the samples' dtype to float32, channels_last, which convolutions prefer."""
        pixels = images.permute(0, 2, 3, 1)
        rows = torch.addcmul(self.shift, pixels.flatten(2), self.scale)
        return rows.view(pixels.shape).permute(0, 3, 1, 2)


def batches_per_epoch(samples: int, batch_size: int, processes: int) -> int:
    """Return the number of batches, without a last one of fewer than two samples per process, as batch norm needs."""
    full, rest = divmod(samples, batch_size)
    return full + (rest >= 2 * processes)


class Loader:
    """Training batches of one process.

    Args:
        samples: all training samples; they are moved to the device once.
        normalization: made from the same samples.
        device: device of the batches.
        batch_size: samples per step, over all processes.
        seed: determines, together with the epoch, order and augmentation.
        augmented: pad by 4, crop at random, flip left to right at random.
        cropped: whether those crops are random; otherwise they are the whole image.
        shuffled: whether each epoch has another order; otherwise it is always the stored one.
        rank, processes: this process takes every ``processes``-th sample of each batch, starting with the ``rank``-th.
    """

    def __init__(
        self,
        samples: Samples,
        normalization: Normalization,
        device: torch.device,
        *,
        batch_size: int,
        seed: int,
        augmented: bool,
        cropped: bool = True,
        shuffled: bool = True,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.augmented, self.cropped, self.shuffled = augmented, cropped, shuffled
        images = samples.images.to(device).permute(0, 2, 3, 1)
        _, height, width, self.channels = images.shape
        padded = _padded_and_mirrored(images) if augmented else images.contiguous()
        self.padded_height, self.padded_width = padded.shape[1:3]
        self.windows = _windows(padded, height, width)
        self.labels = samples.labels.to(device)
        self.normalization = normalization.to(device)
        self.device = device
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.processes = rank, processes

    def __len__(self) -> int:
        return batches_per_epoch(len(self.labels), self.batch_size, self.processes)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield ``(images, labels, share)`` of every batch: float32, int64, and the weight of this process's mean loss.

        The weight is this process's share of the samples times the number of processes.
        """
        order, windows = (values.to(self.device) for values in self._draw(number))
        labels = self.labels[order].split(self.batch_size)
        for expected, wanted in zip(labels, windows.split(self.batch_size), strict=True):
            count = len(expected)
            if count < 2 * self.processes:
                return
            if self.processes > 1:
                expected, wanted = (values[self.rank :: self.processes] for values in (expected, wanted))
            pixels = self.windows.index_select(0, wanted).unflatten(2, (-1, self.channels))
            share = len(expected) * self.processes / count
            yield self.normalization(pixels.permute(0, 3, 1, 2)), expected, share

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the sample indices in the epoch's order, and the window that each sample is read from."""
        count = len(self.labels)
        (state,) = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state))
        order = torch.randperm(count, generator=generator) if self.shuffled else torch.arange(count)
        if not self.augmented:
            return order, order * (self.padded_height * self.padded_width)
        y, x = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
        if not self.cropped:
            y, x = torch.full_like(y, PADDING), torch.full_like(x, PADDING)
        flips = torch.rand(count, generator=generator) < 0.5
        # A crop that is then flipped is a crop of the mirror image at the same distance from the opposite side.
        x = torch.where(flips, 2 * PADDING - x, x)
        images = torch.arange(count) + flips * count
        return order, ((images * self.padded_height + y) * self.padded_width + x)[order]


def _padded_and_mirrored(images: Tensor) -> Tensor:
    """Map [N, H, W, C] to [2 * N, H + 8, W + 8, C]: the zero-padded images, followed by their mirror images."""
    count, height, width, channels = images.shape
    padded = images.new_zeros(2 * count, height + 2 * PADDING, width + 2 * PADDING, channels)
    padded[:count, PADDING : PADDING + height, PADDING : PADDING + width] = images
    padded[count:] = padded[:count].flip(2)
    return padded


def _windows(images: Tensor, height: int, width: int) -> Tensor:
    """Return a view [windows, height, width * C] of [N, H, W, C]: the windows that begin at each pixel in turn.

    A window that would not fit in its image consists of parts of several rows or images.
    """
    count, rows, columns, channels = images.shape
    windows = count * rows * columns - (height - 1) * columns - width + 1
    return images.as_strided((windows, height, width * channels), (channels, columns * channels, 1))
