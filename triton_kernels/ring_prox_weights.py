"""The weights of one filter (output channel) in Triton: their addresses, sums over its rings, and stores.

One program handles one filter, ring after ring, each in blocks, since most sums are of one ring and a later ring's need
the earlier's. A table, made by :mod:`loco_ext.triton_kernels.ring_prox`, tells the programs of a launch which weight
their filter belongs to, and lists where the taps of its rings are. Sums are in float64; weights are multiplied and
clipped in their compute dtype. Scalars of a filter's rings are a tensor with one entry per ring.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from loco_ext.triton_kernels.load_store import load, store

INFINITY = tl.constexpr(float("inf"))

# Columns of the table's first part, which has a row for each weight of a launch and int64 numbers. Each of the three
# operands has an address, strides between filters and between channels, and a list of offsets of its taps.
FIRST_FILTER = tl.constexpr(0)  # number of filters of the rows before
CHANNELS, TAPS, RINGS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TAPS_AT = tl.constexpr(4)  # index in the table of offsets of the operands' taps, [3, taps], and begins, [rings + 1]
T_AT, Q_AT = tl.constexpr(5), tl.constexpr(6)  # indices of the thresholds in the table, or their addresses
THRESHOLDS_STRIDE = tl.constexpr(7)  # between filters, in elements
OPERANDS = tl.constexpr(8)  # weight, out, metric; each an address and two strides
COLUMNS = tl.constexpr(17)
WEIGHT, OUT, METRIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class WeightForm:
    """The compile-time constants of a kernel."""

    weight: tl.dtype
    metric: tl.dtype | None
    linf: bool
    squared: bool
    block: int  # weights at a time, a power of 2
    padded_rings: int  # number of rings, rounded up to a power of 2
    taps_fastest: bool  # whether a ring's weights are visited taps first; else channels first
    adjacent: bool  # the channels of all operands follow each other
    aligned: bool  # all operands are at multiples of 16 bytes; filters, taps and channels come in multiples of 16
    on_device: bool  # thresholds lie elsewhere in the device's memory; else in the table
    wide: bool  # weight indices have 64 bits

    @property
    def arithmetic(self) -> tl.dtype:
        return tl.float64 if self.weight == tl.float64 else tl.float32


class Operand(NamedTuple):
    """The weights of one filter in memory."""

    data: tl.tensor  # pointer to the first weight
    stride: tl.tensor  # between channels, in elements
    offsets: tl.tensor  # offset of each tap in elements, ring by ring: int64, [taps]


class Filter(NamedTuple):
    """The filter that a program works on: weights u, metric d and result out, each an operand, and its penalty."""

    u: Operand
    d: Operand
    out: Operand
    channels: tl.tensor
    rings: tl.tensor
    begins: tl.tensor  # the first tap of each ring, and the number of taps: int64, [rings + 1]
    t: tl.tensor  # float64, [rings]
    q: tl.tensor  # float64, [rings]


# ---- the filter of a program


@triton.jit
def filter_of(table, first_row, rows, OF_NORMS: tl.constexpr, FORM: tl.constexpr):
    """Return the filter of this program; the launch has the filters of ``rows`` rows of the table.

    OF_NORMS: the norms of its rings are written, at the address of ``out``, and it has no thresholds.
    """
    number = tl.program_id(0).to(tl.int64)
    low, high = first_row * 1, first_row + rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(table + middle * COLUMNS + FIRST_FILTER)
        low, high = tl.where(begins <= number, middle, low), tl.where(begins <= number, high, middle)
    row = table + low * COLUMNS
    number -= tl.load(row + FIRST_FILTER)
    channels, taps, rings = tl.load(row + CHANNELS), tl.load(row + TAPS), tl.load(row + RINGS).to(tl.int32)
    if not FORM.wide:
        channels = channels.to(tl.int32)
    if FORM.aligned:
        channels = tl.multiple_of(channels, 16)
    offsets = table + tl.load(row + TAPS_AT)
    u = _operand_of(row, WEIGHT, offsets, number, FORM.weight, FORM.aligned, FORM.adjacent)
    if OF_NORMS:
        out = _operand_of(row, OUT, offsets + taps, number, FORM.arithmetic, False, True)
    else:
        out = _operand_of(row, OUT, offsets + taps, number, FORM.weight, FORM.aligned, FORM.adjacent)
    d = u
    if FORM.metric is not None:
        d = _operand_of(row, METRIC, offsets + 2 * taps, number, FORM.metric, FORM.aligned, FORM.adjacent)
    shift = number * tl.load(row + THRESHOLDS_STRIDE)
    t, q = _thresholds_at(table, row, T_AT, FORM) + shift, _thresholds_at(table, row, Q_AT, FORM) + shift
    return Filter(u, d, out, channels, rings, offsets + 3 * taps, t, q)


@triton.jit
def _operand_of(
    row,
    which: tl.constexpr,
    offsets,
    number,
    dtype: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """Return the operand of the filter of this number."""
    held_as: tl.constexpr = tl.uint16 if dtype == tl.bfloat16 else dtype
    field = row + (OPERANDS + 3 * which)
    data, shift = tl.load(field).to(tl.pointer_type(held_as)), number * tl.load(field + 1)
    if ALIGNED:
        data, shift = tl.multiple_of(data, 16), tl.multiple_of(shift, 16)
    stride = 1 if ADJACENT else tl.load(field + 2)
    return Operand(data + shift, stride, offsets)


@triton.jit
def _thresholds_at(table, row, COLUMN: tl.constexpr, FORM: tl.constexpr):
    at = tl.load(row + COLUMN)
    if FORM.on_device:
        return at.to(tl.pointer_type(tl.float64))
    return (table + at).to(tl.pointer_type(tl.float64), bitcast=True)


# ---- scalars of rings


@triton.jit
def fill(value, FORM: tl.constexpr):
    return tl.full([FORM.padded_rings], value, tl.float64)


@triton.jit
def get(values, ring, FORM: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, FORM.padded_rings) == ring, values, 0.0))


@triton.jit
def put(values, ring, value, FORM: tl.constexpr):
    return tl.where(tl.arange(0, FORM.padded_rings) == ring, value, values)


@triton.jit
def scalar(value):
    return tl.full((), value, tl.float64)


# ---- the weights of a ring


@triton.jit
def _ring(filter, ring, FORM: tl.constexpr):
    """Return a ring's first tap, its number of taps and its number of weights."""
    number: tl.constexpr = tl.int64 if FORM.wide else tl.int32
    begin = tl.load(filter.begins + ring)
    taps = (tl.load(filter.begins + ring + 1) - begin).to(number)
    return begin, taps, taps * filter.channels


@triton.jit
def _block(filter, begin, taps, count, block, FORM: tl.constexpr):
    """Return, for a block of a ring's weights, the mask of those that exist, their channels and their taps."""
    number = (block * FORM.block).to(count.dtype) + tl.arange(0, FORM.block)
    if FORM.taps_fastest:
        channel, tap = number // taps, number % taps
    else:
        channel, tap = number % filter.channels, number // filter.channels
    return number < count, channel, begin + tap


@triton.jit
def _addresses(operand, channel, tap, mask, FORM: tl.constexpr):
    offsets = tl.load(operand.offsets + tap, mask=mask, other=0)
    if FORM.aligned:
        offsets = tl.multiple_of(offsets, 16)
    return operand.data + (offsets + channel.to(tl.int64) * operand.stride)


@triton.jit
def _load_u(filter, channel, tap, mask, T: tl.constexpr, FORM: tl.constexpr):
    return load(_addresses(filter.u, channel, tap, mask, FORM), mask, FORM.weight, T)


@triton.jit
def _load_d(filter, channel, tap, mask, FORM: tl.constexpr):
    """Return the metric as float64; infinity, which keeps a weight as it is, becomes the largest finite number.

    That can be multiplied and divided by.
    """
    d = load(_addresses(filter.d, channel, tap, mask, FORM), mask, FORM.metric, tl.float64)
    largest = _largest_metric(FORM)
    return tl.where(d > largest, largest, d)


@triton.jit
def _largest_metric(FORM: tl.constexpr):
    return 3.4028234663852886e38 if FORM.arithmetic == tl.float32 else 1.7976931348623157e308


@triton.jit
def _damped(u, d, c):
    return u * (d / (d + c))


@triton.jit
def ring_squares(filter, ring, c, scale, OF: tl.constexpr, FORM: tl.constexpr):
    """Return the sum over a ring of the squares of scale * u ("plain"), times d ("weighed") or d / (d + c) ("damped").

    The factors are inside the square.
    """
    sums = tl.full([FORM.block], 0.0, tl.float64)
    begin, taps, count = _ring(filter, ring, FORM)
    block = tl.full((), 0, tl.int64)
    while block * FORM.block < count:
        mask, channel, tap = _block(filter, begin, taps, count, block, FORM)
        value = _load_u(filter, channel, tap, mask, tl.float64, FORM) * scale
        if OF == "weighed":
            value = value * _load_d(filter, channel, tap, mask, FORM)
        elif OF == "damped":
            value = _damped(value, _load_d(filter, channel, tap, mask, FORM), c)
        sums += tl.where(mask, value * value, 0.0)
        block += 1
    return tl.sum(sums)


@triton.jit
def ring_sums_of_squares(filter, scale, OF: tl.constexpr, FORM: tl.constexpr):
    """Return the sum of squares of every ring; see :func:`ring_squares`."""
    squares = fill(0.0, FORM)
    ring = tl.full((), 0, tl.int32)
    while ring < filter.rings:
        squares = put(squares, ring, ring_squares(filter, ring, 0.0, scale, OF, FORM), FORM)
        ring += 1
    return squares


@triton.jit
def _largest(filter, ring, FORM: tl.constexpr):
    """Return the largest size in a ring; NaN if any weight is NaN."""
    largest = tl.full([FORM.block], 0.0, tl.float64)
    begin, taps, count = _ring(filter, ring, FORM)
    block = tl.full((), 0, tl.int64)
    while block * FORM.block < count:
        mask, channel, tap = _block(filter, begin, taps, count, block, FORM)
        size = tl.abs(_load_u(filter, channel, tap, mask, tl.float64, FORM))
        largest = tl.where(mask & ((size > largest) | (size != size)), size, largest)
        block += 1
    return _largest_of(largest)


@triton.jit
def _largest_of(sizes):
    """Return the largest size; NaN if any is NaN."""
    total = tl.sum(sizes)
    return tl.where(total != total, total, tl.max(sizes, 0))


@triton.jit
def ring_sizes(filter, FORM: tl.constexpr):
    sizes = fill(0.0, FORM)
    ring = tl.full((), 0, tl.int32)
    while ring < filter.rings:
        sizes = put(sizes, ring, _largest(filter, ring, FORM), FORM)
        ring += 1
    return sizes


@triton.jit
def scaled_squares(filter, FORM: tl.constexpr):
    """Return a power of two that keeps the squares within float64, and each ring's sum of squares scaled by it."""
    scale = scalar(1.0)
    squares = ring_sums_of_squares(filter, scale, "plain", FORM)
    if FORM.weight == tl.float64:  # the squares of other dtypes fit into float64
        is_ring = tl.arange(0, FORM.padded_rings) < filter.rings
        unsafe = is_ring & ~((squares > 1e-280) & (squares < 1e280))
        if tl.max(unsafe.to(tl.int32), 0) != 0:
            sizes = ring_sizes(filter, FORM)
            is_finite = tl.min((sizes < INFINITY).to(tl.int32), 0) != 0
            size = tl.where(is_finite, tl.max(sizes, 0), 0.0)
            # 2^-e, where 2^(e-1) <= size < 2^e, with e limited to -1020 .. 1020
            exponent = ((size.to(tl.int64, bitcast=True) >> 52) - 1022).to(tl.int32)
            exponent = tl.minimum(tl.maximum(exponent, -1020), 1020)
            scale = ((1023 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            scale = tl.where(size > 0, scale, 1.0)
            squares = ring_sums_of_squares(filter, scale, "plain", FORM)
    return scale, squares


@triton.jit
def sums_above(filter, n, caps, level, FORM: tl.constexpr):
    """Return sums over the weights of rings 0..n, clipped at caps, that exceed a level: those of d |x| and of d.

    The third value is the largest size among weights whose d is infinite, 0 if there is none; they are in neither sum.
    """
    mass = tl.full([FORM.block], 0.0, tl.float64)
    weight, floor = mass, mass
    ring = tl.full((), 0, tl.int32)
    while ring <= n:
        cap = get(caps, ring, FORM)
        begin, taps, count = _ring(filter, ring, FORM)
        block = tl.full((), 0, tl.int64)
        while block * FORM.block < count:
            mask, channel, tap = _block(filter, begin, taps, count, block, FORM)
            size = tl.abs(_load_u(filter, channel, tap, mask, tl.float64, FORM))
            size = tl.where(size > cap, cap, size)
            over = mask & ((size <= level) == 0)
            d = tl.full([FORM.block], 1.0, tl.float64)
            if FORM.metric is not None:
                d = _load_d(filter, channel, tap, mask, FORM)
                stays = over & (d == _largest_metric(FORM))
                over = over & (stays == 0)
                floor = tl.where(stays & ((size <= floor) == 0), size, floor)
            mass += tl.where(over, d * size, 0.0)
            weight += tl.where(over, d, 0.0)
            block += 1
        ring += 1
    return tl.sum(mass), tl.sum(weight), _largest_of(floor)


@triton.jit
def write(filter, ring, value, HOW: tl.constexpr, FORM: tl.constexpr):
    """Write a ring's weights times a value ("scaled"), clipped at it ("clipped"), or u d / (d + value) ("damped")."""
    T: tl.constexpr = FORM.arithmetic
    begin, taps, count = _ring(filter, ring, FORM)
    block = tl.full((), 0, tl.int64)
    while block * FORM.block < count:
        mask, channel, tap = _block(filter, begin, taps, count, block, FORM)
        u = _load_u(filter, channel, tap, mask, T, FORM)
        if HOW == "scaled":
            x = u * value.to(T)
        elif HOW == "clipped":
            cap = value.to(T)
            stays = (tl.abs(u) <= cap) | (u != u)
            x = tl.where(stays, u, tl.where(u < 0, cap * -1, cap))
        else:
            x = _damped(u.to(tl.float64), _load_d(filter, channel, tap, mask, FORM), value).to(T)
        store(_addresses(filter.out, channel, tap, mask, FORM), x, mask, FORM.weight, None, False)
        block += 1
