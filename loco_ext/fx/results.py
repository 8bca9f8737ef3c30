"""Comparison of what a graph returns with what its model returns."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_ROUNDING = 5e-2  # allowed difference, as a part of the largest number: graphs leave out the model's own autocast


def agree(found: Any, expected: Any) -> bool:
    """Return whether the tensors in two results have equal shapes and, up to rounding to bfloat16, equal numbers.

    They differ where tracing has changed what the model's code does: under torch.fx, values are no tensors, and code
    that asks whether they are takes another branch.

    Example:
        >>> import torch
        >>> agree({"logits": torch.ones(2)}, {"logits": torch.zeros(2)})
        False
    """
    ours, others = _tensors(found), _tensors(expected)
    if [each.shape for each in ours] != [each.shape for each in others]:
        return False
    return all(
        torch.allclose(x, y, rtol=0, atol=_ROUNDING * y.abs().nan_to_num(posinf=0.0).max().item(), equal_nan=True)
        for x, y in zip(ours, others, strict=True)
        if y.numel()
    )


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors in a result, also those in dataclasses, in float64."""
    found: list[Tensor] = []
    for part in tree_leaves(result):
        if isinstance(part, Tensor):
            part = part.detach().cpu()
            found.append(part.to(torch.complex128) if part.is_complex() else part.double())
        elif is_dataclass(part):
            found += _tensors([getattr(part, each.name) for each in fields(part)])
    return found
