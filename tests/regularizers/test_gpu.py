"""Tests of losses and measurements on a GPU: they are those on the CPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loco_ext import regularizers
from loco_ext.regularizers import PILCRO, ROLL, MarginLoss
from tests.gpu import needs_gpu
from tests.regularizers import networks, piecewise

pytestmark = needs_gpu

NEAR = 1e-7  # tolerance in units of the largest number, in float64
TARGET = torch.rand(networks.SIZE, networks.SIZE, generator=torch.Generator().manual_seed(1))


def assert_same_on_both(call: Callable[[nn.Module, Tensor], list[Tensor]], model: nn.Module, x: Tensor) -> None:
    """Assert that what a call returns is on the GPU, if the model is, and equal to what it returns on the CPU."""
    there = copy.deepcopy(model).cuda()
    for found, expected in zip(call(there, x.cuda()), call(model, x), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=NEAR * expected.abs().max().item())


def with_gradients(make: Callable[[], Callable[[nn.Module, Tensor], Tensor]]) -> Callable[..., list[Tensor]]:
    """Return a function that calls a new loss, and returns it and its gradients."""

    def call(model: nn.Module, x: Tensor) -> list[Tensor]:
        loss = make()(model, x)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return call


LANDSCAPES = {
    "map": lambda model, x: [regularizers.importance_landscape(model, x)],
    "curvature": with_gradients(lambda: PILCRO(every=1, chunk_size=3)),
    "target": with_gradients(lambda: PILCRO("target", every=1, target=TARGET, expectation="exact")),
    "double backward": with_gradients(lambda: PILCRO(every=1, route="double_backward")),
}
REGIONS = {
    "radius": lambda model, x: [regularizers.region_radius(model, x)],
    "largest norm": lambda model, x: [regularizers.region_radius(model, x, p=float("inf"))],
    "roll": with_gradients(lambda: ROLL(1.0, 0.5, top_percent=20)),
    "margin": with_gradients(lambda: MarginLoss(1.0)),
}


@pytest.mark.parametrize("network", ["batch norm and pooling", "residual"])
@pytest.mark.parametrize("name", LANDSCAPES)
def test_landscapes_and_their_losses(name, network):
    assert_same_on_both(LANDSCAPES[name], networks.make(network), networks.images())


@pytest.mark.parametrize("network", ["cnn", "local", "residual"])
@pytest.mark.parametrize("name", REGIONS)
def test_linear_regions_and_their_losses(name, network):
    assert_same_on_both(REGIONS[name], *piecewise.network(network, samples=5, seed=0))
