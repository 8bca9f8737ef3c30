"""Checks of the indices of a block pattern, before anything is computed with them."""

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_indices(crow: Tensor, col: Tensor, n_in: int) -> tuple[Tensor, Tensor]:
    """Return int64 copies of both on the CPU; raise if they are not the indices of a pattern."""
    crow, col = _copy("crow_indices", crow), _copy("col_indices", col)
    check_rows(crow, col, n_in)
    return crow, col


def check_rows(crow: Tensor, col: Tensor, n_in: int) -> None:
    """Raise ValueError if these are not the indices of a pattern."""
    counts = crow.diff()
    if len(crow) == 0 or crow[0] != 0:
        raise ValueError(f"crow_indices: expected n_out + 1 of them, the first 0, got {_start(crow)}")
    if (counts < 0).any():
        row = int((counts < 0).nonzero()[0])
        raise ValueError(f"crow_indices: expected none to descend, got {crow[row]} and {crow[row + 1]} at row {row}")
    if crow[-1] != len(col):
        raise ValueError(f"crow_indices: expected the last to be the number of col_indices, {len(col)}, got {crow[-1]}")
    outside = (col < 0) | (col >= n_in)
    if outside.any():
        block = int(outside.nonzero()[0])
        raise ValueError(f"col_indices: expected input pixels from 0 to {n_in - 1}, got {col[block]} at {block}")
    ascends = col.diff() > 0
    begins = crow[1:-1]  # the pixel before the start of such a row is another row's and need not be smaller
    ascends[begins[(begins > 0) & (begins < len(col))] - 1] = True
    if not ascends.all():
        block = int((~ascends).nonzero()[0])
        raise ValueError(
            f"col_indices: expected each row to ascend strictly, got {col[block]} and then {col[block + 1]} at {block}"
        )


def _copy(name: str, indices: Tensor) -> Tensor:
    if not isinstance(indices, Tensor) or indices.dtype not in INTEGERS:
        raise TypeError(
            f"{name}: expected a tensor of integers, got {getattr(indices, 'dtype', type(indices).__name__)}"
        )
    if indices.dim() != 1 or indices.layout != torch.strided:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(indices.shape)}, {indices.layout}")
    return indices.detach().to("cpu", torch.int64, copy=True).contiguous()


def _start(indices: Tensor) -> str:
    return f"{len(indices)}, from {indices[0]}" if len(indices) else "none"
