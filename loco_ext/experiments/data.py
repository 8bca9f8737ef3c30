"""The data sets that experiments train on, by name."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

from loco_ext.experiments import files
from loco_ext.experiments.files import DataError
from loco_ext.experiments.image_folder import image_folder
from loco_ext.experiments.samples import Samples

# Few enough to learn from that the accuracy does not saturate, and enough to test on that it has three digits.
DIGITS_TRAIN_SIZE = 800

READERS: dict[str, Callable[[Path], tuple[Samples, Samples]]] = {
    "cifar10": files.cifar10,
    "cifar100": files.cifar100,
    "fashion-mnist": files.fashion_mnist,
}
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "fashion-mnist": 10}
FOLDER = "folder"  # images of the user's own, of any classes
DATA = (*CLASSES, FOLDER)
IMAGE_SIZE = 32  # that images of a folder are brought to: the networks here are made for it


@dataclass(frozen=True)
class Dataset:
    """Samples to train and to test on.

    ``augmented``: crops and flips of the images are images of the same class. ``class_names``: of a folder's classes.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    augmented: bool
    class_names: tuple[str, ...] = ()

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the images."""
        return self.train.images.shape[-1]

    @cached_property
    def description(self) -> dict[str, Any]:
        """What a network trained on it depends on, as plain data; ``digest`` is one of all pixels and labels."""
        content = hashlib.sha256()
        for part in (*self.train, *self.test):
            content.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
        return {
            "channels": self.channels,
            "size": self.size,
            "classes": self.classes,
            "class_names": list(self.class_names),
            "training_samples": len(self.train.labels),
            "test_samples": len(self.test.labels),
            "digest": content.hexdigest()[:12],
        }

    def first(self, samples: int) -> "Dataset":
        """The same with only the first training samples; all of them where there are no more."""
        return replace(self, train=Samples(*(part[:samples] for part in self.train)))


def load(name: str, folder: Path | None, image_size: int | None = None) -> Dataset:
    """Reads a data set into memory.

    Args:
        name: "digits", one of "cifar10", "cifar100", "fashion-mnist", see :mod:`loco_ext.experiments.files`, or
            "folder", see :func:`loco_ext.experiments.image_folder.image_folder`.
        folder: where its files are; digits need none.
        image_size: of the images of "folder"; None: IMAGE_SIZE.

    Raises:
        DataError: an unknown name, no folder, or a file that is missing, cut short or corrupted.
    """
    if name not in DATA:
        raise DataError(f"data: expected one of {', '.join(DATA)}, got {name!r}")
    if name == "digits":
        return Dataset(name, *digits(), classes=CLASSES[name], augmented=False)
    if folder is None:
        raise DataError(f"folder: expected the folder that holds the files of the data set {name}, got none")
    if name == FOLDER:
        train, test, class_names = image_folder(folder, image_size or IMAGE_SIZE)
        return Dataset(name, train, test, len(class_names), augmented=True, class_names=class_names)
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
