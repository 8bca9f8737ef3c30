"""Shapes of every parameter of some networks, in forward order, as an optimizer sees them.

ResNets are torchvision's (He et al. 2015). VGG13 is the 32x32 variant of the LOCO-REG paper's Table 3 (ten 3x3
convolutions with biases, each followed by batch norm, and one linear layer, 10 classes). MobileNet is v1 with 1000
classes (Howard et al. 2017, Table 1). ViT-B/16 is torchvision's, for images of 224x224 (Dosovitskiy et al. 2021).
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from loco_ext.experiments import models

Shape = tuple[int, ...]


def conv(c_in: int, c_out: int, size: int, groups: int = 1) -> Iterator[Shape]:
    """Yield the shapes of a convolution without bias, then batch norm's scale and shift."""
    yield (c_out, c_in // groups, size, size)
    yield (c_out,)
    yield (c_out,)


def linear(n_in: int, n_out: int) -> Iterator[Shape]:
    """Yield the shapes of a linear layer with bias."""
    yield (n_out, n_in)
    yield (n_out,)


def imagenet_resnet(make: Callable[..., nn.Module]) -> Iterator[Shape]:
    """Yield the shapes of an ImageNet ResNet: 7x7 stem, four stages of blocks, 1000 classes."""
    with torch.device("meta"):
        network = make(classes=1000, size=224, stem=7)
    yield from (tuple(parameter.shape) for parameter in network.parameters())


def resnet18() -> Iterator[Shape]:
    """Yield the shapes of 62 tensors, 11,689,512 parameters."""
    yield from imagenet_resnet(models.resnet18)


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of 161 tensors, 25,557,032 parameters."""
    yield from imagenet_resnet(models.resnet50)


def vgg13() -> Iterator[Shape]:
    """Yield the shapes of 42 tensors, 9,416,010 parameters."""
    channels = 3
    for width in (64, 64, 128, 128, 256, 256, 512, 512, 512, 512):
        weight, *norm = conv(channels, width, 3)
        yield from (weight, (width,), *norm)
        channels = width
    yield from linear(channels, 10)


def mobilenet() -> Iterator[Shape]:
    """Yield the shapes of 83 tensors, 4,231,976 parameters: alternating depthwise 3x3 and pointwise convolutions."""
    yield from conv(3, 32, 3)
    channels = 32
    for width in (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024):
        yield from conv(channels, channels, 3, groups=channels)
        yield from conv(channels, width, 1)
        channels = width
    yield from linear(channels, 1000)


def vit_b() -> Iterator[Shape]:
    """Yield the shapes of 152 tensors, 86,567,656 parameters: 16x16 patches, 12 blocks of width 768, 1000 classes."""
    width = 768
    yield (1, 1, width)
    yield from ((width, 3, 16, 16), (width,))
    yield (1, 1 + (224 // 16) ** 2, width)
    for _ in range(12):
        yield from ((width,), (width,))
        yield from linear(width, 3 * width)
        yield from linear(width, width)
        yield from ((width,), (width,))
        yield from linear(width, 4 * width)
        yield from linear(4 * width, width)
    yield from ((width,), (width,))
    yield from linear(width, 1000)


def thousand_small() -> Iterator[Shape]:
    """Yield the shapes of 1,000 tensors of 64 elements: on a GPU, only launches and the work of the host remain."""
    yield from [(64,)] * 1000


def many_small() -> Iterator[Shape]:
    """Yield the shapes of 161 tensors of 64 elements: only the cost per tensor remains."""
    yield from [(64,)] * 161


def large() -> Iterator[Shape]:
    """Yield the shape of a 3x3 convolution, 100,009,998 elements, 400 MB in float32: only memory traffic remains."""
    yield (3334, 3333, 3, 3)


NETWORKS: dict[str, Callable[[], Iterator[Shape]]] = {
    function.__name__: function for function in (resnet18, resnet50, vgg13, mobilenet, many_small, large)
}
# Networks measured on a GPU.
GPU_NETWORKS: dict[str, Callable[[], Iterator[Shape]]] = {
    function.__name__: function for function in (resnet18, resnet50, vit_b, thousand_small)
}
