"""Cohesion against a loop over pairs, and the placement of windows by cohesion."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from loco_ext.analysis import cohesion, localize


def total_force(window, q):
    """Return F_tot of one window; the sum runs over ordered pairs, hence the half."""
    rows, columns = window.shape
    total = 0.0
    for i, j, k, m in itertools.product(range(rows), range(columns), range(rows), range(columns)):
        if (i, j) != (k, m):
            total += window[i, j] * window[k, m] / math.hypot(i - k, j - m) ** q / 2
    return total


def as_pair(window):
    return (window, window) if isinstance(window, int) else window


def total_forces(map, window, q):
    height, width = as_pair(window)
    rows, columns = map.shape[0] - height + 1, map.shape[1] - width + 1
    return np.array([[total_force(map[i : i + height, j : j + width], q) for j in range(columns)] for i in range(rows)])


@pytest.mark.parametrize("window", [2, 3, (1, 3), (4, 1), (2, 5), (6, 7)])
def test_against_a_loop_over_pairs(window):
    map = torch.rand(6, 7, dtype=torch.float64)
    for q in (0, 0.5, 2, 4.5):
        result = cohesion(map, window, q)
        assert result.dtype == torch.float64
        np.testing.assert_allclose(result.numpy(), total_forces(map.numpy(), window, q), rtol=1e-13)


@pytest.mark.parametrize("lead", [(2, 3), (0,)])
def test_leading_dimensions(lead):
    maps = torch.rand(*lead, 5, 6, dtype=torch.float64)
    result = cohesion(maps)
    assert result.shape == (*lead, 3, 4)
    for index in itertools.product(*map(range, lead)):
        assert torch.equal(result[index], cohesion(maps[index]))
    torch.testing.assert_close(cohesion(maps.transpose(-1, -2)), result.transpose(-1, -2))


def test_lower_precision_is_computed_in_float32():
    map = torch.rand(9, 9).mul(100).bfloat16()
    result = cohesion(map, 5)
    assert result.dtype == torch.float32
    assert torch.equal(result, cohesion(map.float(), 5))
    torch.testing.assert_close(result.double(), cohesion(map.double(), 5), rtol=1e-5, atol=0)


def test_the_same_and_mirrored_windows_have_the_same_cohesion():
    """Scores are equal bit for bit; otherwise rounding would break ties. Mirrored windows are those of integers."""
    result = cohesion(torch.rand(7, 5, dtype=torch.float64).repeat(4, 6), 4)
    for i, j in itertools.product(range(7), range(5)):
        assert result[i::7, j::5].unique().numel() == 1
    map = torch.randint(0, 10, (8, 9), dtype=torch.float64)
    result = cohesion(map, 4, q=3)
    for axis in (-1, -2):
        assert torch.equal(cohesion(map.flip(axis), 4, q=3), result.flip(axis))
    assert torch.equal(cohesion(map.T, 4, q=3), result.T)


def test_gradients():
    map = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: cohesion(m, (2, 3), q=1.5), map)


# The paper's Figure 3; the last value of its first row is not printed.
FIGURE_3 = """
0 0 0 0 0 1 1 0 0 1 1 0 0 0 0 0
0 0 1 0 0 1 2 2 1 0 2 3 1 1 1 0
1 0 0 0 1 2 6 3 1 1 2 5 1 2 1 0
0 0 0 0 1 1 3 2 2 3 2 3 2 0 0 0
0 1 0 0 0 1 2 2 2 2 3 2 2 1 0 0
0 0 0 1 0 1 1 1 2 3 3 2 1 1 0 0
"""
MAP_3 = torch.tensor([[float(value) for value in line.split()] for line in FIGURE_3.split("\n") if line])


def placed(scores, count, window):
    """Return the greedy placement by a dict of scores, in row-major order, so that max takes the first tie."""
    height, width = as_pair(window)
    corners = []
    for _ in range(count):
        best = max(scores, key=scores.get)
        corners.append(list(best))
        scores = {
            (i, j): score for (i, j), score in scores.items() if abs(i - best[0]) >= height or abs(j - best[1]) >= width
        }
    return corners


@pytest.mark.parametrize("window", [2, (3, 2), (1, 3), (3, 1)])
def test_greedy_takes_the_best_windows(window):
    map = torch.rand(8, 9, dtype=torch.float64)
    for q in (1, 3):
        scores = dict(np.ndenumerate(total_forces(map.numpy(), window, q)))
        assert localize(map, 5, window, q=q).tolist() == placed(scores, 5, window)
    sums = dict(np.ndenumerate(sliding_window_view(map.numpy(), as_pair(window)).sum((2, 3))))
    assert localize(map, 5, window, "sum").tolist() == placed(sums, 5, window)


def test_figure_3_as_the_paper_describes():
    """Locality puts larger values in the centres of its windows, the peak of 6 first; sums are larger without it."""
    for strategy, centers, total in (("cohesion", [6.0, 3.0], 45), ("sum", [2.0, 2.0], 46)):
        corners = localize(MAP_3, 2, strategy=strategy).tolist()
        windows = [MAP_3[i : i + 3, j : j + 3] for i, j in corners]
        assert [window[1, 1].item() for window in windows] == centers
        assert sum(window.sum() for window in windows) == total


def test_placement_in_full():
    """A flat map is filled row by row; a map that no window meets still has places."""
    for map in (torch.ones(4, 7), torch.zeros(4, 7)):
        for strategy in ("cohesion", "sum"):
            assert localize(map, 6, 2, strategy).tolist() == [[i, j] for i in (0, 2) for j in (0, 2, 4)]
            with pytest.raises(ValueError, match=r"count: expected at most 6, for no more windows fit .* got 7"):
                localize(map, 7, 2, strategy)


def test_greedy_placement_can_leave_no_room():
    """Two windows would fit side by side; the best one is in the middle."""
    map = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]])
    assert localize(map, 1, (1, 3)).tolist() == [[0, 1]]
    assert localize(map, 1, (1, 2)).tolist() == [[0, 2]]
    with pytest.raises(ValueError, match=r"count: expected at most 1, .* got 2"):
        localize(map, 2, (1, 3))


def test_the_result_and_the_map_of_localize():
    map = torch.rand(6, 9, dtype=torch.float64, requires_grad=True)
    before = map.detach().clone()
    result = localize(map, 2, strategy="sum")
    assert result.dtype == torch.int64
    assert result.shape == (2, 2)
    assert not result.requires_grad
    assert torch.equal(map, before)
    assert torch.equal(localize(map.detach().float(), np.int64(2), strategy="sum"), result)


def test_large_values_are_placed_in_float64():
    """4097**2 is 1 more than 4096 * 4098, which is more than 2**24: as float32 numbers they are equal."""
    map = torch.tensor([[4096.0, 4098.0, 0.0, 4097.0, 4097.0, 0.0]])
    assert localize(map, 1, (1, 2)).tolist() == [[0, 3]]


MAP = torch.ones(4, 5)
BAD = [
    ((None,), TypeError, "map: expected a tensor, got NoneType"),
    ((torch.ones(4),), ValueError, r"map: expected .* shape \(\.\.\., H, W\), got torch.float32 of shape \(4,\)"),
    ((MAP.long(),), ValueError, r"map: expected a floating-point .* got torch.int64"),
    ((-MAP,), ValueError, "map: expected finite values of at least 0"),
    ((MAP * math.nan,), ValueError, "map: expected finite values of at least 0"),
    ((MAP * math.inf,), ValueError, "map: expected finite values of at least 0"),
    ((MAP, (1, 1)), ValueError, r"window: expected more than one position .* got \(1, 1\)"),
    ((MAP, 5), ValueError, "window: expected .* at most the map's 4 x 5, got 5"),
    ((MAP, (4, 6)), ValueError, "window: expected .* at most the map's 4 x 5"),
    ((MAP, (-3, 3)), ValueError, "window: expected .* got "),
    ((MAP, 2.0), TypeError, "window: expected an int, or one for each of 2 axes, got 2.0"),
    ((MAP, (3,)), ValueError, "window: expected an int, or one for each of 2 axes"),
    ((MAP, 3, -1), ValueError, "q: expected a finite number of at least 0, got -1"),
    ((MAP, 3, "2"), TypeError, "q: expected a number, got '2'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        cohesion(*arguments)
    map, *window_and_q = arguments
    with pytest.raises(error, match=message):
        localize(map, 1, **dict(zip(("window", "q"), window_and_q, strict=False)))


def test_bad_arguments_of_localize():
    with pytest.raises(ValueError, match=r"map: expected one map of shape \(H, W\), got shape \(2, 4, 5\)"):
        localize(torch.ones(2, 4, 5), 1)
    with pytest.raises(ValueError, match="strategy: expected one of 'cohesion', 'sum', got 'mean'"):
        localize(MAP, 1, strategy="mean")
    with pytest.raises(ValueError, match="count: expected at least 1, got 0"):
        localize(MAP, 0)
