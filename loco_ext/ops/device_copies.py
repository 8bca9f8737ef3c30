"""Small tensors of the host that computations on other devices read in every step."""

import torch
from torch import Tensor

from loco_ext.ops.streams import current_stream, is_capturing

_READ_BY_GRAPHS: list[Tensor] = []  # host memory from which CUDA graphs copy at each replay


class DeviceCopies:
    """Copies of a tensor of the host on other devices, made without waiting for the device, and kept.

    Each stream has its own, since another one may run ahead. While a CUDA graph is captured, each call copies anew, and
    the graph repeats that.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._kept: dict[tuple[torch.device, int], Tensor] = {}

    def __reduce__(self) -> "tuple[type[DeviceCopies], tuple[Tensor]]":
        return DeviceCopies, (self.tensor,)

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, or its copy on another device, which must not be changed."""
        if device.type != "cuda":
            return self.tensor.to(device)
        if is_capturing(device):
            _READ_BY_GRAPHS.append(self.tensor.pin_memory())
            return _READ_BY_GRAPHS[-1].to(device, non_blocking=True)
        key = device, current_stream(device)
        if key not in self._kept:
            self._kept[key] = self.tensor.pin_memory().to(device, non_blocking=True)
        return self._kept[key]
