"""Parts of torch.compiler that do not import torch's compiler, whose import takes longer than that of loco_ext."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

disable = torch._disable_dynamo  # as torch.compiler.disable; torch's own optimizers use it for the same reason


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that torch.compile calls instead of tracing it; it ignores caches, and warns of each."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        return function(*arguments, **options)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


@assume_constant_result
def is_exporting() -> bool:
    """Return whether torch.export traces the code; in torch.compile of torch 2.11, torch's function returns True."""
    return torch.compiler.is_exporting()
