"""What a CUDA graph must not capture."""

from __future__ import annotations

import torch

from loco_ext.optim.plan import Batch


def check_capture(batch: Batch) -> None:
    """Raises if a CUDA graph is being captured and would make the states of this step anew at every replay.

    Raises:
        RuntimeError: the optimizer has not stepped these parameters before.
    """
    if batch.created and batch.params[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("step: expected the optimizer to have made a step before a CUDA graph captures one")
