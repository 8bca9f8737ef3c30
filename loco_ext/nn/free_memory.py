"""Free memory of a device."""

from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on the device without affecting other processes, or None if unknown.

    Example:
        >>> free_memory(torch.device("meta")) is None
        True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None
