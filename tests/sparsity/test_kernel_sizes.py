"""Effective size of a kernel whose outer rings are zero."""

import pytest
import torch

from loco_ext import geometry, sparsity
from tests.ring_prox.cases import square_rings


@pytest.mark.parametrize("rings", square_rings(7), ids=str)
def test_each_ring_taken_away_leaves_the_next_size(rings):
    size = rings.kernel_size[0]
    index = torch.tensor(rings.of_taps).view(rings.kernel_size)
    for gone in range(rings.count + 1):
        weight = torch.where(index >= gone, torch.randn(3, 2, size, size), 0.0)
        left = rings.count - gone
        expected = left if rings.kind == "half" else max(0, 2 * left - 1)
        assert sparsity.kernel_sizes(weight, rings.kind, first=rings.first).tolist() == [expected] * 3
        live = (weight[0] != 0).any(0)
        assert live.any(0).sum() == live.any(1).sum() == expected  # live taps form a square


def test_a_hole_does_not_count():
    weight = torch.ones(2, 1, 5, 5)
    weight[0, 0, 2, 2] = 0  # the centre
    weight[1, 0, 1:, 1:] = 0  # only the outermost ring is left
    assert sparsity.kernel_sizes(weight).tolist() == [5, 5]


def test_one_weight_of_any_channel_keeps_its_ring():
    weight = torch.zeros(4, 3, 5, 5)
    weight[1, 2, 2, 2] = 1e-45
    weight[2, 0, 0, 4] = torch.nan
    weight[3, 1, 1, 1] = -0.0
    assert sparsity.kernel_sizes(weight).tolist() == [0, 1, 5, 0]
    assert sparsity.kernel_sizes(weight, "full").tolist() == [0, 1, 5, 0]


@pytest.mark.parametrize("kernel_size", [(7,), (3, 5), (6, 2), (2, 4, 3)])
def test_the_size_of_a_rectangle_is_along_its_longest_axis(kernel_size):
    index = geometry.ring_index(kernel_size)
    for gone in range(max(kernel_size) + 1):
        weight = (index >= gone).float().expand(2, 3, *kernel_size)
        assert sparsity.kernel_sizes(weight).tolist() == [max(kernel_size) - gone] * 2


def test_sizes_are_int64_for_any_dtype_and_number_of_kernels():
    for dtype in (torch.float64, torch.bfloat16):
        sizes = sparsity.kernel_sizes(torch.ones(2, 1, 3, dtype=dtype, requires_grad=True))
        assert (sizes.dtype, sizes.tolist()) == (torch.int64, [3, 3])
    assert sparsity.kernel_sizes(torch.ones(0, 1, 3)).shape == (0,)
