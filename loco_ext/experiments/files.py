"""Image data sets in the binary formats in which their authors publish them.

CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixel bytes, the red, green and blue planes of 32x32 in
row-major order. MNIST and Fashion-MNIST: idx files, a header of big-endian integers followed by the bytes, plain or
gzipped.

A reader takes the folder with the files, or the one in which their archive or torchvision has put a folder with them.
It returns training and test samples: uint8 images, [N, C, H, W], and labels from 0 on. It raises DataError, which names
the file, for one that cannot be read.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from loco_ext.errors import UserError
from loco_ext.experiments.samples import Samples
from loco_ext.input import open_regular

_PIXELS = 3 * 32 * 32
_IDX_BYTES = 8  # the idx code of unsigned bytes


class DataError(UserError, ValueError):
    """Raised for a data file that is missing, truncated or not what its name says; the message names the file."""


def cifar10(folder: Path) -> tuple[Samples, Samples]:
    """Read CIFAR-10: ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, 10,000 records each."""
    folder = _find_folder(folder, "cifar-10-batches-bin", "data_batch_1.bin")
    batches = [_cifar(folder / f"data_batch_{number}.bin", 10_000, 1, 10) for number in range(1, 6)]
    train = Samples(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    return train, _cifar(folder / "test_batch.bin", 10_000, 1, 10)


def cifar100(folder: Path) -> tuple[Samples, Samples]:
    """Read CIFAR-100 with its 100 fine labels: ``train.bin``, 50,000 records, and ``test.bin``, 10,000."""
    folder = _find_folder(folder, "cifar-100-binary", "train.bin")
    return _cifar(folder / "train.bin", 50_000, 2, 100), _cifar(folder / "test.bin", 10_000, 2, 100)


def fashion_mnist(folder: Path) -> tuple[Samples, Samples]:
    """Read Fashion-MNIST as :func:`mnist`, its images resized bilinearly to 32x32 (LOCO-REG, section 7)."""
    train, test = _mnist(folder, "FashionMNIST/raw")
    return _resized(train), _resized(test)


def mnist(folder: Path) -> tuple[Samples, Samples]:
    """Read MNIST's four files such as ``train-images-idx3-ubyte``, each plain or with ``.gz``; images are 28x28."""
    return _mnist(folder, "MNIST/raw")


def _mnist(folder: Path, inner: str) -> tuple[Samples, Samples]:
    folder = _find_folder(folder, inner, "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz")
    return _idx_samples(folder, "train", 60_000), _idx_samples(folder, "t10k", 10_000)


def _find_folder(folder: Path, inner: str, *names: str) -> Path:
    try:
        for place in (folder, folder / inner):
            if any((place / name).is_file() for name in names):
                return place
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    raise DataError(f"{folder}: expected {names[0]} here or in {inner}, found neither")


def _read(path: Path, size: int, what: str) -> bytes:
    """Return the ``size`` bytes that the file should hold; reading stops as soon as the file proves to be longer."""
    try:
        with open_regular(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            content = file.read(size + 1)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, it may be cut short or corrupted: {error}") from error
    if len(content) != size:
        found = f"found {len(content)}" if len(content) < size else "found more"
        raise DataError(f"{path}: expected {size} bytes ({what}), {found}")
    return content


def _check_labels(path: Path, labels: np.ndarray, classes: int) -> Tensor:
    if labels.max(initial=0) >= classes:
        raise DataError(f"{path}: corrupted, expected labels from 0 to {classes - 1}, found {labels.max()}")
    return torch.from_numpy(labels.astype(np.int64))


def _cifar(path: Path, count: int, label_bytes: int, classes: int) -> Samples:
    """Read one file of ``count`` records; the last label byte of a record is its label."""
    content = _read(path, count * (label_bytes + _PIXELS), f"{count} records")
    records = np.frombuffer(content, np.uint8).reshape(count, -1)
    images = records[:, label_bytes:].reshape(count, 3, 32, 32).copy()
    return Samples(torch.from_numpy(images), _check_labels(path, records[:, label_bytes - 1], classes))


def _idx_samples(folder: Path, name: str, count: int) -> Samples:
    _, images = _idx(folder, f"{name}-images-idx3-ubyte", (count, 28, 28))
    path, labels = _idx(folder, f"{name}-labels-idx1-ubyte", (count,))
    return Samples(torch.from_numpy(images).unsqueeze(1), _check_labels(path, labels, 10))


def _resized(samples: Samples) -> Samples:
    pixels = samples.images.float()
    resized = interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    return Samples(resized.round_().to(torch.uint8), samples.labels)


def _idx(folder: Path, name: str, shape: tuple[int, ...]) -> tuple[Path, np.ndarray]:
    path = folder / name
    if not path.is_file() and (zipped := folder / f"{name}.gz").is_file():
        path = zipped
    header = np.array([_IDX_BYTES << 8 | len(shape), *shape], ">i4").tobytes()
    content = _read(path, len(header) + math.prod(shape), f"an idx file of shape {shape}")
    if not content.startswith(header):
        raise DataError(f"{path}: expected an idx file of unsigned bytes, shape {shape}; its header says otherwise")
    return path, np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape).copy()
