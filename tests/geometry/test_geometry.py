"""Distances, classes, decay maps and rings against hand-written examples and plain Python."""

import itertools
import math
from numbers import Integral

import numpy as np
import pytest
import torch

from loco_ext.geometry import decay_map, distance_classes, ring_index, tap_distances

ODD = [1, 7, (1,), (1, 1), (3, 3), (1, 7), (7, 1), (5, 3), (5, 5), (11, 11), (1, 1, 1), (3, 3, 3), (3, 1, 5)]
EVEN = [2, 8, (2, 2), (4, 4), (3, 4), (6, 1), (2, 3, 4), (4, 4, 4)]


def as_shape(kernel_size):
    return (kernel_size,) if isinstance(kernel_size, Integral) else kernel_size


def taps_of(kernel_size):
    return list(itertools.product(*map(range, as_shape(kernel_size))))


def quarter_squares(kernel_size):
    """Return four times the squared distance of every tap from the middle, as Python integers."""
    shape = as_shape(kernel_size)
    return {tap: sum((2 * i - n + 1) ** 2 for i, n in zip(tap, shape, strict=True)) for tap in taps_of(kernel_size)}


@pytest.mark.parametrize("kernel_size", [*ODD, *EVEN])
def test_distances_brute_force(kernel_size):
    distances = tap_distances(kernel_size, center="midpoint")
    middle = [(n - 1) / 2 for n in as_shape(kernel_size)]
    assert distances.dtype == torch.float64
    assert tuple(distances.shape) == as_shape(kernel_size)
    for tap in taps_of(kernel_size):
        assert distances[tap].item() == pytest.approx(math.dist(tap, middle), abs=1e-15)
    if kernel_size in ODD:
        assert torch.equal(distances, tap_distances(kernel_size))


@pytest.mark.parametrize("kernel_size", [*ODD, *EVEN, (51, 7), torch.Size([3]), np.int64(3)])
def test_classes_are_the_exact_ones(kernel_size):
    """Two taps share a class exactly if their integer squared distances agree: (5, 0) and (3, 4) do, for example."""
    index, distances = distance_classes(kernel_size, center="midpoint")
    squares = quarter_squares(kernel_size)
    ascending = sorted(set(squares.values()))
    expected = [ascending.index(squares[tap]) for tap in taps_of(kernel_size)]
    assert index.dtype == torch.int64
    assert index.flatten().tolist() == expected
    assert distances == pytest.approx([math.sqrt(square) / 2 for square in ascending])
    assert all(type(distance) is float for distance in distances)
    if all(size % 2 for size in as_shape(kernel_size)):
        assert torch.equal(distance_classes(kernel_size)[0], index)


@pytest.mark.parametrize("kernel_size", [size for size in ODD if math.prod(as_shape(size)) > 1])
def test_pair_on_any_odd_kernel(kernel_size):
    squares = quarter_squares(kernel_size).values()
    for gamma, eta in ((0.25, 3.0), (0.0, 1.0), (1.0, 0.0)):
        g = np.array([gamma if square == 0 else 1 if square <= 4 else eta for square in squares])
        result = decay_map(kernel_size, (gamma, eta))
        assert result.dtype == torch.float64
        np.testing.assert_allclose(result.flatten().numpy(), g / g.mean(), rtol=1e-15)
    assert torch.equal(decay_map(kernel_size, (1, 1)), torch.ones(as_shape(kernel_size)).double())


def test_pair_at_the_midpoint_of_even_kernels():
    """No tap is at distance 0, so gamma applies to none; taps up to distance 1 have g = 1."""
    assert decay_map((2, 2), (9.0, 5.0), center="midpoint").tolist() == [[1, 1], [1, 1]]
    assert decay_map(4, (9.0, 3.0), center="midpoint").tolist() == [1.5, 0.5, 0.5, 1.5]


def test_one_factor_per_class():
    factors = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    g = np.array([[6, 5, 4, 5, 6], [5, 3, 2, 3, 5], [4, 2, 1, 2, 4], [5, 3, 2, 3, 5], [6, 5, 4, 5, 6]])
    np.testing.assert_allclose(decay_map((5, 5), factors).numpy(), g / g.mean(), rtol=1e-15)
    np.testing.assert_allclose(decay_map(5, (3, 0, 6)).numpy(), np.array([6, 0, 3, 0, 6]) / 3, rtol=1e-15)
    assert decay_map((1, 1), (0.25,)).tolist() == [[1.0]]
    # Two numbers are a pair even where there are two classes.
    np.testing.assert_allclose(decay_map(3, (2.0, 100.0)).numpy(), np.array([1, 2, 1]) / (4 / 3), rtol=1e-15)


def test_rings_by_hand():
    assert ring_index((3, 3)).tolist() == [[0, 0, 0], [0, 2, 1], [0, 1, 1]]
    assert ring_index((2, 5)).tolist() == [[1, 3, 4, 2, 0], [0, 0, 0, 0, 0]]
    assert ring_index((3, 7), kind="full").tolist() == [[0] * 7, [0, 1, 2, 3, 2, 1, 0], [0] * 7]


@pytest.mark.parametrize("first", ["auto", "top_left", "bottom_right"])
@pytest.mark.parametrize("kernel_size", [*ODD, *EVEN])
def test_half_rings_leave_nested_boxes(kernel_size, first):
    shape = as_shape(kernel_size)
    index = ring_index(kernel_size, first=first)
    top_left_first = first == "top_left" or (first == "auto" and all(n % 2 for n in shape))
    assert index.dtype == torch.int64
    assert sorted(index.unique().tolist()) == list(range(max(shape)))
    for rings_gone in range(max(shape)):
        left = (index >= rings_gone).nonzero()
        low, high = left.min(0).values.tolist(), left.max(0).values.tolist()
        sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
        assert sizes == [max(1, n - rings_gone) for n in shape]
        assert len(left) == math.prod(sizes)  # a box without holes
        peeled = [min(rings_gone, n - 1) for n in shape]
        assert low == [(gone + 1) // 2 if top_left_first else gone // 2 for gone in peeled]


@pytest.mark.parametrize("kernel_size", ODD)
def test_full_rings_leave_nested_centred_boxes(kernel_size):
    shape = as_shape(kernel_size)
    index = ring_index(kernel_size, kind="full")
    assert sorted(index.unique().tolist()) == list(range((max(shape) + 1) // 2))
    assert torch.equal(index, index.flip(tuple(range(index.dim()))))
    for first in ("top_left", "bottom_right"):
        assert torch.equal(ring_index(kernel_size, kind="full", first=first), index)
    for rings_gone in range((max(shape) + 1) // 2):
        left = (index >= rings_gone).nonzero()
        sizes = (left.max(0).values - left.min(0).values + 1).tolist()
        assert sizes == [max(1, n - 2 * rings_gone) for n in shape]
        assert len(left) == math.prod(sizes)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("size", range(1, 10))
def test_the_last_tap_is_the_one_that_same_padding_anchors(size):
    """Convolving an impulse with a kernel that holds this tap alone leaves the impulse where it is."""
    kernel = (ring_index(size) == size - 1).float()
    impulse = torch.zeros(1, 1, 21)
    impulse[..., 10] = 1
    assert torch.equal(torch.nn.functional.conv1d(impulse, kernel.view(1, 1, size), padding="same"), impulse)


FUNCTIONS = (tap_distances, distance_classes, lambda k: decay_map(k, (1, 1)), ring_index)


@pytest.mark.parametrize(
    ("kernel_size", "error"),
    [
        *((size, ValueError) for size in (0, (), (3, 0), (3, 3, 3, 3))),
        *((size, TypeError) for size in (3.0, True, (3, True), (3, 3.0), "33", None, {3, 5})),
    ],
    ids=str,
)
def test_bad_kernel_sizes(kernel_size, error):
    for function in FUNCTIONS:
        with pytest.raises(error, match=r"kernel_size: expected .* got "):
            function(kernel_size)


@pytest.mark.parametrize("kernel_size", EVEN)
def test_even_sizes_have_neither_a_centre_tap_nor_full_rings(kernel_size):
    for function in (*FUNCTIONS[:3], lambda k: ring_index(k, kind="full")):
        with pytest.raises(ValueError, match="kernel_size: expected odd sizes"):
            function(kernel_size)


def test_unknown_choices():
    with pytest.raises(ValueError, match="center: expected one of None, 'midpoint', got 'middle'"):
        tap_distances(3, center="middle")
    with pytest.raises(ValueError, match="kind: expected one of 'half', 'full', got 'whole'"):
        ring_index(3, kind="whole")
    with pytest.raises(ValueError, match=r"first: expected one of .* got 'centre'"):
        ring_index(3, first="centre")


@pytest.mark.parametrize(
    ("kernel_size", "factors", "error"),
    [
        ((3, 3), (), ValueError),
        ((3, 3), (1.0,), ValueError),
        ((3, 3), (1.0, 1.0, 1.0, 1.0), ValueError),
        ((5, 5), (1.0, 1.0, 1.0), ValueError),
        ((3, 3), (-0.1, 1.0), ValueError),
        ((3, 3), (math.nan, 1.0), ValueError),
        ((3, 3), (1.0, math.inf), ValueError),
        ((3, 3), (0.0, 0.0, 0.0), ValueError),
        ((3, 3), (1e308, 1e308, 1e308), ValueError),
        ((1, 1), (0.0, 1.0), ValueError),
        ((3, 3), 0.5, TypeError),
        ((3, 3), None, TypeError),
        ((3, 3), "12", TypeError),
        ((3, 3), ("1", "2"), TypeError),
        ((3, 3), (1.0, 2j), TypeError),
        ((3, 3), (True, 1.0), TypeError),
    ],
)
def test_bad_factors(kernel_size, factors, error):
    with pytest.raises(error, match=r"factors: expected .* got "):
        decay_map(kernel_size, factors)
