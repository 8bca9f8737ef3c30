"""Choice of the blocks that remain when a layer is pruned."""

import math
from numbers import Real

import torch
from torch import Tensor

from loco_ext.argument_checks import check_count
from loco_ext.geometry import BlockPattern
from loco_ext.nn.block_norms import block_norms


def blocks_to_keep(
    weight: Tensor, pattern: BlockPattern, keep: Tensor | None, threshold: float | None, radius: int | None
) -> Tensor:
    """Return which blocks to keep, bool ``[nnz]``, according to the one of the three arguments that is not None.

    Raises:
        TypeError: not exactly one of them is given, or it has a wrong type.
        ValueError: the number is negative or NaN.
    """
    given = [
        name for name, value in (("keep", keep), ("threshold", threshold), ("radius", radius)) if value is not None
    ]
    if len(given) != 1:
        raise TypeError(f"prune: expected exactly one of keep, threshold and radius, got {', '.join(given) or 'none'}")
    if keep is not None:
        return keep
    if threshold is not None:
        return _above(weight, threshold)
    return _within(pattern, check_count("radius", radius))


def _above(weight: Tensor, threshold: float) -> Tensor:
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold: expected a number, got {threshold!r}")
    if math.isnan(threshold) or threshold < 0:
        raise ValueError(f"threshold: expected at least 0, got {threshold}")
    return ~(block_norms(weight.detach()) <= threshold)  # a block with NaN is kept


def _within(pattern: BlockPattern, radius: int) -> Tensor:
    assert pattern.conv is not None
    _, own, wanted = pattern.union(BlockPattern.of_geometry(pattern.conv).grow(radius)[0])
    return torch.isin(own, wanted, assume_unique=True)
