"""The data sets that experiments train on, by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from loco_ext.experiments import files
from loco_ext.experiments.files import DataError
from loco_ext.experiments.samples import Samples

# Few enough to learn from that the accuracy does not saturate, and enough to test on that it has three digits.
DIGITS_TRAIN_SIZE = 800

READERS: dict[str, Callable[[Path], tuple[Samples, Samples]]] = {
    "cifar10": files.cifar10,
    "cifar100": files.cifar100,
    "fashion-mnist": files.fashion_mnist,
}
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "fashion-mnist": 10}


@dataclass(frozen=True)
class Dataset:
    """Samples to train and to test on. ``augmented``: crops and flips of the images are images of the same class."""

    name: str
    train: Samples
    test: Samples
    classes: int
    augmented: bool

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the images."""
        return self.train.images.shape[-1]

    def first(self, samples: int) -> "Dataset":
        """The same with only the first training samples; all of them where there are no more."""
        return replace(self, train=Samples(*(part[:samples] for part in self.train)))


def load(name: str, folder: Path | None) -> Dataset:
    """Reads a data set into memory.

    Args:
        name: "digits", or one of "cifar10", "cifar100", "fashion-mnist", see :mod:`loco_ext.experiments.files`.
        folder: where its files are; digits need none.

    Raises:
        DataError: an unknown name, no folder, or a file that is missing, cut short or corrupted.
    """
    if name not in CLASSES:
        raise DataError(f"data: expected one of {', '.join(CLASSES)}, got {name!r}")
    if name == "digits":
        return Dataset(name, *digits(), classes=CLASSES[name], augmented=False)
    if folder is None:
        raise DataError(f"data: {name} is read from files, expected the folder that holds them")
    return Dataset(name, *READERS[name](folder), classes=CLASSES[name], augmented=True)


def digits() -> tuple[Samples, Samples]:
    """The handwritten digits that come with scikit-learn: 1797 grey images of 8x8 pixels, in ten classes.

    Returns:
        ``(train, test)``: 800 and 997 samples. The split is the same in every run, whatever the run's own seed.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([800, 1, 8, 8]), torch.Size([997]))
    """
    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:DIGITS_TRAIN_SIZE], order[DIGITS_TRAIN_SIZE:]
    return Samples(images[train], labels[train]), Samples(images[test], labels[test])
