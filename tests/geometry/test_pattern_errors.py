"""Bad indices, geometries and arguments: typed errors that name the argument."""

import random

import pytest
import torch
from torch import nn

from loco_ext import geometry
from loco_ext.geometry import BlockPattern, ConvGeometry
from tests.geometry.pattern_cases import MODES


def test_what_torch_refuses_is_refused():
    """ConvGeometry refuses exactly what torch does, in random cases of which about half are invalid."""
    generator, refused = random.Random(0), 0
    for _ in range(600):
        mode, size = generator.choice(MODES), generator.randint(1, 5)
        kernel, padding, dilation = generator.randint(1, 5), generator.randint(0, 6), generator.randint(1, 3)
        try:
            conv = nn.Conv1d(1, 1, kernel, padding=padding, dilation=dilation, padding_mode=mode)
            expected = conv(torch.zeros(1, 1, size)).shape[2:]
        except (RuntimeError, ValueError):
            refused += 1
            with pytest.raises(ValueError, match=r"^(padding|kernel_size): expected at most .* got"):
                ConvGeometry(size, kernel, 1, padding, dilation, mode)
        else:
            assert ConvGeometry(size, kernel, 1, padding, dilation, mode).output_size == expected
    assert 200 < refused < 400


@pytest.mark.parametrize(
    ("crow", "col", "n_in", "message"),
    [
        ([0, 1], [3], 3, "col_indices: expected input pixels from 0 to 2, got 3 at 0"),
        ([0, 2], [0, -1], 3, "col_indices: expected input pixels from 0 to 2, got -1 at 1"),
        ([0, 1], [0], 0, "col_indices: expected input pixels from 0 to -1, got 0 at 0"),
        ([0, 1, 3], [2, 1, 0], 3, "col_indices: expected each row to ascend strictly, got 1 and then 0 at 1"),
        ([0, 1, 3], [2, 1, 1], 3, "col_indices: expected each row to ascend strictly, got 1 and then 1 at 1"),
        ([0, 0, 2, 2], [1, 0], 3, "col_indices: expected each row to ascend strictly, got 1 and then 0 at 0"),
        ([1, 2], [0, 1], 3, "crow_indices: expected n_out . 1 of them, the first 0, got 2, from 1"),
        ([], [], 3, "crow_indices: expected n_out . 1 of them, the first 0, got none"),
        ([0, 2, 1], [0], 3, "crow_indices: expected none to descend, got 2 and 1 at row 1"),
        ([0, 1], [0, 1], 3, "crow_indices: expected the last to be the number of col_indices, 2, got 1"),
        ([0, 5], [0, 1], 3, "crow_indices: expected the last to be the number of col_indices, 2, got 5"),
        ([[0, 1]], [0], 3, r"crow_indices: expected one dimension, got shape \(1, 2\)"),
        ([0, 1], 0, 3, r"col_indices: expected one dimension, got shape \(\)"),
        ([0.0, 1.0], [0], 3, "crow_indices: expected a tensor of integers, got torch.float32"),
        ([0, 1], [True], 3, "col_indices: expected a tensor of integers, got torch.bool"),
        ([0, 1], [0], -1, "n_in: expected at least 0, got -1"),
        ([0, 1], [0], 3.0, "n_in: expected an int, got 3.0"),
    ],
)
def test_bad_indices(crow, col, n_in, message):
    crow, col = (torch.empty(0).long() if indices == [] else torch.tensor(indices) for indices in (crow, col))
    error = TypeError if "a tensor of integers" in message or "an int" in message else ValueError
    with pytest.raises(error, match=message):
        BlockPattern(crow, col, n_in)


def test_indices_are_tensors_and_fit_their_convolution():
    with pytest.raises(TypeError, match="crow_indices: expected a tensor of integers, got list"):
        BlockPattern([0, 1], torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="conv: expected 1 output and 2 input pixels, as the pattern has, got 5 and 5"):
        BlockPattern(torch.tensor([0, 1]), torch.tensor([0]), 2, ConvGeometry(5, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_size": 0}, ValueError, "input_size: expected at least 1"),
        ({"input_size": (2**31, 4)}, ValueError, "input_size: expected at least 1 and at most 2147483647"),
        ({"input_size": (2**31 - 1,) * 3}, ValueError, "input_size: expected pixels and pairs that int64 can count"),
        ({"input_size": (2**31 - 1,) * 2, "kernel_size": 30}, ValueError, "input_size: .* that int64 can count"),
        ({"input_size": (4, 4, 4, 4)}, ValueError, "input_size: expected an int or one to three ints"),
        ({"input_size": 4.0}, TypeError, "input_size: expected an int or one to three ints, got 4.0"),
        ({"kernel_size": 0}, ValueError, "kernel_size: expected at least 1"),
        ({"kernel_size": (3, 3, 3)}, ValueError, "kernel_size: expected an int, or one for each of 2 axes"),
        ({"kernel_size": 10}, ValueError, r"kernel_size: expected at most the padded input, \(8, 9\), got \(10, 10\)"),
        ({"dilation": 5}, ValueError, r"kernel_size: expected at most the padded input, .* with dilation \(5, 5\)"),
        ({"dilation": 0}, ValueError, "dilation: expected at least 1"),
        ({"stride": 0}, ValueError, "stride: expected at least 1"),
        ({"stride": (1, 1.0)}, TypeError, "stride: expected an int, or one for each of 2 axes"),
        ({"padding": -1}, ValueError, "padding: expected at least 0"),
        ({"padding": (1, (0, -1))}, ValueError, "padding: expected at least 0"),
        ({"padding": (1, 1, 1)}, ValueError, "padding: expected an int, or an int or a pair for each of 2 axes"),
        ({"padding": (1, (1, 1, 1))}, ValueError, "padding: expected an int, or one for each of 2 axes"),
        ({"padding": 1.0}, TypeError, "padding: expected ints, pairs of them, 'valid' or 'same', got 1.0"),
        ({"padding": (1, None)}, TypeError, "padding: expected"),
        ({"padding": "full"}, ValueError, "padding: expected ints, pairs of them, 'valid' or 'same', got 'full'"),
        ({"padding": "same", "stride": (1, 2)}, ValueError, "padding: 'same' is for stride 1 alone, got stride"),
        ({"padding_mode": "constant"}, ValueError, "padding_mode: expected one of 'zeros', 'circular', 'reflect'"),
        ({"padding_mode": "reflect", "padding": 8}, ValueError, r"padding: expected at most \(7, 8\) for reflect"),
        ({"padding_mode": "circular", "padding": 9}, ValueError, r"padding: expected at most \(8, 9\) for circular"),
    ],
)
def test_bad_geometries(arguments, error, message):
    with pytest.raises(error, match=message):
        BlockPattern.from_conv(**({"input_size": (8, 9), "kernel_size": 3} | arguments))


FULL, NO_CONV = BlockPattern.full(2, 3), "expected a pattern with a convolution, as from_conv makes it, got BlockPa"


@pytest.mark.parametrize(
    ("error", "message", "operation"),
    [
        (ValueError, "taps: " + NO_CONV, lambda: FULL.taps),
        (ValueError, "taps: " + NO_CONV, FULL.local_mask),
        (ValueError, "grow: " + NO_CONV, lambda: FULL.grow(1)),
        (ValueError, "pattern: expected one with a convolution", lambda: geometry.block_offsets(FULL)),
        (TypeError, "pattern: expected a BlockPattern, got int", lambda: geometry.block_distance_classes(3)),
        (
            ValueError,
            "kernel_size: expected odd sizes",
            lambda: geometry.block_distance_classes(BlockPattern.from_conv(4, 2)),
        ),
        (
            ValueError,
            "center: expected one of None, 'midpoint', got 'middle'",
            lambda: geometry.block_decay_map(BlockPattern.from_conv(4, 2), (1, 1), center="middle"),
        ),
        (TypeError, "other: expected a BlockPattern, got Tensor", lambda: FULL.union(torch.zeros(2, 3))),
        (ValueError, "other: expected n_out=2 and n_in=3, as this", lambda: FULL.union(BlockPattern.full(3, 2))),
        (TypeError, "keep: expected a bool tensor, got torch", lambda: FULL.prune(torch.ones(6, dtype=torch.int64))),
        (TypeError, "keep: expected a bool tensor, got list", lambda: FULL.prune([True] * 6)),
        (ValueError, r"keep: expected shape \(6,\), one for", lambda: FULL.prune(torch.ones(2, 3, dtype=torch.bool))),
        (ValueError, "n_out: expected pairs that int64 can count", lambda: BlockPattern.full(2**40, 2**40)),
        (ValueError, "n_out: expected at least 0, got -1", lambda: BlockPattern.full(-1, 1)),
    ],
)
def test_bad_operations(error, message, operation):
    with pytest.raises(error, match=message):
        operation()


@pytest.mark.parametrize("function", [BlockPattern.from_conv(4, 3).grow, ConvGeometry(4, 3).count_blocks])
def test_bad_radii(function):
    with pytest.raises(ValueError, match="radius: expected at least 0, got -1"):
        function(-1)
    for radius in (1.0, True):
        with pytest.raises(TypeError, match="radius: expected an int, got "):
            function(radius)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 4, 4), ValueError, "blocks: expected at least 0"),
        ((1.0, 4, 4), TypeError, "blocks: expected an int"),
        ((1, 4, 6, 4), ValueError, "out_channels: expected a multiple of groups, 4, got 6"),
        ((1, 6, 4, 4), ValueError, "in_channels: expected a multiple of groups, 4, got 6"),
        ((1, 4, 4, 0), ValueError, "groups: expected at least 1, got 0"),
        ((1, 4, 4, 1, "float32"), TypeError, "dtype: expected a torch.dtype, got 'float32'"),
    ],
)
def test_bad_forecasts(arguments, error, message):
    with pytest.raises(error, match=message):
        geometry.values_bytes(*arguments)
