"""Argument checks of the optimizer step; their errors name the argument, the expectation and the value received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loco_ext.ops.overlap import check_overlap
from loco_ext.ops.penalties import StepPenalty
from loco_ext.reference.optim_step import ADAM_COLUMNS, SGD_COLUMNS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The arguments of each operator, in order.
ARGUMENTS = {
    "optim_step_sgd": (
        *("params", "grads", "momentum_buffers", "first", "group_index", "hyper"),
        *("lrs", "lr_index", "maps", "map_index", "penalties", "nesterov", "maximize", "l1"),
        *("grad_scale", "found_inf", "ordinals", "seed", "rounding_step"),
    ),
    "optim_step_adam": (
        *("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps", "group_index", "hyper"),
        *("lrs", "lr_index", "maps", "map_index", "penalties", "amsgrad", "maximize", "decoupled", "l1"),
        *("grad_scale", "found_inf", "ordinals", "seed", "rounding_step"),
    ),
}
_COLUMNS = {"optim_step_sgd": SGD_COLUMNS, "optim_step_adam": ADAM_COLUMNS}
_STATES = ("momentum_buffers", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def check_step(name: str, arguments: tuple[Any, ...], by_kernels: bool = True) -> None:
    """Raise TypeError or ValueError if the operator ``name`` cannot take ``arguments``.

    Kernels read scalars on the parameters' device; the reference, ``by_kernels=False``, reads them from any device.
    """
    named = dict(zip(ARGUMENTS[name], arguments, strict=True))
    params = named["params"]
    _check_lengths(named)
    for key in ("params", "grads", *_STATES):
        for i, tensor in enumerate(named.get(key, ())):
            _check_tensor(f"{key}[{i}]", tensor, params[i], params[0].device)
    _check_hyper(named["hyper"], _COLUMNS[name], named["group_index"])
    _check_index("lr_index", named["lr_index"], len(named["lrs"]))
    if named["lr_index"]:
        _check_length("lr_index", named["lr_index"], named["hyper"].shape[0])
    _check_maps(named["maps"], named["map_index"], params)
    _check_penalties(named["penalties"], params)
    device = params[0].device if by_kernels else None
    for key in ("steps", "lrs"):
        for i, scalar in enumerate(named.get(key, ())):
            _check_scalar(f"{key}[{i}]", scalar, device)
    for key in ("grad_scale", "found_inf"):
        if named[key] is not None:
            _check_scalar(key, named[key], device)
    scale = named["grad_scale"]
    if scale is not None and scale.is_cpu and scale.item() == 0:
        raise ValueError("grad_scale: expected a number other than 0, got 0")
    writes = {"params": True, "grads": named["grad_scale"] is not None, **dict.fromkeys((*_STATES, "steps"), True)}
    check_overlap((f"{key}[{i}]", t, write) for key, write in writes.items() for i, t in enumerate(named.get(key, ())))


def _check_lengths(named: dict[str, Any]) -> None:
    count = len(named["params"])
    for key in ("grads", "exp_avgs", "exp_avg_sqs", "steps", "group_index", "map_index"):
        if key in named:
            _check_length(key, named[key], count)
    if named.get("momentum_buffers"):
        _check_length("momentum_buffers", named["momentum_buffers"], count)
    if named.get("amsgrad") or named.get("max_exp_avg_sqs"):
        _check_length("max_exp_avg_sqs", named["max_exp_avg_sqs"], count)
    if named.get("first"):
        _check_length("first", named["first"], len(named["momentum_buffers"]))
    if named["seed"] is not None:
        _check_length("ordinals", named["ordinals"], count)


def _check_length(name: str, values: Sequence[object], expected: int) -> None:
    if len(values) != expected:
        raise ValueError(f"{name}: expected {expected} entries, got {len(values)}")


def _check_tensor(name: str, tensor: Tensor, param: Tensor, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {tensor!r}")
    if tensor.is_neg() or tensor._is_zerotensor():
        raise TypeError(f"{name}: expected a tensor of its own memory, got a lazily negated or a zero tensor: clone it")
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
    _check_index("map_index", map_index, len(maps))
    for i, which in enumerate(map_index):
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


def _check_penalties(penalties: Sequence[Any], params: Sequence[Tensor]) -> None:
    if penalties:
        _check_length("penalties", penalties, len(params))
    for i, penalty in enumerate(penalties):
        if not isinstance(penalty, StepPenalty):
            continue
        taps = params[i].shape[2:].numel() if params[i].dim() >= 2 else 0
        if len(penalty.rings) != taps:
            raise ValueError(
                f"penalties[{i}]: expected a parameter with kernels of {len(penalty.rings)} taps, "
                f"got shape {tuple(params[i].shape)}"
            )


def _check_index(name: str, index: Sequence[int], count: int) -> None:
    for i, which in enumerate(index):
        if not -1 <= which < count:
            raise ValueError(f"{name}[{i}]: expected -1 to {count - 1}, got {which}")


def _check_scalar(name: str, value: Tensor, device: torch.device | None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {value!r}")
    if device is not None and value.device != device:
        raise TypeError(f"{name}: expected device {device} as params[0], got {value.device}")
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: expected one float32 or float64 element, got {value.dtype} of {tuple(value.shape)}")
