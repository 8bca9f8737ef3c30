"""Small networks that have every structure budgets must handle, on images of 3 x 9 x 9 and 4 classes."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.sparsity.budget import layer_time, shrink

IMAGE = (3, 9, 9)
CLASSES = 4
IMAGES_OF_8 = torch.randn(2, 3, 8, 8)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.ReLU(),
        nn.Linear(12, CLASSES),
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def constants() -> nn.Module:
    """Return a network in which a filter that goes leaves a constant, 0.5, which the next layer pads with zeros."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Sigmoid(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def decoder() -> nn.Module:
    """Return a network whose transposed convolutions have as many filters as channels, and fewer."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 12, 3, stride=2, padding=1, output_padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 10, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, CLASSES),
    )


class Residual(nn.Module):
    """A stem, a block that adds to it, batch norms ahead of convolutions, and a grouped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(6), nn.Conv2d(6, 10, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(10), nn.Conv2d(10, 6, 3, padding=1)
        self.grouped = nn.Conv2d(6, 4, 3, groups=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())
        return self.head(self.grouped(x).mean((2, 3)))


class Scaled(nn.Module):
    """A block whose channels have learned slopes, scales and shifts, which no layer holds, and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.slope = nn.Conv2d(8, 10, 3, padding=1), nn.Parameter(torch.rand(10))
        self.conv2, self.scale = nn.Conv2d(10, 8, 3, padding=1), nn.Parameter(0.5 + torch.rand(8))
        self.shift, self.head = nn.Parameter(torch.randn(8, 1, 1)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        y = nn.functional.prelu(self.conv1(x), self.slope).type_as(x)
        x = x + self.conv2(y) * self.scale.view(1, -1, 1, 1) + self.shift
        return self.head(x.mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "depthwise": depthwise,
    "residual": Residual,
    "decoder": decoder,
    "scaled": Scaled,
}


def network(name: str, seed: int = 0) -> nn.Module:
    """Return a network whose batch norms have seen other than zero means and unit variances, in eval mode."""
    torch.manual_seed(seed)
    model = {**NETWORKS, "constants": constants}[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def batches(count: int = 2, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, *IMAGE, generator=generator), torch.randint(CLASSES, (8,), generator=generator))
        for _ in range(count)
    ]


def macs(model: nn.Module) -> int:
    """Return eq. 10 for one image: pixels, times the taps of each filter, times the channels that any filter reads."""
    total = 0

    def count(module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        live = module.weight.detach().flatten(2) != 0 if module.weight.dim() > 2 else module.weight[..., None] != 0
        pixels = output[0].numel() // len(live)
        if isinstance(module, nn.ConvTranspose2d):  # whose filters keep their size
            live, pixels = live.any(2, True).transpose(0, 1).expand(-1, -1, live.shape[2]), given[0][0, 0].numel()
        total += pixels * int(live.any(1).sum()) * int(live.any(2).any(0).sum())

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model(torch.zeros(1, *IMAGE))
    for handle in handles:
        handle.remove()
    return total


def fake_times(patch: Callable[[Any, str, Any], None], share: float, together: int = 1) -> None:
    """Let networks take this share of the latency for no MACs, and time in proportion to them above it.

    Filters of a layer run ``together``: fewer take as long.

    Args:
        patch: sets an attribute, such as ``monkeypatch.setattr``.
    """

    def rounded(count: int) -> int:
        return -(-count // together) * together

    def seconds_of(convolution: Any, kind: Any) -> float:
        pixels = prod(kind["shape"][-convolution.axes :]) / prod(convolution.module.stride)
        return pixels * rounded(len(convolution.weight)) * convolution.weight[0].numel()

    def seconds_of_layer(layer: Any, kind: Any) -> float:
        return rounded(layer.out_features) * layer.in_features

    def compact(model: nn.Module, inputs: Any, cost: str = "macs", **options: Any) -> tuple[nn.Module, sparsity.Report]:
        network, report = sparsity.compact(model, inputs, cost="macs", **options)
        filters = [(layer.macs_after, max(1, layer.filters_after)) for layer in report.layers]
        executed = sum(macs * rounded(count) / count for macs, count in filters)
        latency = share + (1 - share) * executed / report.macs_before
        return network, replace(report, latency_before=1.0, latency_after=latency)

    patch(layer_time, "seconds_of", seconds_of)
    patch(layer_time, "seconds_of_layer", seconds_of_layer)
    patch(shrink, "compact", compact)


def conv(channels: int, filters: int, padding: int = 1) -> nn.Module:
    return nn.Conv2d(channels, filters, 3, padding=padding)


def between(norm: nn.Module) -> nn.Module:
    """Return a network with a norm between its layers."""
    if isinstance(norm, nn.BatchNorm1d):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), norm, nn.ReLU(), nn.Linear(12, 10))
    return nn.Sequential(conv(3, 32), norm, nn.ReLU(), conv(32, 32), nn.ReLU(), conv(32, 10, 0))
