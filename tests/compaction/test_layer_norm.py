"""Networks with layer normalisations over channels, such as ConvNeXt, shrink and stay correct at every input size."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from tests.compaction.cases import Network, compacted, same
from tests.covering import covering


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise convolution, layer normalisation, and the layers that read it; the first ``dead`` filters are zero."""

    def __init__(self, width: int, dead: int, biased: bool = True, readers: int = 1, **norm: Any) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=biased, dtype=torch.double)
        self.norm = nn.LayerNorm(width, dtype=torch.double, **norm)
        self.readers = nn.ModuleList(
            nn.Linear(width, 3 + i, bias=bool(i % 2), dtype=torch.double) for i in range(readers)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()
            self.depthwise.weight[:dead] = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1).contiguous())
        return torch.cat([reader(y).permute(0, 3, 1, 2) for reader in self.readers], 1)


def images(channels: int = 9) -> list[Tensor]:
    """Return images of several sizes; a network is compacted for the first."""
    return [torch.randn(n, channels, h, w, dtype=torch.double) for n, h, w in ((2, 5, 4), (1, 1, 1), (3, 4, 6))]


NORMS = ({"eps": 1e-5}, {"eps": 0.5}, {"bias": False}, {"elementwise_affine": False})


@pytest.mark.parametrize(("norm", "biased", "dead"), covering(NORMS, [True, False], [3, 6, 8]), ids=str)
def test_dead_filters_before_a_normalisation_go(norm: dict[str, Any], biased: bool, dead: int, tmp_path: Path) -> None:
    model = Block(9, dead, biased, readers=2, **norm)
    smaller, report = compacted(model, *images())
    assert smaller.depthwise.weight.shape == (9 - dead, 1, 3, 3)
    features = 9 - dead + (2 if biased else 1)
    assert smaller.get_submodule("readers.0").weight.shape == (3, features)
    left = {layer.name: layer.macs_executed / layer.macs_before for layer in report.layers}
    assert left == {"depthwise": (9 - dead) / 9, "readers.0": features / 9, "readers.1": features / 9}
    compacted(smaller, *images())
    sparsity.save(smaller, tmp_path)
    same(sparsity.load(tmp_path), model, *images())


def test_scales_ahead_of_a_normalisation_have_their_channels() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.reader(net.norm((net.depthwise(x) * net.scale).permute(0, 2, 3, 1)))

    layers = {"depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8), "norm": nn.LayerNorm(8), "reader": nn.Linear(8, 4)}
    model = Network(function, **layers, scale=nn.Parameter(0.5 + torch.rand(8, 1, 1))).double().eval()
    model.depthwise.weight.data[:5], model.depthwise.bias.data[:5] = 0, 0
    smaller, _ = compacted(model, *images(8))
    assert smaller.get_submodule("reader").weight.shape == (4, 4)


def test_groups_of_a_norm_ahead_of_a_normalisation_stay_whole() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.reader(net.norm(net.groups(net.depthwise(x)).permute(0, 2, 3, 1)))

    layers = {"depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8), "groups": nn.GroupNorm(4, 8, affine=False)}
    model = Network(function, **layers, norm=nn.LayerNorm(8), reader=nn.Linear(8, 4)).double().eval()
    model.depthwise.weight.data[:2], model.depthwise.bias.data[:2] = 0, 0
    smaller, report = compacted(model, *images(8))
    assert "model" not in report.notes
    assert smaller.reader.in_features == 8 - 2 + 1  # all of the two constants are read as one feature
    assert smaller.groups.num_channels == 4 * smaller.groups.num_groups // 2


def test_a_normalisation_stays_if_the_layer_that_reads_it_is_called_again() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.depthwise(x).permute(0, 2, 3, 1)
        return net.reader(net.norm(y)) + net.reader(torch.tanh(y))

    layers = {"depthwise": nn.Conv2d(9, 9, 3, padding=1, groups=9), "norm": nn.LayerNorm(9), "reader": nn.Linear(9, 4)}
    model = Network(function, **layers).double().eval()
    model.depthwise.weight.data[:6] = 0
    smaller, report = compacted(model, *images())
    assert "model" not in report.notes
    assert type(smaller.norm) is nn.LayerNorm


def test_normalisations_stay_where_fewer_channels_do_not_pay() -> None:
    for dead in (0, 1, 2, 9):
        smaller, _ = compacted(Block(9, dead), *images())
        assert isinstance(smaller.norm, nn.LayerNorm)


def test_constants_far_from_zero_and_from_the_other_channels_keep_their_digits() -> None:
    model = Block(9, 6)
    with torch.no_grad():
        model.depthwise.bias.add_(1e3)
    first, *others = images()
    compacted(model, first, *(scale * x for scale in (0.0, 1e-9, 1e9) for x in others))


READERS: dict[str, tuple[nn.Module, int]] = {  # and the number of filters ahead of it that stay
    "padded with zeros": (nn.Conv2d(8, 4, 3, padding=1), 8),
    "reflecting": (nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), 3),
    "transposed": (nn.ConvTranspose2d(8, 4, 3), 8),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_features_unless_it_reads_zeros_beside_them(name: str) -> None:
    reader, filters = READERS[name]

    def function(net: Network, x: Tensor) -> Tensor:
        return net.reader(net.norm(net.depthwise(x)))

    layers = {"depthwise": nn.Conv2d(8, 8, 3, groups=8), "norm": LayerNorm2d(8)}
    model = Network(function, **layers, reader=reader).double()
    nn.init.normal_(model.norm.bias)
    nn.init.zeros_(model.depthwise.weight[:5])
    smaller, _ = compacted(model, *(torch.randn(n, 8, h, 9, dtype=torch.double) for n, h in ((2, 7), (1, 5), (3, 8))))
    assert smaller.depthwise.weight.shape[0] == filters


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    covering([torch.float32, torch.bfloat16], [torch.contiguous_format, torch.channels_last], strength=1),
)
def test_other_types_and_formats_differ_by_rounding_alone(dtype: torch.dtype, memory_format: Any) -> None:
    exact = Block(16, 8)
    model = copy.deepcopy(exact).to(dtype)
    x = torch.randn(2, 16, 6, 5).to(dtype).contiguous(memory_format=memory_format)
    smaller, _ = sparsity.compact(model, x, cost="macs")
    assert smaller.depthwise.weight.shape[0] == 8
    expected = exact(x.double())
    error = (smaller(x) - expected).abs().max()
    assert error <= 2 * (model(x) - expected).abs().max() + torch.finfo(dtype).eps * expected.abs().max()


def test_the_smaller_network_compiles_and_has_the_gradients_of_the_network() -> None:
    model = Block(9, 5)
    smaller, _ = compacted(model, *images())
    same(torch.compile(smaller, backend="eager", dynamic=True, fullgraph=True), model, *images())
    found, x = [], images()[0]
    for each in (model, smaller):
        y = x.clone().requires_grad_()
        each(y).square().sum().backward()
        found.append((y.grad, each.depthwise.weight.grad[-4:]))
    torch.testing.assert_close(found[0], found[1])


def test_a_depthwise_convolution_that_something_else_reads_keeps_its_filters() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.depthwise(x)
            return self.readers[0](self.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2) + y[:, :3]

    smaller, _ = compacted(Twice(9, 6), *images())
    assert smaller.get_submodule("readers.0").weight.shape == (3, 5)


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_dead_features_before_a_normalisation_of_features_go(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5)).double()
    nn.init.zeros_(model[0].weight[2:7])
    smaller, _ = compacted(model, *(torch.randn(n, *shape, 4, dtype=torch.double) for n in (2, 1, 3)))
    assert smaller.get_submodule("0").weight.shape == (4, 4)
    assert smaller.get_submodule("3").weight.shape == (5, 6)


def test_layers_before_what_is_constant_are_gone_in_the_report_too() -> None:
    """A branch as in ConvNeXt, whose last layer is zero."""

    def function(net: Network, x: Tensor) -> Tensor:
        x = net.first(x)
        y = net.norm(net.depthwise(x).permute(0, 2, 3, 1))
        return net.last(x + net.narrow(net.wide(y).relu()).permute(0, 3, 1, 2))

    layers = {
        "first": nn.Conv2d(3, 6, 3),
        "depthwise": nn.Conv2d(6, 6, 3, padding=1, groups=6),
        "norm": nn.LayerNorm(6),
    }
    layers |= {"wide": nn.Linear(6, 12), "narrow": nn.Linear(12, 6), "last": nn.Conv2d(6, 4, 1)}
    model = Network(function, **layers).double().eval()
    nn.init.zeros_(model.narrow.weight)
    network, report = compacted(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert {name for name, _ in network.named_modules()} == {"", "first", "last"}
    assert [layer.name for layer in report.layers if layer.filters_after] == ["first", "last"]
    assert report.macs_executed == 6 * 6 * (6 * 3 * 9 + 4 * 6)
