"""Queries of a CUDA device: its current stream, and whether that stream captures a CUDA graph.

torch.cuda takes ten times as long with a torch.device as with its index.
"""

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream captures a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Return the handle of the device's current stream, 0 for devices without streams."""
    return torch.cuda.current_stream(device.index).cuda_stream if device.type == "cuda" else 0
