"""Argument checks of the optimizer step; their errors name the argument, the expectation and the value received."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.argument_checks import check_memory, check_tensor
from loco_ext.ops.overlap import check_overlap
from loco_ext.ops.penalties import StepPenalty
from loco_ext.ops.step_args import StepArgs


def check_step(args: StepArgs, by_kernels: bool = True) -> None:
    """Raise TypeError or ValueError if the step cannot be made.

    Kernels read scalars on the parameters' device; the reference, ``by_kernels=False``, reads them from any device.
    """
    params, operands = args.params, args.operands()
    check_lengths(args)
    for name, tensors in operands.items():
        for i, tensor in enumerate(tensors):
            _check_tensor(f"{name}[{i}]", tensor, params[i], params[0].device)
    if args.shapes is not None and args.shapes.tolist() != [n for param in params for n in (param.dim(), *param.shape)]:
        raise ValueError(f"shapes: expected those of params, got {args.shapes.tolist()}")
    _check_hyper(args.hyper, args.rule.columns)
    _check_index("group_index", args.group_index, len(args.hyper), least=0)
    _check_index("lr_index", args.lr_index, len(args.lrs))
    if args.lr_index:
        _check_length("lr_index", args.lr_index, args.hyper.shape[0])
    _check_index("map_index", args.map_index, len(args.maps))
    for i, param in enumerate(params):
        if (decay_map := args.map_of(i)) is not None:
            _check_map(f"maps[{args.map_index[i]}]", decay_map, i, tuple(param.shape))
    check_penalties(args)
    device = params[0].device if by_kernels else None
    for i, count in enumerate(args.steps):
        _check_scalar(f"steps[{i}]", count, device)
    check_scalars(args, device)
    check_overlap(
        (f"{name}[{i}]", tensor, name != "grads" or args.grad_scale is not None)
        for name, tensors in (*operands.items(), ("steps", args.steps))
        for i, tensor in enumerate(tensors)
    )


def check_scalars(args: StepArgs, device: torch.device | None) -> None:
    """Raise TypeError or ValueError if a learning rate, grad_scale or found_inf is unusable; device: None for any."""
    for i, lr in enumerate(args.lrs):
        _check_scalar(f"lrs[{i}]", lr, device)
    for name, value in (("grad_scale", args.grad_scale), ("found_inf", args.found_inf)):
        if value is not None:
            _check_scalar(name, value, device)
    scale = args.grad_scale
    if scale is not None and scale.is_cpu and scale.item() == 0:
        raise ValueError("grad_scale: expected a number other than 0, got 0")


def check_lengths(args: StepArgs) -> None:
    """Raise ValueError if a list has not as many entries as it needs."""
    count = len(args.params)
    for name, tensors in args.operands().items():
        _check_length(name, tensors, count)
    if args.rule.counts_steps:
        _check_length("steps", args.steps, count)
    for name, index in (("group_index", args.group_index), ("map_index", args.map_index)):
        if index:
            _check_length(name, index, count)
    if args.first:
        _check_length("first", args.first, count if args.states else 0)
    if args.penalties:
        _check_length("penalties", args.penalties, count)
    if args.seed is not None:
        _check_length("ordinals", args.ordinals, count)


def _check_length(name: str, values: Sequence[object], expected: int) -> None:
    if len(values) != expected:
        raise ValueError(f"{name}: expected {expected} entries, got {len(values)}")


def _check_tensor(name: str, tensor: Tensor, param: Tensor, device: torch.device) -> None:
    check_tensor(name, tensor)
    if tensor.is_neg() or tensor._is_zerotensor():
        raise TypeError(f"{name}: expected a tensor of its own memory, got a lazily negated or a zero tensor: clone it")
    check_memory(name, tensor)
    if tensor.device != device:
        raise TypeError(f"{name}: expected device {device} as params[0], got {tensor.device}")
    if tensor.shape != param.shape:
        raise ValueError(f"{name}: expected its parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}")


def _check_hyper(hyper: Tensor, columns: Sequence[str]) -> None:
    if hyper.dtype != torch.float64 or hyper.dim() != 2 or hyper.shape[1] != len(columns):
        raise ValueError(
            f"hyper: expected a float64 tensor of shape (groups, {len(columns)}) with columns {', '.join(columns)}, "
            f"got {hyper.dtype} of shape {tuple(hyper.shape)}"
        )


def _check_map(name: str, decay_map: Tensor, index: int, shape: tuple[int, ...]) -> None:
    if decay_map.dtype != torch.float64:
        raise TypeError(f"{name}: expected float64, got {decay_map.dtype}")
    trailing = zip(reversed(decay_map.shape), reversed(shape), strict=False)
    if decay_map.dim() > len(shape) or any(m not in (1, s) for m, s in trailing):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to params[{index}], {shape}, got {tuple(decay_map.shape)}"
        )


def check_penalties(args: StepArgs) -> None:
    """Raise ValueError if a penalty is for filters of another number of taps than its parameter's."""
    for i, penalty in enumerate(args.penalties):
        if not isinstance(penalty, StepPenalty):
            continue
        param = args.params[i]
        taps = param.shape[2:].numel() if param.dim() >= 2 else 0
        if len(penalty.rings) != taps:
            raise ValueError(
                f"penalties[{i}]: expected a parameter with filters of {len(penalty.rings)} taps, "
                f"got shape {tuple(param.shape)}"
            )


def _check_index(name: str, index: Sequence[int], count: int, least: int = -1) -> None:
    for i, which in enumerate(index):
        if not least <= which < count:
            raise ValueError(f"{name}[{i}]: expected {least} to {count - 1}, got {which}")


def _check_scalar(name: str, value: Tensor, device: torch.device | None) -> None:
    check_tensor(name, value)
    if device is not None and value.device != device:
        raise TypeError(f"{name}: expected device {device} as params[0], got {value.device}")
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: expected one float32 or float64 element, got {value.dtype} of {tuple(value.shape)}")
