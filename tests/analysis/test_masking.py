"""Blocks of locally connected layers that are masked: against dense matrices, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from loco_ext import analysis, geometry
from loco_ext import nn as loco_nn


def test_masked_blocks_are_zero_inside_of_the_with_alone():
    """The reference is the layer's dense matrix with a mask made from what the convolution itself reads."""
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    layer = loco_nn.LocallyConnected2d.from_conv(conv, (4, 5)).grow(5)
    layer.reset_parameters(like="linear")
    model, x = nn.Sequential(layer, nn.Flatten()), torch.randn(2, 2, 4, 5, dtype=torch.float64)
    ones = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False).double()
    nn.init.ones_(ones.weight)
    eye = torch.eye(40, dtype=torch.float64)
    read = ones(eye.view(-1, 2, 4, 5)).flatten(1).T > 0  # [outputs, inputs]
    dense, values = layer.to_dense(), layer.weight.detach().clone()
    for kept, mask in (("local", read), ("off-local", ~read)):
        with analysis.only_blocks(model, kept):
            torch.testing.assert_close(model(x), x.flatten(1) @ (dense.weight * mask).T + dense.bias)
        assert torch.equal(layer.weight, values)
    with pytest.raises(RuntimeError, match="stop"), analysis.only_blocks(model, "local"):
        raise RuntimeError("stop")
    assert torch.equal(layer.weight, values)


class Blocks(nn.Module):
    """A user's own layer of blocks."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern, self.weight = pattern, nn.Parameter(torch.ones(pattern.nnz, 1, 1, 1))


def test_a_users_own_layers_of_blocks_are_masked_and_compared():
    pattern, _ = geometry.BlockPattern.from_conv(5, kernel_size=3, padding=1).grow(1)
    layer = Blocks(pattern)
    with analysis.only_blocks(nn.Sequential(nn.ReLU(), layer), "off-local"):
        assert torch.equal(layer.weight.flatten() == 0, pattern.local_mask())
    one, other = (geometry.BlockPattern(torch.arange(3), torch.tensor(columns), n_in=2) for columns in ([0, 1], [1, 0]))
    with pytest.raises(ValueError, match="second: expected the blocks of first, got others in the model"):
        analysis.interpolate(Blocks(one), Blocks(other), 3)


def test_masked_layers_may_change_their_dtype_but_not_their_blocks():
    layer = loco_nn.LocallyConnected2d(1, 2, 3, padding=1, input_size=(4, 5)).grow(1)
    other = copy.deepcopy(layer)
    values = layer.weight.detach().clone()
    with analysis.only_blocks(layer, "off-local"):
        layer.double()
        assert layer.weight.count_nonzero() == 0
    assert torch.equal(layer.weight, values.double())
    model = nn.ModuleList([layer, other])
    with pytest.raises(RuntimeError, match="got one grown"), analysis.only_blocks(model, "off-local"):
        layer.grow(1)
    assert torch.equal(other.weight, values)


def test_masking_refuses_what_has_no_blocks():
    layer = loco_nn.LocallyConnected2d(1, 1, 1, input_size=2)
    computed = nn.utils.parametrizations.weight_norm(copy.deepcopy(layer))
    for model, kept, error, said in (
        (3, "local", TypeError, "model: expected a module"),
        (nn.ReLU(), "local", ValueError, "model: expected locally"),
        (computed, "local", TypeError, "model: expected layers whose weight is a parameter, got a Tensor"),
        (layer, "remote", ValueError, "kept: expected one of 'local', 'off-local', got 'remote'"),
    ):
        with pytest.raises(error, match=said), analysis.only_blocks(model, kept):
            pass
