"""Convolution with filters of different sizes in one pass over the images, for compacted networks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from loco_ext.ops import autocast, backends, transforms
from loco_ext.ops.memory_format import is_channels_last
from loco_ext.reference import mixed_conv as _reference

Pads = tuple[int, int, int, int]

_FAMILY = "mixed_conv"
DTYPES = (torch.float32, torch.float64)  # supported by the CPU kernels; the reference supports all


def mixed_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    pads: Sequence[Pads],
    order: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    add: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return a 2-d convolution in parts; each part has its own filter size and padding.

    If nothing is differentiated, CPU kernels compute all parts at once, each filter with only its own taps, in the
    time that its MACs take, however few filters there are. Results are bitwise independent of the number of threads.
    Otherwise, and under autocast, ``torch.compile`` and ``torch.export``, each part is one of torch's convolutions, and
    the result is differentiable as these are. torch.fx records one call.

    Args:
        x: ``(N, C_in, H, W)``, or one image, ``(C_in, H, W)``; the CPU kernels take float32 and float64.
        weights: one tensor per part, ``(filters, C_in, height, width)``.
        biases: one tensor per part, ``(filters,)``; or empty for no biases.
        pads: for each part, the rows of zeros above and below the image and the columns left and right of it; a
            negative number crops rows or columns of the image. The results of all parts must have the same size.
        order: int64, ``(C_out,)``: for each channel of the result, the index of its filter among those of all parts;
            None keeps the order of the parts.
        stride, dilation: along height and width.
        add: a tensor added to the result, as by ``torch.add``.
        relu: whether ReLU is applied to the result, or to the sum.

    Returns:
        ``(N, C_out, H_out, W_out)``, or ``(C_out, H_out, W_out)`` for one image, in the memory format of ``x``; with
        ``add`` of another shape or dtype, as ``torch.add`` returns it.

    Raises:
        TypeError: an argument is not a tensor, or on another device than ``x``, or (except ``add``) of another dtype.
        ValueError: shapes, pads, strides or dilations that do not fit.
        RuntimeError: an ``order`` on the CPU that contains a filter twice.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", section 3.2.

    Example:
        >>> import torch
        >>> from loco_ext import ops
        >>> x, small, large = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 3)
        >>> y = ops.mixed_conv2d(x, [small, large], [], [(0, 0, 0, 0), (1, 1, 1, 1)], torch.tensor([1, 0]))
        >>> y[0, :, 0].tolist()
        [[4.0, 6.0, 4.0], [1.0, 1.0, 1.0]]
    """
    weights, biases, pads = tuple(weights), tuple(biases), tuple(pads)
    tensors = (x, *weights, *biases, *(() if add is None else (add,)))
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "add": add, "relu": relu}
    if has_torch_function(tensors):
        return handle_torch_function(mixed_conv2d, tensors, x, weights, biases, pads, order, **options)
    if isinstance(x, Tensor) and x.dim() == 3:
        return _of_one_image(x, weights, biases, pads, order, **options)
    if torch.jit.is_tracing():
        traced = torch.ops.loco_ext.mixed_conv2d_traced
        return traced(x, weights, biases, _flat(pads), order, stride, dilation, add, relu)
    arguments = (x, weights, biases, pads, order, stride, dilation, add)
    if _takes(tensors):
        try:
            result = _native(*arguments[:-1])
        except (RuntimeError, TypeError, ValueError):
            _check(*arguments)  # only after the operator has refused: checking first would slow small layers
            raise
        if add is not None:
            _check(*arguments)
        return _reference.add_and_rectify(result, add, relu)
    _check(*arguments)
    if order is not None and order.is_cpu and not torch.compiler.is_compiling():  # on a GPU the check would need a sync
        _check_once_each(order)
    return _reference.mixed_conv2d(x, list(weights), list(biases), _flat(pads), *arguments[4:], relu)


def _of_one_image(x: Tensor, *arguments: Any, add: Tensor | None, **options: Any) -> Tensor:
    """Return the result without a batch dimension, unless ``add`` has one."""
    batched = isinstance(add, Tensor) and add.dim() > 3
    if isinstance(add, Tensor) and add.dim() == 3:
        add = add[None]
    result = mixed_conv2d(x[None], *arguments, add=add, **options)
    return result if batched else result[0]


def _check_once_each(order: Tensor) -> None:
    """Raise if a filter occurs twice in ``order``; the compiled operator checks this itself."""
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise RuntimeError(f"order: expected each of 0 to {len(order) - 1} once")


def _native(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    pads: Sequence[Pads],
    order: Tensor | None,
    stride: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    compute = backends.operators().mixed_conv2d
    parts = [weight.contiguous() for weight in weights], [bias.contiguous() for bias in biases], _flat(pads)
    if not is_channels_last(x):
        return compute(x.contiguous(), *parts, order, stride, dilation, False)
    return compute(x.permute(0, 2, 3, 1), *parts, order, stride, dilation, True).permute(0, 3, 1, 2)


def _flat(pads: Sequence[Pads]) -> list[int]:
    return [pad for top, bottom, left, right in pads for pad in (top, bottom, left, right)]


def _takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether the CPU kernels can compute with these tensors, because no derivative is needed."""
    x = tensors[0]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return False
    if torch.compiler.is_compiling() or x.dtype not in DTYPES or transforms.are_active():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return not autocast.is_enabled(x.device.type) and backends.choose(_FAMILY, x.device) == "native"


def _check(
    x: Any,
    weights: Any,
    biases: Any,
    pads: Any,
    order: Any,
    stride: Sequence[int],
    dilation: Sequence[int],
    add: Any,
) -> None:
    """Raise TypeError or ValueError for arguments that do not fit."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        raise ValueError(f"x: expected a tensor of shape (N, C_in, H, W) or (C_in, H, W), got {_text(x)}")
    if not weights or len(pads) != len(weights) or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"weights: expected one part or more, and as many pads, and biases if there are any, got {len(weights)} "
            f"weights, {len(pads)} pads and {len(biases)} biases"
        )
    for name, values in (("stride", stride), ("dilation", dilation)):
        if len(values) != 2 or min(values) < 1:
            raise ValueError(f"{name}: expected two positive numbers, got {values!r}")
    for i, weight in enumerate(weights):
        _check_tensor(f"weights[{i}]", weight, x)
        if weight.dim() != 4 or weight.shape[1] != x.shape[1] or not weight.numel():
            raise ValueError(
                f"weights[{i}]: expected shape (filters, {x.shape[1]}, height, width) without a 0, got {_text(weight)}"
            )
        if biases:
            _check_tensor(f"biases[{i}]", biases[i], x)
            if biases[i].shape != weight.shape[:1]:
                raise ValueError(f"biases[{i}]: expected shape ({len(weight)},), got {_text(biases[i])}")
    size, filters = _check_sizes(x, weights, pads, stride, dilation), sum(map(len, weights))
    shape = (x.shape[0], filters, *size)
    if order is not None and (not isinstance(order, Tensor) or order.dtype != torch.int64):
        raise TypeError(f"order: expected an int64 tensor, got {_text(order)}")
    if order is not None and order.shape != (filters,):
        raise ValueError(f"order: expected shape ({filters},), got {_text(order)}")
    if add is not None and (not isinstance(add, Tensor) or add.device != x.device):
        raise TypeError(f"add: expected a tensor on {x.device}, got {_text(add)}")
    try:
        torch.broadcast_shapes(() if add is None else add.shape, shape)
    except RuntimeError as error:
        raise ValueError(f"add: expected a shape that fits the result's {shape}, got {_text(add)}") from error


def _check_sizes(x: Tensor, weights: Any, pads: Any, stride: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Check that all parts have the same output size, and return it as (height, width)."""
    sizes = []
    for i, (weight, pad) in enumerate(zip(weights, pads, strict=True)):
        if len(pad) != 4:
            raise ValueError(f"pads[{i}]: expected four numbers, got {pad!r}")
        room = [x.shape[2 + a] + pad[2 * a] + pad[2 * a + 1] - dilation[a] * (weight.shape[2 + a] - 1) for a in (0, 1)]
        sizes.append(tuple((size - 1) // step + 1 for size, step in zip(room, stride, strict=True)))
        if min(room) < 1 or sizes[i] != sizes[0]:
            raise ValueError(f"pads[{i}]: expected results of one size for all parts, at least 1, got {sizes}")
    return sizes[0]


def _check_tensor(name: str, tensor: Any, x: Tensor) -> None:
    cast = isinstance(tensor, Tensor) and autocast.is_enabled(x.device.type)
    if not isinstance(tensor, Tensor) or tensor.device != x.device or not (cast or tensor.dtype == x.dtype):
        raise TypeError(
            f"{name}: expected a tensor of x's dtype and device, {x.dtype} on {x.device}, got {_text(tensor)}"
        )


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {tuple(value.shape)} of {value.dtype} on {value.device}"


# torch.jit.trace records this operator, which decides at each call what it runs.
_TRACED = torch.library.Library("loco_ext", "FRAGMENT")
_TRACED.define(
    "mixed_conv2d_traced(Tensor x, Tensor[] weights, Tensor[] biases, int[] pads, Tensor? order, int[] stride, "
    "int[] dilation, Tensor? add, bool relu) -> Tensor"
)


@torch.library.impl(_TRACED, "mixed_conv2d_traced", "CompositeImplicitAutograd")
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    pads: Sequence[int],
    order: Tensor | None,
    stride: Any,
    dilation: Any,
    add: Tensor | None,
    relu: bool,
) -> Tensor:
    of_parts = [(pads[i], pads[i + 1], pads[i + 2], pads[i + 3]) for i in range(0, len(pads), 4)]
    return mixed_conv2d(x, weights, biases, of_parts, order, stride=stride, dilation=dilation, add=add, relu=relu)
