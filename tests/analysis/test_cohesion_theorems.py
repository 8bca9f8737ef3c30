"""The paper's two theorems on cohesion: their bounds by linear programming, and behaviour within and beyond them."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from loco_ext.analysis import cohesion
from tests.tolerances import STANDARD_ERRORS

# Theorem 1: F_tot is quadratic, so its gradient is `attraction @ masses`.

TAPS = list(itertools.product(range(3), range(3)))
CENTER, NEIGHBORS, CORNERS = 4, (1, 3, 5, 7), (0, 2, 6, 8)
# Pairs whose first tap must have more force: the centre over any neighbour, any neighbour over any corner.
MORE = [(CENTER, n) for n in NEIGHBORS] + list(itertools.product(NEIGHBORS, CORNERS))
BOUNDS = {1: 0.634, 2: 27 / 40, 3: 0.612, 4: 0.543}


def attraction(q):
    return np.array([[0.0 if a == b else math.dist(a, b) ** -q for b in TAPS] for a in TAPS])


@pytest.mark.parametrize("q", BOUNDS)
def test_derivatives_are_the_attractions_of_the_other_masses(q):
    hessian = torch.autograd.functional.hessian(
        lambda masses: cohesion(masses.view(3, 3), q=q).sum(), torch.rand(9, dtype=torch.float64)
    )
    np.testing.assert_allclose(hessian.numpy(), attraction(q), rtol=1e-13, atol=1e-15)


def least_spread(matrix, more, less):
    """Return the least epsilon for which masses in [1, 1 + epsilon] reverse the order of two taps, and these masses.

    The order is ``matrix[more] @ m > matrix[less] @ m`` for the masses m.
    """
    below = np.hstack([np.eye(9), -np.ones((9, 1))])  # m - epsilon <= 1
    broken = np.append(matrix[more] - matrix[less], 0)[None]
    result = linprog(
        np.append(np.zeros(9), 1),
        A_ub=np.vstack([below, broken]),
        b_ub=np.append(np.ones(9), 0),
        bounds=[(1, None)] * 9 + [(0, None)],
    )
    assert result.status == 0
    return result.fun, result.x[:9]


@pytest.mark.parametrize("q", BOUNDS)
def test_the_bound_of_theorem_1_is_tight(q):
    """Linear programming finds the worst masses, with derivatives by autograd."""
    hessian = torch.autograd.functional.hessian(
        lambda masses: cohesion(masses.view(3, 3), q=q).sum(), torch.ones(9, dtype=torch.float64)
    ).numpy()
    bound, worst, (more, less) = min(
        ((*least_spread(hessian, *pair), pair) for pair in MORE), key=lambda found: found[0]
    )
    assert bound == pytest.approx(BOUNDS[q], abs=1e-9 if q == 2 else 5e-4)
    if q == 2:  # the paper's worst case: a neighbour beats the centre
        assert more == CENTER
    masses = torch.from_numpy(worst).requires_grad_()
    (gradient,) = torch.autograd.grad(cohesion(masses.view(3, 3), q=q).sum(), masses)
    assert (gradient[more] - gradient[less]).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("q", BOUNDS)
def test_order_within_the_bound_of_theorem_1(q):
    """Half of the masses lie at an end of their range, where the worst cases are; the unit of mass is arbitrary."""
    spread = torch.rand(2000, 9, dtype=torch.float64)
    spread = torch.where(torch.rand_like(spread) < 0.5, spread.round(), spread)
    unit = 10 ** torch.empty(2000, 1, dtype=torch.float64).uniform_(-5, 5)
    masses = (unit * (1 + (BOUNDS[q] - 1e-3) * spread)).view(2000, 3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(cohesion(masses, q=q).sum(), masses)
    gradient = gradient.flatten(1)
    assert all((gradient[:, more] > gradient[:, less]).all() for more, less in MORE)


def test_order_breaks_beyond_the_bound_of_theorem_1():
    """The proof's masses, large at the centre and at the two corners next to one neighbour, reverse the order."""
    for epsilon, holds in ((0.674, True), (0.676, False)):
        masses = torch.ones(3, 3, dtype=torch.float64)
        masses[0, 0] = masses[0, 2] = masses[1, 1] = 1 + epsilon
        masses.requires_grad_()
        (gradient,) = torch.autograd.grad(cohesion(masses).sum(), masses)
        assert (gradient[1, 1] > gradient[0, 1]).item() == holds
        assert gradient[1, 1].item() == pytest.approx(6 + epsilon)
        assert gradient[0, 1].item() == pytest.approx(4.65 + 3 * epsilon)


# Theorem 2 (section 4.2) is about locating a feature of strength g on a line by a convolution with w. Its claim on the
# expectation, that the centre alone is best, holds for filters of l1 norm 1. It does not hold for those of l2 norm 1,
# the constraint that the paper states for the variance: there negative weights beside the centre cost little.


def strengths(generator, reach):
    """Return a random symmetric g over -reach..reach that decreases away from 0, ever less steeply."""
    slopes = np.sort(generator.uniform(0.01, 1, reach))[::-1] * np.linspace(1, 0.5, reach)
    right = generator.uniform(1, 3) - np.append(0, np.cumsum(slopes))
    return np.append(right[:0:-1], right)


def expected_margins(g, k):
    """Return f(0) - f(x) per unit of each weight, for all x != 0 that a filter of 2k + 1 taps reaches: [x, taps]."""
    middle = len(g) // 2
    offsets = np.arange(-k, k + 1)
    reach = middle - k
    return np.array([g[middle + offsets] - g[middle + x + offsets] for x in range(-reach, reach + 1) if x != 0])


def best_filter(g, k):
    """Return the w of l1 norm 1 that maximises the least expected margin f(0) - f(x) over x != 0, and this margin."""
    margins = expected_margins(g, k)
    # Maximise t over w = plus - minus with margins @ w >= t.
    result = linprog(
        np.append(np.zeros(4 * k + 2), -1),
        A_ub=np.vstack(
            [
                np.hstack([-margins, margins, np.ones((len(margins), 1))]),
                np.append(np.ones(4 * k + 2), 0)[None],
            ]
        ),
        b_ub=np.append(np.zeros(len(margins)), 1),
        bounds=[(0, None)] * (4 * k + 2) + [(None, None)],
    )
    assert result.status == 0
    plus, minus = result.x[:-1].reshape(2, -1)
    return plus - minus, -result.fun


@pytest.mark.parametrize("k", [1, 2])
def test_the_largest_worst_case_margin_is_that_of_the_centre_alone(k):
    generator = np.random.default_rng(0)
    for _ in range(50):
        g = strengths(generator, 8)
        w, margin = best_filter(g, k)
        np.testing.assert_allclose(w, np.eye(2 * k + 1)[k], atol=1e-9)
        assert margin == pytest.approx(g[8] - g[9])


def test_the_centre_alone_is_best_in_the_l1_norm_and_not_in_the_l2_norm():
    """For g = 1 / (1 + |x|), the centre alone has a margin of .500, and .552 with taps of -.264 beside it."""
    g = 1 / (1 + abs(np.arange(-8, 9)))
    w, margin = best_filter(g, 1)
    np.testing.assert_allclose(w, [0, 1, 0], atol=1e-9)
    assert margin == pytest.approx(0.5)

    margins = expected_margins(g, 1)
    for side, expected in ((0, 0.500), (-0.264, 0.552)):
        of_l2_norm_1 = np.array([side, math.sqrt(1 - 2 * side**2), side])
        assert (margins @ of_l2_norm_1).min() == pytest.approx(expected, abs=5e-4)


def test_the_centre_alone_is_not_best_for_a_flat_top():
    """The theorem's assumption fails where g falls less steeply next to its maximum than farther out."""
    w, _ = best_filter(np.array([0, 1, 2, 3, 6.0, 9.9, 10, 9.9, 6, 3, 2, 1, 0]), 1)
    assert abs(w[0]) > 0.1
    assert abs(w[2]) > 0.1


def variance_of(filters, noise):
    """Return the variance over samples of each filter's response to noise, for each position: [filters, positions]."""
    return torch.nn.functional.conv1d(noise[:, None], filters[:, None]).var(0)


def test_variance_of_the_filtered_noise():
    """The theorem's variance is s^2 * sum w^2, that of f(x, w) alone, as the proof leaves out the noise at x* = 0.

    It is the same for all w of norm 1; uniform weights are best among those of sum 1. The difference of f at two
    places has s^2 * sum (w_j - w_{j + x})^2, hence twice the theorem's where the two windows do not overlap.
    """
    k, s, samples = 2, 0.7, 20_000
    size = 2 * k + 1
    # The variance of n normal samples has the relative standard error sqrt(2 / (n - 1)).
    tolerance = STANDARD_ERRORS * math.sqrt(2 / (samples - 1))
    noise = s * torch.randn(samples, 3 * size, dtype=torch.float64)
    filters = torch.cat([torch.eye(size)[k : k + 1], torch.ones(1, size), torch.randn(4, size)]).double()

    unit = filters / filters.norm(dim=1, keepdim=True)
    assert variance_of(unit, noise)[:, size].div(s**2).sub(1).abs().max() < tolerance

    of_sum_1 = filters / filters.sum(1, keepdim=True)
    measured = variance_of(of_sum_1, noise)[:, size]
    assert measured.argmin() == 1
    assert measured[1].item() == pytest.approx(s**2 / size, rel=tolerance)
    torch.testing.assert_close(measured, s**2 * of_sum_1.square().sum(1), rtol=tolerance, atol=0)

    for x in (1, 3, size):
        padded = torch.nn.functional.pad(unit, (0, x))
        difference = torch.nn.functional.pad(unit, (x, 0)) - padded
        expected = s**2 * difference.square().sum(1)
        torch.testing.assert_close(variance_of(difference, noise)[:, 0], expected, rtol=tolerance, atol=0)
        if x == size:
            torch.testing.assert_close(expected, torch.full((6,), 2 * s**2, dtype=torch.float64))
