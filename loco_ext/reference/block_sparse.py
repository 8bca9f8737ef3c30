"""Multiplication by block-sparse matrices in plain PyTorch; half precision is summed in float32.

The functions take the arguments of the operators of the same names (see :mod:`loco_ext.ops.block_sparse`). They process
as many blocks at a time as there are pixels, so that their temporary memory is about as large as the activations.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from loco_ext.reference.dtypes import compute_dtype


def block_sparse_matmul(
    x: Tensor,
    values: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    bias: Tensor | None,
    *,
    at_once: int | None = None,
) -> Tensor:
    """Return ``y[n, o] = bias[o] + sum over the blocks b of row o of x[n, col_indices[b]] @ values[b]``.

    ``at_once``: the number of blocks that are multiplied together; None for as many as there are output pixels.
    """
    groups, _, width = values.shape[1:]
    rows, n_out = _rows(crow_indices, len(col_indices)), len(crow_indices) - 1
    y = x.new_zeros((n_out, groups, x.shape[0], width), dtype=compute_dtype(x.dtype))
    for part in _parts(len(col_indices), at_once or n_out):
        y = y.index_add(0, rows[part], _gather(x, col_indices[part], groups) @ values[part].to(y.dtype))
    y = _pixels_last(y)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def block_sparse_input_gradient(
    grad: Tensor, values: Tensor, crow_indices: Tensor, rows: Tensor, blocks: Tensor
) -> Tensor:
    """Return ``dx[n, p] = sum over the entries e of input pixel p of grad[n, rows[e]] @ values[blocks[e]].T``."""
    groups, depth, _ = values.shape[1:]
    pixels, n_in = _rows(crow_indices, len(rows)), len(crow_indices) - 1
    out = grad.new_zeros((n_in, groups, len(grad), depth), dtype=compute_dtype(grad.dtype))
    for part in _parts(len(rows), n_in):
        transposed = values[blocks[part]].to(out.dtype).transpose(-1, -2)
        out = out.index_add(0, pixels[part], _gather(grad, rows[part], groups) @ transposed)
    return _pixels_last(out).to(grad.dtype)


def block_sparse_value_gradient(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``dvalues[b] = sum over n of the outer product of x[n, col_indices[b]], grad[n, row of b]``, by groups.

    ``dtype``: that of the result; None for that of ``x``.
    """
    dtype = dtype or x.dtype
    nnz, n_out = len(col_indices), len(crow_indices) - 1
    rows = _rows(crow_indices, nnz)
    parts = [x.new_empty((0, groups, x.shape[2] // groups, grad.shape[2] // groups), dtype=dtype)]
    for part in _parts(nnz, n_out):
        outer = _gather(x, col_indices[part], groups).transpose(-1, -2) @ _gather(grad, rows[part], groups)
        parts.append(outer.to(dtype))
    return torch.cat(parts)


def block_sparse_value_gradient_float32(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int
) -> Tensor:
    """Return :func:`block_sparse_value_gradient` of half precision in float32."""
    return block_sparse_value_gradient(x, grad, crow_indices, col_indices, groups, dtype=torch.float32)


def _rows(crow_indices: Tensor, nnz: int) -> Tensor:
    """Return the row of each entry, int64 ``[nnz]``."""
    begins = crow_indices.new_zeros(nnz + 1).index_add(0, crow_indices[1:], torch.ones_like(crow_indices[1:]))
    return begins.cumsum(0)[:-1]  # the number of rows that have ended before the entry


def _parts(nnz: int, pixels: int) -> Iterator[slice]:
    step = max(pixels, 1)
    return (slice(begin, begin + step) for begin in range(0, nnz, step))


def _gather(activations: Tensor, pixels: Tensor, groups: int) -> Tensor:
    """Return the activations of ``pixels`` as ``[pixels, groups, batch, channels of a group]``."""
    batch, _, channels = activations.shape
    taken = activations[:, pixels].view(batch, len(pixels), groups, channels // groups)
    return taken.permute(1, 2, 0, 3).to(compute_dtype(activations.dtype))


def _pixels_last(activations: Tensor) -> Tensor:
    """Return ``[batch, pixels, channels]`` from ``[pixels, groups, batch, channels of a group]``."""
    pixels, groups, batch, channels = activations.shape
    return activations.permute(2, 0, 1, 3).reshape(batch, pixels, groups * channels)
