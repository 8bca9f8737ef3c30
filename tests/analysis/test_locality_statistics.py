"""Statistics of convolutions' weights against loops over matrices and scipy's t-tests."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from loco_ext.analysis import LocalityStatistics, locality_statistics
from tests.analysis.distances import class_means, classes_of

WEIGHTINGS = ["halves", "layers", "matrices"]


def weights_of(*shapes):
    """Return a state dict of one random convolution per shape."""
    return {f"{i}.weight": torch.randn(shape, dtype=torch.float64) for i, shape in enumerate(shapes)}


def standardised(weight):
    """Return a dict from pair of distances to the standardised differences of all matrices."""
    means, result = class_means(weight), {}
    for i, (near, far) in enumerate(itertools.pairwise(classes_of(weight.shape[2:]))):
        s = means[:, i] - means[:, i + 1]
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
    "one layer": [(4, 5, 3, 3)],
    "two layers": [(4, 5, 3, 3), (9, 4, 3, 3)],
    "odd count": [(4, 5, 3, 3), (9, 4, 3, 3), (2, 9, 3, 3), (30, 2, 3, 3), (5, 6, 3, 3)],
    "depthwise": [(8, 1, 3, 3), (16, 8, 1, 1), (16, 1, 3, 3), (16, 1, 5, 5)],
    "axes": [(4, 3, 3, 3, 3), (6, 2, 3), (6, 6, 5), (4, 4, 1, 3, 5), (7, 3, 1, 7), (7, 3, 7, 1), (4, 3, 3, 3, 3)],
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


SMALLEST = {
    dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in (torch.float16, torch.float64)
}


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [*SMALLEST.items(), (torch.float32, 2.0**120), (torch.float64, 2.0**1000), (torch.bfloat16, -1.0)],
)
def test_dtype_and_scale_change_nothing_but_the_sign(dtype, scale):
    """Weights are integers times a power of two, down to denormal numbers."""
    integers = [torch.randint(-50, 50, shape).double() for shape in ((8, 3, 3, 3), (8, 8, 3, 3))]
    scaled = [weight.mul(scale).to(dtype) for weight in integers]
    assert all(torch.equal(a.double() / scale, b) for a, b in zip(scaled, integers, strict=True))
    found, expected = (
        locality_statistics({"0.weight": one, "1.weight": other}).cells for one, other in (scaled, integers)
    )
    for cell, other in zip(found, expected, strict=True):
        assert cell.mean == pytest.approx(math.copysign(1, scale) * other.mean, rel=1e-12)
        assert cell.standard_error == pytest.approx(other.standard_error, rel=1e-12)
        assert cell.p_two_sided == pytest.approx(other.p_two_sided, rel=1e-10)


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
def test_layers_without_variation_are_skipped(weight):
    """Such layers count for nothing, not even in the split into halves."""
    state = weights_of((4, 5, 3, 3), (9, 4, 3, 3))
    statistics = locality_statistics({"first.weight": weight} | state)
    assert statistics.skipped == ("first",)
    assert statistics.cells == locality_statistics(state).cells


def test_a_layer_may_vary_in_one_pair_only():
    weight = torch.ones(8, 8, 3, 3)
    weight[..., 1, 1] = torch.randn(8, 8)
    statistics = locality_statistics({"conv.weight": weight})
    assert statistics.skipped == ("conv",)
    assert {cell.distances for cell in statistics.cells} == {(0.0, 1.0)}


def test_nothing_but_skipped_layers():
    assert locality_statistics(nn.Conv2d(1, 1, 3)) == LocalityStatistics("halves", (), ("",))


def test_inputs_and_choices_that_do_not_fit():
    model = nn.Conv2d(3, 3, 3)
    for inputs in ([torch.ones(1, 3, 9, 9)], "x", (torch.ones(1, 3, 9, 9), 3)):
        with pytest.raises(TypeError, match="example_inputs: expected None, a tensor or a tuple of tensors, got "):
            locality_statistics(model, example_inputs=inputs)
    with pytest.raises(TypeError, match="example_inputs: expected None, for a mapping cannot be run"):
        locality_statistics(model.state_dict(), example_inputs=torch.ones(1, 3, 9, 9))
    with pytest.raises(ValueError, match="weighting: expected one of 'halves', 'layers', 'matrices', got 'half'"):
        locality_statistics(model, weighting="half")
