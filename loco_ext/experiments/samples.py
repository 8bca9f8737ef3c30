"""Images and labels of a data set in memory."""

from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """Images [N, C, H, W], uint8 or float32 scaled to [0, 1], and their int64 labels [N]."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Samples":
        return Samples(self.images.to(device), self.labels.to(device))
