"""Norms of blocks of weights in float64, without a copy of all of them in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 2**20  # elements of which torch may make a copy in float64 at once


def block_norms(weight: Tensor) -> Tensor:
    """Return the norm of each block, float64 ``[nnz]``; weight: ``[nnz, groups, C_in / groups, C_out / groups]``."""
    norms = [torch.linalg.vector_norm(part, dim=(1, 2, 3), dtype=torch.float64) for part in parts_of(weight)]
    return torch.cat(norms)


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return slices along the first axis, small enough for a copy of one of them in float64."""
    if tensor.numel() <= _MOST:
        return (tensor,)
    return tensor.split(max(1, len(tensor) * _MOST // tensor.numel()))
