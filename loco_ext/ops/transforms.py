"""Whether code runs under torch.func or forward-mode AD, and code that is not to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad


def are_active() -> bool:
    """Whether tensors may be a transform's, for which autograd functions need a ``setup_context``."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def suspended() -> AbstractContextManager[object]:
    """Return a context in which tensors that are made are ordinary ones, not those of a torch.func transform."""
    return torch._C._DisableFuncTorch() if are_active() else nullcontext()
