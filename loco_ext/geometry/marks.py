"""What tells the blocks of a locally connected layer from a convolution's weight: their pattern, which goes along."""

from __future__ import annotations

from torch import Tensor

from loco_ext.geometry.block_pattern import BlockPattern


def mark_blocks(values: Tensor, pattern: BlockPattern) -> None:
    """Says that these are the blocks of a pattern. Copies and views of the tensor are not marked."""
    values.block_pattern = pattern  # type: ignore[attr-defined]


def pattern_of(parameter: Tensor) -> BlockPattern | None:
    """The pattern that these are the blocks of; None for other tensors."""
    return getattr(parameter, "block_pattern", None)
