"""Checks against capturing in a CUDA graph a step that would not replay correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from loco_ext.optim.plan import Batch, BatchKey


def is_captured(param: Tensor) -> bool:
    """Return whether a CUDA graph is capturing the current stream of the parameter's device."""
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def check_states(param: Tensor) -> None:
    """Raise if states are about to be created or moved under capture: every replay of the graph would do so again.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the optimizer has not stepped the parameter before.
    """
    if is_captured(param):
        raise RuntimeError("step: expected the optimizer to have made a step before a CUDA graph captures one")


def check_capture(key: BatchKey, batch: Batch) -> None:
    """Raise if a CUDA graph is being captured that would not replay this step as intended.

    Raises:
        RuntimeError: see :func:`check_states`; or the step rounds stochastically, as every replay would draw the same
            numbers.
    """
    if batch.created:
        check_states(batch.params[0])
    if key.seed is not None and is_captured(batch.params[0]):
        raise RuntimeError("stochastic_rounding: expected None while a CUDA graph is captured, as replays round alike")
