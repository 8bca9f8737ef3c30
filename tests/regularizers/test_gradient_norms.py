"""Norms of the gradients of all units, by every route, against autograd."""

import copy
import gc
import math

import pytest
import torch
from torch import nn

from loco_ext.fx.operations import module_of
from loco_ext.regularizers import frozen, gradient_norms
from tests import tolerances
from tests.regularizers import piecewise

NETWORKS = [name for name in piecewise.networks() if name != "residual vectors"]  # Hardtanh bends twice


def around(name, samples=2):
    """Return the network around some samples, the samples, and the model."""
    model, x = piecewise.network(name, samples, 5)
    return frozen.Frozen(frozen.FrozenNetwork(model, x), x), x, model


def norms(network, probes, q, chunk, x):
    with torch.no_grad():
        found = gradient_norms.gradient_norms(network, probes, q, chunk, x)
    nodes = [operation.node for operation in network.network.bending_operations]
    return [found[node].expand(network.bends[node].distances.shape) for node in nodes]


@pytest.mark.parametrize("name", NETWORKS)
def test_exact_norms_are_those_of_autograd(name):
    """Windows of max-pooling compare with the largest in an order of their own, so norms are compared sorted."""
    network, x, model = around(name)
    gradients = torch.stack([piecewise.gradients(model, sample)[2].flatten(1) for sample in x])
    for q in (1, 2, 3.5, math.inf):
        existing = []
        found = norms(network, gradient_norms.choose_probes(network, q), q, 5, x)
        for part, place in zip(found, network.network.bending_operations, strict=True):
            bend = network.bends[place.node]
            existing.append(part[bend.exists].view(len(x), -1) if bend.exists is not None else part.flatten(1))
            if isinstance(module_of(place.node), nn.ReLU6):
                existing.append(existing[-1])
        ours, theirs = torch.cat(existing, 1).sort(1).values, gradients.norm(q, dim=2).sort(1).values
        torch.testing.assert_close(ours, theirs, **tolerances.REGIONS)


def test_routes_are_chosen_by_architecture():
    def route(name, q=2):
        network = around(name)[0]
        return gradient_norms.choose_probes(network, q)

    assert route("mlp").extents is None  # 8 first units, 40 numbers
    assert route("mlp").count == 8
    assert route("mlp", 1).count == 40
    assert route("narrow mlp").count == 3
    assert route("residual vectors").count == 5
    assert route("local").extents == (5, 4)
    assert route("small fields").extents == (2, 2)
    assert route("1d").count == 6  # the last convolution sees 3 + 2 + 1 numbers


def assert_exact_in_float32(model, x, chunk):
    """Assert that the Gram recursion finds the norms in float32, by chunks of directions."""
    network = frozen.Frozen(frozen.FrozenNetwork(model, x), x)
    probes = gradient_norms.choose_probes(network, 2)
    assert probes.extents is None
    found = torch.cat(norms(network, probes, 2, chunk, x), 1).double()
    double = copy.deepcopy(model).double()
    exact = torch.stack([piecewise.gradients(double, sample)[2].norm(dim=1) for sample in x.double()])
    torch.testing.assert_close(found.sort(1).values, exact.sort(1).values, rtol=tolerances.FLOAT32_RADIUS, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "chunk"),
    [("independent", 64), ("independent", 23), ("independent", 5), ("dependent", 64), ("all off", 64), ("all off", 5)],
)
def test_norms_in_float32_are_as_exact(rows, chunk):
    """Samples have factors of their own where a chunk holds one, and where the rows of the first layer allow it.

    23 of the 24 rows count for any of them, so that a chunk of 23 does not hold the Gram matrix of all rows.
    """
    torch.manual_seed(4)
    model, x = nn.Sequential(*piecewise.mlp(40, 24, 24, 24)), torch.randn(5, 40)
    with torch.no_grad():
        if rows == "dependent":
            model[0].weight[1::2] = model[0].weight[::2]
        if rows == "all off":
            model[0].bias.fill_(-1000.0)
    if rows == "independent":
        assert (model[0](x) > 0).any(0).sum() == 23
    assert_exact_in_float32(model, x, chunk)


def test_a_weight_that_changes_between_calls_counts_as_it_is():
    """Its Gram matrix is kept between calls, and edits through ``data`` leave no trace in its version."""
    model, x = nn.Sequential(*piecewise.mlp(40, 24, 24, 24)), torch.randn(3, 40)
    weight = model[0].weight
    assert_exact_in_float32(model, x, 24)
    with torch.no_grad():
        weight *= 2
    assert_exact_in_float32(model, x, 24)
    weight.data[3, 5] += 1
    assert_exact_in_float32(model, x, 24)
    weight.data = torch.randn(weight.shape)
    assert_exact_in_float32(model, x, 24)


def test_nothing_is_kept_of_a_weight_that_is_gone():
    model, x = nn.Sequential(*piecewise.mlp(40, 24, 24)), torch.randn(3, 40)
    network = frozen.Frozen(frozen.FrozenNetwork(model, x), x)
    probes = gradient_norms.choose_probes(network, 2)
    gc.collect()
    before = len(gradient_norms._GRAMS)
    norms(network, probes, 2, probes.count, x)
    assert len(gradient_norms._GRAMS) == before + 1
    del model, network, probes
    gc.collect()
    assert len(gradient_norms._GRAMS) <= before


@pytest.mark.parametrize(
    ("layers", "extents"),
    [
        ([nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, (3, 1)), nn.ReLU()], (5, 3)),
        ([nn.Conv2d(3, 2, 3, dilation=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(2, 1, 2), nn.ReLU()], (8, 8)),
        ([nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), nn.ReLU()], (16, 16)),
        ([nn.MaxPool2d(3, 2), nn.Conv2d(3, 2, 2), nn.ReLU()], (5, 5)),
        ([nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 2)], (3, 3)),  # nothing bends behind the last
        ([nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 2), nn.ReLU()], (16, 16)),
    ],
    ids=range(6),
)
def test_receptive_extents(layers, extents):
    x = torch.randn(1, 3, 16, 16)
    network = frozen.Frozen(frozen.FrozenNetwork(nn.Sequential(*layers), x), x)
    assert gradient_norms.receptive_extents(network) == extents
    assert gradient_norms.receptive_extents(network, memory_limit=100_000) == extents
