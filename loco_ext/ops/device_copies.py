"""Small tensors of the host that computations on other devices read in every step."""

import torch
from torch import Tensor

from loco_ext.ops.streams import current_stream, is_capturing


class DeviceCopies:
    """Copies of a tensor of the host on other devices, made without waiting for the device, and kept.

    Each stream has its own, since another one may run ahead, and each captured CUDA graph too, which repeats the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._kept: dict[tuple[torch.device, int], Tensor] = {}
        self._of_graphs: list[tuple[Tensor, Tensor]] = []

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, or its copy on another device, which must not be changed."""
        if device.type != "cuda":
            return self.tensor.to(device)
        if is_capturing(device):
            pinned = self.tensor.pin_memory()
            copy = pinned.to(device, non_blocking=True)
            self._of_graphs.append((pinned, copy))
            return copy
        key = device, current_stream(device)
        if key not in self._kept:
            self._kept[key] = self.tensor.pin_memory().to(device, non_blocking=True)
        return self._kept[key]
