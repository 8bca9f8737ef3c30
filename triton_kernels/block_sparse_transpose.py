"""A copy of activations in the other order of channels and pixels, in Triton: to[n, r, c] = from[n, r, c].

``from`` is [batch, rows, columns] with the rows of a column adjacent in memory, ``to`` is contiguous and may have
another dtype. Pixels are rows and channels columns to go from NCHW to channels_last; the other way, channels are rows.

One program has a tile of one sample. It loads along rows and stores along columns, and the compiler exchanges the
elements between threads through shared memory. Sizes and strides are given in units of ``row_unit`` and
``column_unit`` elements, so that the compiler knows what divides them; offsets are in 64 bits.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from loco_ext.triton_kernels.launch import next_power_of_2

ELEMENTS, SIDE = 4096, 64  # of a tile, and along each of its sides unless the other one has fewer


@lru_cache(maxsize=256)
def tile_of(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile, powers of 2."""
    side = min(next_power_of_2(rows), SIDE)
    width = min(next_power_of_2(columns), ELEMENTS // side)
    return min(next_power_of_2(rows), ELEMENTS // width), width


@triton.jit(do_not_specialize=["rows", "columns", "sample_stride", "column_stride"])
def transpose_kernel(
    x,
    y,  # [batch, rows, columns]
    rows,  # rows and the strides of x are in units of row_unit
    columns,  # in units of column_unit
    sample_stride,
    column_stride,
    row_unit: tl.constexpr,
    column_unit: tl.constexpr,
    height: tl.constexpr,  # of a tile
    width: tl.constexpr,
):
    rows, columns = rows * row_unit, columns * column_unit
    row_tiles, column_tiles = tl.cdiv(rows, height), tl.cdiv(columns, width)
    program = tl.program_id(0)
    c = (program % column_tiles * width + tl.arange(0, width)).to(tl.int64)[None, :]
    program //= column_tiles
    r = (program % row_tiles * height + tl.arange(0, height)).to(tl.int64)[:, None]
    n = (program // row_tiles).to(tl.int64)
    live = (r < rows) & (c < columns)
    x += n * (sample_stride.to(tl.int64) * row_unit)
    tile = tl.load(x + (c * (column_stride.to(tl.int64) * row_unit) + r), mask=live)
    y += n * rows * columns
    tl.store(y + (r * columns + c), tile.to(y.dtype.element_ty), mask=live)
