"""Tolerances of all tests.

Errors are measured in units of the last place (ulp) of the result's dtype, at the magnitude of the largest number in
the computation: a sum may cancel, but the rounding errors of its terms do not.
"""

import torch
from torch import Tensor

# Distance of a result from exact arithmetic on the same input: one rounding when half precision is stored, and the
# roundings of an update rule's operations in float32 and float64.
ULPS = {torch.float64: 8, torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}
# Distance between the kernels and the reference in float64, where the reference rounds multiply-adds twice.
ULPS_OF_TWO_ROUNDINGS = 2
# Distance between our step and torch.optim's for-loop with a correctly rounded square root.
ULPS_OF_TORCHS_LOOP = 2
# Difference between ONNX Runtime and torch in float32, for outputs of magnitude 1.
ONNX = 1e-5
# A mean of n random numbers lies farther than this many standard errors from its expectation once in 16,000 runs.
STANDARD_ERRORS = 4.0

# Difference between a convolution and the locally connected layer made from it, or back: they sum in other orders.
WITH_CONVOLUTIONS = {torch.float32: 1e-5, torch.float64: 1e-12}

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bits; -0 differs from 0, and all NaNs are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = _BITS[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_within_ulps(actual: Tensor, expected: Tensor, ulps: int | None = None, scale: float | Tensor = 0.0) -> None:
    """Assert that ``actual`` is within ``ulps`` (by default the table's) of ``expected``, which may be more precise.

    ``scale``: the largest number in the computation, where it exceeds the expected element itself.
    """
    if ulps is None:
        ulps = ULPS[actual.dtype]
    actual64, expected64 = actual.double(), expected.double()
    size = expected64.abs().maximum(torch.as_tensor(scale).double()).clamp(min=torch.finfo(actual.dtype).tiny)
    error = (actual64 - expected64).abs() / (size * torch.finfo(actual.dtype).eps)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= ulps, f"{worst:.3g} ulp off, {ulps} allowed"


# Tolerances of the prox of nested rings, in units of the filter's largest weight. It is compared with SPAMS, whose
# arithmetic differs only in its order; with SPAMS for results in float32; with proximal gradient steps until nothing
# changes, whose errors the condition number of the metric amplifies; and with interior points.
BY_SPAMS = 1e-12
BY_SPAMS_FLOAT32 = 2.0**-22
BY_PROXIMAL_GRADIENT = 1e-10
BY_INTERIOR_POINTS = 1e-6
# Distance between the roots that kernels and reference find in different ways, in ulp of the filter's largest weight.
ULPS_OF_ROOTS = {torch.float64: 2**12, torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}
# Residuals of the optimality conditions at solutions that are exact but for rounding.
RESIDUAL = {torch.float64: 1e-12, torch.float32: 1e-5}


def largest_of_kernels(weight: Tensor) -> Tensor:
    """Return the largest magnitude in each filter, ``weight[o]``, as float64 that broadcasts with ``weight``."""
    return weight.detach().double().abs().amax(tuple(range(1, weight.dim())), keepdim=True)


def assert_near_by_kernel(actual: Tensor, expected: Tensor, weight: Tensor, tolerance: float) -> None:
    """Assert that no weight differs by more than the tolerance times the largest of its filter in ``weight``."""
    error = (actual.double() - expected.double()).abs() / largest_of_kernels(weight).clamp(min=1e-300)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance, f"{worst:.3g} of a filter's largest weight off, {tolerance:.3g} allowed"


# Relative error of a float32 number converted to TF32, whose fractions have 10 bits.
TF32 = 2.0**-10


def assert_sum_of_products(actual: Tensor, expected: Tensor, sizes: Tensor, cut: float = 0.0) -> None:
    """Assert that sums of products differ from the exact ones, ``expected``, only by rounding errors.

    The sums round in their own dtype, but at least float32, and once more where the result is stored in half precision.

    ``sizes``: the sums of the terms' magnitudes, to which the summation's errors are relative. ``cut``: the relative
    error of each factor before it is multiplied.
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


# Relative difference between the objective that an optimizer's steps reach and that of coordinate descent.
EQ_34_OBJECTIVE = 1e-4

# Difference of folded kernels from the minimum of loss and penalty, after steps that have almost converged. Running
# variances are unbiased, so they are larger by 1 / samples than the variances that normalise a batch.
STATIONARY = 1e-3

# Difference of filtered or displaced pixels, whose values are in [0, 1], from the same in float64.
RESAMPLED = 1e-6
# Difference from another implementation of JPEG, which rounds a transform's coefficients differently now and then, as a
# share of what the compression changes.
OF_THE_LOSS = 0.35

# Radii of linear regions in float64 against one backward pass per unit, and in float32 against float64; norms of
# gradients against the same; a search for the boundary by bisection; squares of small float32 numbers.
REGIONS = {"rtol": 1e-10, "atol": 1e-13}
FLOAT32_RADIUS = 1e-3
BOUNDARY_SEARCH = 1e-6
SMALL_GRADIENTS = 1e-5
# Gradients of losses over regions against double backward passes.
REGION_LOSSES = {"rtol": 1e-9, "atol": 1e-12}
