"""Images supplied by the user, in folders named by their classes."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from loco_ext.experiments.files import DataError
from loco_ext.experiments.samples import Samples
from loco_ext.input import open_regular
from loco_ext.nn.free_memory import free_memory
from loco_ext.output import progress_bar

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TESTS = ("val", "test")  # names of the folder of test samples; the first one that exists is used


def image_folder(folder: Path, size: int) -> tuple[Samples, Samples, tuple[str, ...]]:
    """Read ``train/CLASS/*.png`` and ``val/CLASS/*.png`` or, where there is no ``val``, ``test/CLASS/*.png``.

    Args:
        folder: holds these folders. Hidden files, files in hidden folders and files whose suffix is not in SUFFIXES are
            skipped.
        size: images are resized so that their shorter side has ``size`` pixels, then centre-cropped.

    Returns:
        ``(train, test, classes)``: uint8 RGB images, [N, 3, size, size]; labels are indices into ``classes``, the
        sorted names of the folders in ``train``. The images are shuffled, always alike, so that the first ones, which
        some measurements are limited to, are of all classes.

    Raises:
        DataError: a folder or file cannot be used; the message names it.
    """
    train = folder / "train"
    test = next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        raise DataError(f"{folder}: expected the folders train and val, or train and test, with one for each class")
    classes = tuple(_classes(train))
    if len(classes) < 2:
        raise DataError(f"{train}: expected a folder for each of at least two classes, found {len(classes)}")
    unknown = sorted(set(_classes(test)) - set(classes))
    if unknown:
        raise DataError(f"{test / unknown[0]}: expected a class that is in {train} too")
    return _samples(train, classes, size), _samples(test, classes, size), classes


def _classes(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error


def _samples(folder: Path, classes: tuple[str, ...], size: int) -> Samples:
    files = [(path, label) for label, name in enumerate(classes) for path in _images(folder / name)]
    missing = set(range(len(classes))) - {label for _, label in files} if folder.name == "train" else set()
    if missing or not files:
        empty = folder / classes[min(missing)] if missing else folder
        raise DataError(f"{empty}: expected images in it, found no {', '.join(SUFFIXES)}")
    needed, free = 3 * len(files) * 3 * size**2, free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise DataError(
            f"image_size: expected one at which {len(files)} images, also padded for crops, fit into {free / 1e9:.1f} "
            f"GB of memory, got {size}, which takes {needed / 1e9:.1f} GB"
        )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    files = [files[place] for place in order.tolist()]
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    with progress_bar(len(files), f"reading {folder}", unit="image") as progress:
        for image, (path, _) in zip(images, files, strict=True):
            image.copy_(torch.from_numpy(_read(path, size)).permute(2, 0, 1))
            progress.update()
    return Samples(images, torch.tensor([label for _, label in files]))


def _images(folder: Path) -> list[Path]:
    """Return the files of a class that are images by their names, in all folders below that are not hidden."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and not path.is_dir())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _read(path: Path, size: int) -> np.ndarray:
    """Return the pixels of one image, uint8 [size, size, 3], with its EXIF orientation applied."""
    try:
        open_regular(path).close()
        with Image.open(path) as image:
            mode = image.mode
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a damaged file can make Pillow raise anything
        raise DataError(f"{path}: cannot be read as an image: {error}") from error
    if mode[0] in "IF":
        raise DataError(f"{path}: expected an image of 8 bits a channel, got Pillow's mode {mode!r}")
    return np.array(ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR))
