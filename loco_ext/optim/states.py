"""States of parameters: those of a step, new ones, and those that a state dict brings."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from loco_ext.argument_checks import check_tensor
from loco_ext.ops.step_args import ADAM, SGD
from loco_ext.optim.options import Group, uses_kernels
from loco_ext.optim.plan import Batch, check_not_captured, extend

_MOMENTS = (*SGD.states, *ADAM.states)
_NEEDED = ("step", *ADAM.states[:2])  # Adam's states, all of which or none a parameter has


def state_dtype(param: Tensor, group: Group) -> torch.dtype:
    """Return the dtype of states: the parameter's, or float32 for bfloat16 and float16 if the group asks for it."""
    return group["state_dtype"] if group["state_dtype"] and param.element_size() < 4 else param.dtype


def add_states(batch: Batch, group: Group, params: list[Tensor], states: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Add the states of the group's parameters to the batch; missing ones are created for this step."""
    nothing = dict[str, Tensor]()
    owned = [states.get(p, nothing) for p in params]
    for name, tensors in batch.states_by_name().items():
        try:
            more: list[Any] = [state[name] for state in owned]
            complete = name != "momentum_buffer"  # which may also be None
        except KeyError:
            more, complete = [state.get(name) for state in owned], False
        new: Sequence[int] = () if complete else [i for i, tensor in enumerate(more) if tensor is None]
        if name == "momentum_buffer":
            extend(batch.first, 0, len(tensors), [int(tensor is None) for tensor in more] if new else [], len(more))
        for i in new:
            if owned[i] and name in _NEEDED:
                raise KeyError(f"state: expected {', '.join(_NEEDED)} of a parameter, got only {', '.join(owned[i])}")
            more[i] = _new_state(name, params[i], group)
        if name == "step" and uses_kernels(group, params[0]) and not all([count.is_cuda for count in more]):
            check_not_captured(params[0])  # a checkpoint may hold the counts on the CPU
            more = [count.to(param.device) for count, param in zip(more, params, strict=True)]
            new = range(len(more))
        batch.created += [(params[i], name, more[i]) for i in new]
        tensors += more


@torch.inference_mode(False)  # later steps may run outside inference mode, so no state may be an inference tensor
def _new_state(name: str, param: Tensor, group: Group) -> Tensor:
    """Return zeros for a state of the parameter, with its strides unless it is the step count."""
    if name == "step":
        on_device = group["capturable"] or group["fused"] or uses_kernels(group, param)
        double = torch.get_default_dtype() == torch.float64 and not group["fused"]
        dtype = torch.float64 if double else torch.float32
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    return torch.zeros_like(param, dtype=state_dtype(param, group), memory_format=torch.preserve_format)


def restore_states(optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Give loaded states their dtype and strides back: torch casts to the parameter's dtype and ignores strides."""
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if not (saved_states := loaded["state"].get(key)):
                continue  # an empty entry would appear in state dicts
            states = optimizer.state[param]
            for name, value in saved_states.items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":
                    count = states[name]  # of any dtype; the operators take float32 and float64
                    states[name] = count if count.dtype in (torch.float32, torch.float64) else count.float()
                elif not is_lazy(param) and value.shape == param.shape:
                    dtype, now = state_dtype(param, group), states[name]
                    if now.dtype != dtype or now.stride() != param.stride():
                        states[name] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(value)


def check_states(groups: list[Group], loaded: Mapping[str, Any]) -> None:
    """Raise if a state does not fit its parameter; groups that do not fit are left to torch.

    NaN and infinities are accepted, as in torch.optim: a diverged training saves them.

    Args:
        groups: the optimizer's ``param_groups``.
        loaded: the state dict that ``load_state_dict`` was given.

    Raises:
        TypeError, ValueError: naming the state, the expectation and the value received.
    """
    states = loaded["state"]
    if not isinstance(states, Mapping):
        raise TypeError(f"state: expected a dict with the states of each parameter, got {type(states).__name__}")
    for group, saved in zip(groups, loaded["param_groups"], strict=False):
        for param, key in zip(group["params"], saved["params"], strict=False):
            state = states.get(key, {})
            if not isinstance(state, Mapping):
                raise TypeError(f"state[{key!r}]: expected a dict of states by name, got {type(state).__name__}")
            if state and "betas" in group and (missing := [name for name in _NEEDED if name not in state]):
                raise ValueError(f"state[{key!r}]: expected {', '.join(_NEEDED)}, got one without {', '.join(missing)}")
            for name, value in state.items():
                if name == "step":
                    _check_step(f"state[{key!r}]['step']", value)
                elif name in _MOMENTS and not (value is None and name == "momentum_buffer"):
                    _check_moment(f"state[{key!r}][{name!r}]", value, param)


def _check_step(name: str, step: Any) -> None:
    expected = f"{name}: expected a finite number of at least 0"
    if not isinstance(step, Tensor | Real):
        raise TypeError(f"{expected}, got {type(step).__name__}")
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex() or step.is_meta:
            raise ValueError(f"{expected}, got a tensor of {step.dtype}, shape {tuple(step.shape)} on {step.device}")
        if type(step) is not Tensor:  # the value of a DTensor or a fake tensor may be elsewhere, or not exist
            return
    count = float(step)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"{expected}, got {count}")


def _check_moment(name: str, value: Any, param: Tensor) -> None:
    check_tensor(name, value)
    if not is_lazy(param) and value.shape != param.shape:
        raise ValueError(f"{name}: expected its parameter's shape {tuple(param.shape)}, got {tuple(value.shape)}")
    if value.layout != torch.strided or value.is_floating_point() != param.is_floating_point():
        raise ValueError(f"{name}: expected dense floating-point numbers, got {value.dtype} in {value.layout}")
    if value.is_meta and not param.is_meta:
        raise ValueError(f"{name}: expected a tensor with data, got one on the meta device")
