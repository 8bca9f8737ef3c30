"""The taps of a convolution kernel: distances from its centre, decay maps and rings. Weights are not involved.

A kernel size is an int ``n`` (a 1-d kernel of ``n`` taps) or a sequence of one to three ints, for 1-d, 2-d and 3-d
kernels. All results are CPU tensors of the kernel's shape. Stride and dilation do not matter: distances are in taps.

Sources: LOCO-REG is Schneider, "Locality-Promoting Representation Learning" (2022); the rings are those of the draft
"Optimal Convolutional Architectures Via Structured Sparsity Regularizers".
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loco_ext.argument_checks import check_choice, check_ints, check_number

KernelSize = int | Sequence[int]
KINDS = ("half", "full")  # of rings
FIRST = ("auto", "top_left", "bottom_right")  # ends that the outermost half ring may take


def tap_distances(kernel_size: KernelSize, center: str | None = None) -> Tensor:
    """Return the Euclidean distance of every tap from the centre of the kernel, in tap units.

    Args:
        kernel_size: int or one to three ints, each at least 1.
        center: None measures from the centre tap, which only odd sizes have; "midpoint" measures from the middle of the
            kernel, which every size has and which is the centre tap for odd sizes.

    Returns:
        float64 tensor of shape ``kernel_size``.

    Raises:
        TypeError: ``kernel_size`` is not made of ints.
        ValueError: a size below 1, not one to three of them, an unknown ``center``, or an even size without a midpoint.

    >>> tap_distances(5).tolist()
    [2.0, 1.0, 0.0, 1.0, 2.0]
    """
    squares = _doubled_squares(kernel_size, center)
    # torch's square root is off by a bit on some CPUs; distances must be the same everywhere.
    return torch.tensor([math.sqrt(n) / 2 for n in squares.flatten().tolist()], dtype=torch.double).view_as(squares)


def distance_classes(kernel_size: KernelSize, center: str | None = None) -> tuple[Tensor, tuple[float, ...]]:
    """Group taps by their distance from the centre (LOCO-REG, section 6), compared exactly, in integers.

    Args:
        kernel_size, center: as for :func:`tap_distances`.

    Returns:
        ``(index, distances)``: the class of every tap, an int64 tensor of shape ``kernel_size``, and the distance of
        every class, ascending. Class 0 is the nearest: the centre tap if there is one.

    Raises:
        TypeError, ValueError: as :func:`tap_distances`.

    >>> index, distances = distance_classes((3, 3))
    >>> index.tolist(), [round(distance, 3) for distance in distances]
    ([[2, 1, 2], [1, 0, 1], [2, 1, 2]], [0.0, 1.0, 1.414])
    """
    squares, index = torch.unique(_doubled_squares(kernel_size, center), sorted=True, return_inverse=True)
    return index, tuple(math.sqrt(square) / 2 for square in squares.tolist())


def decay_map(kernel_size: KernelSize, factors: Sequence[float], center: str | None = None) -> Tensor:
    """Return the relative weight decay of every tap, ``g / Z`` of LOCO-REG (section 6, eq. 6.1); its mean is 1.

    Dividing by ``Z``, the mean of ``g`` over all taps, keeps the total amount of decay. The paper's loss
    ``lambda * map * w**2`` has gradient ``2 * lambda * map * w``: PyTorch's ``weight_decay`` is ``2 * lambda``.

    Args:
        kernel_size, center: as for :func:`tap_distances`.
        factors: ``g``. Two numbers are always the pair ``(gamma, eta)``: gamma at distance 0, 1 for distances up to 1,
            eta beyond. Any other count must be the number of :func:`distance_classes`, with one factor for each,
            nearest first. A kernel of exactly two classes, such as 1x3, thus accepts only a pair. Gamma alone can set
            every ratio there, and eta applies to no tap.

    Returns:
        float64 tensor of shape ``kernel_size``; ``(1, 1)`` gives exactly ones.

    Raises:
        TypeError: as :func:`tap_distances`, or ``factors`` is not a sequence of real numbers.
        ValueError: as :func:`tap_distances`, or the count of ``factors`` does not fit, one of them is negative or not
            finite, or their mean over all taps is not positive and finite.

    >>> decay_map((3, 3), (0.5, 2.0)).mul(12.5).tolist()
    [[18.0, 9.0, 18.0], [9.0, 4.5, 9.0], [18.0, 9.0, 18.0]]
    """
    index, distances = distance_classes(kernel_size, center)
    return relative_decay(index, distances, factors, f"kernel_size {tuple(index.shape)}")


def relative_decay(index: Tensor, distances: Sequence[float], factors: Sequence[float], of: str) -> Tensor:
    """Return ``g / Z`` for the distance class of every entry of ``index``; ``of`` names the entries in messages."""
    values = _check_factors(factors)
    if len(values) == 2:
        gamma, eta = values
        values = [gamma if distance == 0 else 1.0 if distance <= 1 else eta for distance in distances]
    elif len(values) != len(distances):
        raise ValueError(
            f"factors: expected (gamma, eta) or one factor for each of the {len(distances)} distance classes of "
            f"{of}, got {len(values)}: {factors!r}"
        )
    g = torch.tensor(values, dtype=torch.float64, device="cpu")[index]
    z = g.mean().item() if len(g) else 1.0  # a pattern may have no blocks
    if not 0 < z < math.inf:
        raise ValueError(f"factors: expected a positive and finite mean over {of}, got {factors!r}, of mean {z}")
    return g / z


def ring_index(kernel_size: KernelSize, kind: str = "half", first: str = "auto") -> Tensor:
    """Return the ring of every tap, counted from the outside in: half-rings or full rings (eqs. 17-19, Fig. 2).

    Equations and figure are those of the draft. Rings are peeled one by one from the box of remaining taps, along every
    axis still longer than 1. A half ring takes one end of each axis, top-left (the first index) and bottom-right (the
    last) in turn, so a cubic kernel of size ``s`` is left with sizes ``s - 1, s - 2, ..., 1``. A full ring takes both
    ends. The last ring is the single tap that then remains.

    Args:
        kernel_size: int or one to three ints, each at least 1.
        kind: "half" or "full"; "full" needs odd sizes.
        first: the end that the outermost half ring takes: "top_left", "bottom_right", or "auto", which is top-left if
            all sizes are odd and bottom-right if any is even; the last tap is then the one that ``padding="same"``
            anchors. Full rings have no order.

    Returns:
        int64 tensor of shape ``kernel_size``: from 0 on the outermost ring to ``max(kernel_size) - 1`` for half rings,
        or to ``(max(kernel_size) - 1) / 2`` for full rings.

    Raises:
        TypeError: ``kernel_size`` is not made of ints.
        ValueError: a size below 1, not one to three of them, an unknown ``kind`` or ``first``, or an even size with
            full rings.

    >>> ring_index((3, 3)).tolist()
    [[0, 0, 0], [0, 2, 1], [0, 1, 1]]
    >>> ring_index((3, 3), kind="full").tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    """
    shape = check_ints("kernel_size", kernel_size)
    return torch.tensor(ring_list(shape, kind, first), dtype=torch.int64, device="cpu").view(shape)


def ring_list(kernel_size: KernelSize, kind: str = "half", first: str = "auto") -> list[int]:
    """Return :func:`ring_index` as a list in the order of a contiguous kernel.

    It makes no tensor, so that torch.compile can trace it.

    Args, Raises:
        As :func:`ring_index`.

    >>> ring_list((3, 3))
    [0, 0, 0, 0, 2, 1, 0, 1, 1]
    """
    shape = check_ints("kernel_size", kernel_size)
    check_choice("kind", kind, KINDS)
    check_choice("first", first, FIRST)
    any_even = any(size % 2 == 0 for size in shape)
    if kind == "full" and any_even:
        raise ValueError(f"kernel_size: expected odd sizes for full rings, got {shape}")
    top_left_first = first == "top_left" or (first == "auto" and not any_even)
    rings = max(shape) if kind == "half" else (max(shape) + 1) // 2

    # The rings of each axis' taps are those of a 1-d kernel; a tap's ring is the outermost of its axes' rings.
    by_axis = [_peeled(size, rings, kind, top_left_first) for size in shape]
    return [min(ring) for ring in itertools.product(*by_axis)]


def _peeled(size: int, rings: int, kind: str, top_left_first: bool) -> list[int]:
    """Return the last ring that each tap of an axis takes part in; ``rings - 1`` for the tap that is never peeled."""
    start, stop, index = 0, size, [0] * size
    for ring in range(1, rings):
        if stop - start > 1:
            take_first = kind == "full" or (ring % 2 == 1) == top_left_first
            start, stop = start + take_first, stop - (kind == "full" or not take_first)
        index[start:stop] = [ring] * (stop - start)
    return index


def _doubled_squares(kernel_size: KernelSize, center: str | None) -> Tensor:
    """Return squared distances in half taps: integers, so that classes are exact even if the centre is between taps."""
    shape = check_ints("kernel_size", kernel_size)
    check_center(center, shape)
    total = torch.zeros(shape, dtype=torch.int64, device="cpu")
    for axis, size in enumerate(shape):
        offsets = 2 * torch.arange(size, dtype=torch.int64, device="cpu") - (size - 1)
        total += (offsets**2).view([size if other == axis else 1 for other in range(len(shape))])
    return total


def check_center(center: str | None, kernel_size: tuple[int, ...]) -> None:
    """Raise if the centre tap is to be the centre of a kernel that has none, or ``center`` is unknown."""
    check_choice("center", center, (None, "midpoint"))
    if center is None and any(size % 2 == 0 for size in kernel_size):
        raise ValueError(
            'kernel_size: expected odd sizes, for an even one has no centre tap, unless center="midpoint"; got '
            f"{kernel_size}"
        )


def _check_factors(factors: Sequence[float]) -> list[float]:
    if not isinstance(factors, Sequence) or isinstance(factors, str | bytes):
        raise TypeError(f"factors: expected a sequence of real numbers, got {factors!r}")
    return [check_number("factors", factor) for factor in factors]
