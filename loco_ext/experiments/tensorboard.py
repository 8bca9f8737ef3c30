"""TensorBoard metrics of a training run."""

from pathlib import Path
from typing import Any

from loco_ext.experiments.train import Epoch
from loco_ext.extras import need

SCALARS = {
    "loss/train": "train_loss",
    "loss/test": "test_loss",
    "accuracy/train": "train_accuracy",
    "accuracy/test": "test_accuracy",
    "learning_rate": "learning_rate",
}


class TensorBoard:
    """Writer of the metrics of each epoch to event files.

    Metrics that the files already have from the first written epoch on are replaced.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        need("--tensorboard", {"tensorboard": "tensorboard"}, extra="tensorboard")
        self.folder = folder
        self.writer: Any = None

    def write(self, epoch: Epoch) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:
            self.writer = SummaryWriter(str(self.folder), purge_step=epoch.epoch)
        for tag, name in SCALARS.items():
            self.writer.add_scalar(tag, getattr(epoch, name), epoch.epoch)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
