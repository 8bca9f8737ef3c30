"""The three products of block-sparse multiplication in Triton.

With x ``[batch, n_in, groups * depth]``, y ``[batch, n_out, groups * width]`` and a block of values ``[depth, width]``
for each live pair of pixels and each group:

- ``product_kernel``: ``y[n, o] = bias[o] + sum over the blocks b of row o of x[n, pixel of b] @ values[b]``. One
  program has one output pixel and a tile of samples and channels, and goes through the row's blocks. With the pattern
  by input pixel and transposed blocks the same kernel computes the gradient of x.
- ``values_kernel``: ``dvalues[b] = sum over n of the outer product of x[n, pixel of b] and dy[n, o]``. One program has
  a share of one output pixel's blocks, and a tile of each. If not all samples fit into a tile, it goes through them for
  several blocks at a time, so that ``dy`` is read less often.

Programs are numbered so that those that run at the same time read the same memory: all samples of an output pixel,
whose blocks are then read from memory once, and neighbouring output pixels, whose input pixels hit the L2 cache.

Half precision and float32 are summed in float32, in an order that depends on sizes alone. Values in float32 beside x in
half precision are rounded to it before they are multiplied; their gradients are not rounded. Channels and strides are
given in units of ``BlockSparseForm.x_unit`` and ``y_unit`` elements, so that the compiler knows what divides them;
offsets are in 64 bits.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class BlockSparseForm:
    """The compile-time constants of a kernel."""

    samples: int  # samples per tile; a power of 2, like all tile sizes
    depth: int  # channels of x per tile
    width: int  # channels of y per tile
    x_unit: int  # elements in which the channels and strides of x are counted
    y_unit: int  # the same for y
    sums: tl.dtype
    precision: str  # input_precision of tl.dot
    parts: int = 1  # tiles along the dimension that is summed over
    transposed: bool = False  # blocks are transposed: their rows are the channels of the result
    slices: int = 1  # programs that share an output pixel's blocks
    blocks: int = 1  # blocks whose gradients are in one tile


# Arguments that Triton must not specialise; the compiler knows their divisors from the units of BlockSparseForm.
_SIZES = ("batch", "groups", "depth", "width", "x_sample_stride", "x_pixel_stride")


@triton.jit
def _tile(number, size: tl.constexpr):
    """Return the indices of a tile, int64."""
    return (number * size + tl.arange(0, size)).to(tl.int64)


@triton.jit
def _strides(sample_stride, pixel_stride, unit: tl.constexpr):
    """Return both strides in elements, int64."""
    return sample_stride.to(tl.int64) * unit, pixel_stride.to(tl.int64) * unit


@triton.jit
def _share(crow, row, slice, FORM: tl.constexpr):
    """Return a program's share of a row's blocks: the index of the first, and their number."""
    begin = tl.load(crow + row)
    count = tl.load(crow + row + 1) - begin
    first = count * slice // FORM.slices
    return begin + first, (count * (slice + 1) // FORM.slices - first).to(tl.int32)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def product_kernel(
    x,
    values,  # [nnz, groups, depth, width], or transposed: [nnz, groups, width, depth]
    crow,  # int64, [rows + 1]: where the blocks of each output pixel begin
    pixels,  # int64: the input pixel of each block
    blocks,  # int64: the index of each block in values, or None if they are in order
    bias,  # [rows, groups * width], or None
    y,  # [batch, rows, groups * width]
    batch,
    rows,
    groups,
    depth,  # channels that are summed over, in units of x, as are the strides of x
    width,  # in units of y
    x_sample_stride,
    x_pixel_stride,
    FORM: tl.constexpr,
):
    depth, width = depth * FORM.x_unit, width * FORM.y_unit
    x_sample_stride, x_pixel_stride = _strides(x_sample_stride, x_pixel_stride, FORM.x_unit)
    sample_tiles, width_tiles = tl.cdiv(batch, FORM.samples), tl.cdiv(width, FORM.width)
    program = tl.program_id(0)
    n = _tile(program % sample_tiles, FORM.samples)
    program //= sample_tiles
    w = _tile(program % width_tiles, FORM.width)
    program //= width_tiles
    group, row = (program % groups).to(tl.int64), (program // groups).to(tl.int64)
    k = tl.arange(0, FORM.depth)

    x += n[:, None] * x_sample_stride + (group * depth + k[None, :])
    if FORM.transposed:
        values += group * depth * width + (k[:, None] + w[None, :] * depth)
    else:
        values += group * depth * width + (k[:, None] * width + w[None, :])
    begin = tl.load(crow + row)
    steps = ((tl.load(crow + row + 1) - begin) * FORM.parts).to(tl.int32)
    total = tl.full([FORM.samples, FORM.width], 0, FORM.sums)
    for step in range(steps):
        entry, first = begin + step // FORM.parts, step % FORM.parts * FORM.depth
        pixel = tl.load(pixels + entry)
        block = entry if blocks is None else tl.load(blocks + entry)
        summed = first + k < depth
        at = x + (pixel * x_pixel_stride + first)
        x_tile = tl.load(at, mask=(n < batch)[:, None] & summed[None, :], other=0.0)
        at = block * groups * depth
        at = values + (at * width + first if FORM.transposed else (at + first) * width)
        block_tile = tl.load(at, mask=summed[:, None] & (w < width)[None, :], other=0.0).to(x.dtype.element_ty)
        total = tl.dot(x_tile, block_tile, total, input_precision=FORM.precision, out_dtype=FORM.sums)

    channel = group * width + w
    if bias is not None:
        total += tl.load(bias + row * groups * width + channel, mask=w < width, other=0.0).to(FORM.sums)[None, :]
    to = y + (n[:, None] * rows + row) * groups * width + channel[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(n < batch)[:, None] & (w < width)[None, :])


@triton.jit(do_not_specialize=[*_SIZES, "grad_sample_stride", "grad_pixel_stride"])
def values_kernel(
    x,
    grad,
    crow,  # int64, [n_out + 1]
    pixels,  # int64, [nnz]
    values,  # [nnz, groups, depth, width]
    batch,
    groups,
    depth,  # depth, width and the strides are in units of x or y
    width,
    x_sample_stride,
    x_pixel_stride,
    grad_sample_stride,
    grad_pixel_stride,
    FORM: tl.constexpr,
):
    depth, width = depth * FORM.x_unit, width * FORM.y_unit
    x_sample_stride, x_pixel_stride = _strides(x_sample_stride, x_pixel_stride, FORM.x_unit)
    grad_sample_stride, grad_pixel_stride = _strides(grad_sample_stride, grad_pixel_stride, FORM.y_unit)
    depth_tiles, width_tiles = tl.cdiv(depth, FORM.depth), tl.cdiv(width, FORM.width)
    program = tl.program_id(0)
    place = tl.arange(0, FORM.blocks * FORM.depth)  # a tile has the same channels of several blocks
    d = (program % depth_tiles * FORM.depth + place % FORM.depth).to(tl.int64)
    program //= depth_tiles
    w = _tile(program % width_tiles, FORM.width)
    program //= width_tiles
    slice = program % FORM.slices
    program //= FORM.slices
    group, row = (program % groups).to(tl.int64), (program // groups).to(tl.int64)
    begin, count = _share(crow, row, slice, FORM)

    n = tl.arange(0, FORM.samples).to(tl.int64)
    x += (group * depth + d)[:, None] + n[None, :] * x_sample_stride
    grad += row * grad_pixel_stride
    grad += (group * width + w)[None, :] + n[:, None] * grad_sample_stride
    values += group * depth * width + d[:, None] * width + w[None, :]
    live = (d < depth)[:, None] & (w < width)[None, :]

    if FORM.parts == 1:
        grad_tile = tl.load(grad, mask=(n < batch)[:, None] & (w < width)[None, :], other=0.0)
        for entry in range(count):
            block = begin + entry
            pixel = tl.load(pixels + block)
            at = x + pixel * x_pixel_stride
            x_tile = tl.load(at, mask=(d < depth)[:, None] & (n < batch)[None, :], other=0.0)
            total = tl.dot(x_tile, grad_tile, input_precision=FORM.precision, out_dtype=FORM.sums)
            tl.store(values + block * groups * depth * width, total.to(values.dtype.element_ty), mask=live)
    else:
        parts = tl.cdiv(batch, FORM.samples)
        total = tl.full([FORM.blocks * FORM.depth, FORM.width], 0, FORM.sums)
        for step in range(tl.cdiv(count, FORM.blocks) * parts):
            entry, part = step // parts * FORM.blocks + place // FORM.depth, step % parts
            block, first = begin + entry, part * FORM.samples
            pixel = tl.load(pixels + block, mask=entry < count, other=0)
            there = first + n < batch
            at = x + ((pixel * x_pixel_stride)[:, None] + first * x_sample_stride)
            x_tile = tl.load(at, mask=((d < depth) & (entry < count))[:, None] & there[None, :], other=0.0)
            at = grad + first * grad_sample_stride
            grad_tile = tl.load(at, mask=there[:, None] & (w < width)[None, :], other=0.0)
            total = tl.dot(x_tile, grad_tile, total, input_precision=FORM.precision, out_dtype=FORM.sums)
            if part == parts - 1:
                to = values + (block * groups * depth * width)[:, None]
                tl.store(to, total.to(values.dtype.element_ty), mask=live & (entry < count)[:, None])
                total = tl.full([FORM.blocks * FORM.depth, FORM.width], 0, FORM.sums)


# ---- depthwise: blocks have one element, so that groups are channels


@triton.jit(do_not_specialize=["batch", "rows", "channels", "x_sample_stride", "x_pixel_stride"])
def depthwise_product_kernel(
    x,
    values,  # [nnz, channels]
    crow,
    pixels,
    blocks,
    bias,
    y,
    batch,
    rows,
    channels,  # in units of y; the strides are in units of x or y
    x_sample_stride,
    x_pixel_stride,
    FORM: tl.constexpr,
):
    """Compute ``product_kernel``'s result for depthwise blocks."""
    channels = channels * FORM.y_unit
    x_sample_stride, x_pixel_stride = _strides(x_sample_stride, x_pixel_stride, FORM.x_unit)
    sample_tiles, channel_tiles = tl.cdiv(batch, FORM.samples), tl.cdiv(channels, FORM.width)
    program = tl.program_id(0)
    n = _tile(program % sample_tiles, FORM.samples)
    program //= sample_tiles
    c = _tile(program % channel_tiles, FORM.width)
    row = (program // channel_tiles).to(tl.int64)
    there = (n < batch)[:, None] & (c < channels)[None, :]

    x += n[:, None] * x_sample_stride + c[None, :]
    total = tl.full([FORM.samples, FORM.width], 0, FORM.sums)
    begin = tl.load(crow + row)
    for step in range((tl.load(crow + row + 1) - begin).to(tl.int32)):
        entry = begin + step
        pixel = tl.load(pixels + entry)
        block = entry if blocks is None else tl.load(blocks + entry)
        factor = tl.load(values + block * channels + c, mask=c < channels, other=0.0).to(x.dtype.element_ty)
        x_tile = tl.load(x + pixel * x_pixel_stride, mask=there, other=0.0)
        total += x_tile.to(FORM.sums) * factor[None, :].to(FORM.sums)
    if bias is not None:
        total += tl.load(bias + row * channels + c, mask=c < channels, other=0.0).to(FORM.sums)[None, :]
    to = y + (n[:, None] * rows + row) * channels + c[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=there)


@triton.jit(
    do_not_specialize=[
        "batch",
        "channels",
        "x_sample_stride",
        "x_pixel_stride",
        "grad_sample_stride",
        "grad_pixel_stride",
    ]
)
def depthwise_values_kernel(
    x,
    grad,
    crow,
    pixels,
    values,  # [nnz, channels]
    batch,
    channels,  # in units of y; the strides are in units of x or y
    x_sample_stride,
    x_pixel_stride,
    grad_sample_stride,
    grad_pixel_stride,
    FORM: tl.constexpr,
):
    """Compute ``values_kernel``'s result for depthwise blocks."""
    channels = channels * FORM.y_unit
    x_sample_stride, x_pixel_stride = _strides(x_sample_stride, x_pixel_stride, FORM.x_unit)
    grad_sample_stride, grad_pixel_stride = _strides(grad_sample_stride, grad_pixel_stride, FORM.y_unit)
    channel_tiles = tl.cdiv(channels, FORM.width)
    program = tl.program_id(0)
    c = _tile(program % channel_tiles, FORM.width)
    program //= channel_tiles
    row = (program // FORM.slices).to(tl.int64)
    begin, count = _share(crow, row, program % FORM.slices, FORM)

    x += c[None, :]
    grad += row * grad_pixel_stride + c[None, :]
    for entry in range(count):
        block = begin + entry
        pixel = tl.load(pixels + block)
        total = tl.full([FORM.samples, FORM.width], 0, FORM.sums)
        for tile in range(tl.cdiv(batch, FORM.samples)):
            n = _tile(tile, FORM.samples)[:, None]
            there = (n < batch) & (c < channels)[None, :]
            at = pixel * x_pixel_stride + n * x_sample_stride
            x_tile = tl.load(x + at, mask=there, other=0.0).to(FORM.sums)
            grad_tile = tl.load(grad + n * grad_sample_stride, mask=there, other=0.0).to(FORM.sums)
            total += x_tile * grad_tile
        tl.store(values + block * channels + c, tl.sum(total, 0).to(values.dtype.element_ty), mask=c < channels)
