"""Subclasses of torch's layers, and functions called with a module's own weights, in compacted networks."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loco_ext import sparsity
from tests.compaction.cases import Gate, Network, Residual, compacted, sizes_of, strike
from tests.covering import covering


class NormAndActivation(nn.BatchNorm2d):
    """Batch normalisation that checks its input, and applies dropout and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected images")
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))


class OwnConvolution(nn.Conv2d):
    """Subclass with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Standardised(nn.Conv2d):
    """Convolution whose code gives the weights of each filter mean 0 and variance 1, and scales them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(0.5 + torch.rand(sizes[1], 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, weight=(self.gain * 0.7).view(-1), training=True, momentum=0.0)
        return F.conv2d(x, rows.reshape_as(self.weight), self.bias, self.stride, self.padding)


def standardised() -> nn.Module:
    return nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), Standardised(8, 6, 3))


def drop_samples(x: Tensor, training: bool) -> Tensor:
    """Apply stochastic depth; torch.fx does not trace into this function."""
    if not training:
        return x
    return x * (torch.rand(len(x), 1, 1, 1) < 0.5)


torch.fx.wrap("drop_samples")


def network() -> nn.Module:
    block = nn.Sequential(OwnConvolution(8, 12, 1), NormAndActivation(12), OwnConvolution(12, 8, 3, padding=1))
    model = nn.Sequential(
        OwnConvolution(3, 8, 3, padding=1, bias=False),
        NormAndActivation(8),
        Residual(nn.Sequential(block, Network(lambda net, x: drop_samples(x, net.training)))),
        OwnConvolution(8, 4, 1),
    )
    return strike(model, dead=0.5).double().eval()


def test_subclasses_of_layers_shrink_as_layers_do(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 9, 8).double()
    smaller, report = compacted(model, x, torch.randn(1, 3, 7, 11).double())
    assert not report.notes
    assert report.macs_executed < 0.6 * report.macs_before
    assert not any(isinstance(module, nn.BatchNorm2d) for module in smaller.modules())
    sparsity.save(smaller, tmp_path)  # the checks and the dropping of samples in training are gone
    assert torch.equal(sparsity.load(tmp_path)(x), smaller(x))
    kept, _ = compacted(model, x, fold_norms=False)
    assert sum(type(module) is nn.BatchNorm2d for module in kept.modules()) == 2


def test_a_norm_that_is_never_trained_stays_a_function() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return F.batch_norm(x, net.mean, net.var, training=False)

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), Network(function, mean=torch.zeros(4), var=torch.full((4,), 2.0))
    ).double()
    smaller, _ = compacted(model, torch.randn(2, 3, 8, 8).double(), fold_norms=False)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in smaller.modules())


def test_functions_of_the_weights_of_a_layer_that_is_called_as_well_stay() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(net.middle(y) + F.conv2d(y, net.middle.weight, net.middle.bias, padding=2, dilation=2))

    layers = {"first": nn.Conv2d(3, 8, 3), "middle": nn.Conv2d(8, 8, 3, padding=1), "last": nn.Conv2d(8, 2, 3)}
    model = strike(Network(function, **layers)).double().eval()
    _, report = compacted(model, torch.randn(2, 3, 12, 11).double())
    assert "model" not in report.notes
    assert "read outside" in report.notes["middle"]


def test_average_pools_called_as_functions_let_channels_go() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last(F.avg_pool2d(net.first(x), kernel_size=3, stride=1, padding=1))

    model = Network(function, first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 2, 3)).double().eval()
    model.first.weight.data[::2] = 0
    model.first.bias.data[::2] = 0
    smaller, _ = compacted(model, torch.randn(2, 3, 12, 11).double())
    assert sizes_of(smaller)[0][0] == 4


def test_weights_that_code_computes_become_parameters() -> None:
    model = standardised().double().eval()
    for filters in (model[0].weight.data[:5], model[2].weight.data[1:3], model[4].weight.data[:1]):
        filters.zero_()
    network, report = compacted(model, torch.randn(2, 3, 9, 8).double())
    assert sizes_of(network) == [(3, 3, 3, 3), (6, 3, 3, 3), (6, 6, 3, 3)]
    assert [layer.name for layer in report.layers] == ["0", "2", "4"]
    assert "0.gain" not in network.state_dict()
    assert network.get_submodule("0").weight.requires_grad


def test_weights_that_code_computes_from_those_of_called_layers_can_be_saved(tmp_path: Path) -> None:
    """As those of a convolution that is scaled, while it trains, by the batch norm behind it."""

    def function(net: Network, x: Tensor) -> Tensor:
        scale = net.norm.weight.view(-1, 1, 1, 1)
        y = F.conv2d(net.first(x), scale * net.middle.weight) / scale.view(-1, 1, 1)
        return net.norm(y) + F.conv2d(x, net.first.weight * 2)[:, :, 2:, 2:]

    layers = {"first": nn.Conv2d(3, 8, 3), "middle": nn.Conv2d(8, 8, 3), "norm": nn.BatchNorm2d(8)}
    model, x = strike(Network(function, **layers)).double().eval(), torch.randn(2, 3, 9, 8).double()
    network, report = compacted(model, x)
    assert "model" not in report.notes
    sparsity.save(network, tmp_path)
    assert torch.equal(sparsity.load(tmp_path)(x), network(x))


def test_in_a_budget_layers_whose_weights_code_computes_keep_their_filters() -> None:
    """A filter may be other than zero though what it is computed from is zero, and has no importance of its own."""
    x = torch.randn(2, 3, 9, 8)
    _, report = sparsity.shrink_to(standardised(), x, macs=0.7, importance="norm", granularity="filters")
    assert [layer.filters_after for layer in report.layers] == [8, 4, 6]
    with pytest.raises(ValueError, match=r"got none; all channels are kept that these read or return: 0$"):
        sparsity.shrink_to(standardised()[:1], x, macs=0.5, importance="norm")


@pytest.mark.parametrize(
    ("dead", "padding", "norm"),
    covering(["whole groups", "half of each", "any"], [0, 1], [nn.BatchNorm2d, NormAndActivation, nn.SyncBatchNorm]),
)
def test_groups_shrink(dead: str, padding: int, norm: type[nn.Module]) -> None:
    inside = [nn.Conv2d(8, 12, 1), norm(12), nn.ReLU(), nn.Conv2d(12, 24, 3, padding=padding, groups=4), norm(24)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *inside, nn.ReLU(), Gate(24, 2), nn.Conv2d(24, 5, 1)).double()
    strike(model, dead=0, sizes=0, inputs=0)
    gone = {"whole groups": torch.arange(12) < 6, "half of each": torch.arange(12) % 3 > 0}
    first = gone.get(dead, torch.rand(12) < 0.5)
    model[2].weight.data[first] = 0
    second = first.repeat_interleave(2)
    model[5].weight.data[second] = 0
    model[5].bias.data[second] = model[6].running_mean[second] - 0.5
    model[6].bias.data[second] = 0  # the ReLU makes these channels zero
    x = torch.randn(2, 3, 9, 8).double()
    for folded in (True, False):
        _, report = compacted(model.eval(), x, torch.randn(1, 3, 7, 11).double(), fold_norms=folded)
    if dead != "any":
        grouped = next(layer for layer in report.layers if layer.name == "5")
        assert grouped.macs_executed <= 0.8 * grouped.macs_before
    compacted(model, x, fixed_size=True)


def test_groups_of_a_branch_that_adds_nothing_go_with_it() -> None:
    branch = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), Gate(4, 2), nn.Conv2d(4, 4, 1))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Residual(branch), nn.Conv2d(4, 2, 3)).double().eval()
    branch[2].weight.data.zero_()
    network, _ = compacted(model, torch.randn(2, 3, 9, 8).double())
    assert sizes_of(network) == [(4, 3, 3, 3), (2, 4, 3, 3)]
