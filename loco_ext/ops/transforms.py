"""Detection of torch.func and forward-mode AD, and a context that suspends torch.func."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad


def are_active() -> bool:
    """Return whether tensors may belong to a transform, for which autograd functions need a ``setup_context``."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def suspended() -> AbstractContextManager[object]:
    """Return a context in which new tensors are ordinary ones, not wrappers of a torch.func transform."""
    return torch._C._DisableFuncTorch() if are_active() else nullcontext()
