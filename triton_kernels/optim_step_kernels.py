"""The kernels of the optimizer step in Triton: SGD, Adam and AdamW.

    d = gradient with its decay      l2: g + c*w      l1: g + c*sign(w)      decoupled: w <- c*w, d = g
    SGD   b = d at the first step, then mu*b + (1 - dampening)*d;  w <- w - lr*(nesterov ? d + mu*b : b)
    Adam  m <- m + (1-b1)(d - m);  v <- b2*v + (1-b2)*d*d;  w <- w - lr/(1-b1^t) * m / (sqrt(v/(1-b2^t)) + eps)

c is weight_decay times the decay map at the weight's place (l2, l1) or 1 - lr*weight_decay*map (decoupled), computed in
float64 and rounded once. Operations and their order are those of ``csrc/optim_step/math.h``: multiply-adds are fused
where ``tl.fma`` says so and nowhere else (launch with ``enable_fp_fusion=False``), quotients and roots are correctly
rounded.

``table`` is the table of ``csrc/optim_step/gpu_table.h`` in device memory, uint8; the arguments that end in ``_at`` are
the byte offsets of its sections, and ``entries``, ``nests`` and ``chunks`` below are pointers into it. An entry
describes one tensor: the addresses of its operands, of [numel] elements each, and for each operand the nest of strides
that maps the number of an element, counted in the parameter's memory order, to its offset. One program steps one chunk
of BLOCK elements of one tensor. Element numbers have 32 bits if all fit, as the walk along strides divides them;
chunks, addresses and offsets have 64.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from loco_ext.triton_kernels.load_store import load, store

from loco_ext.ops import backends

BLOCK = tl.constexpr(2048)  # elements that one program steps, as in csrc/optim_step/bind_table.cpp
OPERANDS = 5  # parameter, gradient and three states

_FIELDS = backends.library.optim_step_table_fields()  # type: ignore[union-attr]


def _field_at(name: str) -> tl.constexpr:
    return tl.constexpr(_FIELDS[name])


ENTRY_SIZE, NEST_SIZE, NEST_AXES = _field_at("entry_size"), _field_at("nest_size"), _field_at("nest_axes")
W, STATE, COUNTER, COUNTER_IS_DOUBLE = map(_field_at, ("w", "state", "counter", "counter_is_double"))
NUMEL, GROUP, ORDINAL, FIRST, NESTS = map(_field_at, ("numel", "group", "ordinal", "first", "nests"))
MAP, MAP_KIND, RUN, PERIOD = map(_field_at, ("map", "map_kind", "run", "period"))
LOGICAL_NEST, MAP_NEST = tl.constexpr(OPERANDS), tl.constexpr(OPERANDS + 1)
UNIFORM, CYCLIC = tl.constexpr(0), tl.constexpr(1)  # MapKind
SGD_COLUMNS, ADAM_COLUMNS, SCALARS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(8)


@dataclass(frozen=True)
class StepForm:
    """The compile-time constants of a kernel."""

    rule: str  # "sgd" or "adam"
    dtypes: tuple[tl.dtype | None, ...]  # dtypes of parameter, gradient and states; None if absent
    flat: bool  # element i of every operand is at its address + i
    aligned: bool  # flat, and all operands begin at a multiple of 16 bytes
    wide: bool  # element numbers have 64 bits
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
def _field(entry, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    return tl.load((entry + OFFSET).to(tl.pointer_type(TYPE)))


@triton.jit
def _walk(nest, position):
    """Return the offsets, int64, to which a nest maps the elements number ``position``."""
    axis = (nest + NEST_AXES).to(tl.pointer_type(tl.int64))  # (size, stride) of each axis
    count = tl.load(nest.to(tl.pointer_type(tl.int32)))
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
def _offsets(entry, nests, WHICH: tl.constexpr, position):
    """Return the offsets, int64, of the elements number ``position`` of an operand, whose nest may be absent."""
    number = _field(entry, NESTS + 4 * WHICH, tl.int32)
    offsets = position.to(tl.int64)
    if number >= 0:
        offsets = _walk(nests + number.to(tl.int64) * NEST_SIZE, position)
    return offsets


@triton.jit
def _addresses(entry, grad, nests, operand: tl.constexpr, start, position, FORM: tl.constexpr):
    dtype: tl.constexpr = FORM.dtypes[operand]
    stored_as: tl.constexpr = tl.uint16 if dtype == tl.bfloat16 else dtype
    if operand == 0:
        address = _field(entry, W, tl.int64)
    elif operand == 1:
        address = grad
    else:
        address = _field(entry, STATE + 8 * (operand - 2), tl.int64)
    pointer = address.to(tl.pointer_type(stored_as))
    if FORM.flat:
        if FORM.aligned:
            pointer = tl.multiple_of(pointer, 16)
        addresses = pointer + start + tl.arange(0, BLOCK)
    else:
        addresses = pointer + _offsets(entry, nests, operand, position)
    return addresses


@triton.jit
def _number(address, is_double, default):
    """Return the float32 or float64 number at an address as float64, or the default if the address is 0."""
    single = tl.load(address.to(tl.pointer_type(tl.float32)), mask=(address != 0) & ~is_double, other=0.0)
    double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=(address != 0) & is_double, other=0.0)
    return tl.where(address == 0, default, tl.where(is_double, double, single.to(tl.float64)))


@triton.jit
def _learning_rate(table, lrs_at, entry, row):
    """Return the learning rate: the one in the row of hyperparameters, or in the tensor that replaces it."""
    lr = tl.load(row)
    if lrs_at >= 0:
        scalar = (table + lrs_at).to(tl.pointer_type(tl.int64)) + 2 * _field(entry, GROUP, tl.int32)
        lr = _number(tl.load(scalar), tl.load(scalar + 1) != 0, lr)
    return lr


# ---- random words


@triton.jit
def _words(entry, nests, position, seed_low, seed_high, rounding_step):
    """Return four random words for each element: Philox4x32-10 of its index in a contiguous tensor."""
    element = _offsets(entry, nests, LOGICAL_NEST, position)
    low, high = element.to(tl.uint32), (element >> 32).to(tl.uint32)
    ordinal = low * 0 + _field(entry, ORDINAL, tl.uint32)
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
def _coefficients(entry, nests, maps, position, mask, lr, weight_decay, FORM: tl.constexpr):
    """Return the decay coefficient of each element in the compute dtype."""
    kind = _field(entry, MAP_KIND, tl.uint8)
    factors = maps + _field(entry, MAP, tl.int64)
    if kind == UNIFORM:
        c = tl.full([BLOCK], _decay(tl.load(factors), lr, weight_decay, FORM), tl.float64).to(FORM.arithmetic)
    else:
        if kind == CYCLIC:
            run, period = _field(entry, RUN, tl.int32), _field(entry, PERIOD, tl.int32)
            value = (position // run.to(position.dtype) % period.to(position.dtype)).to(tl.int64)
        else:
            value = _offsets(entry, nests, MAP_NEST, position)
        c = _decay(tl.load(factors + value, mask=mask), lr, weight_decay, FORM).to(FORM.arithmetic)
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
    entry, grad, nests, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel,
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
    position = (start if FORM.wide else start.to(tl.int32)) + tl.arange(0, BLOCK)
    mask = position < numel.to(position.dtype) if MASKED else None
    # All loads from global memory are issued first.
    w_at = _addresses(entry, grad, nests, 0, start, position, FORM)
    g_at = _addresses(entry, grad, nests, 1, start, position, FORM)
    w, g = load(w_at, mask, W, T), load(g_at, mask, G, T)
    s0, s1, s2 = w, w, w
    if S0 is not None:
        s0_at = _addresses(entry, grad, nests, 2, start, position, FORM)
        s0 = load(s0_at, mask, S0, T)
    if S1 is not None:
        s1_at = _addresses(entry, grad, nests, 3, start, position, FORM)
        s1 = load(s1_at, mask, S1, T)
    if S2 is not None:
        s2_at = _addresses(entry, grad, nests, 4, start, position, FORM)
        s2 = load(s2_at, mask, S2, T)
    weight_decay = tl.load(numbers + 1)
    decays = weight_decay != 0
    c = _coefficients(entry, nests, maps, position, mask, lr, weight_decay, FORM)
    r0, r1, r2, r3 = position, position, position, position
    if STOCHASTIC:
        r0, r1, r2, r3 = _words(entry, nests, position, seed_low, seed_high, rounding_step)
    if grad_scale is not None:
        g = _divide(g, tl.load(grad_scale).to(T))
        store(g_at, g, mask, G, None, False)
    if FORM.maximize:
        g = g * -1
    if FORM.rule == "sgd":
        w, s0 = _sgd(w, g, s0, c, decays, _field(entry, FIRST, tl.uint8) != 0, numbers, lr, FORM)
    else:
        w, s0, s1, s2 = _adam(w, g, s0, s1, s2, c, decays, numbers, FORM)
    store(w_at, w, mask, W, r0, STOCHASTIC)
    if S0 is not None:
        store(s0_at, s0, mask, S0, r1, STOCHASTIC)
    if S1 is not None:
        store(s1_at, s1, mask, S1, r2, STOCHASTIC)
    if S2 is not None:
        store(s2_at, s2, mask, S2, r3, STOCHASTIC)


_NUMBERS = (
    *("hyper_at", "lrs_at", "entries_at", "nests_at", "maps_at", "chunks_at"),
    *("seed_low", "seed_high", "rounding_step"),
)


@triton.jit(do_not_specialize=_NUMBERS)
def step_kernel(
    table,  # uint8; begins with the addresses of the gradients, int64 [entries]
    hyper_at,  # float64 [groups, columns]
    lrs_at,  # (address, whether float64), int64 [groups, 2]; address 0: none; lrs_at -1: none at all
    entries_at,  # Entry [entries]
    nests_at,  # Nest
    maps_at,  # float64
    chunks_at,  # (entry, index of the chunk within it, 1), int32 [programs, 3]
    scalars,  # float64 [entries, SCALARS], from prepare_kernel; None for SGD
    grad_scale,  # one float32 or float64, or None
    found_inf,  # read like grad_scale
    seed_low,
    seed_high,
    rounding_step,
    FORM: tl.constexpr,
):
    """Step one chunk of one tensor."""
    chunk = (table + chunks_at).to(tl.pointer_type(tl.int32)) + 3 * tl.program_id(0)
    number = tl.load(chunk).to(tl.int64)
    start = tl.load(chunk + 1).to(tl.int64) * BLOCK
    entry = table + entries_at + number * ENTRY_SIZE
    grad = tl.load((table + 8 * number).to(tl.pointer_type(tl.int64)))
    nests, maps = table + nests_at, (table + maps_at).to(tl.pointer_type(tl.float64))
    numel = _field(entry, NUMEL, tl.int64)
    if found_inf is not None:
        numel = tl.where(tl.load(found_inf) == 0, numel, 0)
    if FORM.rule == "sgd":
        numbers = (table + hyper_at).to(tl.pointer_type(tl.float64)) + _field(entry, GROUP, tl.int32) * SGD_COLUMNS
        lr = _learning_rate(table, lrs_at, entry, numbers)
    else:
        numbers = scalars + number * SCALARS
        lr = tl.load(numbers)
    # Whole blocks are loaded and stored without a mask, which would prevent vector instructions.
    if start + BLOCK <= numel:
        _step_block(
            entry, grad, nests, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel,
            False, FORM,
        )  # fmt: skip
    else:
        _step_block(
            entry, grad, nests, maps, numbers, lr, grad_scale, seed_low, seed_high, rounding_step, start, numel,
            True, FORM,
        )  # fmt: skip


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


@triton.jit(do_not_specialize=["hyper_at", "lrs_at", "entries_at"])
def prepare_kernel(
    table,  # see step_kernel
    hyper_at,
    lrs_at,
    entries_at,
    found_inf,  # one float32 or float64, or None
    scalars,  # float64 [entries, SCALARS]
):
    """Increment Adam's step count and compute the tensor's scalars: lr, weight_decay, 1 - beta1, beta2, 1 - beta2, eps,
    -lr / (1 - beta1^t) and sqrt(1 - beta2^t).
    """
    number = tl.program_id(0).to(tl.int64)
    entry = table + entries_at + number * ENTRY_SIZE
    row = (table + hyper_at).to(tl.pointer_type(tl.float64)) + _field(entry, GROUP, tl.int32) * ADAM_COLUMNS
    address, is_double = _field(entry, COUNTER, tl.int64), _field(entry, COUNTER_IS_DOUBLE, tl.uint8) != 0
    step = _number(address, is_double, 0.0) + 1
    counts = address != 0
    if found_inf is not None:
        counts = counts & (tl.load(found_inf) == 0)
    tl.store(address.to(tl.pointer_type(tl.float32)), step.to(tl.float32), mask=counts & ~is_double)
    tl.store(address.to(tl.pointer_type(tl.float64)), step, mask=counts & is_double)
    lr = _learning_rate(table, lrs_at, entry, row)
    beta1, beta2 = tl.load(row + 2), tl.load(row + 3)
    out = scalars + number * SCALARS
    tl.store(out, lr)
    tl.store(out + 1, tl.load(row + 1))
    tl.store(out + 2, 1 - beta1)
    tl.store(out + 3, beta2)
    tl.store(out + 4, 1 - beta2)
    tl.store(out + 5, tl.load(row + 4))
    tl.store(out + 6, lr / (1 - _power(beta1, step.to(tl.int64))) * -1)
    tl.store(out + 7, tl.sqrt(1 - _power(beta2, step.to(tl.int64))))
