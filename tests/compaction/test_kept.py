"""Compaction of in-place changes, of models without a graph, and of parts that it does not understand and keeps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compaction.cases import Network, compacted, sizes_of, strike


def test_a_sum_that_is_gone_protects_no_operand_from_changes_in_place() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        x = net.first(x)
        y = functional.relu(x + net.dead(x), inplace=True)
        return torch.cat([x, y], 1)

    model = Network(function, first=nn.Conv2d(2, 4, 3), dead=nn.Conv2d(4, 4, 1, bias=False)).double().eval()
    nn.init.zeros_(model.dead.weight)
    network, report = compacted(model, torch.randn(2, 2, 6, 6).double())
    assert not report.notes
    assert sizes_of(network) == [(4, 2, 3, 3)]


def on_a_view(net: Network, x: Tensor) -> Tensor:
    """Change a view of a value that is read later."""
    x = net.convolution(x)
    x.flatten(1).relu_()
    return x


def by_value(net: Network, x: Tensor) -> Tensor:
    """Depend on values, so that torch.fx cannot trace it."""
    return net.convolution(x) if x.sum() > 0 else net.convolution(-x)


@pytest.mark.parametrize("function", [on_a_view, by_value])
def test_models_without_a_graph_keep_their_channels_and_are_cropped(function: Callable[..., Tensor]) -> None:
    model = Network(function, convolution=nn.Conv2d(2, 4, 5, padding=2))
    model = strike(model, 1, dead=0.0, sizes=1.0).double().eval()
    with torch.no_grad():
        model.convolution.weight[:, :, 0] = 0
    x = torch.randn(2, 2, 8, 8).double()
    network, report = compacted(model, x, -x)
    assert "all channels are kept" in report.notes["model"]
    assert type(network) is Network
    assert report.macs_executed < report.macs_before


def test_what_is_not_understood_is_kept_and_named() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        x = net.watched(net.hooked(net.twice(net.twice(x))))
        return net.last(torch.fft.fft2(x).real.softmax(1))

    layers = {"twice": nn.Conv2d(4, 4, 3, padding=1, groups=2), "hooked": nn.Conv2d(4, 4, 3)}
    layers |= {"watched": nn.Conv2d(4, 4, 1), "last": nn.Conv2d(4, 4, 1)}
    model = strike(Network(function, **layers), 2).double().eval()
    model.hooked.register_forward_hook(lambda module, x, y: y * 2)
    model.watched.register_full_backward_pre_hook(lambda module, gradient: None)
    _, report = compacted(model, torch.randn(2, 4, 8, 8).double())
    assert "called more than once" in report.notes["twice"]
    assert "hooks" in report.notes["hooked"]
    assert "hooks" in report.notes["watched"]
    assert {"softmax", "fft_fft2"} <= report.notes.keys()
