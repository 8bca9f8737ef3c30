"""Compaction of channels that are not computed: zeros that a padding adds, and fillers of groups."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compaction.cases import IMAGES, Network, compacted, convolution

PADDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "behind": lambda y: functional.pad(y, (0, 0, 0, 0, 0, 5)),
    "on both sides": lambda y: functional.pad(y, (0, 0, 0, 0, 2, 3), "constant", 0),
    "ahead": lambda y: functional.pad(y, [0, 0, 0, 0, 5, 0], value=0.0),
    "beside zeros": lambda y: torch.cat([y, torch.zeros_like(y)[:, 3:]], 1),
}


@pytest.mark.parametrize("dead", [[], [1, 4, 6], range(8)], ids=["none", "some", "all"])
@pytest.mark.parametrize("alone", [False, True], ids=["shortcut", "alone"])
@pytest.mark.parametrize("pad", PADDINGS.values(), ids=PADDINGS)
def test_channels_go_through_a_padding_of_channels(
    pad: Callable[[Tensor], Tensor], alone: bool, dead: list[int]
) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = functional.relu(net.first(x))
        shortcut = pad(y[:, :, ::2, ::2])
        return net.last(functional.relu(shortcut if alone else shortcut + net.middle(y)))

    parts = {"first": convolution(3, 8), "middle": nn.Conv2d(8, 13, 3, 2, 1), "last": convolution(13, 4)}
    model = Network(function, **{k: parts[k] for k in parts if not (alone and k == "middle")}).double().eval()
    with torch.no_grad():
        model.first.weight[list(dead)], model.first.bias[list(dead)] = 0, 0
        if not alone:
            model.middle.weight[3], model.middle.bias[3] = 0, 0
    network, report = compacted(model, *IMAGES)
    assert not report.notes
    if len(dead) < 8:
        assert network.get_submodule("first").weight.shape[0] == 8 - len(dead)


@pytest.mark.parametrize("padded", [False, True], ids=["behind a layer", "behind a padding"])
def test_a_channel_that_fills_a_group_has_one_to_come_from(padded: bool) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        dead = functional.relu(net.dead(functional.relu(net.unread(x))))
        if padded:
            dead = functional.pad(dead, (0, 0, 0, 0, 2, 0))
        return net.last(torch.relu(net.grouped(torch.cat([net.first(x), dead], 1))))

    parts = {"first": convolution(3, 5), "unread": convolution(3, 4, 1), "dead": convolution(4, 1 if padded else 3, 1)}
    parts |= {"grouped": nn.Conv2d(8, 8, 3, groups=2), "last": convolution(8, 4)}
    model = Network(function, **parts).double().eval()
    with torch.no_grad():
        model.dead.weight.zero_()
        model.first.weight[0] = 0
    compacted(model, *IMAGES)
