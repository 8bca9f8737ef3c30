"""Cohesion of feature maps, and placement of features by cohesion.

Source: Schneider, "Locality-Promoting Representation Learning" (2022), section 4.1.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from loco_ext.argument_checks import check_choice, check_count, check_ints, check_number, check_tensor

Window = int | Sequence[int]


def cohesion(map: Tensor, window: Window = 3, q: float = 2) -> Tensor:
    """Return the attraction between the values in a window, for every window position (section 4.1, Theorem 1).

    ``F_tot`` is the sum of ``m_a * m_b / d**q`` over pairs of positions in the window, where ``d`` is their distance;
    the constant is 1 and each pair counts once. Theorem 1: as long as the values in a 3x3 window are within a factor of
    1.675 of each other and ``q`` is 2, cohesion gains most from a larger centre, and more from a larger direct
    neighbour than from a larger corner.

    Args:
        map: non-negative feature maps, floating-point, of shape ``(..., H, W)``.
        window: height and width, as a pair or as one int of at least 2; it covers more than one position.
        q: exponent of the distance, at least 0: how fast attraction decreases.

    Returns:
        Tensor of shape ``(..., H - height + 1, W - width + 1)``, indexed by the window's top-left corner. It is
        float64 for float64 maps; other maps are computed and returned in float32. It is differentiable.

    Raises:
        TypeError: ``map`` is not a tensor, ``window`` is not made of ints, or ``q`` is not a number.
        ValueError: ``map`` has fewer than 2 dimensions, is not floating-point, or has a value that is negative, NaN or
            inf; ``window`` is a single position or larger than the map; ``q`` is negative or infinite.

    >>> cohesion(torch.ones(3, 4), window=2)  # four pairs at distance 1, two at distance sqrt(2)
    tensor([[5., 5., 5.],
            [5., 5., 5.]])
    """
    _check_map(map)
    height, width = _check_window(window, map)
    check_number("q", q)
    return _cohesion(map if map.dtype == torch.float64 else map.float(), height, width, q)


def localize(map: Tensor, count: int, window: Window = 3, strategy: str = "cohesion", q: float = 2) -> Tensor:
    """Place windows on a feature map without overlap, the best first (section 4.1, Figure 3).

    The search is greedy: each window is the best of those that overlap no earlier one; ties go to the first in
    row-major order. Scores are computed in float64.

    Args:
        map: one non-negative feature map, floating-point, of shape ``(H, W)``.
        count: number of windows.
        window: as for :func:`cohesion`.
        strategy: score of a window: "cohesion", which prefers large values near the centre, or "sum" of its values.
        q: as for :func:`cohesion`.

    Returns:
        int64 CPU tensor of shape ``(count, 2)``: row and column of each window's top-left corner.

    Raises:
        TypeError: as :func:`cohesion`; ``count`` is not an int.
        ValueError: as :func:`cohesion`; ``map`` does not have 2 dimensions, ``count`` is below 1, ``strategy`` is
            unknown, or fewer than ``count`` windows fit.

    >>> map = torch.tensor([[3.0, 1.0, 3.0, 0.0, 2.0, 3.0, 1.0]])
    >>> localize(map, 2, window=(1, 3)).tolist(), localize(map, 2, window=(1, 3), strategy="sum").tolist()
    ([[0, 4], [0, 0]], [[0, 0], [0, 4]])
    """
    _check_map(map)
    if map.dim() != 2:
        raise ValueError(f"map: expected one map of shape (H, W), got shape {tuple(map.shape)}")
    height, width = _check_window(window, map)
    check_number("q", q)
    check_choice("strategy", strategy, ("cohesion", "sum"))
    check_count("count", count, smallest=1)
    masses = map.detach().to(device="cpu", dtype=torch.float64)
    scores = _cohesion(masses, height, width, q) if strategy == "cohesion" else _box_sums(masses, height, width)
    corners: list[tuple[int, int]] = []
    for _ in range(count):
        row, column = divmod(int(scores.argmax()), scores.shape[1])
        if scores[row, column] == -math.inf:
            raise ValueError(
                f"count: expected at most {len(corners)}, for no more windows fit when placed greedily, got {count}"
            )
        corners.append((row, column))
        scores[max(0, row - height + 1) : row + height, max(0, column - width + 1) : column + width] = -math.inf
    return torch.tensor(corners, device="cpu")


def _cohesion(masses: Tensor, height: int, width: int, q: float) -> Tensor:
    rows, columns = masses.shape[-2:]
    # Pairs are summed by distance so that mirrored windows of integers score exactly the same.
    offsets: dict[int, list[tuple[int, int]]] = {}
    for down in range(height):
        for right in range(1 if down == 0 else 1 - width, width):
            offsets.setdefault(down**2 + right**2, []).append((down, right))
    total = masses.new_zeros(())
    for square, pairs in sorted(offsets.items()):
        products = masses.new_zeros(())
        for down, right in pairs:
            left = max(0, -right)
            one = masses[..., : rows - down, left : columns - max(0, right)]
            other = masses[..., down:, left + right : columns + min(0, right)]
            products = products + _box_sums(one * other, height - down, width - abs(right))
        total = total + products * square ** (-q / 2)
    return total


def _box_sums(values: Tensor, height: int, width: int) -> Tensor:
    """Return the sum of every window, in an order of additions that does not depend on the window's position."""
    rows, columns = values.shape[-2] - height + 1, values.shape[-1] - width + 1
    lines = reduce(torch.add, [values[..., i : i + rows, :] for i in range(height)])
    return reduce(torch.add, [lines[..., j : j + columns] for j in range(width)])


def _check_map(map: Tensor) -> None:
    check_tensor("map", map)
    if map.dim() < 2 or not map.is_floating_point():
        raise ValueError(
            f"map: expected a floating-point tensor of shape (..., H, W), got {map.dtype} of shape {tuple(map.shape)}"
        )
    if not ((map >= 0) & (map < math.inf)).all():
        raise ValueError("map: expected finite values of at least 0, got a negative one, NaN or inf")


def _check_window(window: Window, map: Tensor) -> tuple[int, int]:
    height, width = check_ints("window", window, 2)
    rows, columns = map.shape[-2:]
    if height > rows or width > columns or height * width == 1:
        raise ValueError(
            f"window: expected more than one position and at most the map's {rows} x {columns}, got {window!r}"
        )
    return height, width
