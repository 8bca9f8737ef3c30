"""What tells the blocks of a locally connected layer from a convolution's weight: their pattern, which goes along."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loco_ext.geometry.block_pattern import BlockPattern


def mark_blocks(values: Tensor, pattern: BlockPattern) -> None:
    """Says that these are the blocks of a pattern. Copies and views of the tensor are not marked."""
    values.block_pattern = pattern  # type: ignore[attr-defined]


def pattern_of(parameter: Tensor) -> BlockPattern | None:
    """The pattern that these are the blocks of, under torch.func and forward-mode AD too; None for other tensors."""
    pattern = getattr(parameter, "block_pattern", None)
    return getattr(_given(parameter), "block_pattern", None) if pattern is None else pattern


def _given(parameter: Tensor) -> Tensor:
    """Return the tensor that transforms were given where this one stands for it as a whole."""
    if torch.compiler.is_compiling() or not isinstance(parameter, Tensor):
        return parameter
    given = parameter
    while torch._C._functorch.is_functorch_wrapped_tensor(given):
        given = torch._C._functorch.get_unwrapped(given)
    if forward_ad._current_level >= 0 and given._base is not None:  # with a tangent it is a view
        given = given._base
    if given is parameter:
        return parameter
    whole = given.shape == parameter.shape and given.stride() == parameter.stride()
    return given if whole else parameter
