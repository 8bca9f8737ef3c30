"""Block-sparse multiplication in Triton, for GPUs.

The functions take the arguments of the operators of the same names (see :mod:`loco_ext.ops.block_sparse`), which have
checked them. Values may be in float32 where activations are in half precision. No call waits for the device, and a CUDA
graph can capture one. Results are deterministic: every sum has one order, and nothing is accumulated in global memory.

float32 is multiplied in IEEE precision, or in TF32 where convolutions are, whose place these products take.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from loco_ext.triton_kernels import block_sparse_tiles as tiles
from loco_ext.triton_kernels.block_sparse_kernels import (
    depthwise_product_kernel,
    depthwise_values_kernel,
    product_kernel,
    values_kernel,
)
from loco_ext.triton_kernels.block_sparse_transpose import tile_of, transpose_kernel
from loco_ext.triton_kernels.launch import cdiv, on_device
from torch import Tensor

# Bytes of shared memory assumed without a GPU: for the interpreter, and for tests that compile for other machines.
NO_GPUS_SHARED_MEMORY = 227 * 1024


def block_sparse_matmul(
    x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None
) -> Tensor:
    """Return ``y[n, o] = bias[o] + sum over the blocks b of row o of x[n, col_indices[b]] @ values[b]``."""
    return _product(x, values, crow_indices, col_indices, None, bias)


def block_sparse_input_gradient(
    grad: Tensor, values: Tensor, crow_indices: Tensor, rows: Tensor, blocks: Tensor
) -> Tensor:
    """Return ``dx[n, p] = sum over the entries e of input pixel p of grad[n, rows[e]] @ values[blocks[e]].T``."""
    return _product(grad, values, crow_indices, rows, blocks, None)


def block_sparse_value_gradient(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int
) -> Tensor:
    """Return ``dvalues[b] = sum over n of the outer product of x[n, col_indices[b]], grad[n, row of b]``, by groups."""
    return _value_gradient(x, grad, crow_indices, col_indices, groups, x.dtype)


def block_sparse_value_gradient_float32(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int
) -> Tensor:
    """Return :func:`block_sparse_value_gradient` of half precision in float32."""
    return _value_gradient(x, grad, crow_indices, col_indices, groups, torch.float32)


def block_sparse_transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` of shape ``[batch, rows, columns]``, whose rows are adjacent in memory, contiguous in the dtype."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    if x.is_neg():  # kernels ignore the lazy negation flag, and a copy without it may have another order of strides
        x = x.resolve_neg().transpose(1, 2).contiguous().transpose(1, 2)
    batch, rows, columns = x.shape
    row_unit, column_unit = tiles.unit_of(rows, x.stride(0), x.stride(2)), tiles.unit_of(columns)
    height, width = tile_of(rows, columns)
    sizes = rows // row_unit, columns // column_unit, x.stride(0) // row_unit, x.stride(2) // row_unit
    with on_device(x.device):
        kernel = transpose_kernel[(batch * cdiv(rows, height) * cdiv(columns, width),)]
        kernel(x, y, *sizes, row_unit, column_unit, height, width, enable_fp_fusion=True)
    return y


def _value_gradient(
    x: Tensor, grad: Tensor, crow_indices: Tensor, col_indices: Tensor, groups: int, dtype: torch.dtype
) -> Tensor:
    batch, rows, nnz = x.shape[0], crow_indices.shape[0] - 1, col_indices.shape[0]  # len() takes longer
    depth, width = x.shape[2] // groups, grad.shape[2] // groups
    values = torch.empty((nnz, groups, depth, width), dtype=dtype, device=x.device)
    if values.numel() == 0:
        return values
    x, grad = x.resolve_neg(), grad.resolve_neg()  # kernels ignore the lazy negation flag
    depthwise = depth == width == 1
    channels = (groups, groups) if depthwise else (depth, width)
    sizes: tuple[int, ...]
    units = tiles.unit_of(channels[0], *x.stride()[:2]), tiles.unit_of(channels[1], *grad.stride()[:2])
    if depthwise:
        plan = tiles.depthwise(batch, groups, x.dtype, units, tiles.slices_of(nnz / rows))
        kernel, sizes = depthwise_values_kernel, (batch, groups // units[1])
        programs = rows * plan.form.slices * cdiv(groups, plan.form.width)
    else:
        arithmetic = x.dtype, _tf32(x.dtype), _gpu(x.device)
        plan = tiles.gradient(batch, depth, width, *arithmetic, units, rows * groups, nnz / rows)
        kernel, sizes = values_kernel, (batch, groups, depth // units[0], width // units[1])
        programs = rows * groups * plan.form.slices * cdiv(depth, plan.form.depth) * cdiv(width, plan.form.width)
    strides = (*_strides(x, units[0]), *_strides(grad, units[1]))
    with on_device(x.device):
        kernel[(programs,)](x, grad, crow_indices, col_indices, values, *sizes, *strides, **plan.options())
    return values


def _product(
    x: Tensor, values: Tensor, crow: Tensor, pixels: Tensor, blocks: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the product with the blocks in order, or with those that ``blocks`` lists, transposed."""
    transposed = blocks is not None
    batch, rows, groups = x.shape[0], crow.shape[0] - 1, values.shape[1]
    summed, width = values.shape[:1:-1] if transposed else values.shape[2:]
    y = torch.empty((batch, rows, groups * width), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, values = x.resolve_neg(), values.resolve_neg()  # kernels ignore the lazy negation flag
    bias = None if bias is None else bias.resolve_neg()
    depthwise = summed == width == 1
    channels = (groups, groups) if depthwise else (summed, width)
    sizes: tuple[int, ...]
    units = tiles.unit_of(channels[0], *x.stride()[:2]), tiles.unit_of(channels[1])
    if depthwise:
        plan = tiles.depthwise(batch, groups, x.dtype, units)
        kernel, sizes = depthwise_product_kernel, (batch, rows, groups // units[1])
        programs = rows * cdiv(groups, plan.form.width) * cdiv(batch, plan.form.samples)
    else:
        arithmetic = x.dtype, _tf32(x.dtype), _gpu(x.device)
        plan = tiles.product(batch, summed, width, *arithmetic, units, transposed, rows * groups)
        kernel, sizes = product_kernel, (batch, rows, groups, summed // units[0], width // units[1])
        programs = rows * groups * cdiv(width, plan.form.width) * cdiv(batch, plan.form.samples)
    strides = _strides(x, units[0])
    with on_device(x.device):
        kernel[(programs,)](x, values, crow, pixels, blocks, bias, y, *sizes, *strides, **plan.options())
    return y


def _strides(activations: Tensor, unit: int) -> tuple[int, int]:
    """Return the strides of samples and of pixels, in units of ``unit`` elements."""
    return activations.stride(0) // unit, activations.stride(1) // unit


def _tf32(dtype: torch.dtype) -> bool:
    if dtype != torch.float32 or torch.version.hip is not None:
        return False
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return conv.fp32_precision == "tf32"


@cache
def _gpu(device: torch.device) -> tiles.GpuLimits:
    """Return what plans depend on."""
    if device.type != "cuda":
        return tiles.GpuLimits(NO_GPUS_SHARED_MEMORY)
    properties: Any = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    if torch.version.hip is not None:
        return tiles.GpuLimits(properties.shared_memory_per_block, multiprocessors=multiprocessors)
    capability = properties.major, properties.minor
    fences = tiles.puts_fences(triton.__version__, capability)
    return tiles.GpuLimits(properties.shared_memory_per_block_optin, fences, multiprocessors, properties.major)
