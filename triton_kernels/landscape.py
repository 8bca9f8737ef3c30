"""Importance landscapes and their losses in Triton; see loco_ext/ops/landscape.py for what is computed.

With g of shape (M, C, H, W) and any strides, weights w (M,), in three launches:

    sums        A[c, h, w] = sum_m w_m g_m^2         one program for each block of the C*H*W numbers; reads g once
    map         n, I', Laplacian, loss, dL/dA        one program; its passes over the pixels meet at barriers
    backward    u = 2 w_m g dL/dA, sum g^2 dL/dA     one program for each sample; reads g once

A, dL/dA and all maps in between are contiguous and float64, whatever the dtype of g. Sums have a fixed order, so
results are the same in every run. The host waits for nothing.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from loco_ext.triton_kernels.launch import cdiv, next_power_of_2, on_device
from torch import Tensor

from loco_ext.reference.dtypes import compute_dtype

BLOCK = 64  # pixels of a program of the sums; with ROWS, what it reads at a time
ROWS = 16
MOST_PIXELS = 1024  # pixels that a program of the other kernels works on at a time
FUSED = {"enable_fp_fusion": True}  # launch option; Triton's default changes with version 3.10


@triton.jit
def _offset(i, width, pixels, strides):
    """Return the offset, int64, of each of the numbers i, int32, of one sample's gradients."""
    y, x = i % pixels // width, i % pixels % width
    return (i // pixels).to(tl.int64) * strides[1] + y.to(tl.int64) * strides[2] + x.to(tl.int64) * strides[3]


@triton.jit
def sums_kernel(g, weights, squares, samples, width, pixels, size, strides, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Add up squares: g [samples, C, H, W] by strides, weights [samples], squares [size = C * pixels]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = _offset(i, width, pixels, strides)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < samples:
        m = first + tl.arange(0, ROWS)
        w = tl.load(weights + m, mask=m < samples, other=0.0).to(tl.float64)
        where = m.to(tl.int64)[:, None] * strides[0] + offset[None, :]
        x = tl.load(g + where, mask=(m < samples)[:, None] & (i < size)[None, :], other=0.0).to(tl.float64)
        total += tl.sum(w[:, None] * x * x, axis=0)
        first += ROWS
    tl.store(squares + i, total, mask=i < size)


@triton.jit
def _reflected(i, count):
    i = tl.abs(i)
    return tl.where(i >= count, 2 * (count - 1) - i, i)


@triton.jit
def _source(i, count, candidate: tl.constexpr, reach: tl.constexpr):
    """Return a padded coordinate that reflects to i, and whether there is that one: i itself, or beyond either edge."""
    if candidate == 0:
        return i, i >= 0
    if candidate == 1:
        return -i, (i >= 1) & (i <= reach)
    return 2 * (count - 1) - i, (i >= count - 1 - reach) & (i <= count - 2)


@triton.jit
def _laplacian_at(values, stencil, i, height, width, pixels, K: tl.constexpr):
    """Return the Laplacian of values [H * W] at pixels i, under reflect padding."""
    REACH: tl.constexpr = K // 2
    result = tl.zeros(i.shape, dtype=tl.float64)
    for dy in range(K):
        for dx in range(K):
            y = _reflected(i // width + dy - REACH, height)
            x = _reflected(i % width + dx - REACH, width)
            near = tl.load(values + y * width + x, mask=i < pixels, other=0.0)
            result += tl.load(stencil + dy * K + dx) * near
    return result


@triton.jit
def _slope_of_variance(curved, mean, stencil, i, height, width, pixels, K: tl.constexpr):
    """Return, at pixels i, the derivative of the variance of the Laplacian, curved [H * W], in the landscape."""
    REACH: tl.constexpr = K // 2
    result = tl.zeros(i.shape, dtype=tl.float64)
    for v in tl.static_range(3):
        y, below = _source(i // width, height, v, REACH)
        for h in tl.static_range(3):
            x, beside = _source(i % width, width, h, REACH)
            for dy in range(K):
                for dx in range(K):
                    row, column = y - dy + REACH, x - dx + REACH
                    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (i < pixels)
                    inside &= below & beside
                    near = tl.load(curved + row * width + column, mask=inside, other=0.0) - mean
                    result += tl.load(stencil + dy * K + dx) * tl.where(inside, near, 0.0) * 2 / pixels
    return result


@triton.jit
def _write_norms(squares, norms, channels, pixels, BLOCK: tl.constexpr):
    """Write each pixel's norm over the channels, of squares divided by the largest of them.

    Return that divisor, and the factor that makes the mean square of the norms 1.
    """
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < channels * pixels:
        i = first + lane
        largest = tl.maximum(largest, tl.load(squares + i, mask=i < channels * pixels, other=0.0))
        first += BLOCK
    size = tl.max(largest, axis=0)
    size = tl.where(size == 0, 1.0, size)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < pixels:
        i = first + lane
        sum_ = tl.zeros((BLOCK,), dtype=tl.float64)
        c = 0
        while c < channels:
            a = tl.load(squares + c * pixels + i, mask=i < pixels, other=0.0) / size
            sum_ += a * a
            c += 1
        total += sum_
        tl.store(norms + i, tl.sqrt(sum_), mask=i < pixels)
        first += BLOCK
    whole = tl.sqrt(tl.sum(total, axis=0))
    return size, tl.sqrt(pixels.to(tl.float64)) / tl.where(whole == 0, 1.0, whole)


@triton.jit
def _write_landscape(
    norms, factor, stencil, scaled, curved, image, laplacian, height, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the landscape and its Laplacian, each twice, and return the mean of the Laplacian."""
    pixels = height * width
    lane = tl.arange(0, BLOCK)
    first = 0
    while first < pixels:
        i = first + lane
        value = tl.load(norms + i, mask=i < pixels, other=0.0) * factor
        tl.store(scaled + i, value, mask=i < pixels)
        tl.store(image + i, value, mask=i < pixels)
        first += BLOCK
    tl.debug_barrier()
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < pixels:
        i = first + lane
        value = _laplacian_at(scaled, stencil, i, height, width, pixels, K)
        tl.store(curved + i, value, mask=i < pixels)
        tl.store(laplacian + i, value, mask=i < pixels)
        sums += value
        first += BLOCK
    return tl.sum(sums, axis=0) / pixels


@triton.jit
def _write_loss(
    scaled, curved, mean, stencil, target, by_map, loss, height, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the loss and its derivative d by the landscape I', and return the mean of d I'."""
    pixels = height * width
    lane = tl.arange(0, BLOCK)
    losses = tl.zeros((BLOCK,), dtype=tl.float64)
    products = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < pixels:
        i = first + lane
        value = tl.load(scaled + i, mask=i < pixels, other=0.0)
        if target is None:
            centred = tl.where(i < pixels, tl.load(curved + i, mask=i < pixels, other=0.0) - mean, 0.0)
            losses += centred * centred / pixels
            d = _slope_of_variance(curved, mean, stencil, i, height, width, pixels, K)
        else:
            difference = value - tl.load(target + i, mask=i < pixels, other=0.0).to(tl.float64)
            losses += difference * difference
            d = 2 * difference
        products += d * value
        tl.store(by_map + i, d, mask=i < pixels)
        first += BLOCK
    tl.store(loss, tl.sum(losses, axis=0))
    return tl.sum(products, axis=0) / pixels


@triton.jit
def map_kernel(
    squares,  # [C, H * W]
    stencil,  # [K, K]
    target,  # [H * W] or None
    scratch,  # [4, H * W]: n, I', its Laplacian, and d = dL/dI'
    loss,  # []
    image,  # [H * W]
    laplacian,  # [H * W]
    slope,  # [C, H * W]
    channels,
    height,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the landscape, its Laplacian, the loss, and the slope dL/dA."""
    pixels = height * width
    norms, scaled, curved, by_map = scratch, scratch + pixels, scratch + 2 * pixels, scratch + 3 * pixels
    size, factor = _write_norms(squares, norms, channels, pixels, BLOCK)
    tl.debug_barrier()
    mean = _write_landscape(norms, factor, stencil, scaled, curved, image, laplacian, height, width, K, BLOCK)
    tl.debug_barrier()
    along = _write_loss(scaled, curved, mean, stencil, target, by_map, loss, height, width, K, BLOCK)
    tl.debug_barrier()
    first = 0
    while first < pixels:
        i = first + tl.arange(0, BLOCK)
        n = tl.load(norms + i, mask=i < pixels, other=0.0)
        d = tl.load(by_map + i, mask=i < pixels, other=0.0)
        by_norm = factor * (d - tl.load(scaled + i, mask=i < pixels, other=0.0) * along)
        by_norm = tl.where(n == 0, 0.0, by_norm / tl.where(n == 0, 1.0, n))
        c = 0
        while c < channels:
            a = tl.load(squares + c * pixels + i, mask=i < pixels, other=0.0) / size
            tl.store(slope + c * pixels + i, by_norm * a / size, mask=i < pixels)
            c += 1
        first += BLOCK


@triton.jit
def backward_kernel(g, weights, slope, grad, u, by_weights, width, pixels, size, strides, BLOCK: tl.constexpr):
    """Multiply one sample's gradients by the slope: g by strides, slope [size], u [samples, size]."""
    m = tl.program_id(0).to(tl.int64)
    w = tl.load(weights + m).to(tl.float64)
    factor = tl.load(grad).to(tl.float64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    first = 0
    while first < size:
        i = first + tl.arange(0, BLOCK)
        x = tl.load(g + m * strides[0] + _offset(i, width, pixels, strides), mask=i < size, other=0.0).to(tl.float64)
        along = x * (tl.load(slope + i, mask=i < size, other=0.0) * factor)
        product = 2 * along * w
        if u.dtype.element_ty.primitive_bitwidth == 16:
            product = product.to(tl.float32)  # Triton rounds to half precision only from float32
        tl.store(u + m * size + i, product.to(u.dtype.element_ty), mask=i < size)
        total += along * x
        first += BLOCK
    tl.store(by_weights + m, tl.sum(total, axis=0))


def landscape(
    g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the landscape, its Laplacian, and the slope dL/dA."""
    samples, channels, height, width = g.shape
    dtype = compute_dtype(g.dtype)
    weights, stencil = weights.contiguous(), stencil.contiguous()
    target = None if target is None else target.contiguous()
    squares, slope = (torch.empty(g.shape[1:], dtype=torch.float64, device=g.device) for _ in range(2))
    image, laplacian = (torch.empty((height, width), dtype=dtype, device=g.device) for _ in range(2))
    loss = torch.empty((), dtype=dtype, device=g.device)
    scratch = torch.empty((4, height, width), dtype=torch.float64, device=g.device)
    size = squares.numel()
    with on_device(g.device):
        sums_kernel[(cdiv(size, BLOCK),)](
            g, weights, squares, samples, width, height * width, size, g.stride(), BLOCK=BLOCK, ROWS=ROWS, **FUSED
        )
        block = min(next_power_of_2(height * width), MOST_PIXELS)
        maps = squares, stencil, target, scratch, loss, image, laplacian, slope
        map_kernel[(1,)](*maps, channels, height, width, K=stencil.shape[0], BLOCK=block, num_warps=8, **FUSED)
    return loss, image, laplacian, slope


def landscape_backward(g: Tensor, weights: Tensor, slope: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the loss in ``g`` and ``weights``."""
    weights = weights.contiguous()
    u, by_weights = torch.empty(g.shape, dtype=g.dtype, device=g.device), torch.empty_like(weights)
    size, pixels = slope.numel(), slope[0].numel()
    if len(g):
        with on_device(g.device):
            sizes = g.shape[3], pixels, size, g.stride()
            block = min(next_power_of_2(size), MOST_PIXELS)
            operands = g, weights, slope.contiguous(), grad, u, by_weights
            backward_kernel[(len(g),)](*operands, *sizes, BLOCK=block, **FUSED)
    return u, by_weights
