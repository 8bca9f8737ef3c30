"""Networks in float64 whose batch normalisations have statistics and weights as after training."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES, SIZE = 5, 8


class Residual(nn.Module):
    """A residual network with in-place sums and ReLUs, strides, groups, and a weight that is computed."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, 2, 1))
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding="same", groups=2)
        self.linear = nn.Linear(8, CLASSES)
        self.activation, self.last = activation, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        return self.linear(self.last(y).mean((2, 3)))


def make(name: str) -> nn.Module:
    network = NETWORKS[name]().double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return network


def batch_norm_and_pooling() -> nn.Module:
    block = (
        nn.Conv2d(3, 8, 3, padding=1, dilation=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    )
    rest = (
        nn.Conv2d(8, 6, 1),
        nn.BatchNorm2d(6, affine=False),
        nn.LeakyReLU(0.1, True),
        nn.Hardtanh(-0.1, 0.5),
        nn.AvgPool2d(2),
    )
    return nn.Sequential(*block, *rest, nn.Dropout(0.5), nn.Flatten(), nn.Linear(24, CLASSES))


class Checkpointed(nn.Module):
    """A network that recomputes its activations in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(checkpoint(self.block, x, use_reentrant=False).flatten(1))


class Attention(nn.Module):
    """A transformer of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.linear = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, CLASSES)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.encoder(self.patches(x).flatten(2).mT).mean(1))


class Siamese(nn.Module):
    """A network that convolves with kernels that it makes of the images, and scales by them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Conv2d(3, 4, 3), nn.Linear(3, 1)
        self.places, self.linear = nn.Parameter(torch.randn(1, 4, 6, 6)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kernels = F.avg_pool2d(self.first(x).relu(), 2)  # [N, 4, 3, 3]
        y = F.conv2d(self.places.repeat(1, len(x), 1, 1), kernels, groups=len(x))  # [1, N, 4, 4]
        scale = self.scale(x.mean((2, 3))).squeeze(1)
        y = F.batch_norm(y, torch.zeros_like(scale), torch.ones_like(scale), scale, scale)
        return self.linear(y.view(len(x), 16))


class Overwriting(nn.Module):
    """A network that writes to its input, and to results of which torch's own functions keep the inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.sub_(0.5).div_(0.25))
        y = F.leaky_relu(x, 0.1)
        y += x
        return self.linear(y.flatten(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES)),
    "batch norm and pooling": batch_norm_and_pooling,
    "residual": Residual,
    "smooth": lambda: Residual(F.gelu),
    "hard sigmoid": lambda: Residual(F.hardsigmoid),
    "checkpointed": Checkpointed,
    "attention": Attention,
    "siamese": Siamese,
    "overwriting": Overwriting,
}


def images(count: int = 7) -> Tensor:
    return torch.rand(count, 3, SIZE, SIZE, dtype=torch.float64)
