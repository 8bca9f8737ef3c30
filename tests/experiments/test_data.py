"""Data sets read from files in their published layouts, and the errors for other files."""

import gzip

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate

from loco_ext.experiments import data, files
from loco_ext.experiments.data import DataError
from tests.experiments import image_files


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar10")
    return folder, image_files.cifar10(folder)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fashion") / "FashionMNIST" / "raw"
    return folder.parent.parent, *image_files.fashion_mnist(folder)


def test_cifar10_is_its_records_in_order(cifar10):
    folder, records = cifar10
    found = data.load("cifar10", folder)
    for samples, expected in ((found.train, records[:50_000]), (found.test, records[50_000:])):
        assert samples.images.dtype == torch.uint8
        assert samples.labels.dtype == torch.int64
        assert np.array_equal(samples.labels, expected[:, 0])
        # A record has planes of red, green and blue, each row by row.
        assert np.array_equal(samples.images, expected[:, 1:].reshape(-1, 3, 32, 32))
    assert (found.channels, found.size, found.classes, found.augmented) == (3, 32, 10, True)


def test_cifar100_has_its_fine_labels(tmp_path):
    records = image_files.cifar100(tmp_path)
    found = data.load("cifar100", tmp_path)
    assert (len(found.train.labels), len(found.test.labels), found.classes) == (50_000, 10_000, 100)
    np.testing.assert_array_equal(found.train.labels, records[:50_000, 1])
    np.testing.assert_array_equal(found.test.images, records[50_000:, 2:].reshape(-1, 3, 32, 32))


def test_fashion_mnist_is_resized(fashion):
    folder, images, labels = fashion
    found = data.load("fashion-mnist", folder)
    assert (len(found.train.labels), len(found.test.labels), found.classes) == (60_000, 10_000, 10)
    np.testing.assert_array_equal(found.test.labels, labels[60_000:])
    assert found.train.images.shape == (60_000, 1, 32, 32)
    some = torch.from_numpy(images[60_000:60_100]).double().unsqueeze(1)
    expected = interpolate(some, size=(32, 32), mode="bilinear", align_corners=False)
    assert (found.test.images[:100].double() - expected).abs().max() <= 0.5 + 1e-4


def damaged(folder, source, name, change):
    """Return a copy of the data set's folder in which one file is changed or missing; the others are links."""
    copy = folder / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).symlink_to(path)
    content = (source / name).read_bytes()
    (copy / name).unlink()
    if change is not None:
        (copy / name).write_bytes(change(content))
    return copy


CIFAR10 = ("cifar10", "cifar-10-batches-bin")
FASHION = ("fashion-mnist", "FashionMNIST/raw")


@pytest.mark.parametrize(
    ("data_set", "name", "change", "said"),
    [
        (CIFAR10, "data_batch_3.bin", None, "no such file"),
        (CIFAR10, "data_batch_3.bin", lambda content: content[:-1], "expected 30730000 bytes"),
        (CIFAR10, "test_batch.bin", lambda content: content + b"\0", "expected 30730000 bytes.*found more"),
        (CIFAR10, "data_batch_5.bin", lambda content: b"\x0a" + content[1:], "labels from 0 to 9, found 10"),
        (FASHION, "t10k-labels-idx1-ubyte", lambda content: content[:-1], "expected 10008 bytes.*found 10007"),
        (FASHION, "train-images-idx3-ubyte", lambda content: content[:3] + b"\x01" + content[4:], "header"),
        (FASHION, "train-labels-idx1-ubyte", lambda content: content[:8] + b"\xff" + content[9:], "found 255"),
    ],
)
def test_damaged_files_are_named(cifar10, fashion, tmp_path, data_set, name, change, said):
    folder = cifar10[0] if data_set is CIFAR10 else fashion[0]
    copy = damaged(tmp_path, folder / data_set[1], name, change)
    with pytest.raises(DataError, match=f"{name}.*{said}"):
        data.load(data_set[0], copy)


def test_zipped_files_are_read_alike_and_named_if_cut_short(fashion, tmp_path):
    folder, *_ = fashion
    name = "t10k-labels-idx1-ubyte"
    copy = damaged(tmp_path, folder / FASHION[1], name, None)
    content = gzip.compress((folder / FASHION[1] / name).read_bytes(), 1)
    (copy / f"{name}.gz").write_bytes(content)
    (_, plain), (_, zipped) = files.mnist(folder / FASHION[1]), files.mnist(copy)
    assert torch.equal(plain.labels, zipped.labels)
    (copy / f"{name}.gz").write_bytes(content[:-40])
    with pytest.raises(DataError, match=rf"{name}.gz.*cut short or corrupted"):
        data.load("fashion-mnist", copy)


def test_an_unknown_data_set_is_named():
    with pytest.raises(DataError, match=r"expected one of digits, cifar10, .* got 'imagenet'"):
        data.load("imagenet", None)


def test_digits_need_no_files_and_are_those_of_scikit_learn(tmp_path, capsys):
    found, again = data.load("digits", None), data.load("digits", tmp_path)
    assert capsys.readouterr().err == f"The digits are scikit-learn's, nothing in {tmp_path} is read\n"
    assert torch.equal(found.train.images, again.train.images)
    images = torch.cat([found.train.images, found.test.images])
    labels = torch.cat([found.train.labels, found.test.labels])
    # The split has each image once: sixteenths are exact, and so is the sum over all of them.
    bunch = load_digits()
    assert images.double().sum().item() * 16 == bunch.images.sum()
    assert (images.min().item(), images.max().item(), images.dtype) == (0, 1, torch.float32)
    assert labels.bincount().tolist() == np.bincount(bunch.target).tolist()
    assert (len(found.train.labels), len(found.test.labels)) == (800, 997)
    assert (found.channels, found.size, found.classes, found.augmented) == (1, 8, 10, False)
