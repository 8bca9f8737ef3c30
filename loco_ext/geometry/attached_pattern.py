"""The block pattern attached to a locally connected layer's weight, which tells it from a convolution's weight."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loco_ext.geometry.block_pattern import BlockPattern


def attach_pattern(weight: Tensor, pattern: BlockPattern) -> None:
    """Attach the pattern whose blocks the tensor has. Its copies and views have none."""
    weight.block_pattern = pattern  # type: ignore[attr-defined]


def pattern_of(parameter: Tensor) -> BlockPattern | None:
    """Return the attached pattern or None, also under torch.func and forward-mode AD."""
    pattern = getattr(parameter, "block_pattern", None)
    return getattr(_unwrapped(parameter), "block_pattern", None) if pattern is None else pattern


def _unwrapped(parameter: Tensor) -> Tensor:
    """Return the tensor that was given to the transforms if this one stands for it as a whole, else itself."""
    if torch.compiler.is_compiling() or not isinstance(parameter, Tensor):
        return parameter
    given = parameter
    while torch._C._functorch.is_functorch_wrapped_tensor(given):
        given = torch._C._functorch.get_unwrapped(given)
    if forward_ad._current_level >= 0 and given._base is not None:  # a dual tensor is a view
        given = given._base
    if given is parameter:
        return parameter
    whole = given.shape == parameter.shape and given.stride() == parameter.stride()
    return given if whole else parameter
