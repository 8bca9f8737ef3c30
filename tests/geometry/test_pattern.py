"""Block patterns against the pixels that torch's windows read, and against dense matrices."""

import copy
import io
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import geometry
from loco_ext.geometry import BlockPattern, ConvGeometry
from tests.geometry.pattern_cases import MODES, dense, embedding, grown, random_case, read_pixels

SEEDS = range(80)


def random_pattern(generator, n_out, n_in, conv=None):
    """Return a random pattern and its dense matrix; each row has its own density, so that some rows are empty."""
    matrix = torch.rand(n_out, n_in, generator=generator) < torch.rand(n_out, 1, generator=generator) - 0.2
    crow = torch.cat([torch.zeros(1), matrix.sum(1).cumsum(0)]).long()
    return BlockPattern(crow, matrix.nonzero()[:, 1], n_in, conv), matrix


def test_pairs_and_taps_are_what_torch_reads():
    """Every tap that reads a pixel is listed, in order, with its block, also in patterns that are grown and pruned."""
    for seed in SEEDS:
        case, generator = random_case(random.Random(seed)), torch.Generator().manual_seed(seed)
        pattern, reads, weights = BlockPattern.from_conv(*case.arguments), read_pixels(case), embedding(case)
        local = weights.sum(2) > 0
        assert torch.equal(dense(pattern), local), case
        assert (pattern.n_out, pattern.n_in, pattern.nnz) == (*local.shape, int(local.sum()))
        assert pattern.crow_indices.dtype == pattern.col_indices.dtype == torch.int64
        assert torch.equal(pattern.row_indices, local.nonzero()[:, 0])
        larger, _ = pattern.grow(seed % 3)
        smaller, _ = larger.prune(torch.rand(larger.nnz, generator=generator) < 0.7)
        for some in (pattern, larger, smaller):
            number = dense(some).flatten().cumsum(0).view(some.n_out, some.n_in) - 1
            there = (reads >= 0) & dense(some).gather(1, reads.clamp(min=0))
            output, tap = there.nonzero().unbind(1)
            assert torch.equal(some.taps.output, output), case
            assert torch.equal(some.taps.tap, tap)
            assert torch.equal(some.taps.block, number[output, reads[output, tap]])
            assert torch.equal(some.local_mask(), local[dense(some)])
        pairs = pattern.conv.tap_pairs()
        assert pairs.dtype == torch.int64
        assert torch.equal(pairs.double(), weights.flatten(0, 1).T @ weights.flatten(0, 1)), case


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_and_valid_padding_are_torchs(mode, dilation):
    for kernel, padding in itertools.product((2, 3, (5, 2)), ("same", "valid")):
        conv = nn.Conv2d(1, 1, kernel, padding=padding, dilation=dilation, padding_mode=mode, bias=False).double()
        pattern = BlockPattern.from_conv((9, 10), kernel, 1, padding, dilation, mode)
        block, tap, _ = pattern.taps
        values = torch.zeros(pattern.nnz).double().index_add(0, block, conv.weight.detach().flatten()[tap])
        matrix = torch.zeros(pattern.n_out, pattern.n_in).double()
        matrix[dense(pattern)] = values
        x = torch.randn(90, dtype=torch.float64)
        torch.testing.assert_close(matrix @ x, conv(x.view(1, 1, 9, 10)).flatten(), rtol=1e-12, atol=1e-13)


def test_growth_spreads_every_row():
    for seed in SEEDS:
        case, radius = random_case(random.Random(seed)), seed % 4
        pattern = BlockPattern.from_conv(*case.arguments)
        larger, places = pattern.grow(radius)
        expected = grown(case, dense(pattern), radius)
        assert torch.equal(dense(larger), expected), (case, radius)
        assert pattern.conv.count_blocks(radius) == larger.nnz == int(expected.sum())
        assert larger.conv is pattern.conv
        assert torch.equal(dense(pattern)[expected].nonzero().flatten(), places)
        most, _ = pattern.grow(max(case.input_size))
        assert most.nnz == pattern.conv.count_blocks(10**30) == pattern.n_out * pattern.n_in


def test_growth_of_pruned_patterns():
    """Any rows can grow, even empty ones, and growing twice equals growing by the sum of the radii."""
    for seed in SEEDS:
        case, radius = random_case(random.Random(seed)), seed % 3 + 1
        conv = ConvGeometry(*case.arguments)
        pattern, matrix = random_pattern(torch.Generator().manual_seed(seed), conv.n_out, conv.n_in, conv)
        once, places = pattern.grow(radius)
        assert torch.equal(dense(once), grown(case, matrix, radius)), (case, radius)
        assert torch.equal(matrix[dense(once)].nonzero().flatten(), places)
        twice, more = once.grow(1)
        direct, all_places = pattern.grow(radius + 1)
        assert torch.equal(dense(twice), dense(direct)), (case, radius)
        assert torch.equal(more[places], all_places)


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (1, 9), (9, 1), (7, 13), (40, 30), (3, 0), (0, 3)], ids=str)
def test_union_pruning_and_transposition_with_dense_matrices(n_out, n_in):
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        (a, in_a), (b, in_b) = (random_pattern(generator, n_out, n_in) for _ in range(2))
        both, places, other_places = a.union(b)
        assert torch.equal(dense(both), in_a | in_b)
        assert torch.equal(in_a[in_a | in_b].nonzero().flatten(), places)
        assert torch.equal(in_b[in_a | in_b].nonzero().flatten(), other_places)

        keep = torch.rand(a.nnz, generator=generator) < 0.5
        pruned, kept = a.prune(keep)
        left = in_a.clone()
        left[in_a] = keep
        assert torch.equal(dense(pruned), left)
        assert torch.equal(kept, keep.nonzero().flatten())

        crow, rows, blocks = a.transpose()
        number = in_a.flatten().cumsum(0).view(n_out, n_in) - 1
        assert crow.tolist() == [0, *in_a.sum(0).cumsum(0).tolist()]
        assert torch.equal(rows, in_a.T.nonzero()[:, 1])
        assert torch.equal(blocks, number.T[in_a.T])
        assert crow.dtype == rows.dtype == blocks.dtype == torch.int64
        assert a.transpose() is a.transpose()


def test_full_patterns():
    assert dense(BlockPattern.full(3, 4)).all()
    assert BlockPattern.full(0, 4).nnz == BlockPattern.full(4, 0).nnz == 0
    conv = ConvGeometry((3, 3), 3, padding=1)
    pattern = BlockPattern.full(9, 9, conv)
    assert pattern.local_mask().sum() == conv.count_blocks() == 49


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_forecast_is_the_memory_of_values(dtype):
    values = torch.empty(7, 3, 4, 5, dtype=dtype)
    assert geometry.values_bytes(7, 12, 15, groups=3, dtype=dtype) == values.untyped_storage().nbytes()
    assert geometry.values_bytes(10**15, 512, 512) == 4 * 512 * 512 * 10**15  # the result may exceed 64 bits


def test_copies_of_patterns():
    pattern, _ = BlockPattern.from_conv((4, 5), 3, padding=1).prune(torch.arange(130) % 3 > 0)
    pattern.transpose(), pattern.to("meta"), pattern.taps
    assert copy.deepcopy(pattern) is pattern
    assert {pattern: 1}[pattern] == 1
    for source in (pattern, pattern.to("meta")):
        buffer = io.BytesIO()
        pickle.dump(source, buffer)
        again = pickle.loads(buffer.getvalue())
        assert torch.equal(again.crow_indices, pattern.crow_indices)
        assert torch.equal(again.col_indices, pattern.col_indices)
        assert (again.n_in, again.conv) == (pattern.n_in, pattern.conv)


def test_patterns_on_a_device():
    """A pattern is copied to a device (here meta) once, with its transpose; computations stay on the CPU."""
    pattern = BlockPattern.from_conv(5, 3)
    there = pattern.to("meta")
    assert there is pattern.to(torch.device("meta")) is there.to("meta")
    assert there.to("cpu") is pattern.to("cpu") is pattern
    assert all(t.is_meta for t in (there.crow_indices, there.col_indices, there.row_indices, *there.transpose()))
    assert [t.shape for t in there.transpose()] == [t.shape for t in pattern.transpose()]
    assert (there.n_in, there.n_out, there.nnz) == (5, 3, 9)
    assert torch.equal(there.grow(1)[0].col_indices, pattern.grow(1)[0].col_indices)
    assert there.grow(0)[0] is pattern
    assert torch.equal(there.taps.block, pattern.taps.block)


def test_default_devices_and_dtypes_change_nothing():
    with torch.device("meta"):
        pattern = BlockPattern.from_conv((6, 7), 3, padding=1)
        larger, places = pattern.grow(1)
        everything = [*pattern.taps, *pattern.transpose(), places, pattern.local_mask(), pattern.row_indices]
        everything += [geometry.block_decay_map(pattern, (0.5, 2.0)), BlockPattern.full(2, 3).crow_indices]
        everything += [
            pattern.conv.tap_pairs(),
            larger.prune(torch.ones(larger.nnz, dtype=torch.bool, device="cpu"))[1],
        ]
    assert all(t.device.type == "cpu" for t in everything)


def test_what_inference_mode_keeps_can_be_trained_with():
    with torch.inference_mode():
        made = BlockPattern(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), n_in=2)
        pattern = BlockPattern.from_conv(4, kernel_size=3, padding=1)
        grown, _ = pattern.grow(1)
        for each in (made, pattern, grown, pattern.to("meta")):
            for kept in (each.crow_indices, each.col_indices, each.row_indices, *each.transpose()):
                assert not kept.is_inference()
        assert not any(kept.is_inference() for kept in pattern.taps)


def test_later_changes_from_outside_change_nothing():
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
    pattern = BlockPattern(crow, col, 3)
    crow[1], col[0] = 99, 99
    assert pattern.crow_indices.tolist() == [0, 2, 3]
    assert pattern.col_indices.tolist() == [0, 2, 1]
    with pytest.raises(AttributeError):
        pattern.n_in = 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_indices_of_any_integer_type(dtype):
    pattern = BlockPattern(torch.tensor([0, 1, 1], dtype=dtype), torch.tensor([4], dtype=dtype), np.int64(5))
    assert pattern.crow_indices.dtype == pattern.col_indices.dtype == torch.int64
    assert type(pattern.n_in) is int
