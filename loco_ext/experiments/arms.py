"""Networks with what their training adds: noise on the images, or PILCRO's loss."""

from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.regularizers import PILCRO


class Trained(nn.Module):
    """Network that computes the same as ``network``; in training mode it adds noise or a loss.

    Args:
        noise: standard deviation of normal noise on the images.
        pilcro: regulariser whose gradient every backward pass through the logits adds. The state dict has its number of
            calls, so that a resumed training goes on with the same steps.
    """

    def __init__(self, network: nn.Module, noise: float = 0.0, pilcro: PILCRO | None = None) -> None:
        super().__init__()
        self.network, self.noise, self.pilcro = network, noise, pilcro

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.noise:
            x = x + self.noise * torch.randn_like(x)
        logits: Tensor = self.network(x)
        if self.training and self.pilcro is not None:
            logits = _WithLoss.apply(logits, self.pilcro(self.network, x))
        return logits

    def get_extra_state(self) -> Tensor:
        return torch.tensor(0 if self.pilcro is None else self.pilcro.state_dict()["calls"])

    def set_extra_state(self, state: Tensor) -> None:
        if self.pilcro is not None:
            self.pilcro.load_state_dict({"calls": int(state)})


class _WithLoss(torch.autograd.Function):
    """Logits whose backward pass is also that of a loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
