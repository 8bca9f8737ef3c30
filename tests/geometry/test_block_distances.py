"""Distances of blocks and their decay, against plain Python and the decay of taps."""

import math
import random

import numpy as np
import pytest
import torch

from loco_ext import geometry
from loco_ext.geometry import BlockPattern
from tests.geometry.pattern_cases import middles, random_case


def test_offsets_and_classes():
    """Distances are measured in taps from the middle of the receptive field, by the shorter way if the image wraps."""
    for seed in range(30):
        case = random_case(random.Random(seed))
        pattern, _ = BlockPattern.from_conv(*case.arguments).grow(seed % 3)
        offsets = geometry.block_offsets(pattern)
        index, distances = geometry.block_distance_classes(pattern, center="midpoint")
        assert distances == tuple(sorted(set(distances)))
        assert index.unique().tolist() == list(range(len(distances)))
        coordinates = np.stack(np.unravel_index(pattern.col_indices.numpy(), case.input_size), 1).tolist()
        for block, (row, pixel) in enumerate(zip(pattern.row_indices.tolist(), coordinates, strict=True)):
            expected = []
            for at, place, size in zip(pixel, middles(case, row), case.input_size, strict=True):
                laps = range(-9, 10) if case.padding_mode == "circular" else (0,)
                expected.append(min((at - place + lap * size for lap in laps), key=lambda d: (abs(d), d)))
            assert offsets[block].tolist() == [2 * d for d in expected], case
            units = [gap if taps > 1 else 1 for gap, taps in zip(case.dilation, case.kernel_size, strict=True)]
            distance = math.hypot(*(d / unit for d, unit in zip(expected, units, strict=True)))
            assert distances[index[block]] == pytest.approx(distance, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 3), (1, 7)])
@pytest.mark.parametrize(
    "arguments", [{}, {"stride": 2}, {"dilation": 2}, {"dilation": (1, 3), "padding": ((3, 1), 2)}]
)
def test_blocks_keep_the_decay_of_their_taps(kernel, arguments):
    """Blocks decay in proportion to their taps at any stride and dilation; new blocks of grown patterns by distance."""
    pattern = BlockPattern.from_conv((17, 23), kernel, **arguments)
    taps = geometry.decay_map(kernel, (0.5, 2.0)).flatten()
    for some in (pattern, pattern.grow(2)[0]):
        decay = geometry.block_decay_map(some, (0.5, 2.0))
        assert decay.dtype == torch.float64
        assert decay.mean().item() == pytest.approx(1, rel=1e-13)
        ratio = decay[some.taps.block] / taps[some.taps.tap]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-14, atol=0)
    assert geometry.block_decay_map(pattern, (1, 1)).eq(1).all()


def test_pairs_and_one_factor_per_class_of_blocks():
    pattern = BlockPattern.from_conv(3, kernel_size=1)
    near, full = pattern.grow(1)[0], pattern.grow(2)[0]
    assert geometry.block_decay_map(pattern.prune(torch.zeros(3, dtype=torch.bool))[0], (2.0, 4.0)).shape == (0,)
    assert geometry.block_decay_map(near, (2.0, 4.0)).mul(10 / 7).tolist() == pytest.approx([2, 1, 1, 2, 1, 1, 2])
    assert geometry.block_decay_map(full, (1.0, 2.0, 3.0)).mul(17 / 9).tolist() == pytest.approx(
        [1, 2, 3, 2, 1, 2, 3, 2, 1]
    )
    with pytest.raises(ValueError, match=r"factors: expected .* the 2 distance classes of the blocks of BlockPattern"):
        geometry.block_decay_map(near, (1.0, 2.0, 3.0))
