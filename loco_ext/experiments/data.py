"""The data sets that experiments train on, by name."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loco_ext.experiments import files
from loco_ext.experiments.files import DataError
from loco_ext.experiments.image_folder import image_folder
from loco_ext.experiments.samples import Samples
from loco_ext.output import note, one_line

# Small enough a training set that the accuracy does not saturate; large enough a test set for three digits.
DIGITS_TRAIN_SIZE = 800

READERS: dict[str, Callable[[Path], tuple[Samples, Samples]]] = {
    "cifar10": files.cifar10,
    "cifar100": files.cifar100,
    "fashion-mnist": files.fashion_mnist,
}


class ImageFormat(NamedTuple):
    """Shape and classes of a data set's images, which are square; only a folder's classes have names.

    >>> str(ImageFormat(3, 32, 2, ("cat", "dog")))
    'images of 3x32x32 in 2 classes (cat, dog)'
    """

    channels: int
    size: int
    classes: int
    class_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f" ({', '.join(self.class_names)})" if self.class_names else ""
        return f"images of {self.channels}x{self.size}x{self.size} in {self.classes} classes{names}"


FORMATS = {
    "digits": ImageFormat(1, 8, 10),
    "cifar10": ImageFormat(3, 32, 10),
    "cifar100": ImageFormat(3, 32, 100),
    "fashion-mnist": ImageFormat(1, 32, 10),
}
FOLDER = "folder"  # images supplied by the user, of any classes
DATA = (*FORMATS, FOLDER)
IMAGE_SIZE = 32  # images of a folder are resized to this: the networks here are made for it


@dataclass(frozen=True)
class Dataset:
    """Training and test samples of a data set.

    ``augmented`` tells that crops and flips of the images stay in the same class; ``class_names`` are those of a
    folder.
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

    @property
    def images(self) -> ImageFormat:
        return ImageFormat(self.channels, self.size, self.classes, self.class_names)

    def blank(self, device: torch.device, count: int = 1) -> Tensor:
        """Return images of the data set's shape that are zero, [count, channels, size, size]."""
        return torch.zeros(count, self.channels, self.size, self.size, device=device)

    @cached_property
    def description(self) -> dict[str, Any]:
        """Return the properties that a training depends on, as plain data; ``digest`` covers all pixels and labels."""
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

    def first(self, samples: int | None, tests: int | None = None) -> "Dataset":
        """Return the data set with only the first training and test samples; all where there are fewer, or for None."""
        return replace(self, train=self.train.first(samples), test=self.test.first(tests))


def load(name: str, folder: Path | None, image_size: int | None = None) -> Dataset:
    """Read a data set into memory.

    Args:
        name: "digits", one of "cifar10", "cifar100", "fashion-mnist", see :mod:`loco_ext.experiments.files`, or
            "folder", see :func:`loco_ext.experiments.image_folder.image_folder`.
        folder: where its files are; "digits" needs none, and says so if there is one.
        image_size: height and width to resize the images of "folder" to; None means IMAGE_SIZE.

    Raises:
        DataError: the name is unknown, there is no folder, or a file is missing, truncated or corrupted.
    """
    if name not in DATA:
        raise DataError(f"data: expected one of {', '.join(DATA)}, got {name!r}")
    if name == "digits":
        if folder is not None and not folder.is_dir():
            raise DataError(f"folder: expected none for digits, or a folder, got {str(folder)!r}")
        if folder is not None:
            note(f"The digits are scikit-learn's, nothing in {one_line(str(folder))} is read")
        return Dataset(name, *digits(), classes=FORMATS[name].classes, augmented=False)
    if folder is None:
        raise DataError(f"folder: expected the folder that holds the files of the data set {name}, got none")
    if name == FOLDER:
        train, test, class_names = image_folder(folder, image_size or IMAGE_SIZE)
        return Dataset(name, train, test, len(class_names), augmented=True, class_names=class_names)
    return Dataset(name, *READERS[name](folder), classes=FORMATS[name].classes, augmented=True)


def digits() -> tuple[Samples, Samples]:
    """Return the handwritten digits of scikit-learn: 1797 grey images of 8x8 pixels in ten classes.

    Returns:
        ``(train, test)``: 800 and 997 samples. The split is the same in every run, whatever the seed.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([800, 1, 8, 8]), torch.Size([997]))
    """
    from sklearn.datasets import load_digits  # takes as long to import as torch

    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:DIGITS_TRAIN_SIZE], order[DIGITS_TRAIN_SIZE:]
    return Samples(images[train], labels[train]), Samples(images[test], labels[test])
