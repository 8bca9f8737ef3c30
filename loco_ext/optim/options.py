"""The options of parameter groups: those that this package adds to torch.optim's, and checks of both."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_ext.argument_checks import check_choice
from loco_ext.warning import warn_caller

Group = dict[str, Any]


# The options that this package adds to a group.
OWN_OPTIONS: Group = {
    "locality": None,
    "norm": "l2",
    "penalty": None,
    "state_dtype": None,
    "stochastic_rounding": None,
}
# The entries that this package adds; rounding_step is no option, it counts the steps of stochastic rounding.
OWN_DEFAULTS: Group = {**OWN_OPTIONS, "rounding_step": 0}


def with_options(params: Any, own: Group) -> Any:
    """Return an optimizer's ``params`` as groups with these options, which torch.optim's constructors do not take."""
    if isinstance(params, Tensor):
        return params  # torch's constructor says what is wrong
    if isinstance(params, set):
        warn_caller("params: expected a list or another ordered collection, got a set, which has no order")
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        for name, value in own.items() if isinstance(group, dict) else ():
            group.setdefault(name, value)
    return groups


def uses_torch(group: Group) -> bool:
    """Return whether the group asks for torch's own implementation."""
    return bool(group["foreach"] or group["differentiable"])


def uses_kernels(group: Group, param: Tensor) -> bool:
    """Return whether GPU kernels step this parameter; they read its step count on the GPU."""
    return param.is_cuda and group["fused"] is not False and not uses_torch(group)


def device_lr(group: Group, device: torch.device) -> Tensor | None:
    """Return the group's learning rate if it is a tensor that the parameters' device reads itself, else None."""
    lr = group["lr"]
    return lr.to(device) if isinstance(lr, Tensor) and not lr.is_cpu and device.type != "cpu" else None


def lr_for(param: Tensor, group: Group) -> float | Tensor:
    """Return the group's learning rate; a tensor on a GPU as float64 of shape (), without waiting for it."""
    lr = group["lr"]
    return lr.to(param.device, torch.float64).reshape(()) if isinstance(lr, Tensor) else lr


def check_own(group: Group) -> None:
    """Raise TypeError or ValueError if an option that this package adds is unusable, whatever the parameters are."""
    check_choice("norm", group["norm"], ("l2", "l1"))
    if group["norm"] == "l1" and group.get("decoupled_weight_decay"):
        raise ValueError("norm: expected 'l2' for AdamW, whose decay is decoupled (Adam and SGD take 'l1')")
    if group["state_dtype"] not in (None, torch.float32):
        raise ValueError(f"state_dtype: expected None or torch.float32, got {group['state_dtype']!r}")
    seed = group["stochastic_rounding"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"stochastic_rounding: expected None or an integer seed, got {seed!r}")
    if uses_torch(group) and (group["state_dtype"] is not None or seed is not None):
        raise ValueError("state_dtype, stochastic_rounding: expected None with foreach=True or differentiable=True")
    if group["penalty"] is not None and not group.get("momentum", 0) < 1:
        raise ValueError(f"momentum: expected less than 1 with a penalty, got {group['momentum']}")
    if group["penalty"] is not None and group["differentiable"]:
        raise ValueError("penalty: expected None with differentiable=True")


_AT_LEAST_ZERO = ("lr", "momentum", "weight_decay", "eps")


def check_hyper(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a hyper-parameter among ``options`` is unusable; missing ones are skipped.

    Tensors and arrays of one element count as numbers, as in torch.optim.
    """
    for name in _AT_LEAST_ZERO:
        if name in options and not 0 <= _number(name, options[name]) < math.inf:
            raise ValueError(f"{name}: expected a finite number of at least 0, got {options[name]!r}")
    if "dampening" in options and not math.isfinite(_number("dampening", options["dampening"])):
        raise ValueError(f"dampening: expected a finite number, got {options['dampening']!r}")
    if "betas" in options:
        _check_betas(options["betas"])


def is_zero(weight_decay: float | Tensor) -> bool:
    """Return whether a weight decay is 0 for good; a tensor never is, as it can be changed in place."""
    return not isinstance(weight_decay, Tensor) and weight_decay == 0


def _check_betas(betas: Any) -> None:
    try:
        pair = tuple(betas)
    except TypeError:
        raise TypeError(f"betas: expected a pair of numbers, got {betas!r}") from None
    if len(pair) != 2:
        raise ValueError(f"betas: expected a pair of numbers, got {len(pair)} of them: {betas!r}")
    for i, beta in enumerate(pair):
        if not 0 <= _number(f"betas[{i}]", beta) < 1:
            raise ValueError(f"betas[{i}]: expected a number of at least 0 and less than 1, got {beta!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor | np.ndarray):
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name}: expected a number, got a tensor of shape {tuple(value.shape)}")
        value = value.item()
    if value is True or not isinstance(value, Real):  # False is 0, as in torch.optim
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return float(value)
