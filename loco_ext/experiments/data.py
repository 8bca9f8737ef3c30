"""Data sets as tensors, in memory."""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

# Few enough to learn from that the accuracy does not saturate, and enough to test on that it has three digits.
DIGITS_TRAIN_SIZE = 800


class Samples(NamedTuple):
    """Images, float32 ``(N, C, H, W)`` scaled to [0, 1], and their labels, int64 ``(N,)``."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Samples":
        return Samples(self.images.to(device), self.labels.to(device))


def digits() -> tuple[Samples, Samples]:
    """The handwritten digits that come with scikit-learn: 1797 grey images of 8x8 pixels, in ten classes.

    Returns:
        ``(train, test)``: 800 and 997 samples. The split is the same in every run, whatever the run's own seed.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([800, 1, 8, 8]), torch.Size([997]))
    """
    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:DIGITS_TRAIN_SIZE], order[DIGITS_TRAIN_SIZE:]
    return Samples(images[train], labels[train]), Samples(images[test], labels[test])
