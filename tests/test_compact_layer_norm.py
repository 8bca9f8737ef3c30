"""Networks with layer normalisations over channels, as ConvNeXt, shrink and stay right at every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compact_cases import compacted, same
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity


class LayerNorm2d(nn.LayerNorm):
    """A layer normalisation over the channels of images."""

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
    """Linear layers between permutations, a scale of (channels, 1, 1), and the sum in place."""

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
    """Convolutions of 1x1 in the place of linear layers, and a scale of (channels,)."""

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
    """Half of the kernels of each layer are zero; their biases are not."""
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block", BLOCKS)
def test_features_inside_the_blocks_of_convnext_go(block: Any, seed: int, tmp_path: Path) -> None:
    model = halved(network(block), seed)
    smaller, report = compacted(model, torch.randn(2, 3, 16, 12, dtype=torch.double))
    inputs = images((2, 16, 12), (1, 16, 16), (3, 24, 20))
    same(smaller, model, *inputs)
    for layer in report.layers:
        inside = any(name in layer.name for name in ("block.3", "block.5", "first", "second"))
        assert layer.multiply_adds_executed * (2 if inside else 1) == layer.multiply_adds_before
    sparsity.save(smaller, tmp_path / "saved")
    same(sparsity.load(tmp_path / "saved"), model, *inputs)


def test_features_between_linear_layers_of_tokens_shrink() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(6), nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(functional.gelu(self.first(self.norm(x))))

    model = halved(Tokens())
    smaller, _ = compacted(model, torch.randn(2, 7, 6, dtype=torch.double))
    for shape in ((1, 3, 6), (4, 6, 6)):
        torch.testing.assert_close(smaller(x := torch.randn(shape, dtype=torch.double)), model(x))
    assert smaller.second.weight.shape == (3, 12)
