"""The networks that the experiments train, by name, and loading of their weights.

Every convolution is followed by batch norm and ReLU, except in the networks of the eFCN paper, which have no
normalisation.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loco_ext.experiments.own_model import own_model
from loco_ext.foreign_checkpoints import CheckpointError, read_checkpoint, without_wrappers


def small_cnn(in_channels: int = 1, classes: int = 10, size: int = 8, *, width: float = 1.0) -> nn.Sequential:
    """Build three 3x3 convolutions of 32, 64 and 64 channels; 57 thousand parameters.

    The maps are halved before the last convolution, and also before the second for images at least 16 pixels wide.

    Args:
        in_channels: channels of the images, float [N, in_channels, size, size].
        classes: number of logits; the output is [N, classes].
        size: height and width of the images, at least 2.
        width: factor on the numbers of channels.
    """
    first, last = (max(1, round(width * channels)) for channels in (32, 64))
    return nn.Sequential(
        *_convolution(in_channels, first),
        *([nn.MaxPool2d(2)] if size >= 16 else []),
        *_convolution(first, last),
        nn.MaxPool2d(2),
        *_convolution(last, last),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(last, classes),
    )


def vgg13(in_channels: int = 3, classes: int = 10, size: int = 32, *, kernel_size: int = 3) -> nn.Sequential:
    """Build the VGG13 of LOCO-REG, Table 3: ten 3x3 convolutions in pairs, a pooling after each pair, one linear layer.

    A larger ``kernel_size`` is that of the layers whose maps are larger than it, as in section 7.1; the others stay.
    """
    layers: list[nn.Module] = []
    channels = in_channels
    for pooled, width in enumerate((64, 128, 256, 512, 512)):
        kernel = kernel_size if size >> pooled > kernel_size else 3
        layers += [*_convolution(channels, width, kernel), *_convolution(width, width, kernel), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (size // 32) ** 2, classes))


def mobilenet(in_channels: int = 3, classes: int = 10, size: int = 32) -> nn.Sequential:
    """Build the MobileNet of LOCO-REG, Table 3: alternating depthwise 3x3 and pointwise convolutions."""
    layers: list[nn.Module] = [*_convolution(in_channels, 64)]
    channels = 64
    # (stride of the depthwise convolution, channels after the pointwise one)
    for stride, width in ((2, 64), (1, 128), (2, 128), (1, 256), (1, 256), (2, 256), (1, 512), (1, 512), (2, 512)):
        layers += _convolution(channels, channels, stride=stride, groups=channels)
        layers += _convolution(channels, width, kernel_size=1)
        channels = width
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * (size // 32) ** 2, classes))


def resnet(
    in_channels: int = 3,
    classes: int = 10,
    size: int = 32,
    *,
    block: Callable[[int, int, int, int], tuple[nn.Module, ...]],
    expansion: int = 1,
    blocks: int | tuple[int, ...] = 3,
    width: float = 1.0,
    stages: tuple[int, ...] = (16, 32, 64),
    kernel_size: int = 3,
    stem: int | None = None,
) -> nn.Sequential:
    """Build a convolution, stages of blocks that all but the first begin with a stride of 2, and one linear layer.

    Without further arguments it is a base architecture of the structured-sparsity draft, Table 2: a 3x3 convolution,
    then three stages of three blocks of two convolutions with 16, 32 and 64 channels.

    Args:
        in_channels, classes, size: as for :func:`small_cnn`.
        block: makes the layers of a block of input channels, channels, first stride and kernel size.
        expansion: times as many channels come out of a block.
        blocks: blocks of each stage or of all; the depth that the draft counts is ``6 * blocks + 2``.
        width: factor on the numbers of channels.
        stages: channels of the stages before that factor.
        kernel_size: size of all kernels but those of shortcuts.
        stem: size of the first kernels, which for images as large as ImageNet's have a stride of 2 and a pooling behind
            them; with None, the first convolution is like the others.
    """
    first, *_ = widths = [max(1, round(width * channels)) for channels in stages]
    layers: list[nn.Module] = [*_convolution(in_channels, first, stem or kernel_size, 1 if stem is None else 2)]
    layers += [] if stem is None else [nn.MaxPool2d(3, 2, padding=1)]
    channels = first
    for stage, wide in enumerate(widths):
        for number in range(blocks if isinstance(blocks, int) else blocks[stage]):
            layers += block(channels, wide, 2 if stage > 0 and number == 0 else 1, kernel_size)
            channels = expansion * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def plain_block(in_channels: int, width: int, stride: int, kernel_size: int) -> tuple[nn.Module, ...]:
    """Return two convolutions without a shortcut."""
    return *_convolution(in_channels, width, kernel_size, stride), *_convolution(width, width, kernel_size)


def basic_block(
    in_channels: int, width: int, stride: int, kernel_size: int, *, padded: bool = False
) -> tuple[nn.Module, ...]:
    """Return two convolutions with a shortcut, which has no weights if it is ``padded``."""
    layers = plain_block(in_channels, width, stride, kernel_size)
    return (ResidualBlock(layers, in_channels, width, stride, padded=padded),)


def bottleneck(in_channels: int, width: int, stride: int, kernel_size: int) -> tuple[nn.Module, ...]:
    """Return a 1x1, a larger and a 1x1 convolution, the last four times as wide, with a shortcut."""
    layers = (
        *_convolution(in_channels, width, kernel_size=1),
        *_convolution(width, width, kernel_size, stride),
        *_convolution(width, 4 * width, kernel_size=1),
    )
    return (ResidualBlock(layers, in_channels, 4 * width, stride),)


cifar_resnet = partial(resnet, block=basic_block)
cifar_plain = partial(resnet, block=plain_block)
resnet18 = partial(cifar_resnet, blocks=2, stages=(64, 128, 256, 512))
resnet50 = partial(resnet, block=bottleneck, expansion=4, blocks=(3, 4, 6, 3), stages=(64, 128, 256, 512))


def vanilla_cnn(in_channels: int = 3, classes: int = 10, size: int = 32) -> nn.Sequential:
    """Build the VanillaCNN of the eFCN paper, section 4: three convolutions of 64 channels, poolings, one linear layer.

    The kernels are 4x4 with a stride of 2, 5x5 and 3x3, each followed by ReLU and 3x3 pooling of stride 2; 143,178
    parameters for three channels and ten classes.
    """
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 64, 4, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        nn.Flatten(),
        nn.Linear(64 * _after_poolings(size) ** 2, classes),
    )


def alexnet(in_channels: int = 3, classes: int = 100, size: int = 32) -> nn.Sequential:
    """Build the AlexNet of the eFCN paper, appendix B, for small images.

    It has five convolutions, three linear layers and dropout.
    """
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 64, 4, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        nn.Flatten(),
        *(nn.Dropout(), nn.Linear(256 * _after_poolings(size) ** 2, 512), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, classes),
    )


class ResidualBlock(nn.Module):
    """Layers, the last of them a ReLU, and a shortcut around all others.

    Where shapes change the shortcut is a 1x1 convolution or, if it is ``padded``, every ``stride``-th pixel and zeros
    in the new channels, which is option A of He et al. (2015).
    """

    def __init__(
        self, layers: Iterable[nn.Module], in_channels: int, channels: int, stride: int, *, padded: bool = False
    ) -> None:
        super().__init__()
        *residual, relu = layers
        self.residual = nn.Sequential(*residual)
        self.shortcut: nn.Module = nn.Identity()
        if padded and (stride != 1 or in_channels != channels):
            self.shortcut = PaddedShortcut(channels - in_channels, stride)
        elif stride != 1 or in_channels != channels:
            # Average pooling of one pixel replaces the stride, because oneDNN's backward of a strided 1x1 convolution
            # of few channels writes out of bounds (uxlfoundation/oneDNN#6035).
            narrow = stride != 1 and in_channels < 16
            *shortcut, _ = _convolution(in_channels, channels, kernel_size=1, stride=1 if narrow else stride)
            self.shortcut = nn.Sequential(*([nn.AvgPool2d(1, stride)] if narrow else []), *shortcut)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """Keep every ``stride``-th pixel and append ``more_channels`` channels of zeros."""

    def __init__(self, more_channels: int, stride: int) -> None:
        super().__init__()
        self.pool, self.padding = nn.AvgPool2d(1, stride), (0, 0, 0, 0, 0, more_channels)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.pool(x), self.padding)


class Model(NamedTuple):
    """Builder of a network from channels, classes and size of the images, and the smallest size it accepts.

    ``scalable``: the builder also takes a ``width``, the factor on its numbers of channels.
    """

    make: Callable[..., nn.Module]
    least_size: int
    scalable: bool = False


# Networks of the draft's Table 2: ResNets, and their plain twins without shortcuts.
_padded = partial(resnet, block=partial(basic_block, padded=True))
_SQUARE: Any = {"stages": (64, 64, 64), "kernel_size": 5}
_IMAGENET: dict[int, Any] = {
    8: {"stages": (64, 128, 256), "blocks": 1, "stem": 7},
    18: {"stages": (64, 128, 256, 512), "blocks": 2, "stem": 7},
}
MODELS = {
    "small": Model(small_cnn, 2),
    "vgg13": Model(vgg13, 32),
    "mobilenet": Model(mobilenet, 32),
    "resnet18": Model(resnet18, 8),
    "resnet50": Model(resnet50, 8),
    "resnet20": Model(cifar_resnet, 8, scalable=True),
    "plain20": Model(cifar_plain, 8, scalable=True),
    "resnet8": Model(partial(cifar_resnet, blocks=1), 8, scalable=True),
    "plain8": Model(partial(cifar_plain, blocks=1), 8, scalable=True),
    "resnet20-a": Model(_padded, 8, scalable=True),
    "resnet8-a": Model(partial(_padded, blocks=1), 8, scalable=True),
    "resnet20-5x5": Model(partial(_padded, **_SQUARE), 8, scalable=True),
    "plain20-5x5": Model(partial(cifar_plain, **_SQUARE), 8, scalable=True),
    **{f"resnet{d}-7x7": Model(partial(_padded, **a), 32, scalable=True) for d, a in _IMAGENET.items()},
    **{f"plain{d}-7x7": Model(partial(cifar_plain, **a), 32, scalable=True) for d, a in _IMAGENET.items()},
    "vgg13-5x5": Model(partial(vgg13, kernel_size=5), 32),
    "vanilla": Model(vanilla_cnn, 28),
    "alexnet": Model(alexnet, 28),
}


def is_own(name: str) -> bool:
    """Return whether the name has the form MODULE:FUNCTION of a function written by the user."""
    return ":" in name


def find_model(name: str) -> Model:
    """Return the network of that name, one of MODELS or the user's own."""
    return Model(partial(own_model, name), 1) if is_own(name) else MODELS[name]


def fully_connected(sizes: list[int], classes: int) -> nn.Sequential:
    """Return a network of linear layers with ReLUs between them; ``sizes`` are the numbers of inputs of the layers."""
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into ``model``, see :func:`loco_ext.foreign_checkpoints.read_checkpoint`.

    The file may be of a module that has the network as an attribute, as Lightning's modules do.

    Raises:
        CheckpointError: the file cannot be read, its names or shapes are those of another network, or its parameters
            are not finite floating-point numbers, which copying them into the model would not tell.
    """
    prefix, own = without_wrappers(model.state_dict())
    weights = {prefix + name: value for name, value in _without_attribute(read_checkpoint(path), own.keys()).items()}
    for name, parameter in model.named_parameters():
        value = weights.get(name, parameter)
        if parameter.is_floating_point() and not value.is_floating_point():
            raise CheckpointError(f"{path}: expected floating-point numbers in {name!r}, got {value.dtype}")
        if not value.to(parameter.dtype).isfinite().all():
            raise CheckpointError(f"{path}: expected finite numbers in {name!r}, got NaN or infinity")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise CheckpointError(f"{path}: weights of another network: {lines[-1].strip()}") from error


def _without_attribute(weights: dict[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """Return the weights without the first part of all their names, if that gives just the names of the network."""
    inner = {name.partition(".")[2]: value for name, value in weights.items()}
    attributes = {name.partition(".")[0] for name in weights}
    return inner if len(attributes) == 1 and inner.keys() == names else weights


def digest(model: nn.Module) -> str:
    """Return an identifier of the weights of ``model``: 12 characters of their SHA-256."""
    content = hashlib.sha256()
    for value in model.state_dict().values():
        content.update(value.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:12]


def _after_poolings(size: int) -> int:
    """Return the size left by a 4x4 kernel with stride 2 and padding 2, and three 3x3 poolings with stride 2."""
    size = size // 2 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size


def _convolution(
    in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, ...]:
    # No bias: the normalisation that follows would cancel it.
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
    )
    return convolution, nn.BatchNorm2d(out_channels), nn.ReLU()
