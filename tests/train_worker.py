"""The command line with a network that has no batch normalisation in place of the small one: tests start this under
torchrun, for only without it do several processes train exactly as one."""

import sys

from torch import nn

from loco_ext.cli import main
from loco_ext.experiments.models import MODELS, Model


def make(channels, classes, size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, classes)
    )


MODELS["small"] = Model(make, 8)
sys.exit(main())
