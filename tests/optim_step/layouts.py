"""Strides that tensors of a step may have, and kinds of steps to try them with."""

import torch
from torch import Tensor

from tests.optim_step.cases import copy_storage, whole

GUARD = 77.0  # fills the memory around and between the elements of a view; every dtype holds it


def guarded(tensor: Tensor, view) -> Tensor:
    """Copy the tensor into a larger one filled with GUARD; ``view`` selects the elements of the larger tensor."""
    spread = [2 * size + 3 for size in tensor.shape]
    place = view(torch.full(spread, GUARD, dtype=tensor.dtype))
    assert place.shape == tensor.shape
    place.copy_(tensor)
    return place


def shifted(tensor: Tensor, by: int) -> Tensor:
    """Copy the tensor ``by`` elements into larger memory filled with GUARD, which continues after it."""
    memory = torch.full((tensor.numel() + by + 9,), GUARD, dtype=tensor.dtype)
    return memory[by : by + tensor.numel()].view(tensor.shape).copy_(tensor)


def permuted(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the same values with the dimensions in memory in the given order."""
    inverse = [order.index(d) for d in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def every_other_channel(tensor: Tensor) -> Tensor:
    return guarded(
        tensor, lambda t: t[: tensor.shape[0], 1 : 2 * tensor.shape[1] : 2, 1 : 1 + tensor.shape[2]][..., :3]
    )


def every_other_tap(tensor: Tensor) -> Tensor:
    return guarded(tensor, lambda t: t[1::2, 2::2, 1:-1:2, 2:-1:2][: len(tensor), : tensor.shape[1], :3, :3])


def transposed_with_gaps(tensor: Tensor) -> Tensor:
    shape = tensor.shape
    place = torch.full((shape[1], shape[0] + 1, 4, 5), GUARD, dtype=tensor.dtype)
    return place[:, :-1, 1:, 1:4].transpose(0, 1).copy_(tensor)


LAYOUTS = {
    "contiguous": torch.clone,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: permuted(t, [1, 0, 3, 2]),
    "taps_slowest": lambda t: permuted(t, [3, 2, 0, 1]),
    "taps_apart": lambda t: permuted(t, [0, 2, 1, 3]),
    "every_other_channel": every_other_channel,
    "every_other_tap": every_other_tap,
    "transposed_with_gaps": transposed_with_gaps,
}

KINDS = {
    "float32": {},
    "float64": {"dtypes": [torch.float64] * 3},
    "half": {"dtypes": [torch.bfloat16, torch.float16, torch.float32]},
    "scaled": {"grad_scale": torch.tensor(4.0), "maximize": True},
    "rounded": {"dtypes": [torch.bfloat16] * 3, "seed": 5},
}


def gaps(tensor: Tensor) -> Tensor:
    """Return the whole memory of the tensor with its own elements set to 0."""
    copy = copy_storage(tensor)
    copy.zero_()
    return whole(copy)
