"""Batches of a data set that lies in memory, cropped and flipped at random, normalised, on the device that trains.

Everything random is drawn on the CPU from (seed, epoch) alone, so a resumed run and another device see the same images
in the same order, and several processes share the batches that one would have. Crops are read through a view of all
windows of the padded images and of their mirror images, on the device: one ``index_select`` per batch, which on the CPU
copies whole rows at once and not, as a gather does, byte after byte.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from loco_ext.experiments.samples import Samples

PADDING = 4  # LOCO-REG, section 7: random cropping by up to 8 pixels


class Normalization:
    """Per channel, ``(x - mean) / deviation`` over all pixels of the images it is made from; for images as wide."""

    def __init__(self, samples: Samples) -> None:
        pixels = samples.images.transpose(0, 1).flatten(1)  # [channels, pixels]
        count = pixels.shape[1]
        means, scales = [], []
        for channel in pixels:
            total, squares = 0.0, 0.0
            for part in channel.split(1 << 22):  # float64 of all pixels at once would be eight times the data
                values = part.double()
                total += values.sum().item()
                squares += values.square().sum().item()
            mean = total / count
            deviation = max(squares / count - mean**2, 0.0) ** 0.5
            means.append(mean)
            scales.append(1 / deviation if deviation > 0 else 1.0)
        # Of a whole row, so that the arithmetic runs along rows instead of three channels at a time.
        width = samples.images.shape[-1]
        self.shift = torch.tensor([-mean * scale for mean, scale in zip(means, scales, strict=True)]).repeat(width)
        self.scale = torch.tensor(scales).repeat(width)

    def to(self, device: torch.device) -> "Normalization":
        self.shift, self.scale = self.shift.to(device), self.scale.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """Images of the samples' type, ``(N, C, H, W)``, as float32 in channels_last, which convolutions prefer."""
        pixels = images.permute(0, 2, 3, 1)
        rows = torch.addcmul(self.shift, pixels.flatten(2), self.scale)
        return rows.view(pixels.shape).permute(0, 3, 1, 2)


class Loader:
    """The training batches of one process.

    Args:
        samples: all training samples; they are moved to the device once.
        normalization: made from the same samples.
        device: where the batches are to be.
        batch_size: samples per step, of all processes together.
        seed: decides, with the epoch, order and augmentations.
        augmented: pad by 4, crop at random, flip left to right at random.
        shuffled: in another order in every epoch; otherwise always in that of the samples.
        rank, processes: this process takes every ``processes``-th sample of each batch, from the ``rank``-th on.
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
        shuffled: bool = True,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.augmented, self.shuffled = augmented, shuffled
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
        """Batches per epoch. A last batch with fewer than two samples per process is left out: batch normalisation
        cannot take one."""
        full, rest = divmod(len(self.labels), self.batch_size)
        return full + (rest >= 2 * self.processes)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields ``(images, labels, share)`` of every batch: float32, int64, and this process's share of the samples
        times the number of processes, by which its mean loss counts."""
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
        """The samples in the epoch's order, and the window that each is read from."""
        count = len(self.labels)
        (state,) = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state))
        order = torch.randperm(count, generator=generator) if self.shuffled else torch.arange(count)
        if not self.augmented:
            return order, order * (self.padded_height * self.padded_width)
        y, x = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
        flips = torch.rand(count, generator=generator) < 0.5
        # A crop that is then flipped is a crop of the mirror image, as far from its other side.
        x = torch.where(flips, 2 * PADDING - x, x)
        images = torch.arange(count) + flips * count
        return order, ((images * self.padded_height + y) * self.padded_width + x)[order]


def _padded_and_mirrored(images: Tensor) -> Tensor:
    """``(N, H, W, C)`` to ``(2 * N, H + 8, W + 8, C)``: with zeros around, then once more from right to left."""
    count, height, width, channels = images.shape
    padded = images.new_zeros(2 * count, height + 2 * PADDING, width + 2 * PADDING, channels)
    padded[:count, PADDING : PADDING + height, PADDING : PADDING + width] = images
    padded[count:] = padded[:count].flip(2)
    return padded


def _windows(images: Tensor, height: int, width: int) -> Tensor:
    """A view ``(windows, height, width * C)`` of ``(N, H, W, C)``: the window that begins at each pixel in turn.

    One that begins where it would not fit in its image is made up of parts of several rows or images.
    """
    count, rows, columns, channels = images.shape
    windows = count * rows * columns - (height - 1) * columns - width + 1
    return images.as_strided((windows, height, width * channels), (channels, columns * channels, 1))
