"""What a CUDA graph must not capture."""

from __future__ import annotations

import torch

from loco_ext.optim.plan import Batch, Rule


def check_capture(rule: Rule, batch: Batch) -> None:
    """Raises if a CUDA graph is being captured that would not replay this step as it is meant.

    Raises:
        RuntimeError: the optimizer has not stepped these parameters before, so that every replay would make their
            states anew; or it rounds stochastically, where every replay would draw the same numbers.
    """
    if not batch.params[0].is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    if batch.created:
        raise RuntimeError("step: expected the optimizer to have made a step before a CUDA graph captures one")
    if rule.seed is not None:
        message = "stochastic_rounding: expected None while a CUDA graph is captured, replays would round alike"
        raise RuntimeError(message)
