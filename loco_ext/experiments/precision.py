"""The arithmetic of training steps: float32, or autocast with the scale of the loss that float16 needs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from loco_ext.experiments.settings import SettingsError


class Precision:
    """How the steps of one training are computed.

    Args:
        amp: under autocast: in bfloat16, or in float16 on GPUs that compute bfloat16 by emulation alone.
        device: of the model.

    Raises:
        SettingsError: there is no autocast for such devices.
    """

    def __init__(self, amp: bool, device: torch.device) -> None:
        kind = device.type
        if amp and not torch.amp.is_autocast_available(kind):
            raise SettingsError(f"amp: expected a device with autocast, got {kind}")
        self.amp, self.kind, self.dtype = amp, kind, torch.bfloat16
        if amp and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            self.dtype = torch.float16
        self.scaler = torch.amp.GradScaler(kind, enabled=amp and self.dtype == torch.float16)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for the forward pass."""
        return torch.autocast(self.kind, self.dtype) if self.amp else nullcontext()

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward and the optimizer's step, left out where float16's gradients overflow."""
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
