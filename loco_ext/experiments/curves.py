"""Plot losses and accuracies of a training run by epoch."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from loco_ext.experiments.figures import finish, write
from loco_ext.experiments.train import Epoch


def save(history: Sequence[Epoch], path: Path) -> None:
    """Write a PNG with training and test loss, and training and test accuracy, after each epoch."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    epochs = [epoch.epoch for epoch in history]
    for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for samples in ("train", "test"):
            axes.plot(epochs, [getattr(epoch, f"{samples}_{what}") for epoch in history], marker=".", label=samples)
        axes.set(xlabel="epoch", title=what)
        finish(axes, "medium", whole=True, percent=what == "accuracy")
    write(figure, path)
