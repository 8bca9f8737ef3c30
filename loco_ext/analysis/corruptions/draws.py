"""Random numbers that are the same on every device."""

import torch
from torch import Tensor


class Draws:
    """Random numbers drawn on the CPU in float32 from a seed, then moved to a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu").to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu").to(self.device)

    def poisson(self, rates: Tensor) -> Tensor:
        """Return Poisson numbers of the given rates."""
        return torch.poisson(rates.cpu(), generator=self.generator).to(self.device)
