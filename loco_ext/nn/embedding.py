"""Embedding of a convolution's weights into blocks, and the orthogonal projection back (eFCN, section 3).

Weights are stored by tap here, ``[n_taps, groups, C_in / groups, C_out / groups]``, so that each tap has the layout of
a block. With ``E`` the matrix of zeros and ones that :class:`loco_ext.geometry.ConvTaps` describes, the blocks are
``E w``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.geometry import BlockPattern


def weight_by_tap(weight: Tensor, groups: int) -> Tensor:
    """Return the weight ``[C_out, C_in / groups, *kernel_size]`` by tap, see the module docstring.

    It is a contiguous copy, which :func:`embed` puts into blocks several times as fast as a transposed view.
    """
    return weight.flatten(2).unflatten(0, (groups, -1)).permute(3, 0, 2, 1).contiguous()


def kernel_weight(by_tap: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """Return the weight of a convolution, ``[C_out, C_in / groups, *kernel_size]``; the inverse of weight_by_tap."""
    return by_tap.permute(1, 3, 2, 0).flatten(0, 1).unflatten(2, tuple(kernel_size)).contiguous()


def embed(by_tap: Tensor, pattern: BlockPattern) -> Tensor:
    """Return ``E w``, the blocks of the convolution with these weights; blocks outside of receptive fields are zero."""
    taps = pattern.taps
    values = by_tap.new_zeros((pattern.nnz, *by_tap.shape[1:]))
    return values.index_add_(0, taps.block.to(values.device), by_tap[taps.tap])


def project(values: Tensor, pattern: BlockPattern) -> Tensor:
    """Return the weights of the convolution nearest to the blocks, ``(E^T E)^-1 E^T values``, in float64.

    Pruned blocks count as zeros. Where several weights give the same layer, the result is the one of least norm.
    """
    assert pattern.conv is not None
    taps, pairs = pattern.taps, pattern.conv.tap_pairs()
    by_tap = taps.block[taps.tap.argsort(stable=True)].split(taps.tap.bincount(minlength=len(pairs)).tolist())
    sums = torch.stack([values[blocks].sum(0, dtype=torch.float64) for blocks in by_tap])
    inverse = torch.linalg.pinv(pairs.double(), hermitian=True).to(sums.device)
    return (inverse @ sums.flatten(1)).view_as(sums)
