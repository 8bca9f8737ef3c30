"""Conversion of a parameter group's ``locality`` to one decay map per parameter."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from loco_ext import geometry
from loco_ext.geometry.attached_pattern import pattern_of

# (gamma, eta), or one factor per distance class, nearest first.
Factors: TypeAlias = tuple[float, ...]
Locality: TypeAlias = Factors | Sequence[Factors | None] | None

LARGEST_GUESSED_KERNEL = 15


def as_tuples(locality: Any) -> Any:
    """Return a locality with the tuples that JSON and distributed checkpoints have turned into lists."""
    if not isinstance(locality, list):
        return locality
    if locality and all(isinstance(factor, Real) for factor in locality):
        return tuple(locality)
    return [tuple(entry) if isinstance(entry, list) else entry for entry in locality]


def entries_of(name: str, option: Any, params: Sequence[Tensor], check: Callable[[str, object], None]) -> list[Any]:
    """Return a group's option for each parameter: the entry of a list, else the option itself or None.

    An option that is no list applies to the parameters that look like convolution weights.

    Raises:
        TypeError, ValueError: the list has another length, or ``check(name, entry)`` raises.
    """
    if option is None:
        return [None] * len(params)  # which may be lazy parameters, without a shape
    if not isinstance(option, list):
        check(name, option)
        return [option if looks_like_convolution(param) else None for param in params]
    if len(option) != len(params):
        raise ValueError(f"{name}: expected a list of {len(params)} entries, one per parameter, got {len(option)}")
    for i, entry in enumerate(option):
        check(f"{name}[{i}]", entry)
    return option


def check_factors(name: str, factors: object) -> None:
    """Raise TypeError or ValueError unless ``factors`` are the factors of one parameter, or None."""
    if factors is None:
        return
    if not isinstance(factors, tuple) or not all(isinstance(f, Real) and not isinstance(f, bool) for f in factors):
        raise TypeError(
            f"{name}: expected None or a tuple of numbers, (gamma, eta) or one per distance class, got {factors!r}"
        )
    if len(factors) == 0 or not all(math.isfinite(f) and f >= 0 for f in factors):
        raise ValueError(f"{name}: expected finite factors of at least 0, got {factors!r}")


def decay_maps(params: Sequence[Tensor], locality: Locality) -> list[Tensor | None]:
    """Return one float64 decay map per parameter, or None for uniform decay; equal kernels share a map.

    A tuple applies to the parameters that look like convolution weights: 3 to 5 dimensions, odd spatial sizes up to 15,
    more than one tap; and to the blocks of locally connected layers. A list names each parameter's factors, so that any
    kernel may have a map. Kernels of an even size have no centre and stay uniform.

    Raises:
        TypeError, ValueError: ``locality`` does not suit these parameters.
    """
    shared: dict[tuple[tuple[int, ...], Factors], Tensor] = {}

    def map_of(param: Tensor, factors: Factors | None) -> Tensor | None:
        # Factors of 1 mean exactly uniform decay.
        if factors is None or set(factors) == {1} or has_even_kernel(param):
            return None
        if (pattern := pattern_of(param)) is not None:
            return geometry.block_decay_map(pattern, factors).view(-1, 1, 1, 1) if pattern.nnz else None
        kernel = tuple(param.shape[2:])
        if math.prod(kernel) == 1:
            return None
        if (kernel, factors) not in shared:
            shared[kernel, factors] = geometry.decay_map(kernel, factors)
        return shared[kernel, factors]

    maps = []
    for i, (param, factors) in enumerate(zip(params, _entries(params, locality), strict=True)):
        try:
            maps.append(map_of(param, factors))
        except ValueError as error:
            raise ValueError(f"locality of parameter {i}: {error}") from None
    return maps


def even_kernels(params: Sequence[Tensor], locality: Locality) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters that ``locality`` addresses but cannot act on, as their kernels are even."""
    entries = zip(params, _entries(params, locality), strict=True)
    return [tuple(param.shape) for param, factors in entries if factors is not None and has_even_kernel(param)]


def has_even_kernel(param: Tensor) -> bool:
    """Return whether the kernel has no centre tap, because one of its sizes is even."""
    return any(size % 2 == 0 for size in _kernel_size(param))


def _kernel_size(param: Tensor) -> tuple[int, ...]:
    pattern = pattern_of(param)
    return tuple(param.shape[2:]) if pattern is None or pattern.conv is None else pattern.conv.kernel_size


def _entries(params: Sequence[Tensor], locality: Locality) -> list[Factors | None]:
    entries = entries_of("locality", locality, params, check_factors)
    for i, (param, factors) in enumerate(zip(params, entries, strict=True)):
        if factors is not None and not 3 <= param.dim() <= 5:
            raise ValueError(
                f"locality[{i}]: expected None for a parameter that is no convolution weight (3 to 5 dimensions), "
                f"got {factors!r} for shape {tuple(param.shape)}"
            )
    return entries


def looks_like_convolution(param: Tensor) -> bool:
    """Return whether a parameter counts as a convolution weight judging by its shape; even kernel sizes count too."""
    if pattern_of(param) is not None:
        return True
    if not 3 <= param.dim() <= 5:
        return False
    kernel = param.shape[2:]
    return max(kernel) <= LARGEST_GUESSED_KERNEL and math.prod(kernel) > 1
