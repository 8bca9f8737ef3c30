"""Block patterns against the pixels that torch's windows read, and against dense matrices."""

import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import geometry
from loco_ext.geometry import BlockPattern, ConvGeometry
from tests.geometry.pattern_cases import MODES, dense, embedding, grown, random_case, read_pixels

seeds = pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 300), marks=pytest.mark.slow)])


def random_pattern(generator, n_out, n_in, conv=None):
    """Return a random pattern and its dense matrix; each row has its own density, so that some rows are empty."""
    matrix = torch.rand(n_out, n_in, generator=generator) < torch.rand(n_out, 1, generator=generator) - 0.2
    crow = torch.cat([torch.zeros(1), matrix.sum(1).cumsum(0)]).long()
    return BlockPattern(crow, matrix.nonzero()[:, 1], n_in, conv), matrix


@seeds
def test_pairs_are_what_torch_reads(seeds):
    for seed in seeds:
        case = random_case(random.Random(seed))
        pattern = BlockPattern.from_conv(*case.arguments)
        matrix = embedding(case).sum(2) > 0
        assert torch.equal(dense(pattern), matrix), case
        assert (pattern.n_out, pattern.n_in, pattern.nnz) == (*matrix.shape, int(matrix.sum()))
        assert pattern.crow_indices.dtype == pattern.col_indices.dtype == torch.int64
        assert torch.equal(pattern.row_indices, matrix.nonzero()[:, 0])


@seeds
def test_taps_are_what_torch_reads(seeds):
    """Taps of the pattern, grown and pruned: every tap that reads a pixel is listed, in order, with its block."""
    for seed in seeds:
        case, generator = random_case(random.Random(seed)), torch.Generator().manual_seed(seed)
        pattern = BlockPattern.from_conv(*case.arguments)
        larger, _ = pattern.grow(seed % 3)
        smaller, _ = larger.prune(torch.rand(larger.nnz, generator=generator) < 0.7)
        reads = read_pixels(case)
        for some in (pattern, larger, smaller):
            number = dense(some).flatten().cumsum(0).view(some.n_out, some.n_in) - 1
            there = (reads >= 0) & dense(some).gather(1, reads.clamp(min=0))
            output, tap = there.nonzero().unbind(1)
            assert torch.equal(some.taps.output, output), case
            assert torch.equal(some.taps.tap, tap)
            assert torch.equal(some.taps.block, number[output, reads[output, tap]])
            local = (embedding(case).sum(2) > 0)[dense(some)]
            assert torch.equal(some.local_mask(), local)


def test_blocks_of_a_convolution_compute_it():
    """Weights by tap that are summed into blocks, groups included, give torch's convolution for any geometry."""
    convolutions = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    for seed in range(200):
        case = random_case(random.Random(seed), symmetric=True)
        groups, axes = seed % 3 + 1, len(case.input_size)
        pads = [pair[0] for pair in case.padding]
        conv = convolutions[axes](2 * groups, 3 * groups, case.kernel_size, case.stride, pads, case.dilation, groups,
                                  bias=False, padding_mode=case.padding_mode, dtype=torch.float64)  # fmt: skip
        pattern = BlockPattern.from_conv(case.input_size, conv.kernel_size, conv.stride, conv.padding, conv.dilation,
                                         conv.padding_mode)  # fmt: skip
        weight = conv.weight.detach().view(groups, 3, 2, -1).permute(3, 0, 2, 1)  # [taps, groups, in, out]
        values = weight.new_zeros(pattern.nnz, *weight.shape[1:])
        values.index_add_(0, pattern.taps.block, weight[pattern.taps.tap])

        x = torch.randn(2, 2 * groups, *case.input_size, dtype=torch.float64)
        pixels = x.flatten(2).unflatten(1, (groups, 2))[..., pattern.col_indices]  # [N, groups, in, nnz]
        terms = torch.einsum("ngib,bgio->ngob", pixels, values)
        y = terms.new_zeros(2, groups, 3, pattern.n_out).index_add(3, pattern.row_indices, terms)
        expected = conv(x).detach()
        assert expected.shape[2:] == pattern.conv.output_size
        torch.testing.assert_close(y.flatten(1, 2), expected.flatten(2), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, (5, 2)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_and_valid_padding_are_torchs(mode, kernel, dilation):
    for padding in ("same", "valid"):
        conv = nn.Conv2d(1, 1, kernel, padding=padding, dilation=dilation, padding_mode=mode, bias=False).double()
        pattern = BlockPattern.from_conv((9, 10), kernel, 1, padding, dilation, mode)
        block, tap, _ = pattern.taps
        values = torch.zeros(pattern.nnz).double().index_add(0, block, conv.weight.detach().flatten()[tap])
        matrix = torch.zeros(pattern.n_out, pattern.n_in).double()
        matrix[dense(pattern)] = values
        x = torch.randn(90, dtype=torch.float64)
        torch.testing.assert_close(matrix @ x, conv(x.view(1, 1, 9, 10)).flatten(), rtol=1e-12, atol=1e-13)


@seeds
def test_positions_of_taps_are_counted(seeds):
    """tap_pairs is E^T E of the matrix E that maps weights to blocks."""
    for seed in seeds:
        case = random_case(random.Random(seed))
        pairs = embedding(case).flatten(0, 1)
        counted = ConvGeometry(*case.arguments).tap_pairs()
        assert counted.dtype == torch.int64
        assert torch.equal(counted.double(), pairs.T @ pairs), case


def test_projection_is_the_nearest_convolution():
    """The projection that ConvTaps describes is least squares over all pairs, with pruned ones as zeros."""
    merged = 0
    for seed in range(100):
        case, generator = random_case(random.Random(seed)), torch.Generator().manual_seed(seed)
        whole, _ = BlockPattern.from_conv(*case.arguments).grow(1)
        pattern, _ = whole.prune(torch.rand(whole.nnz, generator=generator) < 0.8)
        values = torch.randn(pattern.nnz, dtype=torch.float64, generator=generator)
        counts = pattern.conv.tap_pairs().double()
        sums = torch.zeros(len(counts)).double().index_add(0, pattern.taps.tap, values[pattern.taps.block])
        weight = torch.linalg.pinv(counts, hermitian=True) @ sums

        target = torch.zeros(pattern.n_out, pattern.n_in, dtype=torch.float64)
        target[dense(pattern)] = values
        matrix = embedding(case).flatten(0, 1)
        expected = torch.linalg.lstsq(matrix, target.flatten(), driver="gelsd").solution  # the solution of least norm
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-10)
        if torch.equal(counts, counts.diag().diag()):
            reads = read_pixels(case)
            means = torch.where(reads >= 0, target.gather(1, reads.clamp(min=0)), torch.nan).nanmean(0).nan_to_num()
            torch.testing.assert_close(weight, means, rtol=1e-12, atol=1e-13)
        else:
            merged += 1
    assert 10 < merged < 90


@seeds
def test_growth_spreads_every_row(seeds):
    for seed in seeds:
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


@seeds
def test_growth_of_pruned_patterns(seeds):
    """Any rows can grow, even empty ones, and growing twice equals growing by the sum of the radii."""
    for seed in seeds:
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


@pytest.mark.parametrize("radius", [1, 2, 5])
def test_a_grown_convolution_has_the_pattern_of_a_larger_kernel(radius):
    pattern, _ = BlockPattern.from_conv((9, 12), (3, 2), (2, 1), ((1, 2), 1)).grow(radius)
    pads = ((1 + radius, 2 + radius), (1 + radius, 1 + radius))
    larger = BlockPattern.from_conv((9, 12), (3 + 2 * radius, 2 + 2 * radius), (2, 1), pads)
    assert torch.equal(dense(pattern), dense(larger))


def test_outputs_that_read_padding_alone_grow_from_the_border():
    pattern = BlockPattern.from_conv(4, kernel_size=1, padding=2)
    assert pattern.crow_indices.tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    larger, places = pattern.grow(1)
    assert larger.col_indices.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 2, 1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert places.tolist() == [4, 7, 10, 13]


def test_union_with_dense_matrices():
    generator = torch.Generator().manual_seed(0)
    for n_out, n_in in [(1, 1), (1, 9), (9, 1), (7, 13), (40, 30), (3, 0), (0, 3)] * 10:
        a, in_a = random_pattern(generator, n_out, n_in)
        b, in_b = random_pattern(generator, n_out, n_in)
        both, places, other_places = a.union(b)
        assert torch.equal(dense(both), in_a | in_b)
        assert torch.equal(in_a[in_a | in_b].nonzero().flatten(), places)
        assert torch.equal(in_b[in_a | in_b].nonzero().flatten(), other_places)


def test_pruning_with_dense_matrices():
    generator = torch.Generator().manual_seed(0)
    for n_out, n_in in [(1, 1), (1, 9), (9, 1), (7, 13), (40, 30), (3, 0), (0, 3)] * 10:
        pattern, matrix = random_pattern(generator, n_out, n_in)
        keep = torch.rand(pattern.nnz, generator=generator) < 0.5
        pruned, kept = pattern.prune(keep)
        left = matrix.clone()
        left[matrix] = keep
        assert torch.equal(dense(pruned), left)
        assert torch.equal(kept, keep.nonzero().flatten())


def test_transposition_with_dense_matrices():
    generator = torch.Generator().manual_seed(0)
    for n_out, n_in in [(1, 1), (1, 9), (9, 1), (7, 13), (40, 30), (3, 0), (0, 3)] * 10:
        pattern, matrix = random_pattern(generator, n_out, n_in)
        crow, rows, blocks = pattern.transpose()
        number = matrix.flatten().cumsum(0).view(n_out, n_in) - 1
        assert crow.tolist() == [0, *matrix.sum(0).cumsum(0).tolist()]
        assert torch.equal(rows, matrix.T.nonzero()[:, 1])
        assert torch.equal(blocks, number.T[matrix.T])
        assert crow.dtype == rows.dtype == blocks.dtype == torch.int64
        assert pattern.transpose() is pattern.transpose()


def test_full_patterns():
    assert dense(BlockPattern.full(3, 4)).all()
    assert BlockPattern.full(0, 4).nnz == BlockPattern.full(4, 0).nnz == 0
    conv = ConvGeometry((3, 3), 3, padding=1)
    pattern = BlockPattern.full(9, 9, conv)
    assert pattern.local_mask().sum() == conv.count_blocks() == 49


def test_the_papers_network_has_the_papers_size():
    """The eFCN's layers have 110.6 million weights if padding is part of the input, and 73.9 million of them live."""
    live = padded = 0
    for size, kernel, stride, padding, channels in [(32, 4, 2, 2, 3), (8, 5, 1, 2, 64), (3, 3, 1, 1, 64)]:
        conv = ConvGeometry((size, size), kernel, stride, padding)
        inside = ConvGeometry((size + 2 * padding, size + 2 * padding), kernel, stride)
        assert inside.output_size == conv.output_size
        live += geometry.values_bytes(conv.n_out * conv.n_in, channels, 64) // 4
        padded += geometry.values_bytes(inside.n_out * inside.n_in, channels, 64) // 4
    assert (round(live / 1e6, 1), round(padded / 1e6, 1)) == (73.9, 110.6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
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


def test_compiled_and_exported_graphs_use_patterns():
    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.pattern = BlockPattern.from_conv((4, 5), 3, padding=1)
            self.pattern.transpose()

        def forward(self, x):
            pattern = self.pattern.to(x.device)
            _, rows, blocks = pattern.transpose()
            return x[:, pattern.col_indices][:, blocks] * rows + pattern.nnz * pattern.n_in + pattern.n_out

    module, x = Transposing(), torch.randn(2, 20)
    expected = module(x)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), expected)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_patterns_on_a_gpu():
    pattern = BlockPattern.from_conv((6, 7), 3, padding=1)
    there = pattern.to("cuda")
    assert there is pattern.to("cuda:0")
    for ours, theirs in zip(pattern.transpose(), there.transpose(), strict=True):
        assert theirs.is_cuda
        assert torch.equal(ours, theirs.cpu())
    assert torch.equal(there.row_indices.cpu(), pattern.row_indices)


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_indices_of_any_integer_type(dtype):
    pattern = BlockPattern(torch.tensor([0, 1, 1], dtype=dtype), torch.tensor([4], dtype=dtype), np.int64(5))
    assert pattern.crow_indices.dtype == pattern.col_indices.dtype == torch.int64
    assert type(pattern.n_in) is int
