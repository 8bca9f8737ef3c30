"""Tensors handed to the compiled library once for many steps.

Handing over hundreds of tensors costs more than stepping them where they are small. A Held keeps what consecutive
steps have in common; the library still reads every pointer, size and stride anew at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops import backends


class Held:
    """The unchanging arguments of the optimizer step, held by the compiled library until this object is gone.

    Args:
        lists: params, three lists of states, steps, maps; as the operators of :mod:`loco_ext.ops.optim_step` take them.
        indices: group_index, map_index, the numbers of penalties, ordinals.
    """

    def __init__(self, lists: Sequence[list[Tensor]], indices: Sequence[list[int]]) -> None:
        params, state0, state1, state2, steps, maps = lists
        group_index, map_index, penalties, ordinals = indices
        self.number: int = backends.operators().optim_step_hold(
            params, state0, state1, state2, steps, group_index, maps, map_index, penalties, ordinals
        )
        library = backends.cuda_library if params[0].is_cuda else backends.library
        self._release: Any = library.release if library else None

    def __del__(self) -> None:
        if release := getattr(self, "_release", None):
            release(self.number)

    @staticmethod
    def possible(param: Tensor) -> bool:
        """Whether steps on this parameter's device run in the compiled library, and nothing watches operator calls."""
        return torch._C._len_torch_dispatch_stack() == 0 and backends.choose("optim_step", param.device) == "native"
