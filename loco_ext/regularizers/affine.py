"""Operations that are affine in a network's input: each computes values, tangents or dependences.

A tangent is the derivative of a value along a direction of the input: the same operation without its constant terms.
A dependence says which values may depend on which pixels: the same with ones as weights, so that nothing cancels.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from loco_ext import ops
from loco_ext.errors import UserError
from loco_ext.fx.operations import POOLS, module_of, operation
from loco_ext.nn.locally_connected import LocallyConnectedNd


class NotPiecewiseLinearError(UserError, ValueError):
    """Raised for a model that is not known to be piecewise linear in each sample; the message names the module.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU())
        >>> regularizers.region_radius(model, torch.zeros(1, 2))
        Traceback (most recent call last):
            ...
        loco_ext.regularizers.affine.NotPiecewiseLinearError: model: expected piecewise linear layers, got GELU at 1
    """


class Pass(enum.Enum):
    """Tell the passes through the network apart by the results that they compute."""

    VALUE = enum.auto()
    TANGENT = enum.auto()
    DEPENDENCE = enum.auto()


@dataclass
class AffineCall:
    """One call of an operation in one pass.

    Attributes:
        node: the call in the graph.
        args, kwargs: the arguments in this pass; those that depend on the input have one leading axis, of samples or of
            pairs of a direction and a sample.
        depends: for each of ``args``, whether it is a tensor that depends on the input.
        kind: what the pass computes.
        shape: shape of the result without its leading axis, known after the pass of values.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    depends: tuple[bool, ...]
    kind: Pass
    shape: Any = None

    @property
    def module(self) -> Any:
        """The module that is called; None for functions and methods."""
        return module_of(self.node)

    def option(self, place: int, name: str, default: Any = None) -> Any:
        """Return a module's attribute, or the function's argument at this place behind its input."""
        if self.module is not None:
            return getattr(self.module, name, default)
        return self.args[place + 1] if place + 1 < len(self.args) else self.kwargs.get(name, default)

    def weight(self, weight: Tensor) -> Tensor:
        """Return the weight to use in this pass."""
        return torch.ones_like(weight) if self.kind is Pass.DEPENDENCE else weight

    def constant(self, term: Any) -> Any:
        """Return a constant term in the pass of values, and None in the others."""
        return term if self.kind is Pass.VALUE else None

    def run(self, *args: Any) -> Any:
        """Run the operation itself on ``args`` and the node's other arguments."""
        args, kwargs = (*args, *self.args[len(args) :]), self.kwargs
        if self.module is not None:
            return self.module(*args, **kwargs)
        if self.node.op == "call_method":
            return getattr(args[0], str(self.node.target))(*args[1:], **kwargs)
        return self.node.target(*args, **kwargs)  # type: ignore[operator]

    @property
    def description(self) -> str:
        """Return the name of the called module or function, and its place in the model."""
        if self.module is not None:
            return f"{type(self.module).__name__} at {self.node.target}"
        stack = list((self.node.meta.get("nn_module_stack") or {}).values())
        name = getattr(self.node.target, "__name__", self.node.target)
        return f"{name}() in {stack[-1][0] if stack else 'the model'}"

    def refuse_axis(self) -> NotPiecewiseLinearError:
        """Return the error for an operation that may mix samples."""
        return self.refuse(f"an operation along the axis of samples: {self.description}")

    def refuse(self, got: str | None = None) -> NotPiecewiseLinearError:
        """Return the error for an operation that is not supported."""
        return NotPiecewiseLinearError(f"model: expected piecewise linear layers, got {got or self.description}")


AffineRule = Callable[[AffineCall], Any]


def _linear(call: AffineCall) -> Tensor:
    layer = call.module
    weight, bias = (layer.weight, layer.bias) if layer else (call.option(0, "weight"), call.option(1, "bias"))
    return functional.linear(call.args[0], call.weight(weight), call.constant(bias))


def _convolution(call: AffineCall) -> Tensor:
    if call.args[0].dim() != call.option(0, "weight").dim():
        raise call.refuse(f"an input without an axis of samples for {call.description}")
    if call.module is not None:
        return call.module._conv_forward(call.args[0], call.weight(call.module.weight), call.constant(call.module.bias))
    function: Any = getattr(functional, operation(call.node))
    names = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
    options = [call.option(place, name, default) for place, (name, default) in enumerate(names, 2)]
    weight, bias = call.weight(call.option(0, "weight")), call.constant(call.option(1, "bias"))
    return function(call.args[0], weight, bias, *options)


def _locally_connected(call: AffineCall) -> Tensor:
    layer, (x,) = call.module, call.args
    if x.dim() != layer.axes + 2:
        raise call.refuse(f"an input without an axis of samples for {call.description}")
    pixels, pattern = x.movedim(1, -1).flatten(1, -2), layer.pattern.to(x.device)
    y = ops.block_sparse_matmul(pixels, call.weight(layer.weight), pattern, call.constant(layer.bias))
    return y.unflatten(1, layer.output_size).movedim(-1, 1)


def _batch_norm(call: AffineCall) -> Tensor:
    if call.module is None and call.node.target is not functional.batch_norm:  # torch's takes them in another order
        raise call.refuse()
    x, mean, variance = call.args[0], call.option(0, "running_mean"), call.option(1, "running_var")
    weight, bias, eps = call.option(2, "weight"), call.option(3, "bias"), call.option(6, "eps", 1e-5)
    if call.option(4, "training", False) or mean is None:
        raise NotPiecewiseLinearError(
            "model: expected batch normalisations in evaluation mode with running statistics, got one that normalises "
            f"by the batch: {call.description}; call eval() on it"
        )
    if call.kind is Pass.DEPENDENCE:
        return x
    if call.kind is Pass.VALUE:
        return functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    return x * scale.view(-1, *[1] * (x.dim() - 2))


def _dropout(call: AffineCall) -> Tensor:
    training = call.module.training if call.module is not None else call.option(1, "training", True)
    if training:
        raise NotPiecewiseLinearError(
            f"model: expected dropout in evaluation mode, got {call.description} that is active; call eval() on it"
        )
    return call.args[0]


def _sum_of_two(call: AffineCall, sign: int) -> Tensor:
    factor = call.kwargs.get("alpha", 1)
    if not call.kwargs.keys() <= {"alpha"} or len(call.args) != 2:
        raise call.refuse()
    one, other = call.args
    constant = None if all(call.depends) else call.args[call.depends[0]]
    shape = _same_for_all_samples(call, constant).shape if isinstance(constant, Tensor) else ()
    if call.kind is Pass.VALUE:
        return one + sign * factor * other
    sign = 1 if call.kind is Pass.DEPENDENCE else sign * factor
    if all(call.depends):
        return one + sign * other
    term = one if call.depends[0] else sign * other
    return term.expand(torch.broadcast_shapes(term.shape, shape))


def _product(call: AffineCall) -> Tensor:
    name = operation(call.node)
    if call.kwargs or sum(call.depends) != 1 or len(call.args) != 2 or (name == "div" and call.depends[1]):
        raise call.refuse()
    factor, x = (call.args[1], call.args[0]) if call.depends[0] else call.args
    if isinstance(factor, Tensor):
        factor = call.weight(_same_for_all_samples(call, factor, x.dim()))
    elif call.kind is Pass.DEPENDENCE:
        factor = 1
    return x / factor if name == "div" else x * factor


def _same_for_all_samples(call: AffineCall, constant: Tensor, dims: int | None = None) -> Tensor:
    """Return the constant; raise if it has an axis of samples."""
    if constant.dim() and constant.shape[0] != 1 and constant.dim() >= (dims or call.args[not call.depends[0]].dim()):
        raise call.refuse(f"a constant for each sample of the batch: {call.description}")
    return constant


def _matmul(call: AffineCall) -> Tensor:
    weight = call.option(0, "other")
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise call.refuse()
    return call.args[0] @ call.weight(weight)


def _concatenated(call: AffineCall) -> Tensor:
    parts, axis = call.args[0], call.option(0, "dim", 0)
    _check_axes(call, parts[0].dim(), axis)
    return torch.cat(parts, axis)


def _view(call: AffineCall) -> Tensor:
    x = call.args[0]
    if call.shape is None:
        return call.run(x.contiguous())  # rules may return other strides than the model's operations
    return x.reshape(len(x), *call.shape)


def _along(place: int, name: str, *, several: bool = False, added: int = 0) -> AffineRule:
    """Return the rule of a linear operation along axes, which are the argument at this place, or all arguments.

    Args:
        several: whether each further argument may be an axis.
        added: number of axes that the result has more than the input.
    """

    def rule(call: AffineCall) -> Any:
        axes = call.args[1:] if several and len(call.args) > 2 else call.option(place, name)
        _check_axes(call, call.args[0].dim() + added, axes)
        return call.run(call.args[0])

    return rule


def _check_axes(call: AffineCall, dims: int, axes: Any) -> None:
    """Raise unless the axes are given, and the axis of samples is not among them."""
    each = axes if isinstance(axes, tuple | list) else (axes,)
    if not all(isinstance(axis, int) and axis % dims for axis in each):
        raise call.refuse_axis()


def _permuted(call: AffineCall) -> Tensor:
    axes = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], tuple | list) else call.args[1:]
    if not axes or axes[0] != 0:
        raise call.refuse_axis()
    return call.args[0].permute(*axes)


def _item(call: AffineCall) -> Any:
    source, places = call.args
    if isinstance(source, Tensor):
        each: Any = places if isinstance(places, tuple) else (places,)
        if each and each[0] is ...:
            behind = [place for place in each[1:] if place is not None]
            masks = [place for place in behind if isinstance(place, Tensor) and place.dtype == torch.bool]
            axes = len(behind) + sum(mask.dim() - 1 for mask in masks)
            each = behind if axes == source.dim() else (slice(None),)
        if each and each[0] != slice(None):
            raise call.refuse_axis()
    return source[places]


def _padded(call: AffineCall) -> Tensor:
    if call.module is not None:
        if isinstance(call.module, nn.ConstantPad1d | nn.ConstantPad2d | nn.ConstantPad3d):
            value = call.module.value if call.kind is Pass.VALUE else 0.0
            return functional.pad(call.args[0], call.module.padding, value=value)
        return call.run(call.args[0])
    pads, mode = call.option(0, "pad"), call.option(1, "mode", "constant")
    filling = call.option(2, "value") if call.kind is Pass.VALUE else None
    return functional.pad(call.args[0], pads, mode, filling)


_PADDINGS = [
    f"{kind}pad{axes}d" for kind in ("zero", "constant", "reflection", "replication", "circular") for axes in (1, 2, 3)
]
_AVERAGES = [f"{kind}{name}" for name in POOLS if name.startswith("avg") for kind in ("", "adaptive")]
AFFINE: dict[str, AffineRule] = {
    "linear": _linear,
    **{f"conv{axes}d": _convolution for axes in (1, 2, 3)},
    **{f"batchnorm{axes}d": _batch_norm for axes in (1, 2, 3)},
    **dict.fromkeys(("batchnorm", "syncbatchnorm"), _batch_norm),
    **{name: _dropout for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout")},
    "add": lambda call: _sum_of_two(call, 1),
    "sub": lambda call: _sum_of_two(call, -1),
    **{name: _product for name in ("mul", "div")},
    "matmul": _matmul,
    "neg": lambda call: call.args[0] if call.kind is Pass.DEPENDENCE else -call.args[0],
    "cat": _concatenated,
    **dict.fromkeys((*_AVERAGES, "unflatten", "identity", "contiguous", "clone"), lambda call: call.run(call.args[0])),
    **{name: _along(0, "dim") for name in ("mean", "sum", "squeeze")},
    "unsqueeze": _along(0, "dim", added=1),
    "transpose": _along(0, "", several=True),
    **{name: _view for name in ("view", "flatten")},
    "permute": _permuted,
    "chunk": _along(1, "dim"),
    "split": _along(1, "dim"),
    "getitem": _item,
    **{name: _padded for name in ("pad", *_PADDINGS)},
}


def affine_rule(node: fx.Node) -> AffineRule | None:
    """Return the rule of an affine operation; None for others."""
    if isinstance(module_of(node), LocallyConnectedNd):
        return _locally_connected
    return AFFINE.get(operation(node))
