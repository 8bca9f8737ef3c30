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
from loco_ext.ops.channels import layer_norm_with_constants
from tests.compaction.cases import compacted, same
from tests.covering import slow


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return torch.permute(x, self.axes)


class LinearBlock(nn.Module):
    """Residual block with linear layers between permutations, a scale of (channels, 1, 1), and an in-place sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            Permute(0, 3, 1, 2),
        )
        self.scale = nn.Parameter(torch.rand(width, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        result = self.scale * self.block(x)
        result += x
        return result


class ConvolutionBlock(nn.Module):
    """Residual block with 1x1 convolutions instead of linear layers, and a scale of (channels,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = LayerNorm2d(width, eps=1e-6)
        self.first, self.second = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.gelu(self.first(self.norm(self.depthwise(x)))))
        return y.mul(self.scale.reshape(1, -1, 1, 1)) + x


BLOCKS = (LinearBlock, ConvolutionBlock)


def network(block: Any, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 2, stride=2),
        LayerNorm2d(width, eps=1e-6),
        block(width),
        block(width),
        LayerNorm2d(width, eps=1e-6),
        nn.Conv2d(width, 2 * width, 2, stride=2),
        block(2 * width),
        nn.AdaptiveAvgPool2d(1),
        LayerNorm2d(2 * width),
        nn.Flatten(1),
        nn.Linear(2 * width, 5),
    )


def halved(model: nn.Module, seed: int = 0) -> nn.Module:
    """Zero half of the filters of each layer, but not their biases; return the model in float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(generator=generator)
            elif isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[0] != 5:
                module.bias.normal_(generator=generator)
                count = len(module.weight)
                module.weight[torch.randperm(count, generator=generator)[: count // 2]] = 0
    return model


def images(*sizes: tuple[int, int, int]) -> list[Tensor]:
    return [torch.randn(n, 3, h, w, dtype=torch.double) for n, h, w in sizes]


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("block", BLOCKS)
def test_channels_and_features_inside_the_blocks_of_convnext_go(block: Any, seed: int, tmp_path: Path) -> None:
    model = halved(network(block), seed)
    smaller, report = compacted(model, torch.randn(2, 3, 16, 12, dtype=torch.double))
    inputs = images((2, 16, 12), (1, 16, 16), (3, 24, 20))
    same(smaller, model, *inputs)
    for layer in report.layers:
        left = layer.macs_executed / layer.macs_before
        if any(name in layer.name for name in ("block.0", "depthwise", "block.5", "second")):
            assert left == 1 / 2
        elif any(name in layer.name for name in ("block.3", "first")):
            width = layer.channels_before
            assert left == (width / 2 + 2) / width / 2  # half of the filters; two features beside the channels
        else:
            assert left == 1
    sparsity.save(smaller, tmp_path / "saved")
    same(sparsity.load(tmp_path / "saved"), model, *inputs)
    again, _ = compacted(smaller, torch.randn(2, 3, 16, 12, dtype=torch.double))
    same(again, model, *inputs)


class Block(nn.Module):
    """Depthwise convolution, layer normalisation, and the layers that read it, without zero weights."""

    def __init__(self, width: int, biased: bool = True, readers: int = 1, **norm: Any) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=biased, dtype=torch.double)
        self.norm = nn.LayerNorm(width, dtype=torch.double, **norm)
        self.readers = nn.ModuleList(
            nn.Linear(width, 3 + i, bias=bool(i % 2), dtype=torch.double) for i in range(readers)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1).contiguous())
        return torch.cat([reader(y).permute(0, 3, 1, 2) for reader in self.readers], 1)


def struck(model: Block, dead: int) -> Block:
    """Zero the first ``dead`` filters of the depthwise convolution; return the model."""
    with torch.no_grad():
        model.depthwise.weight[:dead] = 0
    return model


NORMS: tuple[dict[str, Any], ...] = (
    {"eps": 1e-5},
    {"eps": 0.5},
    {"bias": False},
    {"elementwise_affine": False},
)


def agrees(network: nn.Module, model: Block) -> None:
    """Assert equal outputs, to 1e-12 of the largest, for several sizes of batches and images."""
    for n, h, w in ((1, 1, 1), (2, 5, 3), (3, 4, 6)):
        x = torch.randn(n, model.depthwise.in_channels, h, w, dtype=torch.double)
        expected = model(x)
        assert (network(x) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dead", [3, 6, 8])
def test_dead_kernels_before_a_normalisation_go(norm: dict[str, Any], biased: bool, dead: int) -> None:
    model = struck(Block(9, biased, readers=2, **norm), dead)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    agrees(smaller, model)
    assert smaller.depthwise.weight.shape == (9 - dead, 1, 3, 3)
    assert smaller.get_submodule("readers.0").weight.shape == (3, 9 - dead + (2 if biased else 1))


@pytest.mark.parametrize("dead", [0, 1, 2, 9])
def test_normalisations_stay_where_fewer_channels_do_not_pay(dead: int) -> None:
    model = struck(Block(9), dead)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    agrees(smaller, model)
    assert isinstance(smaller.norm, nn.LayerNorm)


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e9])
def test_constants_far_from_zero_and_from_the_other_channels_keep_their_digits(scale: float) -> None:
    model = struck(Block(9), 6)
    with torch.no_grad():
        model.depthwise.bias.add_(1e3)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    x = scale * torch.randn(2, 9, 4, 6).double()
    expected = model(x)
    assert (smaller(x) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_reader_with_padding_takes_features_unless_it_pads_with_zeros(mode: str) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(8, 8, 3, groups=8), LayerNorm2d(8)
            self.reader = nn.Conv2d(8, 4, 3, padding=1, padding_mode=mode)
            nn.init.normal_(self.norm.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(self.norm(self.depthwise(x)))

    model = Padded().double()
    nn.init.zeros_(model.depthwise.weight[:5])
    smaller, _ = compacted(model, torch.randn(2, 8, 7, 6, dtype=torch.double))
    same(smaller, model, *(torch.randn(n, 8, h, 9, dtype=torch.double) for n, h in ((1, 5), (3, 8))))
    assert smaller.depthwise.weight.shape[0] == (8 if mode == "zeros" else 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_other_types_and_formats_differ_by_rounding_alone(dtype: torch.dtype, memory_format: Any) -> None:
    exact = struck(Block(16), 8)
    model = copy.deepcopy(exact).to(dtype)
    x = torch.randn(2, 16, 6, 5).to(dtype).contiguous(memory_format=memory_format)
    smaller, _ = compacted(model, x)
    assert smaller.depthwise.weight.shape[0] == 8
    expected = exact(x.double())
    error = (smaller(x) - expected).abs().max()
    assert error <= 2 * (model(x) - expected).abs().max() + torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("variance", [0.0, 0.7])
def test_gradients_of_the_features_are_right(variance: float) -> None:
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer_norm_with_constants(x, 5, 0.3, variance, 1e-3), x)


def test_gradients_of_the_smaller_network_are_those_of_the_network() -> None:
    model = struck(Block(9), 5)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    x = torch.randn(2, 9, 5, 4, dtype=torch.double)
    found = []
    for each in (model, smaller):
        y = x.clone().requires_grad_()
        each(y).square().sum().backward()
        found.append((y.grad, each.depthwise.weight.grad[-4:]))
    torch.testing.assert_close(found[0], found[1])


def test_a_compiled_network_gives_the_same() -> None:
    model = struck(Block(9), 6)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    agrees(torch.compile(smaller, backend="eager", dynamic=True, fullgraph=True), model)


def test_a_depthwise_convolution_that_something_else_reads_keeps_its_kernels() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.depthwise(x)
            return self.readers[0](self.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2) + y[:, :3]

    model = struck(Twice(9), 6)
    smaller, _ = compacted(model, torch.randn(2, 9, 5, 4, dtype=torch.double))
    agrees(smaller, model)
    assert smaller.get_submodule("readers.0").weight.shape == (3, 5)


@pytest.mark.parametrize("shape", [(), (7,), (3, 2)])
def test_dead_features_before_a_normalisation_of_features_go(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5)).double()
    nn.init.zeros_(model[0].weight[2:7])
    smaller, _ = compacted(model, torch.randn(2, *shape, 4, dtype=torch.double))
    same(smaller, model, *(torch.randn(n, *shape, 4, dtype=torch.double) for n in (1, 3)))
    assert smaller.get_submodule("0").weight.shape == (4, 4)
    assert smaller.get_submodule("3").weight.shape == (5, 6)


class ConstantBranch(nn.Module):
    """A residual branch of a convolution, a normalisation over channels and linear layers, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return self.last(x + self.narrow(self.wide(y).relu()).permute(0, 3, 1, 2))


def test_layers_before_what_is_constant_are_gone_in_the_report_too() -> None:
    model, x = ConstantBranch().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model.narrow.weight.data.zero_()
    network, report = sparsity.compact(model, x, cost="macs")
    torch.testing.assert_close(network(x), model(x))
    assert {name for name, _ in network.named_modules()} == {"", "first", "last"}
    assert [layer.name for layer in report.layers if layer.filters_after] == ["first", "last"]
    assert report.macs_executed == 6 * 6 * (6 * 3 * 9 + 4 * 6)
