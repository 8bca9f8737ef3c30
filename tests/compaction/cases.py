"""Networks with zeros in their weights, for the tests of compaction."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from loco_ext import geometry, sparsity
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
Inputs = Tensor | tuple[Tensor, ...]
IMAGES = torch.randn(2, 3, 12, 11).double(), torch.randn(1, 3, 9, 13).double()


def convolution(channels: int, filters: int, size: int = 3) -> nn.Conv2d:
    """Return a convolution that keeps the size of images."""
    return nn.Conv2d(channels, filters, size, padding=size // 2)


def strike(model: nn.Module, seed: int = 0, dead: float = 0.4, sizes: float = 0.6, inputs: float = 0.1) -> nn.Module:
    """Zero random filters, outer rings and input channels; give normalisations random statistics and shifts."""
    generator = torch.Generator().manual_seed(seed)

    def chance(count: int, probability: float) -> Tensor:
        return torch.rand(count, generator=generator) < probability

    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                weight[chance(len(weight), dead)] = 0
                weight[:, chance(weight.shape[1], inputs)] = 0
                first = ("top_left", "bottom_right")[int(torch.randint(2, (), generator=generator))]
                rings = geometry.ring_index(tuple(weight.shape[2:]), first=first)
                gone = torch.randint(int(rings.max()) + 1, (len(weight),), generator=generator)
                for kernel, count, small in zip(weight, gone, chance(len(weight), sizes), strict=True):
                    if small:
                        kernel[:, rings < count] = 0
            elif isinstance(module, tuple(TRANSPOSED.values())):
                weight[:, chance(weight.shape[1], dead)] = 0
                weight[chance(len(weight), inputs)] = 0
            elif isinstance(module, nn.Linear):
                weight[chance(len(weight), inputs)] = 0
            elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                if module.running_mean is not None:
                    module.running_mean.normal_(generator=generator)
                    module.running_var.uniform_(0.5, 2, generator=generator)
                if module.affine:
                    weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.normal_(generator=generator)
    return model


def compacted(model: nn.Module, *inputs: Inputs, **options: Any) -> tuple[nn.Module, Any]:
    """Compact the model for the first input at the cost "macs", and assert equal outputs; also that it got smaller."""
    network, report = sparsity.compact(model, inputs[0], cost="macs", **options)
    assert "it stays as it is" not in report.notes.get("model", "")
    same(network, model, *inputs)
    return network, report


def same(network: nn.Module, model: nn.Module, *inputs: Inputs, tolerance: float = 1e-10) -> None:
    """Assert equal outputs, tensors or structures of them, to a part of the largest number of each."""
    for given in inputs:
        arguments = given if isinstance(given, tuple) else (given,)
        expected, results = (tree_leaves(each(*(x.clone() for x in arguments))) for each in (model, network))
        for result, right in zip(results, expected, strict=True):
            numbers = right.detach()[right.isfinite()]
            scale = numbers.abs().max().item() if numbers.numel() else 0.0
            torch.testing.assert_close(result, right, rtol=0, atol=tolerance * scale, equal_nan=True)


def mixed(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> Sequence[Bucket]:
    """Compute a layer with mixed_conv2d if that is possible, and else with one convolution for each size."""
    if cost.takes_mixed(convolution, kind):
        return cost.all_at_once(convolution)
    return cost.fewest_macs(convolution, kind, free)


def conv(weight: Tensor, bias: list[float] | None = None, **arguments: object) -> nn.Conv2d:
    """Return a float64 convolution with this weight and bias."""
    module = nn.Conv2d(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=bias is not None, **arguments)
    with torch.no_grad():
        module.double().weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(torch.tensor(bias))
    return module


def sizes_of(network: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(m.weight.shape) for m in network.modules() if isinstance(m, nn.Conv2d)]


class Network(nn.Module):
    """Module whose forward is a function of its named layers, parameters, buffers and input."""

    def __init__(self, function: Callable[..., object], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Two(Network):
    """Network of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> object:  # type: ignore[override]
        return self.function(self, x, y)


class Residual(nn.Module):
    """Residual block ``x + f(x)``, in either order, in place or not."""

    def __init__(self, function: nn.Module, order: int = 0, in_place: bool = False) -> None:
        super().__init__()
        self.function, self.order, self.in_place = function, order, in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x)
        if self.in_place:
            y += x
            return y
        return x + y if self.order == 0 else y + x


class Branches(nn.Module):
    """Concatenation of several modules' results along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Gate(nn.Module):
    """Squeeze and excitation: each channel is scaled by a factor computed from the channels' means."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.dims = dims
        convolution = CONVOLUTIONS[dims]
        self.squeeze, self.excite = convolution(channels, 3, 1), convolution(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(tuple(range(2, 2 + self.dims)), keepdim=True)
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(mean))))


class Next(nn.Module):
    """Block of ConvNeXt: linear layers and a layer normalisation over channels, scaled and added in place."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.depthwise = CONVOLUTIONS[dims](channels, channels, 3, padding=1, groups=channels)
        self.norm, self.wide = nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, 3 * channels)
        self.narrow = nn.Linear(3 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, *[1] * dims) + 0.5)
        self.there, self.back = (0, *range(2, 2 + dims), 1), (0, 1 + dims, *range(1, 1 + dims))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.permute(self.depthwise(x), self.there))
        result = self.scale * torch.permute(self.narrow(nn.functional.gelu(self.wide(y))), self.back)
        result += x
        return result


def random_network(seed: int, dims: int) -> nn.Module:
    """Return a chain of random layers, blocks and branches that takes inputs of at least 9 pixels along every axis."""
    choose = random.Random(seed)
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(5):
        block, channels = choose.choice(BLOCKS)(choose, channels, dims)
        layers += block
    layers += _convolution(choose, channels, 4, dims, same=True)
    return strike(nn.Sequential(*layers), seed).double().eval()


def random_case(
    seed: int, dims: int, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Return a random network with inputs of two sizes and its outputs; skip the test if it takes no such inputs."""
    torch.manual_seed(seed)
    model = random_network(seed, dims)
    shapes = (2, 3, *(12, 11, 10)[:dims]), (2, 3, *(9, 13, 9)[:dims])
    inputs = [torch.randn(shape, dtype=torch.double).contiguous(memory_format=memory_format) for shape in shapes]
    try:
        return model, inputs, [model(x) for x in inputs]
    except RuntimeError:
        pytest.skip("an image becomes too small for a kernel or a padding on its way")


def _convolution(choose: random.Random, channels: int, out: int, dims: int, same: bool = False) -> list[nn.Module]:
    """Return a convolution, often with normalisation and activation; ``same`` keeps the input's size."""
    groups = choose.choice([1, 1, 1, 2]) if channels % 2 == out % 2 == 0 else 1
    size = [choose.choice([1, 2, 3, 3, 3, 4, 5]) for _ in range(dims)]
    dilation = [choose.choice([1, 1, 2]) if k < 4 else 1 for k in size]
    mode = choose.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    if mode == "reflect" and dims == 3:
        mode = "zeros"
    stride, padding = 1, "same"
    if not same and choose.random() < 0.5:
        stride = choose.choice([1, 1, 2])
        padding = tuple(
            d * (k - 1) // 2 + choose.choice([0, 0, 1]) * (mode == "zeros") for k, d in zip(size, dilation, strict=True)
        )
    convolution = CONVOLUTIONS[dims](
        channels, out, size, stride, padding, dilation, groups, choose.random() < 0.5, mode
    )
    activation = [choose.choice([nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.SiLU, nn.PReLU])()]
    norm = [NORMS[dims](out)]
    return [convolution, *choose.choice([norm, []]), *choose.choice([activation, activation, []])]


def _plain(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    out = choose.choice([2, 4, 6])
    return _convolution(choose, channels, out, dims, same=dims == 3), out


def _depthwise(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    size = choose.choice([2, 3, 5])
    padding = choose.choice([0, size // 2]) if dims < 3 else "same"
    convolution = CONVOLUTIONS[dims](channels, channels, size, 1, padding, groups=channels)
    return [convolution, NORMS[dims](channels), nn.ReLU()], channels


def _transposed(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    """Return a transposed convolution and a pooling to about as many pixels as before."""
    out, stride, bias = choose.choice([2, 4]), choose.choice([1, 2]), choose.random() < 0.5
    size, dilation = choose.choice([2, 3]), choose.choice([1, 2])
    padding, more = choose.choice([0, 1]), choose.choice([0, stride - 1])
    layer = TRANSPOSED[dims](channels, out, size, stride, padding, more, 1, bias, dilation)
    behind = [choose.choice([nn.ReLU, nn.Tanh])(), getattr(nn, f"MaxPool{dims}d")(stride)]
    return [layer, *choose.choice([[NORMS[dims](out)], []]), *behind], out


def _residual(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    middle = choose.choice([3, 4])
    inside = _convolution(choose, channels, middle, dims, same=True)
    inside += _convolution(choose, middle, channels, dims, same=True)[: choose.choice([1, 2])]
    in_place = choose.random() < 0.3
    return [Residual(nn.Sequential(*inside), choose.choice([0, 1]), in_place), nn.ReLU(inplace=in_place)], channels


def _branches(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    widths = [choose.choice([1, 2, 3]) for _ in range(2)]
    parts = [nn.Sequential(*_convolution(choose, channels, width, dims, same=True)) for width in widths]
    return [Branches(nn.Identity(), *parts), NORMS[dims](channels + sum(widths))], channels + sum(widths)


def _gate(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    return [Gate(channels, dims)], channels


def _next(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    return [Next(channels, dims)], channels


def _pool(choose: random.Random, channels: int, dims: int) -> tuple[list[nn.Module], int]:
    kind = choose.choice(["MaxPool", "AvgPool"])
    padding = choose.choice([0, 1]) if dims < 3 else 1
    return [getattr(nn, f"{kind}{dims}d")(3, 1, padding), nn.Dropout(0.5)], channels


BLOCKS: Sequence[Callable[[random.Random, int, int], tuple[list[nn.Module], int]]]
BLOCKS = (_plain, _plain, _plain, _depthwise, _transposed, _residual, _residual, _branches, _gate, _next, _pool)
