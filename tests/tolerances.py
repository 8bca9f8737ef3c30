"""The tolerances of all tests, in one place.

Everything is measured in units of the last place (ulp) of the result's dtype, at the size of the largest number that
took part: a sum may cancel, the rounding errors of its terms do not.
"""

import torch
from torch import Tensor

# Roundings that separate a result from exact arithmetic on the same input: one when half precision is stored, those of
# an update rule's operations in float32 and float64.
ULPS = {torch.float64: 8, torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}
# Between the kernels and the reference in float64, whose multiply-adds the reference rounds twice.
ULPS_OF_TWO_ROUNDINGS = 2
# Between our step and torch.optim's for-loop with a correctly rounded square root.
ULPS_OF_TORCHS_LOOP = 2
# The same with the for-loop's own float32 square root, which may be off by one, which four more roundings follow.
ULPS_OF_TORCHS_SQRT = 3
# Between ONNX Runtime and torch in float32, for outputs of size 1.
ONNX = 1e-5
# A mean of n random numbers lies farther than this many standard errors from its expectation once in 16,000 runs.
STANDARD_ERRORS = 4.0

# Between a convolution and the layer of own weights that it is turned into, and back, whose sums run in other orders.
WITH_CONVOLUTIONS = {torch.float32: 1e-5, torch.float64: 1e-12}

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, -0 and 0 told apart; any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = _BITS[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_within_ulps(actual: Tensor, expected: Tensor, ulps: int | None = None, scale: float | Tensor = 0.0) -> None:
    """Asserts that ``actual`` is within ``ulps`` (by default the table's) of ``expected``, which may be more precise.

    ``scale``: the largest number that took part, where that is neither in the element nor in its expectation.
    """
    if ulps is None:
        ulps = ULPS[actual.dtype]
    actual64, expected64 = actual.double(), expected.double()
    size = expected64.abs().maximum(torch.as_tensor(scale).double()).clamp(min=torch.finfo(actual.dtype).tiny)
    error = (actual64 - expected64).abs() / (size * torch.finfo(actual.dtype).eps)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= ulps, f"{worst:.3g} ulp off, {ulps} allowed"


# Of the prox of nested rings, in units of its kernel's largest weight: against SPAMS, whose arithmetic is the same but
# for its order; the same for results in float32; proximal gradient steps until nothing changes, amplified by the
# condition number of the metric; and interior points.
BY_SPAMS = 1e-12
BY_SPAMS_FLOAT32 = 2.0**-22
BY_PROXIMAL_GRADIENT = 1e-10
BY_INTERIOR_POINTS = 1e-6
# Between two ways to the same root, kernels and reference, in ulp of the kernel's largest weight.
ULPS_OF_ROOTS = {torch.float64: 2**12, torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}
# Residuals of the conditions of optimality: the rounding of what is exact but for it.
RESIDUAL = {torch.float64: 1e-12, torch.float32: 1e-5}


def largest_of_kernels(weight: Tensor) -> Tensor:
    """The largest size in each kernel, ``weight[o]``, of a shape that broadcasts with ``weight``."""
    return weight.detach().double().abs().amax(tuple(range(1, weight.dim())), keepdim=True)


def assert_near_by_kernel(actual: Tensor, expected: Tensor, weight: Tensor, tolerance: float) -> None:
    """Asserts that no weight differs by more than the tolerance times the largest of its kernel in ``weight``."""
    error = (actual.double() - expected.double()).abs() / largest_of_kernels(weight).clamp(min=1e-300)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance, f"{worst:.3g} of a kernel's largest weight off, {tolerance:.3g} allowed"


# What a float32 number loses when it becomes one of TF32, whose fractions have 10 bits.
TF32 = 2.0**-10


def assert_sum_of_products(actual: Tensor, expected: Tensor, sizes: Tensor, cut: float = 0.0) -> None:
    """Asserts that sums of products differ from the exact ones, ``expected``, by roundings in their own type, which is
    at least float32, and by one more where the result is stored in half precision.

    ``sizes``: the sums of the terms' sizes, in which the first are measured. ``cut``: what each factor loses first.
    """
    half = actual.dtype in (torch.bfloat16, torch.float16)
    summed_in = torch.float32 if half else actual.dtype
    allowed = (ULPS[summed_in] * torch.finfo(summed_in).eps + 2 * cut + cut**2) * sizes
    if half:
        kept = torch.finfo(actual.dtype)
        allowed = allowed + (expected.abs() + allowed) * kept.eps / 2 + kept.smallest_normal * kept.eps / 2
    excess = ((actual.double() - expected).abs() - allowed).nan_to_num(nan=torch.inf)
    worst = excess.max().item() if excess.numel() else 0.0
    assert worst <= 0, f"{worst:.3g} more than rounding allows"


# Between the objective that an optimizer's steps reach and that of coordinate descent, relative.
EQ_34_OBJECTIVE = 1e-4

# Of folded kernels against the minimum of loss and penalty, after steps that have all but ended; running variances are
# those of a sample, 1 / samples larger than what a batch is divided by.
STATIONARY = 1e-3
