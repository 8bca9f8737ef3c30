"""Loads and stores of all dtypes in Triton.

bfloat16 is represented by its bits; every conversion rounds to nearest even and keeps NaN and infinity.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(addresses, mask, dtype: tl.constexpr, T: tl.constexpr):
    """Load numbers of a dtype and return them as T; pointers to bfloat16 must be to uint16."""
    value = tl.load(addresses, mask=mask)
    if dtype == tl.bfloat16:
        value = (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(T)


@triton.jit
def _bf16_bits(value, random, STOCHASTIC: tl.constexpr):
    """Return float32 as bfloat16 bits; STOCHASTIC: up with a probability equal to the part cut off (infinity: 0)."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = bits + (random & 0xFFFF) if STOCHASTIC else bits + 0x7FFF + ((bits >> 16) & 1)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return (tl.where(is_nan, bits | 0x400000, rounded) >> 16).to(tl.uint16)


@triton.jit
def store(addresses, value, mask, dtype: tl.constexpr, random, STOCHASTIC: tl.constexpr):
    """Store a value; STOCHASTIC: bfloat16 is rounded by the bits of ``random``, which else may be None."""
    if dtype == tl.bfloat16:
        tl.store(addresses, _bf16_bits(value.to(tl.float32), random, STOCHASTIC), mask=mask)
    elif dtype == tl.float16:
        tl.store(addresses, value.to(tl.float32).to(tl.float16), mask=mask)
    else:
        tl.store(addresses, value.to(dtype), mask=mask)
