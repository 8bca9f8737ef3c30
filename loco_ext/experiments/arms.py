"""Networks with what their training adds: noise on the images, or PILCRO's loss."""

from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.regularizers import PILCRO


class Trained(nn.Module):
    """Network that computes the same as ``network``; in training mode it adds noise or a loss.

    Args:
        noise: standard deviation of normal noise on the images.
        pilcro: regulariser whose gradient every backward pass through the logits adds. Its number of calls is a buffer,
            so that a checkpoint of the network has it.
    """

    calls: Tensor

    def __init__(self, network: nn.Module, noise: float = 0.0, pilcro: PILCRO | None = None) -> None:
        super().__init__()
        self.network, self.noise, self.pilcro = network, noise, pilcro
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.noise:
            x = x + self.noise * torch.randn_like(x)
        logits: Tensor = self.network(x)
        if self.training and self.pilcro is not None:
            self.pilcro.load_state_dict({"calls": int(self.calls)})
            logits = _WithLoss.apply(logits, self.pilcro(self.network, x))
            self.calls += 1
        return logits


class _WithLoss(torch.autograd.Function):
    """Logits whose backward pass is also that of a loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
