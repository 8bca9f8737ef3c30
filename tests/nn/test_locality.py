"""Decay by distance of locally connected layers, from the convolution to full connection."""

import copy

import pytest
import torch
from torch import nn

from loco_ext import geometry, optim
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d

LOCALITY = (0.5, 2.0)
PATHS = {"kernels": {}, "reference": {"fused": False}, "torch": {"foreach": True}}


def make_model():
    return nn.Sequential(
        LocallyConnected2d(2, 3, 3, padding=1, input_size=(5, 4), dtype=torch.float64),
        LocallyConnected2d(3, 3, (3, 5), padding=(1, 2), groups=3, input_size=(5, 4), dtype=torch.float64),
        nn.Conv2d(3, 2, 3, dtype=torch.float64),
    )


def decays(optimizer, parameter):
    """Make a step with zero gradients; return the relative decay of each weight of ``parameter``."""
    before = parameter.detach().clone()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    return 1 - (parameter.detach() / before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_blocks_decay_by_their_distance_after_growth_and_pruning_too(name, path):
    model = make_model()
    optimizer = getattr(optim, name)(
        optim.parameter_groups(model, 0.1, LOCALITY, per_layer={"1": (2.0, 1.0)}), lr=1.0, **PATHS[path]
    )
    for change in (
        None,
        lambda layer: layer.grow(4, optimizer),
        lambda layer: layer.prune(radius=1, optimizer=optimizer),
    ):
        for layer, factors in zip(model[:2], (LOCALITY, (2.0, 1.0)), strict=True):
            if change is not None:
                change(layer)
            nn.init.ones_(layer.weight)
            map_ = geometry.block_decay_map(layer.pattern, factors)
            expected = 0.1 * map_.view(-1, 1, 1, 1).expand_as(layer.weight)
            assert map_.std() > 0.1
            for _ in range(2):  # the second step repeats the first
                torch.testing.assert_close(decays(optimizer, layer.weight), expected)
            assert decays(optimizer, layer.bias).count_nonzero() == 0


def test_adam_adds_the_decay_to_the_gradient():
    model = make_model()
    other = copy.deepcopy(model)
    ours = optim.Adam(optim.parameter_groups(model, 0.1, LOCALITY), lr=0.01)
    theirs = torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(3):
        for ours_p, theirs_p in zip(model.parameters(), other.parameters(), strict=True):
            ours_p.grad = torch.randn_like(ours_p)
            theirs_p.grad = ours_p.grad.clone()
        for layer in other[:2]:
            map_ = geometry.block_decay_map(layer.pattern, LOCALITY).view(-1, 1, 1, 1)
            layer.weight.grad += 0.1 * map_ * layer.weight.detach()
        weight = other[2].weight
        weight.grad += 0.1 * geometry.decay_map((3, 3), LOCALITY) * weight.detach()
        ours.step()
        theirs.step()
    for ours_p, theirs_p in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours_p, theirs_p)


@pytest.mark.parametrize("channels", [(3, 5), (20, 3)])
def test_bare_parameters_have_their_map_too_and_never_that_of_a_kernel(channels):
    """A block of 3 by 5 channels has the shape of a kernel."""
    layer = LocallyConnected1d(*channels, 3, padding=1, input_size=7, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    map_ = geometry.block_decay_map(layer.pattern, LOCALITY).view(-1, 1, 1, 1)
    plain = nn.utils.parametrizations.weight_norm(copy.deepcopy(layer))
    nn.utils.parametrize.remove_parametrizations(plain, "weight")
    for model in (layer, copy.deepcopy(layer), plain):
        optimizer = optim.SGD(model.parameters(), 1.0, weight_decay=0.1, locality=LOCALITY)
        torch.testing.assert_close(decays(optimizer, model.weight), (0.1 * map_).expand_as(model.weight))


def test_even_kernels_stay_uniform_with_a_warning():
    layer = LocallyConnected1d(1, 1, 4, input_size=7, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    with pytest.warns(UserWarning, match="kernels of an even size have no centre tap"):
        optimizer = optim.SGD(optim.parameter_groups(layer, 0.1, LOCALITY), lr=1.0)
    torch.testing.assert_close(decays(optimizer, layer.weight), torch.full_like(layer.weight, 0.1).detach())
