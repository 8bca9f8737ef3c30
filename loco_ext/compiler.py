"""Parts of torch.compiler that do not import torch's compiler, whose import takes longer than that of loco_ext."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

disable = torch._disable_dynamo  # as torch.compiler.disable; torch's own optimizers use it for the same reason


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that torch.compile is to call instead of tracing it, as it ignores caches."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
