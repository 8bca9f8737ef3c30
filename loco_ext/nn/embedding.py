"""The way from a convolution's weights to blocks, and the orthogonal projection back (eFCN, section 3).

Weights are by tap here: ``[n_taps, groups, C_in / groups, C_out / groups]``, each tap's as a block has them. With ``E``
the matrix of zeros and ones that :class:`loco_ext.geometry.ConvTaps` describes, blocks are ``E w``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.geometry import BlockPattern


def weight_by_tap(weight: Tensor, groups: int) -> Tensor:
    """From a convolution's ``[C_out, C_in / groups, *kernel_size]``."""
    return weight.flatten(2).unflatten(0, (groups, -1)).permute(3, 0, 2, 1)


def kernel_weight(by_tap: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """Back to a convolution's."""
    return by_tap.permute(1, 3, 2, 0).flatten(0, 1).unflatten(2, tuple(kernel_size)).contiguous()


def embed(by_tap: Tensor, pattern: BlockPattern) -> Tensor:
    """``E w``: the blocks of the convolution with these weights; zero outside its receptive fields."""
    taps = pattern.taps
    values = by_tap.new_zeros((pattern.nnz, *by_tap.shape[1:]))
    return values.index_add_(0, taps.block.to(values.device), by_tap[taps.tap])


def project(values: Tensor, pattern: BlockPattern) -> Tensor:
    """The weights whose convolution is nearest to the blocks, in float64: ``(E^T E)^-1 E^T values``.

    Blocks that were pruned count as zeros. Where several weights are the same layer, the smallest.
    """
    assert pattern.conv is not None
    taps, pairs = pattern.taps, pattern.conv.tap_pairs()
    by_tap = taps.block[taps.tap.argsort(stable=True)].split(taps.tap.bincount(minlength=len(pairs)).tolist())
    sums = torch.stack([values[blocks].sum(0, dtype=torch.float64) for blocks in by_tap])
    inverse = torch.linalg.pinv(pairs.double(), hermitian=True).to(sums.device)
    return (inverse @ sums.flatten(1)).view_as(sums)
