"""Whether autocast is on."""

import torch


def is_enabled(device_type: str) -> bool:
    """Return whether autocast is on for a device type; torch.compile can trace this, also in torch 2.11."""
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # torch has no autocast for this type
        return False
