"""Networks with noise on the images that they train on."""

import torch
from torch import Tensor, nn


class Noisy(nn.Module):
    """Network that computes the same as ``network``, but for normal noise on its images in training mode.

    Args:
        noise: standard deviation of the noise.
    """

    def __init__(self, network: nn.Module, noise: float) -> None:
        super().__init__()
        self.network, self.noise = network, noise

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x + self.noise * torch.randn_like(x) if self.training else x)
        return logits
