"""The kernels of ring norms and of the prox of nested rings in Triton.

    norms[o, r] = ||w(o, ring r)||_2
    out[o] = argmin_x 1/2 sum_i d_i (x_i - w_i)^2 + sum_n t_n ||x(G_n)|| + (sum_n q_n ||x(G_n)||)^2

The maths, including the treatment of NaN, infinity and thresholds of 0, is that of ``csrc/ring_prox/math.h``. As there,
sums and everything derived from them are in float64, and nothing is fused (launch with ``enable_fp_fusion=False``).

A launch has the filters of several weights, each in a row of the table, which is int64 (ring_prox_weights.py). weight,
metric (d) and out are [filters, channels, taps] with strides in elements for filters and channels and an offset for
each tap; the table lists the taps ring after ring, outermost first. thresholds (t) and squared (q) are float64
[filters, rings], or [rings] with a stride of 0 between filters; norms, which take the place of out, are contiguous
[filters, rings].

One program handles one filter (output channel) from its first sum to its last weight: it reads the filter in blocks of
one ring's weights, once for the sums of squares and again wherever a metric or a clipped ring needs them, solves for
the scalars of all rings, and writes every weight once.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from loco_ext.triton_kernels.ring_prox_search import DONE, LAST, narrow, search_above, search_at
from loco_ext.triton_kernels.ring_prox_weights import (
    INFINITY,
    fill,
    filter_of,
    get,
    put,
    ring_sizes,
    ring_squares,
    ring_sums_of_squares,
    scalar,
    scaled_squares,
    sums_above,
    write,
)

# Relative tolerances: of the squared part's factor, and of the metric's coefficients for float64 and other weights.
FACTOR_TOLERANCE, DOUBLE_TOLERANCE, SINGLE_TOLERANCE = tl.constexpr(4e-16), tl.constexpr(2e-16), tl.constexpr(1e-11)


@triton.jit
def _threshold(filter, ring, factor, scale, FORM: tl.constexpr):
    """Return scale * (t + factor q), or scale * t if the factor is infinite.

    Infinite weights stay, and would demand an infinite threshold for all others.
    """
    t = tl.load(filter.t + ring)
    if FORM.squared:
        q = tl.load(filter.q + ring)
        t += tl.where((q != 0) & (factor != INFINITY), factor * q, 0.0)
    return t * scale


@triton.jit
def _weighed_by_q(filter, ring, norm):
    q = tl.load(filter.q + ring)
    return tl.where(q != 0, q * norm, 0.0)


# ---- l2


@triton.jit
def _chain(squares, filter, factor, scale, FORM: tl.constexpr):
    """Return the factor that shrinks each ring, from its sum of squares, and the first ring that does not vanish."""
    factors = fill(1.0, FORM)
    b, first, n = scalar(0.0), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while n < filter.rings:
        t = _threshold(filter, n, factor, scale, FORM)
        a = tl.sqrt(b * b + get(squares, n, FORM))
        stays = (t == 0) | (a == INFINITY)
        vanishes = (a <= t) & (stays == 0)
        b = tl.where(stays, a, tl.where(vanishes, 0.0, a - t))
        f = tl.where(stays, 1.0, tl.where(vanishes, 0.0, b / a))
        factors = tl.where(tl.arange(0, FORM.padded_rings) <= n, factors * f, factors)
        first = tl.where(vanishes, n + 1, first)
        n += 1
    return factors, first


@triton.jit
def _l2_penalty(squares, factors, filter, FORM: tl.constexpr):
    """Return sum_n q_n ||x(G_n)|| where ring r of x has the sum of squares factors[r]^2 squares[r]."""
    kept = tl.where(factors != 0, factors * factors * squares, 0.0)
    total, penalty, n = scalar(0.0), scalar(0.0), tl.full((), 0, tl.int32)
    while n < filter.rings:
        total += get(kept, n, FORM)
        penalty += _weighed_by_q(filter, n, tl.sqrt(total))
        n += 1
    return penalty


@triton.jit
def _squared_search(penalty_of_u):
    """Return a search for the root f of f - 2 sum_n q_n ||x(G_n)||, where x is the prox with thresholds t + f q."""
    upper = 2 * penalty_of_u
    known = ((upper > 0) & (upper < INFINITY)) == 0
    return search_above(scalar(0.0), upper * -1, upper, known)


@triton.jit
def _prox_l2(filter, FORM: tl.constexpr):
    scale, squares = scaled_squares(filter, FORM)
    factors = fill(1.0, FORM)
    search = search_at(scalar(0.0))
    if FORM.squared:
        search = _squared_search(_l2_penalty(squares, factors, filter, FORM) / scale)
    while search.phase != DONE:
        factors, _first = _chain(squares, filter, search.x, scale, FORM)
        balance = scalar(0.0)
        if FORM.squared:
            balance = search.x - 2 * _l2_penalty(squares, factors, filter, FORM) / scale
        search = narrow(search, balance, FACTOR_TOLERANCE)
    ring = tl.full((), 0, tl.int32)
    while ring < filter.rings:
        write(filter, ring, get(factors, ring, FORM), "scaled", FORM)
        ring += 1


# ---- l2 in a metric


@triton.jit
def _shoot(filter, first, c, factor, scale, last, FORM: tl.constexpr):
    """Return c beyond the last ring, c of all rings and sum_n q_n ||x(G_n)||, given c of ring ``first``.

    Stops at the first c that is negative; with ``last``, takes it for 0 instead.
    """
    coefficients = fill(0.0, FORM)
    total, penalty, ring = scalar(0.0), scalar(0.0), first
    while (ring < filter.rings) & (((c < 0) == 0) | last):
        c = tl.where(c < 0, 0.0, c)
        coefficients = put(coefficients, ring, c, FORM)
        total += ring_squares(filter, ring, c, scale, "damped", FORM)
        t = _threshold(filter, ring, factor, scale, FORM)
        c = tl.where(t == 0, c, c - t / tl.sqrt(total))
        if FORM.squared:
            penalty += _weighed_by_q(filter, ring, tl.sqrt(total))
        ring += 1
    return c, coefficients, penalty


@triton.jit
def _lower_coefficient(filter, squares, first, factor, scale, FORM: tl.constexpr):
    """Return a lower bound of c of ring ``first``, using that every ||x(G_n)|| is at most that of u."""
    lower, total, n = scalar(0.0), scalar(0.0), tl.full((), 0, tl.int32)
    while n < filter.rings:
        total += get(squares, n, FORM)
        t = _threshold(filter, n, factor, scale, FORM)
        lower += tl.where((n < first) | (t == 0), 0.0, t / tl.sqrt(total))
        n += 1
    return lower


@triton.jit
def _solve_metric(filter, squares, first, factor, scale, FORM: tl.constexpr):
    """Return c of all rings from ``first`` on, and sum_n q_n ||x(G_n)||."""
    tolerance: tl.constexpr = DOUBLE_TOLERANCE if FORM.weight == tl.float64 else SINGLE_TOLERANCE
    lower = _lower_coefficient(filter, squares, first, factor, scale, FORM)
    known = ((lower > 0) & (lower < INFINITY)) == 0
    search = search_above(lower, scalar(0.0), lower, known)
    coefficients, penalty = fill(0.0, FORM), scalar(0.0)
    while search.phase != DONE:
        beyond, coefficients, penalty = _shoot(filter, first, search.x, factor, scale, search.phase == LAST, FORM)
        search = narrow(search, beyond, tolerance)
    return coefficients, penalty


@triton.jit
def _prox_metric(filter, FORM: tl.constexpr):
    scale, squares = scaled_squares(filter, FORM)
    weighed = ring_sums_of_squares(filter, scale, "weighed", FORM)
    coefficients, first = fill(0.0, FORM), tl.full((), 0, tl.int32)
    search = search_at(scalar(0.0))
    if FORM.squared:
        search = _squared_search(_l2_penalty(squares, fill(1.0, FORM), filter, FORM) / scale)
    while search.phase != DONE:
        _factors, first = _chain(weighed, filter, search.x, scale, FORM)
        coefficients, penalty = _solve_metric(filter, squares, first, search.x, scale, FORM)
        search = narrow(search, search.x - 2 * penalty / scale, FACTOR_TOLERANCE)
    ring = tl.full((), 0, tl.int32)
    while ring < filter.rings:
        c = get(coefficients, ring, FORM)
        if (ring < first) | (c == 0):
            write(filter, ring, tl.where(ring < first, scalar(0.0), 1.0), "scaled", FORM)
        else:
            write(filter, ring, c, "damped", FORM)
        ring += 1


# ---- linf


@triton.jit
def _level(filter, n, caps, t, FORM: tl.constexpr):
    """Return the level at which rings 0..n, already clipped at caps, must be clipped to remove t in total.

    It is approached from below: a weight that does not exceed the level found for more weights will not exceed the one
    sought (Michelot 1986).
    """
    level, heaviest, floor, goes_on = scalar(-1.0), scalar(INFINITY), scalar(0.0), tl.full((), 1, tl.int32)
    while goes_on != 0:
        mass, weight, staying = sums_above(filter, n, caps, level, FORM)
        floor = tl.where(level < 0, staying, floor)
        lighter = (level < 0) | ((weight < heaviest) & (weight > 0))
        level = tl.where(lighter, tl.where(mass <= t, 0.0, (mass - t) / weight), level)
        heaviest = weight
        goes_on = (lighter & (level > 0) & (level < INFINITY)).to(tl.int32)
    return tl.where((level < floor) | (floor != floor), floor, level)


@triton.jit
def _solve_linf(filter, factor, FORM: tl.constexpr):
    """Return the size at which each ring is clipped."""
    caps = fill(INFINITY, FORM)
    n = tl.full((), 0, tl.int32)
    while n < filter.rings:
        t = _threshold(filter, n, factor, 1.0, FORM)
        if t != 0:
            level = _level(filter, n, caps, t, FORM)
            stays = (tl.arange(0, FORM.padded_rings) > n) | (caps <= level) | (caps != caps)
            caps = tl.where(stays, caps, level)
        n += 1
    return caps


@triton.jit
def _linf_penalty(sizes, caps, filter, FORM: tl.constexpr):
    """Return sum_n q_n ||x(G_n)||_inf where ring r of u, whose largest size is sizes[r], is clipped at caps[r]."""
    clipped = tl.where(sizes > caps, caps, sizes)
    largest, penalty, n = scalar(0.0), scalar(0.0), tl.full((), 0, tl.int32)
    while n < filter.rings:
        size = get(clipped, n, FORM)
        largest = tl.where((size > largest) | (size != size), size, largest)
        penalty += _weighed_by_q(filter, n, largest)
        n += 1
    return penalty


@triton.jit
def _prox_linf(filter, FORM: tl.constexpr):
    caps, sizes = fill(INFINITY, FORM), fill(0.0, FORM)
    search = search_at(scalar(0.0))
    if FORM.squared:
        sizes = ring_sizes(filter, FORM)
        search = _squared_search(_linf_penalty(sizes, caps, filter, FORM))
    while search.phase != DONE:
        caps = _solve_linf(filter, search.x, FORM)
        balance = scalar(0.0)
        if FORM.squared:
            balance = search.x - 2 * _linf_penalty(sizes, caps, filter, FORM)
        search = narrow(search, balance, FACTOR_TOLERANCE)
    ring = tl.full((), 0, tl.int32)
    while ring < filter.rings:
        write(filter, ring, get(caps, ring, FORM), "clipped", FORM)
        ring += 1


# ---- entry points


@triton.jit(do_not_specialize=["first_row", "rows"])
def norms_kernel(table, first_row, rows, FORM: tl.constexpr):
    """Compute the Euclidean norm of each ring."""
    filter = filter_of(table, first_row, rows, True, FORM)
    scale, squares = scaled_squares(filter, FORM)
    ring = tl.arange(0, FORM.padded_rings)
    result = (tl.sqrt(squares) / scale).to(FORM.arithmetic)
    tl.store(filter.out.data + ring, result, mask=ring < filter.rings)


@triton.jit(do_not_specialize=["first_row", "rows"])
def prox_kernel(table, first_row, rows, FORM: tl.constexpr):
    """Compute the prox of nested groups."""
    filter = filter_of(table, first_row, rows, False, FORM)
    if FORM.linf:
        _prox_linf(filter, FORM)
    elif FORM.metric is not None:
        _prox_metric(filter, FORM)
    else:
        _prox_l2(filter, FORM)
