"""The networks that the experiments train."""

from torch import nn


def small_cnn(in_channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Three 3x3 convolutions of 32, 64 and 64 channels, each with batch normalisation and ReLU; 57 thousand parameters.

    Args:
        in_channels: channels of the images, float ``(N, in_channels, H, W)`` with H and W at least 2.
        classes: length of the output, ``(N, classes)`` logits.

    >>> import torch
    >>> small_cnn()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(
        *_convolution(in_channels, 32),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def _convolution(in_channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    # The normalisation that follows would cancel a bias.
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(out_channels), nn.ReLU()
