"""A query of autocast that torch.compile can trace."""

import torch
from torch.amp import is_autocast_available

# torch refuses the question for device types without autocast, and torch.compile of torch 2.11 cannot trace
# is_autocast_available.
_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "ipu", "xla", torch._C._get_privateuse1_backend_name())
_AVAILABLE = frozenset(filter(is_autocast_available, _TYPES))


def is_enabled(device_type: str) -> bool:
    """Return whether autocast is on for a device type."""
    return device_type in _AVAILABLE and torch.is_autocast_enabled(device_type)
