"""Synthetic data sets in the published layouts: every image and label is a known function of its position."""

import numpy as np


def cifar10(folder):
    """Write all six files, with random pixels and labels in turn; return the records, uint8 ``[60000, 3073]``."""
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (60_000, 3073), np.uint8)
    records[:, 0] = np.arange(60_000) % 10
    for number, part in enumerate(np.split(records, 6), start=1):
        part.tofile(target / (f"data_batch_{number}.bin" if number < 6 else "test_batch.bin"))
    return records


def cifar100(folder):
    """Write both files; return the records, uint8 ``[60000, 3074]``."""
    target = folder / "cifar-100-binary"
    target.mkdir(parents=True)
    records = np.random.default_rng(1).integers(0, 256, (60_000, 3074), np.uint8)
    records[:, 0] = np.arange(60_000) % 20
    records[:, 1] = np.arange(60_000) % 100
    records[:50_000].tofile(target / "train.bin")
    records[50_000:].tofile(target / "test.bin")
    return records


def fashion_mnist(folder):
    """Write all four files; return the images, uint8 ``[70000, 28, 28]``, and labels, uint8 ``[70000]``."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(2).integers(0, 256, (70_000, 28, 28), np.uint8)
    labels = (np.arange(70_000) % 10).astype(np.uint8)
    for name, part in (("train", slice(60_000)), ("t10k", slice(60_000, None))):
        for kind, values in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            header = np.array([0x0800 | values.ndim, *values.shape], ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + values.tobytes())
    return images, labels
