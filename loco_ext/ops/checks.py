"""Argument checks of the optimizer step, with typed errors that name the argument, the expectation and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loco_ext.reference.optim_step import ADAM_COLUMNS, SGD_COLUMNS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAMES = {
    "optim_step_sgd": ("params", "grads", "momentum_buffers", "first", "group_index", "hyper", "maps", "map_index"),
    "optim_step_adam": (
        "params",
        "grads",
        "exp_avgs",
        "exp_avg_sqs",
        "max_exp_avg_sqs",
        "steps",
        "group_index",
        "hyper",
        "maps",
        "map_index",
    ),
}
_STATES = ("momentum_buffers", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def check_step(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises TypeError or ValueError if the operator ``name`` cannot take ``arguments``; reads metadata only."""
    named = dict(zip(_NAMES[name], arguments, strict=False))
    params = named["params"]
    for key in ("params", "grads", *_STATES, "steps"):
        optional = key in ("momentum_buffers", "max_exp_avg_sqs")
        if key in named and not (optional and not named[key]):
            _check_length(key, named[key], len(params))
    for key in ("group_index", "map_index"):
        _check_length(key, named[key], len(params))
    if named.get("first"):
        _check_length("first", named["first"], len(named["momentum_buffers"]))
    for key in ("params", "grads", *_STATES):
        for i, tensor in enumerate(named.get(key, ())):
            _check_tensor(f"{key}[{i}]", tensor, params[i], params[0].device)
    columns = SGD_COLUMNS if name == "optim_step_sgd" else ADAM_COLUMNS
    _check_hyper(named["hyper"], columns, named["group_index"])
    _check_maps(named["maps"], named["map_index"], params)
    for i, step in enumerate(named.get("steps", ())):
        if step.numel() != 1 or step.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"steps[{i}]: expected one float32 or float64 element, got {step.dtype} of {tuple(step.shape)}"
            )
    written = [(f"{key}[{i}]", t) for key in ("params", *_STATES, "steps") for i, t in enumerate(named.get(key, ()))]
    _check_overlap(written, [(f"grads[{i}]", t) for i, t in enumerate(named["grads"])])


def _check_length(name: str, values: Sequence[object], expected: int) -> None:
    if len(values) != expected:
        raise ValueError(f"{name}: expected {expected} entries, got {len(values)}")


def _check_tensor(name: str, tensor: Tensor, param: Tensor, device: torch.device) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {tensor.dtype}")
    if tensor.device != device:
        raise TypeError(f"{name}: expected device {device} as params[0], got {tensor.device}")
    if tensor.shape != param.shape:
        raise ValueError(f"{name}: expected its parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}")


def _check_hyper(hyper: Tensor, columns: Sequence[str], group_index: Sequence[int]) -> None:
    if hyper.dtype != torch.float64 or hyper.dim() != 2 or hyper.shape[1] != len(columns):
        raise ValueError(
            f"hyper: expected a float64 tensor of shape (groups, {len(columns)}) with columns {', '.join(columns)}, "
            f"got {hyper.dtype} of shape {tuple(hyper.shape)}"
        )
    for i, group in enumerate(group_index):
        if not 0 <= group < hyper.shape[0]:
            raise ValueError(f"group_index[{i}]: expected 0 to {hyper.shape[0] - 1}, got {group}")


def _check_maps(maps: Sequence[Tensor], map_index: Sequence[int], params: Sequence[Tensor]) -> None:
    for i, which in enumerate(map_index):
        if not -1 <= which < len(maps):
            raise ValueError(f"map_index[{i}]: expected -1 to {len(maps) - 1}, got {which}")
        if which < 0:
            continue
        decay_map, shape = maps[which], params[i].shape
        if decay_map.dtype != torch.float64:
            raise TypeError(f"maps[{which}]: expected float64, got {decay_map.dtype}")
        trailing = zip(reversed(decay_map.shape), reversed(shape), strict=False)
        if decay_map.dim() > len(shape) or any(m not in (1, s) for m, s in trailing):
            raise ValueError(
                f"maps[{which}]: expected a shape that broadcasts to params[{i}], {tuple(shape)}, "
                f"got {tuple(decay_map.shape)}"
            )


def _check_overlap(written: list[tuple[str, Tensor]], read: list[tuple[str, Tensor]]) -> None:
    """Finds dense tensors that share memory; interleaved views are left to the compiled check."""
    for name, tensor in written:
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(f"{name}: expected an element each in memory, got strides {tensor.stride()}")
    intervals = [(*_interval(t), True, name) for name, t in written] + [(*_interval(t), False, n) for n, t in read]
    end, end_written, last, last_written = 0, 0, "", ""
    for begin, stop, writes, name in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if begin < (end if writes else end_written):
            other = last if writes else last_written
            raise ValueError(f"{name} and {other}: expected separate memory, got tensors that overlap")
        if stop > end:
            end, last = stop, name
        if writes and stop > end_written:
            end_written, last_written = stop, name


def _interval(tensor: Tensor) -> tuple[int, int]:
    """First and one past the last byte of a dense tensor; an empty interval for any other, or on another device."""
    dense = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if not dense or tensor.device.type == "meta":
        return 0, 0
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
