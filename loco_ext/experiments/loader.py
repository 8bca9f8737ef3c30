"""Batches of an in-memory data set, randomly cropped and flipped, normalised, on the training device.

All randomness is drawn on the CPU and depends only on (seed, epoch), so that a resumed run and another device see the
same images in the same order, and several processes share the batches of a single one.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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
        images = samples.images.to(device)
        *_, self.height, self.width = images.shape
        padded = pad(images, [PADDING] * 4) if augmented else images
        self.padded_height, self.padded_width = padded.shape[2:]
        self.pixels = padded.permute(0, 2, 3, 1).flatten(0, 2)  # [N * padded height * padded width, C]
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
        for batch in self._draw(number).to(self.device).split(self.batch_size, 1):
            count = batch.shape[1]
            if count < 2 * self.processes:
                return
            image, y, x, flipped = batch[:, self.rank :: self.processes]
            pixels = self._crops(image, y, x, flipped == 1)
            share = len(image) * self.processes / count
            yield self.normalization(pixels.permute(0, 3, 1, 2)), self.labels[image], share

    def _draw(self, epoch: int) -> Tensor:
        """Return int64 [4, N] in the epoch's order: index of each sample, corner of its crop, whether it is flipped."""
        count = len(self.labels)
        (state,) = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state))
        order = torch.randperm(count, generator=generator) if self.shuffled else torch.arange(count)
        if not self.augmented:
            return torch.cat([order[None], order.new_zeros(3, count)])
        corners = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
        if not self.cropped:
            corners.fill_(PADDING)
        flipped = torch.rand(1, count, generator=generator) < 0.5
        return torch.cat([order[None], torch.cat([corners, flipped])[:, order]])

    def _crops(self, image: Tensor, y: Tensor, x: Tensor, flipped: Tensor) -> Tensor:
        """Return crops [samples, height, width, C] of the padded images; those that are flipped have reversed rows."""
        rows, columns = (torch.arange(size, device=self.device) for size in (self.height, self.width))
        begins = ((image * self.padded_height + y)[:, None] + rows) * self.padded_width + x[:, None]
        places = begins[:, :, None] + torch.where(flipped[:, None], columns.flip(0), columns)[:, None]
        # Unlike advanced indexing, index_select copies whole pixels.
        return self.pixels.index_select(0, places.flatten()).view(*places.shape, -1)
