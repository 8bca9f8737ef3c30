"""Search for the root of an increasing function in Triton; the caller evaluates the function.

    search = search_above(...)
    while search.phase != DONE:
        ... f at search.x
        search = narrow(search, f, tolerance)

Thus a function of many instructions occurs once in a kernel. The search asks for the root last, so that whatever the
caller has computed there is the answer.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# The root is beyond x; or it is between two ends; or it is x, which has not been evaluated; or it has been evaluated.
BEYOND, BETWEEN, LAST, DONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MOST_STEPS = tl.constexpr(200)
INFINITY = tl.constexpr(float("inf"))


class Search(NamedTuple):
    """State of a search: float64 scalars, except the phase and the steps, which are int32."""

    phase: tl.tensor
    x: tl.tensor  # the next point at which f is evaluated
    x1: tl.tensor  # the end found last, or the last point where f was negative
    f1: tl.tensor
    x2: tl.tensor  # the other end
    f2: tl.tensor
    steps: tl.tensor


@triton.jit
def search_above(lower, f_lower, upper, known):
    """Start a search for a root that is at least ``lower`` and usually at most ``upper``; known: it is ``upper``."""
    phase = tl.where(known, LAST, BEYOND).to(tl.int32)
    return Search(phase, upper, upper, f_lower, lower, f_lower, tl.full((), 0, tl.int32))


@triton.jit
def search_at(x):
    """Start a search for a root that is known."""
    return search_above(x, x, x, x == x)


@triton.jit
def narrow(search, f, tolerance: tl.constexpr):
    """Return the next state of the search, given f at ``search.x``.

    It doubles x until f is positive, then bisects, or takes inverse quadratic interpolation if that is safe
    (Chandrupatla 1997).
    """
    x, x1, f1, x2, f2 = search.x, search.x1, search.f1, search.x2, search.f2
    begins = search.phase == BEYOND
    doubles = begins & (f < 0) & (x < INFINITY)
    crosses = (begins == 0) & ((f > 0) != (f1 > 0))
    x3, f3 = tl.where(crosses, x2, x1), tl.where(crosses, f2, f1)
    x2, f2 = tl.where(crosses, x1, x2), tl.where(crosses, f1, f2)
    x2, f2 = tl.where(doubles, x, x2), tl.where(doubles, f, f2)
    x1, f1 = x, f
    best = tl.where(tl.abs(f2) < tl.abs(f1), x2, x1)
    least = tolerance * tl.abs(best) / tl.abs(x2 - x1)
    xi, phi = (x1 - x2) / (x3 - x2), (f1 - f2) / (f3 - f2)
    part = f1 / (f2 - f1) * (f3 / (f2 - f3)) + (x3 - x1) / (x2 - x1) * (f1 / (f3 - f1)) * (f2 / (f3 - f2))
    safe = (begins == 0) & (phi * phi < xi) & ((1 - phi) * (1 - phi) < 1 - xi)
    part = tl.where(safe, part, 0.5)
    part = tl.where(part < least, least, tl.where(part > 1 - least, 1 - least, part))
    exact = (f == 0) | (f != f)
    found = (doubles == 0) & (exact | ((least <= 0.5) == 0) | (search.steps >= MOST_STEPS))
    following = tl.where(doubles, 2 * x, x1 + part * (x2 - x1))
    following = tl.where(found, tl.where(exact, x, best), following)
    phase = tl.where(found, LAST, tl.where(doubles, BEYOND, BETWEEN))
    phase = tl.where(search.phase == LAST, DONE, phase).to(tl.int32)
    return Search(phase, following, x1, f1, x2, f2, search.steps + 1)
