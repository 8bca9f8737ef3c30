"""The block pattern attached to a locally connected layer's weight, which tells it from a convolution's weight."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loco_ext.geometry.block_pattern import BlockPattern
from loco_ext.geometry.conv import ConvGeometry


class SharedPattern:
    """The pattern of a weight's blocks, shared by all layers that share the weight."""

    def __init__(self, pattern: BlockPattern) -> None:
        self.pattern = pattern


# torch.load reads saved parameters by default; these have their pattern with them.
torch.serialization.add_safe_globals([SharedPattern, BlockPattern, ConvGeometry])


def attach_pattern(weight: Tensor, pattern: BlockPattern) -> SharedPattern:
    """Attach the pattern whose blocks the tensor has, and return it as attached. Copies and views have none.

    What is attached already and is of the same geometry stays the same object, as layers hold it.
    """
    shared = attached_pattern(weight)
    if shared is None or shared.pattern.conv != pattern.conv:
        weight.shared_pattern = shared = SharedPattern(pattern)  # type: ignore[attr-defined]
    shared.pattern = pattern
    return shared


def attached_pattern(parameter: Tensor | None) -> SharedPattern | None:
    """Return the pattern that is attached to this very tensor, or None."""
    return getattr(parameter, "shared_pattern", None)


def pattern_of(parameter: Tensor) -> BlockPattern | None:
    """Return the attached pattern or None, also under torch.func and forward-mode AD."""
    shared = attached_pattern(parameter) or attached_pattern(_unwrapped(parameter))
    return None if shared is None else shared.pattern


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
