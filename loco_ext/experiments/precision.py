"""Arithmetic of training steps: float32, or autocast with the loss scaling that float16 needs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from loco_ext.experiments.settings import SettingsError


class Precision:
    """Precision and loss scaling of the steps of one training.

    Args:
        amp: use autocast: bfloat16, or float16 on GPUs that only emulate bfloat16.
        device: device of the model.

    Raises:
        SettingsError: there is no autocast for that device type.
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
        """Return a context manager for the forward pass."""
        return torch.autocast(self.kind, self.dtype) if self.amp else nullcontext()

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Run backward and the optimizer step; the step is skipped where float16 gradients overflow."""
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
