"""Statistics of convolutions' weights against loops over matrices and scipy's t-tests."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from loco_ext.analysis import LocalityStatistics, locality_statistics

ROOT2, ROOT3, ROOT5, ROOT8 = (math.sqrt(n) for n in (2, 3, 5, 8))
WEIGHTINGS = ["halves", "layers", "matrices"]


def weights_of(*shapes, dtype=torch.float64):
    """Return a state dict of one random convolution per shape."""
    return {f"{i}.weight": torch.randn(shape, dtype=torch.float64).to(dtype) for i, shape in enumerate(shapes)}


def classes_of(shape):
    """Return a dict from squared distance to the taps at that distance from the centre, nearest first."""
    taps = sorted(itertools.product(*map(range, shape)))
    squares = {tap: sum((i - n // 2) ** 2 for i, n in zip(tap, shape, strict=True)) for tap in taps}
    return {square: [tap for tap in taps if squares[tap] == square] for square in sorted(set(squares.values()))}


def standardised(weight):
    """Return a dict from pair of distances to the standardised differences of all matrices, by plain loops."""
    weight = np.asarray(weight.double())
    matrices = weight.reshape(-1, *weight.shape[2:])
    classes = classes_of(weight.shape[2:])
    result = {}
    for near, far in itertools.pairwise(classes):
        s = np.array([np.mean([m[t] for t in classes[near]]) - np.mean([m[t] for t in classes[far]]) for m in matrices])
        result[math.sqrt(near), math.sqrt(far)] = s / np.sqrt(np.mean((s - s.mean()) ** 2))
    return result


def mean_of_means(samples):
    """Return mean, standard error, one- and two-sided p-value, by scipy's own tests where it has them."""
    if len(samples) == 1:
        greater = scipy.stats.ttest_1samp(samples[0], 0, alternative="greater").pvalue
        return np.mean(samples[0]), scipy.stats.sem(samples[0]), greater, scipy.stats.ttest_1samp(samples[0], 0).pvalue
    mean = np.mean([np.mean(sample) for sample in samples])
    error = np.sqrt(sum(scipy.stats.sem(sample) ** 2 for sample in samples)) / len(samples)
    if len(samples) == 2:  # Welch's test applies, as a + b > 0 means a > -b
        a, b = samples[0], -samples[1]
        greater = scipy.stats.ttest_ind(a, b, equal_var=False, alternative="greater").pvalue
        return mean, error, greater, scipy.stats.ttest_ind(a, b, equal_var=False).pvalue
    squares = [scipy.stats.sem(sample) ** 2 for sample in samples]
    freedom = sum(squares) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(squares, samples, strict=True))
    t = scipy.stats.t(freedom)
    return mean, error, t.sf(mean / error), 2 * t.sf(abs(mean) / error)


def expected_cells(weights, weighting):
    """Return a dict from (kernel size, distances, part) to the contents of the cell."""
    by_row = {}
    for weight in weights:
        for pair, values in standardised(weight).items():
            by_row.setdefault((tuple(weight.shape[2:]), pair), []).append(values)
    cells = {}
    for (size, pair), layers in by_row.items():
        middle = math.ceil(len(layers) / 2)
        parts = {"all": layers, "lower": layers[:middle], "upper": layers[middle:]}
        for part, counted in parts.items():
            if not counted:
                continue
            samples = counted if weighting == "layers" else [np.concatenate(counted)]
            if weighting == "halves" and part == "all":
                samples = [np.concatenate(parts[half]) for half in ("lower", "upper") if parts[half]]
            cells[size, pair, part] = (*mean_of_means(samples), sum(map(len, counted)), len(counted))
    return cells


NETWORKS = {
    "3x3": [(8, 3, 3, 3), (8, 8, 3, 3), (4, 8, 3, 3), (6, 4, 3, 3)],
    "one layer": [(4, 5, 3, 3)],
    "two layers": [(4, 5, 3, 3), (9, 4, 3, 3)],
    "odd count": [(4, 5, 3, 3), (9, 4, 3, 3), (2, 9, 3, 3), (30, 2, 3, 3), (5, 6, 3, 3)],
    "depthwise": [(8, 1, 3, 3), (16, 8, 1, 1), (16, 1, 3, 3), (16, 1, 5, 5)],
    "1-d": [(6, 2, 3), (6, 6, 5), (6, 6, 9)],
    "3-d": [(4, 3, 3, 3, 3), (4, 4, 1, 3, 5), (2, 4, 5, 5, 5)],
    "bars": [(7, 3, 1, 7), (7, 3, 7, 1), (7, 3, 3, 5)],
    "mixed sizes": [(8, 3, 7, 7), (8, 8, 3, 3), (8, 8, 5, 5), (8, 8, 3, 3), (8, 8, 3, 3), (4, 8, 5, 5), (4, 4, 11, 11)],
    "two matrices": [(2, 1, 3, 3), (1, 2, 3, 3)],
}


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_cells_against_loops_and_scipy(network, weighting):
    state = weights_of(*NETWORKS[network])
    for weight in state.values():  # some locality, so that not all means are about 0
        weight[(..., *(size // 2 for size in weight.shape[2:]))] += 0.3
    expected = expected_cells([weight for weight in state.values() if math.prod(weight.shape[2:]) > 1], weighting)
    statistics = locality_statistics(state, weighting)
    assert statistics.weighting == weighting
    assert statistics.skipped == ()
    order = ["all", "lower", "upper"]
    assert [(cell.kernel_size, cell.distances, cell.part) for cell in statistics.cells] == sorted(
        expected, key=lambda key: (len(key[0]), key[0], key[1], order.index(key[2]))
    )
    for cell in statistics.cells:
        mean, error, greater, two_sided, matrices, layers = expected[cell.kernel_size, cell.distances, cell.part]
        assert (cell.matrices, cell.layers) == (matrices, layers)
        assert cell.mean == pytest.approx(mean, rel=1e-10, abs=1e-12)
        assert cell.standard_error == pytest.approx(error, rel=1e-10)
        assert cell.p_greater == pytest.approx(greater, rel=1e-8)
        assert cell.p_two_sided == pytest.approx(two_sided, rel=1e-8)


def test_kernel_sizes_and_pairs_of_classes_by_hand():
    state = weights_of((4, 3, 3, 3), (4, 3, 5, 5), (4, 3, 1, 7), (4, 3, 3), (4, 3, 3, 3, 3), (4, 3, 7, 1), (9, 9, 3, 3))
    cells = [cell for cell in locality_statistics(state).cells if cell.part == "all"]
    assert [(cell.kernel_size, cell.distances, cell.layers) for cell in cells] == [
        ((3,), (0.0, 1.0), 1),
        ((1, 7), (0.0, 1.0), 1),
        ((1, 7), (1.0, 2.0), 1),
        ((1, 7), (2.0, 3.0), 1),
        ((3, 3), (0.0, 1.0), 2),
        ((3, 3), (1.0, ROOT2), 2),
        ((5, 5), (0.0, 1.0), 1),
        ((5, 5), (1.0, ROOT2), 1),
        ((5, 5), (ROOT2, 2.0), 1),
        ((5, 5), (2.0, ROOT5), 1),
        ((5, 5), (ROOT5, ROOT8), 1),
        ((7, 1), (0.0, 1.0), 1),
        ((7, 1), (1.0, 2.0), 1),
        ((7, 1), (2.0, 3.0), 1),
        ((3, 3, 3), (0.0, 1.0), 1),
        ((3, 3, 3), (1.0, ROOT2), 1),
        ((3, 3, 3), (ROOT2, ROOT3), 1),
    ]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_other_kernel_sizes_change_nothing(weighting):
    """A 7x7 stem of the opposite profile and a 5x5 layer between do not count in the cells of the 3x3 layers."""
    small = weights_of((8, 3, 3, 3), (8, 8, 3, 3), (4, 8, 3, 3))
    stem, between = torch.randn(8, 3, 7, 7).double(), torch.randn(8, 8, 5, 5).double()
    stem[..., 3, 3] -= 5
    mixed = {"stem.weight": stem, "0.weight": small["0.weight"], "between.weight": between} | small
    found = [cell for cell in locality_statistics(mixed, weighting).cells if cell.kernel_size == (3, 3)]
    assert tuple(found) == locality_statistics(small, weighting).cells


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_weights_are_read_exactly(dtype):
    state = weights_of((8, 3, 3, 3), (8, 8, 3, 3), dtype=dtype)
    wide = {name: weight.double() for name, weight in state.items()}
    assert locality_statistics(state) == locality_statistics(wide)


@pytest.mark.parametrize("scale", [1e30, 1e-30, -1.0, 1e300, 1e-300])
def test_scale_changes_nothing_but_the_sign(scale):
    state = weights_of((8, 3, 3, 3), (8, 8, 3, 3))
    scaled = locality_statistics({name: weight * scale for name, weight in state.items()})
    for cell, other in zip(locality_statistics(state).cells, scaled.cells, strict=True):
        assert other.mean == pytest.approx(math.copysign(1, scale) * cell.mean, rel=1e-12)
        assert other.standard_error == pytest.approx(cell.standard_error, rel=1e-12)
        assert other.p_two_sided == pytest.approx(cell.p_two_sided, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_denormal_weights(dtype):
    """Weights are integers times the smallest denormal number; the statistics are those of the integers."""
    integers = {"conv.weight": torch.randint(-50, 50, (8, 8, 3, 3)).double()}
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    denormal = {"conv.weight": integers["conv.weight"].mul(smallest).to(dtype)}
    assert denormal["conv.weight"].unique().numel() == integers["conv.weight"].unique().numel() > 90
    for cell, other in zip(locality_statistics(integers).cells, locality_statistics(denormal).cells, strict=True):
        assert other.mean == pytest.approx(cell.mean, rel=1e-12)
        assert other.p_greater == pytest.approx(cell.p_greater, rel=1e-10)


BLUR = torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([0.1, 0.2, 0.1]))
# Kernels have 27 taps because means of 6 or 12 equal numbers are rounded, unlike those of 4.
FLAT = torch.linspace(0.3, 0.4, 24, dtype=torch.float64).view(6, 4, 1, 1, 1).expand(6, 4, 3, 3, 3)
SKIPPED = {
    "one matrix": torch.arange(9.0).view(1, 1, 3, 3),
    "zeros": torch.zeros(4, 4, 3, 3),
    "all equal": BLUR.expand(37, 1, 3, 3),
    "flat but for rounding": FLAT,
    "huge": torch.full((4, 4, 3, 3), 1e38),
}


@pytest.mark.parametrize("weight", SKIPPED.values(), ids=SKIPPED.keys())
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_layers_without_variation_are_skipped(weight, weighting):
    """Such layers count for nothing, not even in the split into halves."""
    state = weights_of((4, 5, 3, 3), (9, 4, 3, 3))
    with_it = {"first.weight": weight, "0.weight": state["0.weight"], "1.weight": state["1.weight"]}
    statistics = locality_statistics(with_it, weighting)
    assert statistics.skipped == ("first",)
    assert statistics.cells == locality_statistics(state, weighting).cells


def test_a_layer_may_vary_in_one_pair_only():
    weight = torch.ones(8, 8, 3, 3)
    weight[..., 1, 1] = torch.randn(8, 8)
    statistics = locality_statistics({"conv.weight": weight})
    assert statistics.skipped == ("conv",)
    assert {cell.distances for cell in statistics.cells} == {(0.0, 1.0)}


def test_nothing_but_skipped_layers():
    assert locality_statistics(nn.Conv2d(1, 1, 3)) == LocalityStatistics("halves", (), ("",))


def test_statistics_become_json():
    statistics = locality_statistics(weights_of((4, 5, 3, 3), (1, 1, 3, 3)))
    plain = json.loads(json.dumps(dataclasses.asdict(statistics)))
    assert set(plain) == {"weighting", "cells", "skipped"}
    assert plain["skipped"] == ["1"]
    assert plain["cells"][0]["mean"] == statistics.cells[0].mean
    assert plain["cells"][0]["distances"] == [0.0, 1.0]
    assert plain["cells"][0]["kernel_size"] == [3, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value):
    state = weights_of((4, 5, 3, 3), (4, 5, 3, 3))
    state["1.weight"][3, 4, 2, 0] = value
    with pytest.raises(ValueError, match=r"model: expected finite weights, got NaN or inf in layer '1'"):
        locality_statistics(state)


def test_inputs_and_choices_that_do_not_fit():
    model = nn.Conv2d(3, 3, 3)
    for inputs in ([torch.ones(1, 3, 9, 9)], "x", (torch.ones(1, 3, 9, 9), 3)):
        with pytest.raises(TypeError, match="example_inputs: expected None, a tensor or a tuple of tensors, got "):
            locality_statistics(model, example_inputs=inputs)
    with pytest.raises(TypeError, match="example_inputs: expected None, for a mapping cannot be run"):
        locality_statistics(model.state_dict(), example_inputs=torch.ones(1, 3, 9, 9))
    with pytest.raises(ValueError, match="weighting: expected one of 'halves', 'layers', 'matrices', got 'half'"):
        locality_statistics(model, weighting="half")
