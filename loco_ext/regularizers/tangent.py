"""The tangent route: the gradient of <g, u> from one pass of tangents that reuses the input-gradient pass.

With u constant, <g, u> is the derivative of the chosen logits along u. Where the network is piecewise linear, this is
a linear network applied to u, with the weights and masks of the forward pass. The gradient in a layer's weight is the
product of the layer's back-propagated delta, which the pass for g has computed, and its tangent input::

    forward   x -> W x        for g   delta -> W' delta        tangents   t -> W t        gradient   dW = delta t'

That is four passes in all, where training takes three. While the model runs, convolutions, batch normalisation,
rectifiers and pooling are replaced by functions with these formulas: torch would differentiate a convolution's
backward pass by slower convolutions, and then the forward pass, whose contribution is zero. All other operations keep
torch's own derivatives. If one of them depends on the forward pass, as smooth activations do, its contribution comes
through the replaced layers too, which then have to keep their inputs. So the gradient is exact for every network.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from loco_ext.fx.modules import per_axis
from loco_ext.regularizers.input_gradients import InputGradients, input_gradients
from loco_ext.regularizers.routes import Gradients, Pull, double_backward, pull_back

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


class TangentRoute:
    """The tangent route to the parameters' gradient; see :mod:`loco_ext.regularizers.routes`.

    It finds out whether layers have to keep their inputs, and remembers it for the next calls. Some models take the
    double backward: those with activation checkpoints, whose repeated forward passes would call torch's own layers,
    those with weights that depend on the input, and those that write to a result that only torch's own functions need
    no more.
    """

    def __init__(self) -> None:
        self._keep_inputs = False
        self._is_unsuited = False

    def __call__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        x: Tensor,
        classes: Tensor | float | None,
        uniform: Tensor | None,
    ) -> tuple[InputGradients, Pull]:
        """Return the input gradients, and the function that pulls back their factors."""
        if self._is_unsuited:
            return double_backward(model, parameters, x, classes, uniform)
        passes = _Passes(self._keep_inputs)
        try:
            with _LayersReplaced(passes):
                found = input_gradients(model, x, classes, uniform, graph=True)
        except (CheckpointError, _WeightOfInputError, RuntimeError) as error:
            known = isinstance(error, CheckpointError | _WeightOfInputError)
            if not known and "modified by an inplace operation" not in str(error):
                raise
            self._is_unsuited = True
            return self(model, parameters, x, classes, uniform)
        passes.forward_is_over = True

        def pull(u: Tensor) -> Gradients:
            try:
                return pull_back(found.g, parameters, u)
            except _InputsNeeded:
                self._keep_inputs = True
            _, pull_again = self(model, parameters, x, found.classes, uniform)
            return pull_again(u)

        return found._replace(g=found.g.detach()), pull


class _InputsNeeded(Exception):
    """The gradient depends on the forward pass, but layers have not kept their inputs."""


class _WeightOfInputError(Exception):
    """A layer's weight or shift depends on the network's input."""


@dataclass
class _Passes:
    """State of the passes that the replaced layers read."""

    keep_inputs: bool
    forward_is_over: bool = False  # and the pass for g with it


class _LayersReplaced(TorchFunctionMode):
    """Replace convolutions, batch normalisation, rectifiers and pooling in what a model calls."""

    def __init__(self, passes: _Passes) -> None:
        super().__init__()
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {
            **{function: partial(_convolve, passes, function) for function in _CONVOLUTIONS},
            **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
            **dict.fromkeys((torch.relu_, Tensor.relu_), partial(_relu, inplace=True)),
            F.leaky_relu: _leaky_relu,
            F.hardtanh: _hardtanh,
            F.batch_norm: partial(_normalise, passes),
            F.avg_pool2d: partial(_avg_pool2d, passes),
            F.max_pool2d: _max_pool2d,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **kwargs or {})


@dataclass(frozen=True)
class _Convolution:
    """A convolution as a function that is linear in its input and in its weight."""

    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def apply(self, t: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(t, weight, None, *self._geometry())

    def to_input(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        like = delta.new_empty(1).expand(shape)
        return self._backward(delta, like, weight, [True, False, False])[0]

    def to_weight(self, delta: Tensor, t: Tensor, weight: Tensor) -> Tensor:
        return self._backward(delta, t, weight, [False, True, False])[1]

    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups

    def _backward(self, delta: Tensor, t: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(delta, t, weight, None, *self._geometry(), mask)


@dataclass(frozen=True)
class _Scaling:
    """The product of each channel with a number: batch normalisation by running statistics, without its shift."""

    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def apply(self, t: Tensor, weight: Tensor) -> Tensor:
        return t * weight.view(-1, *[1] * (t.dim() - 2))

    def to_input(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return self.apply(delta, weight)

    def to_weight(self, delta: Tensor, t: Tensor, weight: Tensor) -> Tensor:
        return (delta * t).sum((0, *range(2, t.dim())))


@dataclass(frozen=True)
class _AvgPool2d:
    """Average pooling, which has no weight."""

    options: dict[str, Any]

    def value(self, x: Tensor, _weight: None, _shift: None) -> Tensor:
        return F.avg_pool2d(x, **self.options)

    def apply(self, t: Tensor, _weight: None) -> Tensor:
        return F.avg_pool2d(t, **self.options)

    def to_input(self, delta: Tensor, _weight: None, shape: torch.Size) -> Tensor:
        pull = torch.func.vjp(lambda x: self.apply(x, None), delta.new_empty(shape))[1]
        return pull(delta)[0]


def _avg_pool2d(passes: _Passes, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
    options = dict(zip(names, args, strict=False)) | kwargs
    return _Layer.apply(passes, _AvgPool2d(options), input, None, None)


def _convolve(
    passes: _Passes,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    axes = _CONVOLUTIONS[func]
    stride, dilation = per_axis(stride, axes), per_axis(dilation, axes)
    if isinstance(padding, str):
        spans = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = padding if any(span % 2 for span in spans) else [span // 2 for span in spans]
    if isinstance(padding, str) or input.dim() != axes + 2:
        return func(input, weight, bias, stride, padding, dilation, groups)
    geometry = stride, per_axis(padding, axes), dilation, groups
    layer = _Convolution(lambda x, w, b: func(x, w, b, *geometry), *geometry)
    return _Layer.apply(passes, layer, input, weight, bias)


def _normalise(
    passes: _Passes,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    roots = torch.rsqrt(running_var + eps)
    scale = roots if weight is None else weight * roots
    shift = -running_mean * scale if bias is None else bias - running_mean * scale

    def value(x: Tensor, _scale: Tensor, _shift: Tensor | None) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)

    return _Layer.apply(passes, _Scaling(value), input, scale, shift)


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    return _Rectifier.apply(input, torch.relu_ if inplace else torch.relu, _relu_backward)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    if negative_slope < 0:  # the sign of the result does not tell the sign of the input
        return F.leaky_relu(input, negative_slope, inplace)

    def backward(delta: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.leaky_relu_backward(delta, y, negative_slope, True)

    return _Rectifier.apply(input, partial(F.leaky_relu, negative_slope=negative_slope, inplace=inplace), backward)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    def backward(delta: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.hardtanh_backward(delta, y, min_val, max_val)

    return _Rectifier.apply(input, partial(F.hardtanh, min_val=min_val, max_val=max_val, inplace=inplace), backward)


def _relu_backward(delta: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(delta, y, 0)


def _max_pool2d(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"
    options = dict(zip(names, args, strict=False)) | kwargs
    if options.pop("return_indices", False):
        return F.max_pool2d_with_indices(input, **options)
    if input.dim() != 4:
        return F.max_pool2d(input, **options)
    with torch.no_grad():
        _, indices = F.max_pool2d_with_indices(input, **options)
    return input.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


class _Layer(torch.autograd.Function):
    """A function that is linear in its input and in its weight, if it has one, plus a shift."""

    @staticmethod
    def forward(
        ctx: Any, passes: _Passes, layer: Any, x: Tensor, weight: Tensor | None, shift: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes, ctx.layer, ctx.shape = passes, layer, x.shape
        ctx.makers = [each.grad_fn for each in (weight, shift) if each is not None and each.grad_fn is not None]
        ctx.save_for_backward(weight, x if passes.keep_inputs else None)
        return layer.value(x, weight, shift)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        if delta is None:
            return (None,) * 5
        weight, x = ctx.saved_tensors
        to_input = _ToInput.apply(ctx.layer, delta, weight, ctx.shape) if ctx.needs_input_grad[2] else None
        if not ctx.passes.forward_is_over:
            if any(map(torch._C._will_engine_execute_node, ctx.makers)):
                raise _WeightOfInputError
            return None, None, to_input, None, None
        if x is None and ctx.needs_input_grad[3]:
            raise _InputsNeeded
        by_weight = ctx.layer.to_weight(delta, x, weight) if ctx.needs_input_grad[3] else None
        by_shift = delta.sum((0, *range(2, delta.dim()))) if ctx.needs_input_grad[4] else None
        return None, None, to_input, by_weight, by_shift


class _ToInput(torch.autograd.Function):
    """The back-propagation of deltas to a layer's input; its own backward pass is the layer on tangents."""

    @staticmethod
    def forward(ctx: Any, layer: Any, delta: Tensor, weight: Tensor | None, shape: torch.Size) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(delta, weight)
        return layer.to_input(delta, weight, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor | None, ...]:
        delta, weight = ctx.saved_tensors
        along = ctx.layer.apply(t, weight) if ctx.needs_input_grad[1] else None
        return None, along, ctx.layer.to_weight(delta, t, weight) if ctx.needs_input_grad[2] else None, None


class _Rectifier(torch.autograd.Function):
    """A piecewise linear function of each number, whose slope follows from its result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], by_result: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        y = function(x)
        if y is x:
            ctx.mark_dirty(x)
        ctx.by_result = by_result
        # Detached, so that the slope counts as constant. Masks of bool would take a quarter of the memory, but 15 times
        # as long on the CPU.
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return ctx.by_result(delta, y), None, None
