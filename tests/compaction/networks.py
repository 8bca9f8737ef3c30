"""Networks whose graphs resemble those of compacted networks, for the tests of files and of ONNX."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


class Residual(nn.Module):
    """Network in which two layers write to one sum, and channels are scattered, as in the results of `compact`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.branch = nn.Sequential(nn.Conv2d(6, 4, (3, 2), padding="same"), nn.PReLU(4), nn.Conv2d(4, 2, 1))
        self.head = nn.Linear(6, 5)
        self.register_buffer("places", torch.tensor([4, 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = torch.index_add(x, 1, self.places, self.branch(x))
        x = x + 0.5 * x.index_select(1, torch.flip(self.places, (0,)).repeat(3))
        return self.head(x.mean((2, 3)))


class Cropping(nn.Module):
    """Network whose filters are bucketed by size, each bucket with its own pads, some of them negative."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(3, 2, 1)
        self.large = nn.Conv2d(3, 3, (5, 4), groups=1)
        self.scale = nn.Parameter(torch.randn(5, 1, 1))
        self.register_buffer("order", torch.tensor([3, 0, 4, 1, 2]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        small = self.small(F.pad(x, (-1, -2, -1, -1)))
        large = self.large(F.pad(x, (0, 0, 1, 1), mode="circular"))
        both = torch.cat([small, large], 1)
        picked = torch.index_select(both, 1, self.order) * self.scale
        picked += picked
        return picked[:, 1::2].contiguous().view(x.shape[0], -1)


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.ReLU6(inplace=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Hardswish(),
        nn.Upsample(scale_factor=2.0, mode="bilinear"),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.LayerNorm(4),
        nn.Linear(4, 7),
    )


NETWORKS = {"plain": plain, "residual": Residual, "cropping": Cropping}


def network(name: str) -> fx.GraphModule:
    """Return one of NETWORKS in evaluation mode, with running statistics that differ from a new network's."""
    model = fx.symbolic_trace(NETWORKS[name]())
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(2 * images(6) + 1)
    return model.eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 13, 11)


def graph_module(layers: dict[str, nn.Module | Tensor], build: Callable[[fx.Graph, fx.Node], Any]) -> fx.GraphModule:
    """Return a graph module of one input, whose output node is the result of ``build(graph, x)``."""
    root = nn.Module()
    for name, value in layers.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            root.register_buffer(name, value)
        else:
            setattr(root, name, value)
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule(root, graph)
