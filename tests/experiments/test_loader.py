"""Batches hold every sample once an epoch, cropped and flipped as documented, for any number of processes."""

import numpy as np
import pytest
import torch

from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.samples import Samples

CPU = torch.device("cpu")


def make_samples(count=50, channels=3, height=8, width=8, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(1, 256, (count, channels, height, width), generator=generator)
    images = images.to(torch.uint8) if dtype == torch.uint8 else images.to(dtype) / 255
    return Samples(images, torch.arange(count))


class Unchanged(Normalization):
    """Normalization that leaves pixels unchanged, so that they can be found again."""

    def __init__(self, images):
        row = images.shape[1] * images.shape[3]
        self.scale, self.shift = torch.ones(row), torch.zeros(row)


def make_loader(samples, batch_size=16, seed=5, augmented=False, **others):
    unchanged = Unchanged(samples.images)
    return Loader(samples, unchanged, CPU, batch_size=batch_size, seed=seed, augmented=augmented, **others)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalized_images_have_mean_zero_and_deviation_one(dtype):
    samples = make_samples(300, dtype=dtype)
    images = Normalization(samples)(samples.images)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(images.double().mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(images.double().square().mean((0, 2, 3)), 1, rtol=1e-5)


def test_a_constant_channel_becomes_zero():
    samples = Samples(torch.full((4, 1, 8, 8), 7, dtype=torch.uint8), torch.arange(4))
    assert (Normalization(samples)(samples.images) == 0).all()


def test_an_epoch_has_every_sample_once_with_its_label_in_an_order_of_its_own():
    samples = make_samples()
    loader = make_loader(samples)
    orders = []
    for epoch in range(3):
        batches = list(loader.epoch(epoch))
        assert [len(labels) for _, labels, _ in batches] == [16, 16, 16, 2]
        assert len(loader) == 4
        labels = torch.cat([labels for _, labels, _ in batches])
        images = torch.cat([images for images, _, _ in batches])
        assert sorted(labels.tolist()) == list(range(50))
        assert torch.equal(images, samples.images[labels].float())
        orders.append(labels.tolist())
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] == torch.cat([labels for _, labels, _ in make_loader(samples).epoch(0)]).tolist()
    assert orders[0] != torch.cat([labels for _, labels, _ in make_loader(samples, seed=6).epoch(0)]).tolist()


def test_samples_stay_in_their_order_without_shuffling():
    samples = make_samples(10)
    loader = make_loader(samples, batch_size=4, shuffled=False)
    for epoch in range(2):
        images, labels = (torch.cat(parts) for parts in list(zip(*loader.epoch(epoch), strict=True))[:2])
        assert torch.equal(labels, samples.labels)
        assert torch.equal(images, samples.images.float())


@pytest.mark.parametrize(
    ("count", "processes", "batches"), [(33, 1, 2), (34, 1, 3), (35, 2, 2), (36, 2, 3), (32, 1, 2)]
)
def test_a_last_batch_too_small_for_batch_normalisation_is_left_out(count, processes, batches):
    loader = make_loader(make_samples(count), processes=processes)
    assert len(loader) == len(list(loader.epoch(0))) == batches


@pytest.mark.parametrize("shape", [(8, 8), (5, 9)])
def test_crops_are_windows_of_the_padded_image_flipped_or_not(shape):
    samples = make_samples(40, 2, *shape)
    padded = np.pad(samples.images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    seen = set()
    for epoch in range(40):
        for images, labels, _ in make_loader(samples, augmented=True).epoch(epoch):
            for image, label in zip(images.numpy(), labels.tolist(), strict=True):
                windows = np.lib.stride_tricks.sliding_window_view(padded[label], shape, (1, 2))  # [C, 9, 9, *shape]
                pairs = np.stack([image, image[:, :, ::-1]])[:, :, None, None]
                ((flipped, y, x),) = np.argwhere((windows == pairs).all((1, 4, 5)))
                seen.add((y, x, flipped))
    # There are 1600 draws of 162 places, so each place is missed with probability 5e-5.
    assert len(seen) == 162


def test_without_crops_whole_images_are_flipped_at_random():
    samples = make_samples(40)
    cropped, whole = (list(make_loader(samples, augmented=True, cropped=crop).epoch(2)) for crop in (True, False))
    flips = 0
    for (_, expected, _), (images, labels, _) in zip(cropped, whole, strict=True):
        assert torch.equal(labels, expected)
        originals = samples.images[labels]
        flipped = (images == originals.flip(3)).flatten(1).all(1)
        assert torch.equal(flipped, (images != originals).flatten(1).any(1))
        flips += flipped.sum().item()
    assert 8 <= flips <= 32  # 20 are expected; fewer or more with probability 1e-4


def test_augmentation_changes_neither_order_nor_another_epochs_crops():
    samples = make_samples()
    plain = [labels for _, labels, _ in make_loader(samples).epoch(3)]
    augmented = make_loader(samples, augmented=True)
    first = list(augmented.epoch(3))
    list(augmented.epoch(0))
    again = list(augmented.epoch(3))
    for one, two, labels in zip(first, again, plain, strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], labels)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_each_batch_and_weigh_it_by_their_samples(processes):
    samples = make_samples(50)
    whole = list(make_loader(samples, augmented=True, batch_size=20).epoch(1))
    loaders = [
        make_loader(samples, augmented=True, batch_size=20, rank=rank, processes=processes) for rank in range(processes)
    ]
    for batch, *parts in zip(whole, *(loader.epoch(1) for loader in loaders), strict=True):
        values = torch.zeros(50)
        for rank, (images, labels, share) in enumerate(parts):
            assert torch.equal(images, batch[0][rank::processes])
            assert torch.equal(labels, batch[1][rank::processes])
            values[labels] += share / len(labels) / processes
        # The average over processes of share times mean loss is the mean loss over the batch.
        torch.testing.assert_close(values[batch[1]], torch.full((len(batch[1]),), 1 / len(batch[1])))
