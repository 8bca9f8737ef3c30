"""A trained network whose outputs another one learns while it trains."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loco_ext.sparsity import distillation_loss


@dataclass(frozen=True)
class Teacher:
    """A trained network in eval mode, and the weight and temperature of its part in another network's loss.

    See :func:`loco_ext.sparsity.distillation_loss`.
    """

    model: nn.Module
    weight: float
    temperature: float

    def loss(self, logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of another network's logits for these images; no gradient reaches the teacher."""
        with torch.no_grad():
            own = self.model(images)
        return distillation_loss(logits, own, labels, weight=self.weight, temperature=self.temperature)
