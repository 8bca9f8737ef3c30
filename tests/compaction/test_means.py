"""Channels ahead of means over them, and parts of channels along the last axis."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compaction.cases import IMAGES, Network, compacted, convolution
from tests.compaction.test_models import check


def response_norm(net: Network, y: Tensor) -> Tensor:
    """Normalise channels by their responses as ConvNeXt V2 does."""
    size = torch.linalg.vector_norm(y, dim=(2, 3), keepdim=True)
    return y + torch.addcmul(net.shift, net.scale, y * (size / (size.mean(1, keepdim=True) + 1e-6)))


def parts_of_features(net: Network, y: Tensor) -> Tensor:
    one, other = y.permute(0, 2, 3, 1).split([5, 3], -1)
    return torch.cat([other.relu(), one.tanh()], dim=3)


# Functions of a network and of eight channels.
MEANS_AND_PARTS: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "attention to pixels": lambda net, y: y.sigmoid() * net.pixels(y.sigmoid().mean(dim=1, keepdim=True)).tanh(),
    "responses": response_norm,
    "all numbers of a sample": lambda net, y: y.sigmoid() * y.sigmoid().mean((-3, 2, 3), True),
    "means of features": lambda net, y: (x := y.flatten(2).transpose(1, 2).relu()) / (1 + x.mean(-1, keepdim=True)),
    "parts of features": parts_of_features,
}


@pytest.mark.parametrize("name", MEANS_AND_PARTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_channels_vanish_before_and_behind(name: str, seed: int) -> None:
    numbers = {key: nn.Parameter(torch.randn(1, 8, 1, 1)) for key in ("scale", "shift")}
    last = nn.Linear(8, 4) if "features" in name else convolution(8, 4)
    layers = {"first": convolution(3, 8), "pixels": convolution(1, 1), "last": last}
    model = Network(lambda net, x: net.last(MEANS_AND_PARTS[name](net, net.first(x))), **layers, **numbers)
    report = check(model, *IMAGES, seed=seed)
    assert not report.notes
    assert report.layers[0].filters_after < 8


def test_a_mean_that_only_fills_a_group_is_computed() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        mean = net.first(x).mean(1, keepdim=True)
        return net.last(net.grouped(torch.cat([net.other(x), net.pixels(mean)], 1)))

    layers = {"first": convolution(3, 6), "pixels": convolution(1, 6), "other": convolution(3, 2)}
    grouped = nn.Conv2d(8, 6, 3, groups=2)  # its second group reads nothing
    grouped.weight.data[:, 2:], grouped.weight.data[3:] = 0, 0
    model = Network(function, **layers, grouped=grouped, last=convolution(6, 3)).double().eval()
    compacted(model, *IMAGES)
