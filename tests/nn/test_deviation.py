"""Projection onto convolutions, which is orthogonal, and the deviation of layers from their projections."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from loco_ext.nn import Deviation, LocallyConnected2d, deviation
from tests.nn.cases import block_of_taps, random_layer
from tests.regularizers.memory import peak_bytes
from tests.tolerances import WITH_CONVOLUTIONS

DOUBLE = WITH_CONVOLUTIONS[torch.float64]


def embedding(layer, case):
    """Return the blocks of each convolution with a single nonzero weight of 1, as columns: [values, weights]."""
    shape = (layer.out_channels, layer.in_channels // layer.groups, *case.kernel_size)
    columns = []
    of_taps = block_of_taps(layer, case)
    pixels, taps = (of_taps >= 0).nonzero(as_tuple=True)
    for which in range(math.prod(shape)):
        blocks = torch.zeros_like(layer.weight.detach())
        weight = torch.zeros(shape, dtype=torch.float64)
        weight.view(-1)[which] = 1
        rows = weight.flatten(2).unflatten(0, (layer.groups, -1)).permute(3, 0, 2, 1)
        blocks.index_add_(0, of_taps[pixels, taps], rows[taps])
        columns.append(blocks.flatten())
    return torch.stack(columns, 1)


@pytest.mark.parametrize("grown", [False, True], ids=["local", "grown"])
@pytest.mark.parametrize("seed", range(3))
def test_the_way_back_is_the_orthogonal_projection(seed, grown):
    """The reference is the least-squares solution of least norm, for random blocks."""
    generator = random.Random(seed)
    for _ in range(8):
        layer, case = random_layer(generator)
        if grown:
            layer.grow(1)
        with torch.no_grad():
            layer.weight.normal_()
        matrix = embedding(layer, case)
        blocks = layer.weight.detach().flatten()
        solution = torch.linalg.lstsq(matrix, blocks.unsqueeze(1), driver="gelsd").solution
        back = layer.to_conv()
        conv = back[1] if isinstance(back, nn.Sequential) else back
        torch.testing.assert_close(conv.weight.detach().flatten(), solution[:, 0])
        residual = blocks - matrix @ conv.weight.detach().flatten()
        torch.testing.assert_close(matrix.T @ residual, torch.zeros_like(conv.weight).flatten().detach())

        mean = 0.0 if layer.bias is None else layer.bias.mean(0)
        if layer.bias is not None:
            torch.testing.assert_close(conv.bias, mean)
        unshared = residual.square().sum() + (
            0.0 if layer.bias is None else (layer.bias - mean).detach().square().sum()
        )
        total = max(float(sum(p.detach().square().sum() for p in layer.parameters())), 1e-300)
        shares = layer.deviation()
        assert shares.delta_sharing == pytest.approx(math.sqrt(unshared / total), rel=DOUBLE)
        local = matrix.any(1).view(layer.weight.shape)
        off_local = layer.weight[~local].detach().square().sum() if grown else 0.0
        assert shares.delta_locality == pytest.approx(math.sqrt(off_local / total), rel=DOUBLE)


def test_pruned_blocks_count_as_zeros_and_tied_weights_once():
    layer = LocallyConnected2d(2, 3, 3, padding=1, bias=False, input_size=(4, 5), dtype=torch.float64)
    keep = torch.rand(layer.pattern.nnz) < 0.7
    whole = copy.deepcopy(layer)
    with torch.no_grad():
        whole.weight[~keep] = 0
    layer.prune(keep)
    torch.testing.assert_close(layer.to_conv().weight, whole.to_conv().weight)
    assert layer.deviation() == pytest.approx(whole.deviation())
    torch.testing.assert_close(copy.deepcopy(layer).grow(1).prune(radius=0).weight, whole.weight)
    other = copy.deepcopy(layer)
    other.weight = layer.weight
    assert deviation(nn.Sequential(layer, other)) == layer.deviation()


def test_large_layers_are_measured_in_little_memory():
    """A fully grown layer may take most of a device's memory."""
    layer = LocallyConnected2d(8, 8, 3, padding=1, bias=False, input_size=(16, 16)).grow(16)
    size = layer.weight.nbytes
    assert peak_bytes(layer.deviation) < size
    assert peak_bytes(lambda: layer.prune(threshold=0.0)) < size


def test_layers_whose_weights_are_computed_count_each():
    class Kept(nn.Module):
        def forward(self, weight):
            self.last = weight * 1.0
            return self.last

    model = nn.Sequential(*(LocallyConnected2d(1, 2, 3, input_size=(4, 4)) for _ in range(6)))
    expected = deviation(model)
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Kept())
    assert deviation(model) == expected


def test_deviations_of_models():
    local = LocallyConnected2d(2, 3, 3, input_size=6)
    model = nn.Sequential(local, nn.Flatten(), nn.Linear(48, 4))
    alone, shares = local.deviation(), deviation(model)
    own = sum(p.square().sum() for p in local.parameters())
    share = math.sqrt(own / sum(p.square().sum() for p in model.parameters()))
    assert alone.delta_locality == shares.delta_locality == 0
    assert shares.delta_sharing == pytest.approx(alone.delta_sharing * share, rel=WITH_CONVOLUTIONS[torch.float32])
    assert deviation(nn.Flatten()) == Deviation(delta_locality=0, delta_sharing=0)
    assert LocallyConnected2d.from_conv(nn.Conv2d(2, 3, 3), (6, 7)).grow(2).deviation() == (0, 0)
    with torch.no_grad():
        local.weight[0, 0, 0, 0] = math.nan
    assert math.isnan(deviation(model).delta_sharing)
    with pytest.raises(TypeError, match=r"model: expected a module, got list"):
        deviation([local])


def paper_network(padded: bool):
    """Return the paper's network on 32x32 pixels, fully connected; if ``padded``, inputs include the zero padding."""
    sizes, arguments = (32, 8, 3), ((3, 64, 4, 2, 2), (64, 64, 5, 1, 2), (64, 64, 3, 1, 1))
    layers = []
    for size, (channels, width, kernel, stride, padding) in zip(sizes, arguments, strict=True):
        around = (0, size + 2 * padding) if padded else (padding, size)
        layer = LocallyConnected2d(channels, width, kernel, stride, around[0], input_size=around[1])
        layers.append(layer.grow(around[1]))
        layer.reset_parameters(like="linear")
    return nn.Sequential(*layers, nn.Linear(64, 10))


@pytest.mark.slow
@pytest.mark.parametrize(("padded", "millions", "delta"), [(False, 73.9, 0.961), (True, 110.6, 0.975)])
def test_a_full_network_as_initialised_is_as_far_from_local_as_published(padded, millions, delta):
    """Section 4.3 and the caption of figure 10 state about .97 and 97 %; the exact value depends on the padding."""
    model = paper_network(padded)
    assert round(sum(layer.weight.numel() for layer in model[:3]) / 1e6, 1) == millions
    assert round(deviation(model).delta_locality, 3) == delta
