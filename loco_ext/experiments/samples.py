"""Images and labels of a data set in memory."""

from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """Images [N, C, H, W], uint8 or float32 scaled to [0, 1], and their int64 labels [N]."""

    images: Tensor
    labels: Tensor

    def first(self, count: int | None) -> "Samples":
        """Return only the first samples; all of them where there are fewer, or for None."""
        return Samples(self.images[:count], self.labels[:count])

    def to(self, device: torch.device) -> "Samples":
        return Samples(self.images.to(device), self.labels.to(device))


def unit_range(images: Tensor) -> Tensor:
    """Return images of either dtype as float32, scaled to [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()
