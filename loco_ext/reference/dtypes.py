"""The dtype that the reference implementations, and the kernels, compute in."""

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype of tensors of this dtype: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
