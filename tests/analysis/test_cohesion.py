"""Cohesion against a loop over pairs, and the placement of windows by cohesion."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

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


@pytest.mark.parametrize("q", [0, 0.5, 1, 2, 3, 4.5])
@pytest.mark.parametrize("window", [2, 3, 4, 5, (1, 3), (4, 1), (2, 5), (6, 7)])
def test_against_a_loop_over_pairs(window, q):
    map = torch.rand(6, 7, dtype=torch.float64)
    expected = total_forces(map.numpy(), window, q)
    result = cohesion(map, window, q)
    assert result.dtype == torch.float64
    assert result.shape == expected.shape
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-13)


def test_by_hand():
    """Masses 2, 3, 5 in a row have the cohesion 2*3 + 3*5 + 2*5/4."""
    map = torch.tensor([[2.0, 3.0, 5.0]])
    assert cohesion(map, (1, 3)).tolist() == [[23.5]]
    assert cohesion(map, (1, 3), q=0).tolist() == [[31.0]]
    assert cohesion(map, (1, 2)).tolist() == [[6.0, 15.0]]
    # Nine unit masses have 12 pairs at distance 1, 8 at sqrt2, 6 at 2, 8 at sqrt5 and 2 at sqrt8.
    assert cohesion(torch.ones(3, 3, dtype=torch.float64)).item() == pytest.approx(12 + 8 / 2 + 6 / 4 + 8 / 5 + 2 / 8)


def test_defaults_are_the_papers():
    map = torch.rand(5, 5)
    assert torch.equal(cohesion(map), cohesion(map, window=3, q=2))
    assert torch.equal(localize(map, 1), localize(map, 1, window=3, strategy="cohesion", q=2))


@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (0,), (2, 0, 1)])
def test_leading_dimensions(lead):
    maps = torch.rand(*lead, 5, 6, dtype=torch.float64)
    result = cohesion(maps)
    assert result.shape == (*lead, 3, 4)
    for index in itertools.product(*map(range, lead)):
        assert torch.equal(result[index], cohesion(maps[index]))
    flipped = maps.transpose(-1, -2)
    torch.testing.assert_close(cohesion(flipped), result.transpose(-1, -2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_computed_in_float32(dtype):
    map = torch.rand(9, 9).mul(100).to(dtype)
    result = cohesion(map, 5)
    assert result.dtype == torch.float32
    assert torch.equal(result, cohesion(map.float(), 5))
    torch.testing.assert_close(result.double(), cohesion(map.double(), 5), rtol=1e-5, atol=0)


def test_the_same_window_has_the_same_cohesion_wherever_it_lies():
    """Scores are equal bit for bit; otherwise rounding would break ties."""
    tile = torch.rand(7, 5, dtype=torch.float64)
    result = cohesion(tile.repeat(4, 6), 4)
    for i, j in itertools.product(range(7), range(5)):
        assert result[i::7, j::5].unique().numel() == 1


def test_mirrored_windows_of_integers_have_the_same_cohesion():
    map = torch.randint(0, 10, (8, 9), dtype=torch.float64)
    result = cohesion(map, 4, q=3)
    assert torch.equal(cohesion(map.flip(-1), 4, q=3), result.flip(-1))
    assert torch.equal(cohesion(map.flip(-2), 4, q=3), result.flip(-2))
    assert torch.equal(cohesion(map.T, 4, q=3), result.T)


def test_gradients():
    map = torch.rand(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: cohesion(m, (3, 4), q=1.5), map)
    assert torch.autograd.gradgradcheck(lambda m: cohesion(m, 2), map)


@pytest.mark.parametrize(("q", "bound"), [(1, 0.634), (2, 27 / 40), (3, 0.612), (4, 0.543)])
def test_the_bound_of_theorem_1_is_tight(q, bound):
    """Linear programming finds the least spread of masses from 1 to 1 + spread that reverses the order of two taps.

    The centre has more force than its neighbours, and these have more than the corners, up to that spread. Forces are
    ``hessian @ masses``, since cohesion is quadratic.
    """
    hessian = torch.autograd.functional.hessian(
        lambda masses: cohesion(masses.view(3, 3), q=q).sum(), torch.ones(9, dtype=torch.float64)
    ).numpy()
    taps = list(itertools.product(range(3), range(3)))
    attraction = [[0.0 if a == b else math.dist(a, b) ** -q for b in taps] for a in taps]
    np.testing.assert_allclose(hessian, attraction, rtol=1e-13, atol=1e-15)
    neighbors, corners = (1, 3, 5, 7), (0, 2, 6, 8)
    spreads = {}
    for more, less in [*((4, n) for n in neighbors), *itertools.product(neighbors, corners)]:
        result = linprog(
            [0.0] * 9 + [1.0],
            A_ub=np.vstack([np.hstack([np.eye(9), -np.ones((9, 1))]), np.append(hessian[more] - hessian[less], 0)]),
            b_ub=[1.0] * 9 + [0.0],
            bounds=[(1, None)] * 9 + [(0, None)],
        )
        assert result.status == 0
        spreads[more, less] = result.fun
    assert min(spreads.values()) == pytest.approx(bound, abs=1e-9 if q == 2 else 5e-4)
    if q == 2:  # the paper's worst case: a neighbour has more force than the centre
        assert min(spreads, key=spreads.get)[0] == 4


# The tests below place windows.

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


def exact_scores(map, window, strategy):
    """Return the score of each window as a fraction, for a map of integers and q = 2."""
    height, width = as_pair(window)
    values = [[Fraction(int(value)) for value in row] for row in map.tolist()]
    scores = {}
    for i, j in itertools.product(range(len(values) - height + 1), range(len(values[0]) - width + 1)):
        taps = list(itertools.product(range(i, i + height), range(j, j + width)))
        if strategy == "sum":
            scores[i, j] = sum(values[a][b] for a, b in taps)
        else:
            pairs = itertools.combinations(taps, 2)
            scores[i, j] = sum(values[a][b] * values[c][d] / ((a - c) ** 2 + (b - d) ** 2) for (a, b), (c, d) in pairs)
    return scores


def placed(map, count, window, strategy):
    """Return the greedy placement by exact arithmetic; the dict is in row-major order, so max takes the first tie."""
    height, width = as_pair(window)
    scores = exact_scores(map, window, strategy)
    corners = []
    for _ in range(count):
        best = max(scores, key=scores.get)
        corners.append(list(best))
        scores = {
            (i, j): score for (i, j), score in scores.items() if abs(i - best[0]) >= height or abs(j - best[1]) >= width
        }
    return corners


@pytest.mark.parametrize("strategy", ["cohesion", "sum"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_figure_3_against_exact_arithmetic(strategy, count):
    assert localize(MAP_3, count, strategy=strategy).tolist() == placed(MAP_3, count, 3, strategy)


def test_figure_3_as_the_paper_describes():
    """Locality puts larger values in the centres of its windows, the peak of 6 first; sums are larger without it."""
    assert MAP_3.shape == (6, 16)
    windows = {
        strategy: [MAP_3[i : i + 3, j : j + 3] for i, j in localize(MAP_3, 2, strategy=strategy).tolist()]
        for strategy in ("cohesion", "sum")
    }
    centers = {strategy: [window[1, 1].item() for window in both] for strategy, both in windows.items()}
    sums = {strategy: sum(window.sum().item() for window in both) for strategy, both in windows.items()}
    assert centers == {"cohesion": [6.0, 3.0], "sum": [2.0, 2.0]}
    assert sums == {"cohesion": 45.0, "sum": 46.0}


@pytest.mark.parametrize(
    ("window", "strategy"),
    [(3, "sum"), ((2, 3), "sum"), (2, "cohesion"), ((1, 3), "cohesion"), ((3, 1), "cohesion")],
)
def test_greedy_against_exact_arithmetic(window, strategy):
    """Small integers give many ties, and the distances' inverse squares are exact."""
    for _ in range(40):
        map = torch.randint(0, 3, (9, 10)).float()
        assert localize(map, 3, window, strategy).tolist() == placed(map, 3, window, strategy)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_greedy_takes_the_most_cohesive_windows(q):
    map = torch.rand(8, 9, dtype=torch.float64)
    scores = total_forces(map.numpy(), (3, 2), q)
    for i, j in localize(map, 5, (3, 2), q=q).tolist():
        assert scores[i, j] == scores.max() > 0
        scores[max(0, i - 2) : i + 3, max(0, j - 1) : j + 2] = -1


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
    (([[1.0]],), TypeError, "map: expected a tensor, got list"),
    ((torch.ones(4),), ValueError, r"map: expected .* shape \(\.\.\., H, W\), got torch.float32 of shape \(4,\)"),
    ((MAP.long(),), ValueError, r"map: expected a floating-point .* got torch.int64"),
    ((-MAP,), ValueError, "map: expected finite values of at least 0"),
    ((MAP * math.nan,), ValueError, "map: expected finite values of at least 0"),
    ((MAP * math.inf,), ValueError, "map: expected finite values of at least 0"),
    ((MAP, 1), ValueError, "window: expected more than one position and at most the map's 4 x 5, got 1"),
    ((MAP, (1, 1)), ValueError, r"window: expected more than one position .* got \(1, 1\)"),
    ((MAP, 5), ValueError, "window: expected .* at most the map's 4 x 5, got 5"),
    ((MAP, (4, 6)), ValueError, "window: expected .* at most the map's 4 x 5"),
    ((MAP, 0), ValueError, "window: expected .* got 0"),
    ((MAP, (-3, 3)), ValueError, "window: expected .* got "),
    ((MAP, 2.0), TypeError, "window: expected an int, or one for each of 2 axes, got 2.0"),
    ((MAP, True), TypeError, "window: expected an int, or one for each of 2 axes, got True"),
    ((MAP, (3,)), ValueError, "window: expected an int, or one for each of 2 axes"),
    ((MAP, "33"), TypeError, "window: expected an int, or one for each of 2 axes"),
    ((MAP, (2, 3.0)), TypeError, "window: expected an int, or one for each of 2 axes"),
    ((MAP, 3, -1), ValueError, "q: expected a finite number of at least 0, got -1"),
    ((MAP, 3, math.inf), ValueError, "q: expected a finite number of at least 0, got inf"),
    ((MAP, 3, "2"), TypeError, "q: expected a number, got '2'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
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
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count: expected at least 1, got {count}"):
            localize(MAP, count)
    for count in (1.0, True, None):
        with pytest.raises(TypeError, match=f"count: expected an int, got {count}"):
            localize(MAP, count)
