"""Constant values of channels after operations, in float64; NaN stands for a channel that varies.

Constants have shape [channels], and what is known of a layer's filters is [C_out, C_in/groups].
"""

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from loco_ext.fx.modules import paddings
from loco_ext.fx.operations import CASTS, module_of, operation
from loco_ext.sparsity.compaction.roles import (
    NORMS,
    GraphInfo,
    has_running_statistics,
    is_depthwise,
    is_padding,
    is_resampling,
    keeps_constants,
)
from loco_ext.sparsity.compaction.whole_filters import TRANSPOSED, by_taps, filter_weights

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

_NUMPY: dict[str, Callable[[Floats, Floats], Floats]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"maximum": np.maximum, "minimum": np.minimum},
    "where": lambda one, other: np.where(one == other, one, np.nan),
}


def live_weights(weight: Tensor) -> Booleans:
    """Return which slices of the weight have a non-zero number, [C_out, C_in/groups]."""
    return (by_taps(weight) != 0).any(2).cpu().numpy()


def sums_of_taps(weight: Tensor) -> Tensor:
    """Return the sum over the taps of each slice of the weight, in float64, [C_out, C_in/groups]."""
    return by_taps(weight.double()).sum(2)


def meets_no_padding(module: Any) -> Booleans:
    """Return, as [C_out, C_in/groups], whether no non-zero weight meets zero padding at any size of the input."""
    weight = filter_weights(module).detach()
    if weight.dim() == 2 or module.padding_mode != "zeros":
        return np.ones(tuple(weight.shape[:2]), dtype=bool)
    if type(module) in TRANSPOSED:  # reads zeros between pixels
        return ~live_weights(weight)
    never = torch.ones(weight.shape[2:], dtype=torch.bool)
    for axis, (lower, upper) in enumerate(paddings(module)):
        taps, step = weight.shape[2 + axis], module.dilation[axis]
        place = torch.arange(taps).reshape([-1 if i == axis else 1 for i in range(never.dim())])
        never = never & (place * step >= lower) & ((taps - 1 - place) * step >= upper)
    return ((weight.cpu() == 0) | never).flatten(2).all(2).numpy()


def after_layer(module: Any, constants: Floats) -> tuple[Booleans, Booleans, Booleans, Floats]:
    """Return which channels the filters of a layer read, and what its constant outputs are.

    Args:
        constants: those that the layer reads, [C_in].

    Returns:
        Three times [C_out, C_in/groups]: whether any weight is not zero; whether the channel is constant; whether that
        holds at borders too, despite padding, so that a bias can replace the channel. Then the constant output of each
        filter, [C_out]; NaN if it reads a channel that no bias can replace.
    """
    weight, groups = filter_weights(module).detach(), getattr(module, "groups", 1)
    read = constants.reshape(groups, -1).repeat(len(weight) // groups, 0)  # [C_out, C_in/groups]
    live, known = live_weights(weight), np.isfinite(read)
    foldable = known & ((read == 0) | meets_no_padding(module))
    outputs = (sums_of_taps(weight).cpu().numpy() * np.where(live & foldable, read, 0.0)).sum(1)
    if module.bias is not None:
        outputs = outputs + module.bias.detach().double().cpu().numpy()
    return live, known, foldable, _finite(np.where((live & ~foldable).any(1), np.nan, outputs))


def after_channel_operation(info: GraphInfo, node: fx.Node, constants: Floats) -> Floats:
    """Return the constants after an operation that treats each channel separately."""
    module, name = module_of(node), operation(node)
    if module is not None and is_depthwise(module):
        return after_layer(module, constants)[-1]
    if is_padding(node):
        zeros = node.kwargs.get("mode", "constant") == "constant"
        return np.where((constants != 0) & zeros, np.nan, constants)
    if node.target is operator.getitem:
        return constants
    if name == "zeroslike":
        return np.zeros_like(constants)
    if name in CASTS:
        return _finite(torch.from_numpy(constants).to(node.meta["dtype"]).double().numpy())
    if is_resampling(name):
        return constants.copy() if keeps_constants(module, name) else np.where(constants == 0, 0.0, np.nan)
    if type(module) in NORMS and not has_running_statistics(module):  # subtracts the mean of what it is given
        shifts = 0.0 if module.bias is None else module.bias.detach().double().cpu().numpy()
        by_group = constants.reshape(getattr(module, "num_groups", len(constants)), -1)
        zero = np.broadcast_to((by_group == 0).all(1, keepdims=True), by_group.shape).reshape(-1)
        return _finite(np.where(zero, shifts, np.nan))
    if whole := info.read_whole(node):
        (source,) = info.nodes[node].sources
        numbers = {source: constants, **{x: info.numbers_of(x, source) for x in whole}}
        operands: Any = [numbers[x] if isinstance(x, fx.Node) else x for x in node.args[-2:]]
        after = after_arithmetic(name, *operands)
        # A factor of zero does not make channels constant, because it may be trained, unless it is part of a mask.
        return after if info.is_masked(node) else np.where(np.isnan(constants), np.nan, after)
    return _evaluate(node, module, constants)


def _evaluate(node: fx.Node, module: Any, constants: Floats) -> Floats:
    """Return the constants after a pointwise operation, computed by running it in float64."""
    dims = len(node.meta["shape"])
    x = torch.from_numpy(np.nan_to_num(constants)).reshape(1, -1, *[1] * (dims - 2))
    with torch.no_grad():
        if module is not None:
            y = copy.deepcopy(module).double().cpu().eval()(x.clone())
        else:
            args = [x.clone() if isinstance(arg, fx.Node) else arg for arg in node.args]
            function: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
            y = function(*args, **node.kwargs)
    return np.where(np.isnan(constants), np.nan, _finite(y.reshape(-1).numpy()))


def after_arithmetic(name: str, one: Floats, other: Floats) -> Floats:
    """Return the constants of the result of an operation on two tensors, see :meth:`GraphInfo.arithmetic`."""
    with np.errstate(all="ignore"):
        constants = _finite(_NUMPY[name](one, other))
    if name == "mul":  # 0 times anything is 0, as for a filter of zeros
        constants = np.where((one == 0) | (other == 0), 0.0, constants)
    if name == "div":  # a divisor that varies is taken to be other than 0
        constants = np.where((one == 0) & np.isnan(other), 0.0, constants)
    return constants


def _finite(constants: Floats) -> Floats:
    """Replace constants that are not finite by NaN: such channels count as varying, so that they are not hidden."""
    return np.where(np.isfinite(constants), constants, np.nan)
