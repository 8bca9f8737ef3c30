"""Multiplication by a block-sparse matrix: layers between convolution and full connection (eFCN).

The matrix has a dense block for each live pair of an output and an input pixel, as
:class:`loco_ext.geometry.BlockPattern` lists them. The three products of the activations, the blocks and the output are
bilinear, and each one's gradients are the two others; so they can be differentiated any number of times.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from loco_ext import compiler
from loco_ext.argument_checks import check_memory, check_tensor
from loco_ext.geometry import BlockPattern
from loco_ext.ops import autocast, backends, transforms
from loco_ext.reference import block_sparse as _reference

# Called once in a backward pass with an iterator over parts of the gradient of values: (blocks, gradient of
# values[blocks]).
Consume = Callable[[Iterator[tuple[slice, Tensor]]], None]

_FAMILY = "block_sparse"
_CPU_PART, _GPU_PART = 2**21, 2**24  # elements of a part of a consumed gradient: little memory, yet enough work
_LEAST_TRANSPOSED = 2**23  # for fewer elements, a launch takes the host longer than it spares the GPU, by estimate


def block_sparse_matmul(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    bias: Tensor | None = None,
    *,
    consume: Consume | None = None,
) -> Tensor:
    """Return ``y[n, o] = bias[o] + sum over the blocks b of row o of x[n, col_indices[b]] @ values[b]``, by groups.

    - *Gradients.* The result is differentiable any number of times in ``x``, ``values`` and ``bias``. Only ``x`` and
      ``values`` are saved for backward.
    - *Precision.* Half precision is summed in float32. Results are bitwise independent of the number of threads. On
      NVIDIA GPUs float32 is multiplied in TF32 if convolutions are, as ``torch.backends.cudnn.conv.fp32_precision``
      says.
    - *Autocast.* It computes in autocast's dtype, as ``torch.matmul`` does. On GPUs, ``values`` in float32 are
      converted as they are read, and their gradient is not rounded to autocast's dtype.
    - *Memory formats.* ``x.permute(0, 2, 3, 1).flatten(1, 2)`` of an image batch in ``channels_last`` costs no copy.
      Activations whose channels are not adjacent in memory are copied once in each pass. If blocks have one element
      (depthwise), the forward pass on a CPU also reads NCHW images, whose pixels are adjacent, in place. Large NCHW
      images on a GPU are copied only once, by a kernel that also casts under autocast. That copy is saved in place of
      ``x``, and the gradient of ``x`` has the copy's order in memory.

    Args:
        x: ``(N, n_in, C_in)``, float32, float64, bfloat16 or float16, of any strides.
        values: ``(nnz, groups, C_in / groups, C_out / groups)``, a block for each pair of the pattern.
        pattern: a BlockPattern on the device of ``x``.
        bias: ``(n_out, C_out)``.
        consume: function that receives the gradient of ``values``, which then have no gradient of their own. Backward
            calls it once, with an iterator over pairs of a slice of the blocks and their gradient, which the iterator
            computes step by step. The rest of the pass is done by then, so ``consume`` may change ``values``.

    Returns:
        ``(N, n_out, C_out)``, contiguous.

    Raises:
        TypeError: a wrong dtype, layout or device, or operands that differ in dtype or device; ``pattern`` is no
            BlockPattern; ``consume`` cannot be called.
        ValueError: shapes that do not match each other or the pattern.
        RuntimeError: with ``consume``, in code that torch.compile traces, or in backward with ``create_graph``.

    Source:
        d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), section 2.

    Example:
        >>> import torch
        >>> from loco_ext import geometry, ops
        >>> pattern = geometry.BlockPattern(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), n_in=2)
        >>> values = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
        >>> ops.block_sparse_matmul(torch.tensor([[[1.0], [2.0]]]), values, pattern)
        tensor([[[ 21.],
                 [200.]]])
    """
    with ignore_tracer_warnings():
        x, values, bias = _checked(x, values, pattern, bias)
    consumer = None
    if consume is not None:
        if not callable(consume):
            raise TypeError(f"consume: expected None or a callable, got {type(consume).__name__}")
        if torch.compiler.is_compiling():
            raise RuntimeError("consume: expected a call that torch.compile leaves alone")
        consumer = _Consumer(consume, pattern)
    indices = (pattern.crow_indices, pattern.col_indices, *pattern.transpose())
    if (torch.jit.is_tracing() or compiler.is_exporting()) and consumer is None:
        return torch.ops.loco_ext.block_sparse_traced(x, values, bias, indices)
    return _product("y", (x, values), values.shape[1], values.dtype, indices, bias, consumer)


def ignore_tracer_warnings() -> AbstractContextManager[object]:
    """Return a context for decisions that torch.jit.trace may record as constants: they hold for every batch size."""
    if not torch.jit.is_tracing():
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=torch.jit.TracerWarning)


def _checked(x: Tensor, values: Tensor, pattern: BlockPattern, bias: Tensor | None) -> Any:
    wide = False
    if autocast.is_enabled(x.device.type if isinstance(x, Tensor) else "cpu"):
        wide = _reads_wide_values(x, values)
        if wide:
            x, bias = _cast(x, bias)
        else:
            x, values, bias = _cast(x, values, bias)
    _check(x, values, pattern, bias, torch.float32 if wide else None)
    return _transposed(x, x.dtype) if _has_fast_transpose(x) else x, values, bias


class _Consumer(NamedTuple):
    consume: Consume
    pattern: BlockPattern

    def take(self, x: Tensor, grad: Tensor, values: Tensor) -> None:
        """Pass the gradient of values to ``consume``."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "consume or step_in_backward: expected a backward without create_graph, as the gradient is not kept"
            )
        self.consume(self._parts(_adjacent(x), grad, values))

    def _parts(self, x: Tensor, grad: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        crow, col = self.pattern.crow_indices, self.pattern.col_indices
        starts = self.pattern.to("cpu").crow_indices
        most = (_CPU_PART if x.is_cpu else _GPU_PART) // values.shape[1:].numel()
        row = 0
        while row < self.pattern.n_out:
            begin = int(starts[row])
            end_row = max(row + 1, int(torch.searchsorted(starts, begin + most, right=True)) - 1)
            blocks = slice(begin, int(starts[end_row]))
            part = crow[row : end_row + 1] - begin, col[blocks]
            yield blocks, _value_gradient(x, grad[:, row:end_row], *part, values.shape[1], values.dtype)
            row = end_row


# The output y, or its gradient, the input x and the values: each product gives one of the three, by name, from the two
# others. Its gradient in an operand is the product that gives this operand, with the gradient in place of the result.
_OPERANDS = {"y": ("x", "values"), "x": ("y", "values"), "values": ("x", "y")}


def _product(
    result: str,
    operands: Sequence[Tensor],
    groups: int,
    dtype: torch.dtype,
    pattern: Sequence[Tensor],
    bias: Tensor | None = None,
    consumer: _Consumer | None = None,
) -> Tensor:
    """Return a product, bypassing autograd if it has nothing to record: that takes longer than a small layer's product.

    Args:
        result, operands: the name of the product, and the operands that ``_OPERANDS`` lists for it.
        groups, dtype: of the values.
        pattern: by output pixel, (crow_indices, col_indices), and by input pixel, (crow_indices, rows, blocks).
        bias, consumer: of the product that gives y.
    """
    function: Any = _Product.compute
    if transforms.are_active():
        function = _TransformableProduct.apply
    elif _is_recorded(*operands, bias):
        function = _Product.apply
    return function(*operands, bias, consumer, result, groups, dtype, *pattern)


def _is_recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _Product(torch.autograd.Function):
    @staticmethod
    def compute(
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        _: _Consumer | None,
        result: str,
        groups: int,
        dtype: torch.dtype,
        *pattern: Tensor,
    ) -> Tensor:
        if result == "values":
            return _value_gradient(_adjacent(first), _adjacent(second), pattern[0], pattern[1], groups, dtype)
        if result == "x":
            return _run("block_sparse_input_gradient", _adjacent(first), second.contiguous(), *pattern[2:])
        if first.stride(2) != 1 and not _reads_by_channel(first, second):
            first = _adjacent(first)
        bias = None if bias is None else bias.contiguous()
        return _run("block_sparse_matmul", first, second.contiguous(), *pattern[:2], bias)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _save(ctx, arguments)
        return _Product.compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second, *pattern = ctx.saved_tensors
        _, consumer, result, groups, dtype = ctx.other
        grad = grads[0]
        if grad is None:
            return (None,) * (7 + len(pattern))
        grad = grad if result == "values" else _adjacent(grad)
        known = dict(zip(_OPERANDS[result], (first, second), strict=True)) | {result: grad}
        found: list[Tensor | None] = []
        for name, is_needed in zip(_OPERANDS[result], ctx.needs_input_grad[:2], strict=True):
            if is_needed and name == "values" and consumer is not None:
                consumer.take(first, grad, second)
                is_needed = False
            operands = [known[each] for each in _OPERANDS[name]]
            found.append(_product(name, operands, groups, dtype, pattern) if is_needed else None)
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return (*found, of_bias, *[None] * (4 + len(pattern)))


def _save(ctx: Any, arguments: tuple[Any, ...]) -> None:
    """Save the tensors and options that the derivatives of a product need."""
    ctx.save_for_backward(*arguments[:2], *arguments[-5:])
    ctx.other = arguments[2:-5]


class _TransformableProduct(_Product):
    """_Product for forward-mode derivatives and torch.func.

    torch.compile accepts no function with a ``jvp``, and with a ``setup_context``, ``apply`` binds its arguments by
    their signature, which multiplies the time it takes.
    """

    forward: Any = staticmethod(_Product.compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs)
        ctx.save_for_forward(*inputs[:2], *inputs[-5:])
        ctx.set_materialize_grads(False)  # a product with a tangent of zeros takes as long as any other

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        first, second, *pattern = ctx.saved_tensors
        _, _, result, groups, dtype = ctx.other
        terms = []
        for pair in ((tangents[0], second), (first, tangents[1])):
            operands = [each for each in pair if each is not None]  # None stands for zeros
            if len(operands) == 2:
                terms.append(_product(result, operands, groups, dtype, pattern))
        if tangents[2] is not None:
            terms.append(tangents[2].expand(first.shape[0], -1, -1))
        return reduce(torch.add, terms)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        consumer: _Consumer | None,
        result: str,
        groups: int,
        dtype: torch.dtype,
        *pattern: Tensor,
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if result == "values":
            operands = _into_channels(first, in_dims[0], size), _into_channels(second, in_dims[1], size)
            values = _product(result, operands, size * groups, dtype, pattern)
            return values.unflatten(1, (size, groups)), 1
        if in_dims[1] is None and in_dims[2] is None:
            first = first.movedim(in_dims[0], 0)
            y = _product(result, (first.flatten(0, 1), second), groups, dtype, pattern, bias, consumer)
            return y.unflatten(0, first.shape[:2]), 0
        # One product with more groups would copy the weights, which are most of what a layer reads.
        parts: Any = [
            [each] * size if each is None or dim is None else each.unbind(dim)
            for each, dim in zip((first, second, bias), in_dims[:3], strict=True)
        ]
        products = [
            _product(result, (a, b), groups, dtype, pattern, c, consumer) for a, b, c in zip(*parts, strict=True)
        ]
        return torch.stack(products), 0


class _Transposed(torch.autograd.Function):
    """A copy of activations in another order, perhaps in another dtype; the gradient is in their own of both."""

    @staticmethod
    def compute(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _run("block_sparse_transposed", x, dtype)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.dtype = arguments[0].dtype
        return _Transposed.compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _transposed(grads[0].transpose(1, 2), ctx.dtype).transpose(1, 2), None


def _into_channels(activations: Tensor, dim: int | None, size: int) -> Tensor:
    """Return the activations with the dimension that vmap iterates over as further groups of channels."""
    every = activations.unsqueeze(2).expand(-1, -1, size, -1) if dim is None else activations.movedim(dim, 2)
    return every.flatten(2)


def _value_gradient(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of values in the dtype, which is that of ``x`` or float32."""
    name = "block_sparse_value_gradient" if dtype == x.dtype else "block_sparse_value_gradient_float32"
    return _run(name, x, grad, crow_indices, col_indices, groups)


def _run(name: str, activations: Tensor, *arguments: Any) -> Tensor:
    if backends.choose(_FAMILY, activations.device) == "reference":
        device_type = activations.device.type
        with torch.autocast(device_type, enabled=False) if autocast.is_enabled(device_type) else nullcontext():
            return getattr(_reference, name)(activations, *arguments)
    if backends.library is None:
        return _run_triton(name, activations, *arguments)
    return getattr(backends.operators(), name)(activations, *arguments)


def _run_triton(name: str, *arguments: Any) -> Tensor:
    from loco_ext.triton_kernels import block_sparse  # in less than half the time of importlib

    return getattr(block_sparse, name)(*arguments)


def _adjacent(activations: Tensor) -> Tensor:
    """Return the activations with the channels of each pixel adjacent in memory, copied if they are not."""
    if activations.stride(2) == 1 or activations.shape[2] <= 1:
        return activations
    if _has_fast_transpose(activations):
        return _transposed(activations, activations.dtype)
    if transforms.are_active() or _is_recorded(activations) or backends.choose(_FAMILY, activations.device) != "native":
        # contiguous() would leave an empty batch as it is
        return activations.clone(memory_format=torch.contiguous_format)
    return backends.operators().block_sparse_by_pixel(activations)


def contiguous(images: Tensor) -> Tensor:
    """Return a contiguous copy of images ``(N, C, *size)``, whose axes of size 1 also have the strides of such ones."""
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()) and images.numel() >= _LEAST_TRANSPOSED:
        activations = images.flatten(2)
        if _has_fast_transpose(activations):
            # A view would make operations in place behind it copy all of it in their backward.
            return torch.ops.aten._unsafe_view(_transposed(activations, images.dtype), images.shape)
    return images.clone(memory_format=torch.contiguous_format)  # contiguous() would keep the strides of size-1 axes


def _transposed(activations: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the activations in the dtype, with the entries of the last dimension adjacent in memory."""
    if _has_fast_transpose(activations):
        function = _Transposed.apply if _is_recorded(activations) else _Transposed.compute
        return function(activations, dtype)
    return _adjacent(activations).to(dtype)


def _has_fast_transpose(activations: Tensor) -> bool:
    """Return whether a kernel of ours transposes the activations. Otherwise torch's copy does, which takes any strides.

    Compilers get torch's copy, which they fuse with operations before or after it.
    """
    return (
        activations.stride(2) != 1
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and activations.numel() >= _LEAST_TRANSPOSED
        and activations.stride(1) == 1
        and min(activations.shape[1:]) > 1
        and not transforms.are_active()
        and backends.choose(_FAMILY, activations.device) == "triton"
    )


def _reads_by_channel(x: Tensor, values: Tensor) -> bool:
    """Return whether the kernels can read images whose pixels are adjacent in memory (NCHW) without a copy."""
    return values.shape[2:] == (1, 1) and x.stride(1) == 1 and backends.choose(_FAMILY, x.device) == "native"


def _reads_wide_values(x: Any, values: Any) -> bool:
    """Return whether autocast, which is on, would convert float32 values that kernels can convert as they read them.

    So the values are read once, and no copy of them is written nor kept for the backward pass.
    """
    if not (isinstance(x, Tensor) and isinstance(values, Tensor) and values.dtype == torch.float32):
        return False
    half = x.dtype != torch.float64 and torch.get_autocast_dtype(x.device.type).itemsize == 2
    return half and backends.choose(_FAMILY, x.device) == "triton"


def _cast(*tensors: Any) -> Any:
    """Return the tensors cast as torch.matmul's autocast rule does: all but float64 to autocast's dtype."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu")

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        dense = tensor.dim() == 3 and tensor.layout == torch.strided
        return _transposed(tensor, dtype) if dense and _has_fast_transpose(tensor) else tensor.to(dtype)

    return tuple(map(cast, tensors))


def _check(
    x: Tensor, values: Tensor, pattern: BlockPattern, bias: Tensor | None, dtype: torch.dtype | None = None
) -> None:
    """Check the operands; ``dtype`` is that of values, by default that of ``x``."""
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern: expected a BlockPattern, got {type(pattern).__name__}")
    _, pixels, channels = sizes = _check_tensor("x", x, "(N, n_in, C_in)")
    blocks, groups, depth, width = shape = _check_tensor(
        "values", values, "(nnz, groups, C_in / groups, C_out / groups)", x, dtype
    )
    if pattern.crow_indices.device != x.device:
        raise TypeError(f"pattern: expected device {x.device} as x, got {pattern.crow_indices.device}")
    if pixels != pattern.n_in:
        raise ValueError(f"x: expected {pattern.n_in} pixels, as the pattern has, got shape {tuple(sizes)}")
    if blocks != pattern.nnz:
        raise ValueError(f"values: expected {pattern.nnz} blocks, as the pattern has, got shape {tuple(shape)}")
    if channels != groups * depth:
        raise ValueError(
            f"values: expected blocks for the {channels} channels of x, got {groups} groups of {depth} in shape "
            f"{tuple(shape)}"
        )
    if groups == 0 or depth == 0 or width == 0:
        raise ValueError(f"values: expected blocks of at least one element, got shape {tuple(shape)}")
    if bias is not None and _check_tensor("bias", bias, "(n_out, C_out)", x) != (pattern.n_out, groups * width):
        raise ValueError(f"bias: expected shape {(pattern.n_out, groups * width)}, got {tuple(bias.shape)}")


def _check_tensor(
    name: str, tensor: Tensor, shape: str, like: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Return the sizes of a tensor after checking it; it must have as many dimensions as ``shape`` lists.

    Its device must be that of ``like``, and its dtype ``dtype`` or, if that is None, that of ``like``.
    """
    check_tensor(name, tensor)
    check_memory(name, tensor)
    if like is not None and tensor.dtype != (dtype or like.dtype):
        raise TypeError(f"{name}: expected {like.dtype} as x, got {tensor.dtype}")
    if like is not None and tensor.device != like.device:
        raise TypeError(f"{name}: expected device {like.device} as x, got {tensor.device}")
    sizes = tensor.shape
    if len(sizes) != shape.count(",") + 1:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(sizes)}")
    return sizes


def _keep_kernel(op: torch._ops.OpOverload) -> None:
    """Make inductor call the operator's kernel although exporters have a decomposition of it.

    It does so unasked, but where the environment variable CI is set, as on most test machines, it refuses operators
    that have both.
    """
    lowering = sys.modules.get("torch._inductor.lowering") if os.getenv("CI") else None
    if lowering is not None and op not in lowering.lowerings:
        constraint = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(op, with_default=True))
        lowering.make_fallback(op, constraint, warn=False)


# torch.jit.trace and torch.export record this operator in place of autograd functions, which they cannot save; it is
# differentiable as they are.
_TRACED = torch.library.Library("loco_ext", "FRAGMENT")
_TRACED.define("block_sparse_traced(Tensor x, Tensor values, Tensor? bias, Tensor[] pattern) -> Tensor")
# The gradient of float32 values that were multiplied in half precision; only on GPUs.
_TRACED.define(
    "block_sparse_value_gradient_float32(Tensor x, Tensor grad, Tensor crow_indices, Tensor col_indices, int groups) "
    "-> Tensor"
)
# A contiguous copy of x, of which the entries of dimension 1 are adjacent in memory; only on GPUs.
_TRACED.define("block_sparse_transposed(Tensor x, ScalarType dtype) -> Tensor")


@torch.library.impl(_TRACED, "block_sparse_traced", "CompositeImplicitAutograd")
def _(x: Tensor, values: Tensor, bias: Tensor | None, pattern: Sequence[Tensor]) -> Tensor:
    return _product("y", (x, values), values.shape[1], values.dtype, pattern, bias)


if backends.library is not None:
    # The library defines the operators, which torch.compile knows; on GPUs their implementation is Triton's.
    for _name in (
        "block_sparse_matmul",
        "block_sparse_input_gradient",
        "block_sparse_value_gradient",
        "block_sparse_value_gradient_float32",
        "block_sparse_transposed",
    ):
        torch.library.impl(f"loco_ext::{_name}", "cuda", partial(_run_triton, _name))

    # For exporters to formats without these operators, such as ONNX: graphs of few nodes. torch.compile also runs it to
    # get shapes and strides if sizes are symbolic.
    @register_decomposition(torch.ops.loco_ext.block_sparse_matmul.default)
    def _(x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None) -> Tensor:
        blocks = len(col_indices)
        y = _reference.block_sparse_matmul(x, values, crow_indices, col_indices, bias, at_once=blocks)
        return y.contiguous()

    @register_decomposition(torch.ops.loco_ext.block_sparse_by_pixel.default)
    def _(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @torch.library.register_fake("loco_ext::block_sparse_by_pixel")
    def _(x: Tensor) -> Tensor:
        _keep_kernel(torch.ops.loco_ext.block_sparse_by_pixel.default)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("loco_ext::block_sparse_matmul")
    def _(x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None) -> Tensor:
        backends.check_one_device(x=x, values=values, bias=bias)
        _keep_kernel(torch.ops.loco_ext.block_sparse_matmul.default)
        return x.new_empty((x.shape[0], crow_indices.shape[0] - 1, values.shape[1] * values.shape[3]))

    @torch.library.register_fake("loco_ext::block_sparse_input_gradient")
    def _(grad: Tensor, values: Tensor, crow_indices: Tensor, rows: Tensor, blocks: Tensor) -> Tensor:
        backends.check_one_device(grad=grad, values=values)
        return grad.new_empty((grad.shape[0], crow_indices.shape[0] - 1, values.shape[1] * values.shape[2]))

    def of_values(x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int) -> Tensor:
        backends.check_one_device(x=x, grad=grad)
        return x.new_empty((col_indices.shape[0], groups, x.shape[2] // groups, grad.shape[2] // groups))

    torch.library.register_fake("loco_ext::block_sparse_value_gradient", of_values)
    torch.library.register_fake(
        "loco_ext::block_sparse_value_gradient_float32", lambda *arguments: of_values(*arguments).float()
    )

    @torch.library.register_fake("loco_ext::block_sparse_transposed")
    def _(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty(x.shape, dtype=dtype)
