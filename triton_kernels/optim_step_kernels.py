"""The kernels of the optimizer step in Triton: SGD, Adam and AdamW.

    d = gradient with its decay      l2: g + c*w      l1: g + c*sign(w)      decoupled: w <- c*w, d = g
    SGD   b = d at the first step, then mu*b + (1 - dampening)*d;  w <- w - lr*(nesterov ? d + mu*b : b)
    Adam  m <- m + (1-b1)(d - m);  v <- b2*v + (1-b2)*d*d;  w <- w - lr/(1-b1^t) * m / (sqrt(v/(1-b2^t)) + eps)

c is weight_decay times the decay map at the weight's place (l2, l1) or 1 - lr*weight_decay*map (decoupled), computed in
float64 and rounded once. Operations and their order are those of ``csrc/optim_step/math.h``: multiply-adds are fused
where ``tl.fma`` says so and nowhere else (launch with ``enable_fp_fusion=False``), quotients and roots are correctly
rounded.

One program steps one block of elements of one tensor, which it finds in the tables of
:mod:`loco_ext.triton_kernels.optim_step_tables`. Element indices have 32 bits if all fit, as the walk along strides
divides them; chunks, addresses and offsets have 64.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from loco_ext.triton_kernels.conversions import load, store
from loco_ext.triton_kernels.optim_step_tables import KINDS, OPERANDS, ROW


def _column(name: str) -> tl.constexpr:
    return tl.constexpr(ROW.fields[name][1] // 8)


COLUMNS = tl.constexpr(ROW.itemsize // 8)
NUMEL, FIRST_CHUNK, GROUP = _column("numel"), _column("first_chunk"), _column("group")
LR, LR_KIND, STEP, STEP_KIND = _column("lr"), _column("lr_kind"), _column("step"), _column("step_kind")
FIRST, ORDINAL, MAP = _column("first"), _column("ordinal"), _column("map")
POINTERS, NESTS = _column("pointers"), _column("nests")
LOGICAL_NEST, MAP_NEST = tl.constexpr(OPERANDS), tl.constexpr(OPERANDS + 1)
SINGLE, DOUBLE = tl.constexpr(KINDS[torch.float32]), tl.constexpr(KINDS[torch.float64])
SGD_COLUMNS, ADAM_COLUMNS, SCALARS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(8)


@dataclass(frozen=True)
class Form:
    """The compile-time constants of a kernel; ``flat``, ``aligned`` and ``wide`` as in ``optim_step_tables.Kind``."""

    rule: str  # "sgd" or "adam"
    dtypes: tuple[tl.dtype | None, ...]  # of parameter, gradient and states; None if absent
    flat: bool
    aligned: bool
    wide: bool
    block: int
    maximize: bool
    l1: bool
    nesterov: bool = False
    amsgrad: bool = False
    decoupled: bool = False
    stochastic: bool = False

    @property
    def arithmetic(self) -> tl.dtype:
        return tl.float64 if self.dtypes[0] == tl.float64 else tl.float32


# ---- addresses


@triton.jit
def _walk(axes, nest, position):
    """Return the offsets of the elements number ``position`` from an operand's first; nest: (index, count) of axes."""
    axis = axes + 2 * tl.load(nest)
    count = tl.load(nest + 1)
    offset = position.to(tl.int64) * 0
    rest = position
    while count > 1:
        outer = rest // tl.load(axis).to(position.dtype)
        inner = rest - outer * tl.load(axis).to(position.dtype)
        offset += inner.to(tl.int64) * tl.load(axis + 1)
        rest = outer
        axis += 2
        count -= 1
    return offset + rest.to(tl.int64) * tl.load(axis + 1)


@triton.jit
def _addresses(row, axes, operand: tl.constexpr, start, position, FORM: tl.constexpr):
    dtype: tl.constexpr = FORM.dtypes[operand]
    held_as: tl.constexpr = tl.uint16 if dtype == tl.bfloat16 else dtype
    pointer = tl.load(row + POINTERS + operand).to(tl.pointer_type(held_as))
    if FORM.flat:
        if FORM.aligned:
            pointer = tl.multiple_of(pointer, 16)
        addresses = pointer + start + tl.arange(0, FORM.block)
    else:
        addresses = pointer + _walk(axes, row + NESTS + 2 * operand, position)
    return addresses


@triton.jit
def _number(address, kind, default):
    """Return the float32 or float64 number at an address as float64, or the default if there is none."""
    single = tl.load(address.to(tl.pointer_type(tl.float32)), mask=kind == SINGLE, other=0.0).to(tl.float64)
    double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=kind == DOUBLE, other=0.0)
    return tl.where(kind == DOUBLE, double, tl.where(kind == SINGLE, single, default))


# ---- random words


@triton.jit
def _words(row, axes, position, seed_low, seed_high, rounding_step):
    """Return four random words for each element: Philox4x32-10 of its index in a contiguous tensor."""
    element = _walk(axes, row + NESTS + 2 * LOGICAL_NEST, position)
    low, high = element.to(tl.uint32), (element >> 32).to(tl.uint32)
    ordinal = low * 0 + tl.load(row + ORDINAL).to(tl.uint32)
    step = low * 0 + rounding_step.to(tl.uint32, bitcast=True)
    key_low, key_high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    return tl.philox_impl(low, high, ordinal, step, key_low, key_high)


# ---- the rules, for one block of elements in the compute dtype T


@triton.jit
def _divide(a, b):
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def _sqrt(a):
    return tl.sqrt(a) if a.dtype == tl.float64 else tl.sqrt_rn(a)


@triton.jit
def _decay(factor, lr, weight_decay, FORM: tl.constexpr):
    """Return the decay coefficient, float64, for a factor of the map."""
    return 1 - lr * weight_decay * factor if FORM.decoupled else weight_decay * factor


@triton.jit
def _coefficients(row, axes, maps, position, mask, lr, weight_decay, FORM: tl.constexpr):
    """Return the decay coefficient of each element in the compute dtype."""
    place = tl.load(row + MAP)
    if place >= 0:
        factors = tl.load(maps + place + _walk(axes, row + NESTS + 2 * MAP_NEST, position), mask=mask)
        c = _decay(factors, lr, weight_decay, FORM).to(FORM.arithmetic)
    else:
        c = tl.full([FORM.block], _decay(1, lr, weight_decay, FORM), tl.float64).to(FORM.arithmetic)
    return c


@triton.jit
def _decayed(w, g, c, decays, L1: tl.constexpr):
    """Return the gradient with its decay; without decay it stays as it is, even if the weight is infinite."""
    by = (w > 0).to(w.dtype) - (w < 0).to(w.dtype) if L1 else w
    return tl.where(decays, tl.fma(c, by, g), g)


@triton.jit
def _sgd(w, g, buffer, c, decays, first, numbers, lr, FORM: tl.constexpr):
    """Return parameter and momentum buffer after the step; numbers: the group's hyperparameters, float64."""
    T: tl.constexpr = w.dtype
    momentum = tl.load(numbers + 2).to(T)
    undamped = (1 - tl.load(numbers + 3)).to(T)
    d = _decayed(w, g, c, decays, FORM.l1)
    b = d
    if FORM.dtypes[2] is not None:
        b = tl.where(first, d, tl.fma(undamped, d, buffer * momentum))
        d = tl.fma(momentum, b, d) if FORM.nesterov else b
    return tl.fma(lr.to(T) * -1, d, w), b


@triton.jit
def _adam(w, g, m, v, largest, c, decays, numbers, FORM: tl.constexpr):
    """Return parameter, moments and largest v after the step; numbers: float64, from ``prepare_kernel``."""
    T: tl.constexpr = w.dtype
    beta2, one_minus_beta2 = tl.load(numbers + 3).to(T), tl.load(numbers + 4).to(T)
    eps, negative_step_size = tl.load(numbers + 5).to(T), tl.load(numbers + 6).to(T)
    root_of_correction2 = tl.load(numbers + 7).to(T)
    from_end = tl.load(numbers + 2) >= 0.5  # torch.lerp's second form
    weight = tl.load(numbers + 2).to(T)
    weight = tl.where(from_end, weight - 1, weight)
    if FORM.decoupled:
        w = tl.where(decays, w * c, w)
        d = g
    else:
        d = _decayed(w, g, c, decays, FORM.l1)
    m = tl.fma(weight, d - m, tl.where(from_end, d, m))
    v = tl.fma(one_minus_beta2 * d, d, v * beta2)
    second = v
    if FORM.amsgrad:
        second = tl.where((v > largest) | (v != v), v, largest)  # NaN wins, as in torch.maximum
    denominator = _divide(_sqrt(second), root_of_correction2) + eps
    return w + _divide(negative_step_size * m, denominator), m, v, second


# ---- kernels


@triton.jit
def _step_block(
    row, axes, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel,
    MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Step the elements start .. start + block - 1 of a tensor; MASKED: only those below numel."""
    W: tl.constexpr = FORM.dtypes[0]
    G: tl.constexpr = FORM.dtypes[1]
    S0: tl.constexpr = FORM.dtypes[2]
    S1: tl.constexpr = FORM.dtypes[3]
    S2: tl.constexpr = FORM.dtypes[4]
    T: tl.constexpr = FORM.arithmetic
    STOCHASTIC: tl.constexpr = FORM.stochastic
    position = (start if FORM.wide else start.to(tl.int32)) + tl.arange(0, FORM.block)
    mask = position < numel.to(position.dtype) if MASKED else None
    # All loads from global memory are issued first.
    w_at = _addresses(row, axes, 0, start, position, FORM)
    g_at = _addresses(row, axes, 1, start, position, FORM)
    w, g = load(w_at, mask, W, T), load(g_at, mask, G, T)
    s0, s1, s2 = w, w, w
    if S0 is not None:
        s0_at = _addresses(row, axes, 2, start, position, FORM)
        s0 = load(s0_at, mask, S0, T)
    if S1 is not None:
        s1_at = _addresses(row, axes, 3, start, position, FORM)
        s1 = load(s1_at, mask, S1, T)
    if S2 is not None:
        s2_at = _addresses(row, axes, 4, start, position, FORM)
        s2 = load(s2_at, mask, S2, T)
    weight_decay = tl.load(numbers + 1)
    decays = weight_decay != 0
    c = _coefficients(row, axes, maps, position, mask, lr, weight_decay, FORM)
    r0, r1, r2, r3 = position, position, position, position
    if STOCHASTIC:
        r0, r1, r2, r3 = _words(row, axes, position, seed_low, seed_high, rounding_step)
    if grad_scale is not None:
        g = _divide(g, tl.load(grad_scale).to(T))
        store(g_at, g, mask, G, None, False)
    if FORM.maximize:
        g = g * -1
    if FORM.rule == "sgd":
        w, s0 = _sgd(w, g, s0, c, decays, tl.load(row + FIRST) != 0, numbers, lr, FORM)
    else:
        w, s0, s1, s2 = _adam(w, g, s0, s1, s2, c, decays, numbers, FORM)
    store(w_at, w, mask, W, r0, STOCHASTIC)
    if S0 is not None:
        store(s0_at, s0, mask, S0, r1, STOCHASTIC)
    if S1 is not None:
        store(s1_at, s1, mask, S1, r2, STOCHASTIC)
    if S2 is not None:
        store(s2_at, s2, mask, S2, r3, STOCHASTIC)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "rounding_step"])
def step_kernel(
    rows,  # int64, [tensors, COLUMNS]
    axes,  # int64, [axes, 2]
    owners,  # int32, [programs]
    maps,  # float64
    hyper,  # float64, [groups, SGD_COLUMNS]; for Adam [tensors, SCALARS]
    grad_scale,  # one float32 or float64, or None
    found_inf,  # like grad_scale
    seed_low,
    seed_high,
    rounding_step,
    FORM: tl.constexpr,
):
    """Step one block of one tensor."""
    tensor = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = rows + tensor * COLUMNS
    start = (tl.program_id(0) - tl.load(row + FIRST_CHUNK)) * FORM.block
    numel = tl.load(row + NUMEL)
    if found_inf is not None:
        numel = tl.where(tl.load(found_inf) == 0, numel, 0)
    if FORM.rule == "sgd":
        numbers = hyper + tl.load(row + GROUP) * SGD_COLUMNS
        lr = _number(tl.load(row + LR), tl.load(row + LR_KIND), tl.load(numbers))
    else:
        numbers = hyper + tensor * SCALARS
        lr = tl.load(numbers)
    # Whole blocks are loaded and stored without a mask, which would prevent vector instructions.
    if start + FORM.block <= numel:
        _step_block(
            row, axes, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel, False, FORM
        )
    else:
        _step_block(
            row, axes, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel, True, FORM
        )


@triton.jit
def _split(a):
    """Split a into two numbers of half as many digits each, whose sum is a (Veltkamp)."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


@triton.jit
def _product(a, a_rest, b, b_rest):
    """Return (a + a_rest) * (b + b_rest) as such a sum, to about 100 bits; the error of a*b is Dekker's."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    product = a * b
    rest = a_high * b_high - product + a_high * b_low + a_low * b_high + a_low * b_low
    rest = rest + (a * b_rest + a_rest * b)
    total = product + rest
    return total, rest - (total - product)


@triton.jit
def _power(base, exponent):
    """Return base**exponent, float64, for 0 <= base <= 1 and a whole exponent, rounded once from about 100 bits."""
    power, power_rest = tl.full((), 1.0, tl.float64), tl.full((), 0.0, tl.float64)
    factor, factor_rest = base, base * 0
    while exponent > 0:
        if (exponent & 1) == 1:
            power, power_rest = _product(power, power_rest, factor, factor_rest)
        factor, factor_rest = _product(factor, factor_rest, factor, factor_rest)
        exponent = exponent >> 1
    return power


@triton.jit
def prepare_kernel(
    rows,  # int64, [tensors, COLUMNS]
    hyper,  # float64, [groups, ADAM_COLUMNS]
    found_inf,  # one float32 or float64, or None
    scalars,  # float64, [tensors, SCALARS]
):
    """Increment Adam's step count and compute the tensor's scalars: lr, weight_decay, 1 - beta1, beta2, 1 - beta2, eps,
    -lr / (1 - beta1^t) and sqrt(1 - beta2^t).
    """
    tensor = tl.program_id(0).to(tl.int64)
    row = rows + tensor * COLUMNS
    numbers = hyper + tl.load(row + GROUP) * ADAM_COLUMNS
    address, kind = tl.load(row + STEP), tl.load(row + STEP_KIND)
    step = _number(address, kind, 0.0) + 1
    if found_inf is not None:
        kind = tl.where(tl.load(found_inf) == 0, kind, 0)
    tl.store(address.to(tl.pointer_type(tl.float32)), step.to(tl.float32), mask=kind == SINGLE)
    tl.store(address.to(tl.pointer_type(tl.float64)), step, mask=kind == DOUBLE)
    lr = _number(tl.load(row + LR), tl.load(row + LR_KIND), tl.load(numbers))
    beta1, beta2 = tl.load(numbers + 2), tl.load(numbers + 3)
    out = scalars + tensor * SCALARS
    tl.store(out, lr)
    tl.store(out + 1, tl.load(numbers + 1))
    tl.store(out + 2, 1 - beta1)
    tl.store(out + 3, beta2)
    tl.store(out + 4, 1 - beta2)
    tl.store(out + 5, tl.load(numbers + 4))
    tl.store(out + 6, lr / (1 - _power(beta1, step.to(tl.int64))) * -1)
    tl.store(out + 7, tl.sqrt(1 - _power(beta2, step.to(tl.int64))))
