"""Command line with changes for tests that start it under torchrun.

train_worker.py --plain ...          the small network has no batch normalisation: only without it do several
                                     processes train exactly as one
train_worker.py --die-after N ...    the process is killed when it has saved N epochs
"""

import os
import signal
import sys

from torch import nn

from loco_ext.cli import main
from loco_ext.experiments import run
from loco_ext.experiments.models import MODELS, Model


def plain(channels, classes, size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, classes)
    )


def dying_after(epochs):
    save = run._save

    def save_and_die(*arguments):
        save(*arguments)
        if len(arguments[-1]) == epochs:
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die


if sys.argv[1] == "--plain":
    MODELS["small"] = Model(plain, 8)
    sys.exit(main(sys.argv[2:]))
run._save = dying_after(int(sys.argv[2]))
sys.exit(main(sys.argv[3:]))
