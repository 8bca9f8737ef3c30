"""Folders of the user's own images: the files that are read, their pixels, and errors for unreadable ones."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from loco_ext.checkpoints import save_weights
from loco_ext.cli import main
from loco_ext.commands import train
from loco_ext.experiments import compacting, data, models
from loco_ext.experiments.data import DataError
from tests.experiments.runs import quick


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Write 4x4 images of one grey each: two classes of two to train on, and one to test on."""
    for number, name in enumerate(["train/cat/a.png", "train/cat/deep/b.png", "train/ant/c.png", "train/ant/d.PNG"]):
        write(tmp_path / name, np.full((4, 4, 3), 10 * number, np.uint8))
    write(tmp_path / "val" / "cat" / "e.png", np.full((4, 4, 3), 200, np.uint8))
    return tmp_path


def test_images_of_the_size_asked_for_are_read_to_the_bit(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    write(folder / "train" / "cat" / "a.png", pixels)
    for number in (4, 5):
        write(folder / "train" / "ant" / f"{number}.png", np.full((4, 4, 3), 10 * number, np.uint8))
    (folder / "train" / "cat" / ".hidden.png").write_text("")
    write(folder / "train" / "cat" / ".thumbnails" / "deep" / "g.png", pixels)
    (folder / "train" / "cat" / "notes.txt").write_text("")
    (folder / "train" / "cat" / "folder.png").mkdir()
    write(folder / "test" / "cat" / "f.png", pixels)  # val takes precedence over test
    found = data.load("folder", folder, 4)
    assert found.class_names == ("ant", "cat")
    assert set(found.train.first(2).labels.tolist()) == {0, 1}
    assert found.test.labels.tolist() == [1]
    assert found.test.images.unique().tolist() == [200]
    assert found.train.images.dtype == torch.uint8
    labels = dict(zip(found.train.images[:, 0, 0, 0].tolist(), found.train.labels.tolist(), strict=True))
    assert labels == {20: 0, 30: 0, 40: 0, 50: 0, int(pixels[0, 0, 0]): 1, 10: 1}
    (same,) = found.train.images[found.train.images[:, 0, 0, 0] == pixels[0, 0, 0]]
    np.testing.assert_array_equal(same, pixels.transpose(2, 0, 1))
    assert found.description["digest"] != data.load("folder", folder, 2).description["digest"]


@pytest.fixture
def trained(folder):
    """Write what is read of a run on the images of ``folder`` and on others; return its folder."""
    run = folder / "run"
    run.mkdir()
    description = data.load("folder", folder, 8).description
    record = {"settings": {"model": "small", "data": "folder"}, "dataset": description}
    (run / "settings.json").write_text(json.dumps(record))
    save_weights(run / "model.safetensors", models.small_cnn(3, 2).state_dict())
    return run


def test_a_network_is_measured_and_teaches_on_the_classes_that_it_was_trained_on_alone(folder, trained, capsys):
    assert compacting.read_trained(trained).load_data(folder).class_names == ("ant", "cat")
    for part in ("train", "val"):
        (folder / part / "cat").rename(folder / part / "dog")
    with pytest.raises(DataError, match=r"folder: expected images of 3x8x8 in 2 classes \(ant, cat\), as for the"):
        compacting.read_trained(trained).load_data(folder)
    line = ["train", "--model", "small", "--data", str(folder), "--image-size", "8", "--teacher", str(trained)]
    assert main([*line, "--out", str(folder / "out")]) == 2
    wanted, found = (f"folder, images of 3x8x8 in 2 classes (ant, {name})" for name in ("dog", "cat"))
    assert f"--teacher: {trained}: expected a network for {wanted}, got one for {found}" in capsys.readouterr().err


def test_images_that_are_not_those_of_the_training_are_said_to_be_others(folder, trained, capsys):
    for notes in (0, 1):
        dataset = compacting.read_trained(trained).load_data(folder)
        train._read_teacher(quick(data="folder", image_size=8), dataset, trained)
        assert capsys.readouterr().err.count("The trained network was trained on other images") == 2 * notes
        write(folder / "train" / "cat" / "a.png", np.full((4, 4, 3), 77, np.uint8))


def test_other_images_are_resized_and_cropped_around_their_centre(folder):
    wide = np.zeros((8, 16), np.uint8)  # a grey image becomes three equal channels
    wide[:, 2:14] = 255  # the crop, and the pixels beside it that bilinear resizing reads
    write(folder / "val" / "cat" / "e.png", wide)
    image = data.load("folder", folder, 4).test.images[0]
    assert torch.equal(image, torch.full((3, 4, 4), 255, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train/cat/a.png", b"no image", r"train/cat/a\.png: cannot be read as an image"),
        ("train/cat/a.png", np.zeros((4, 4), np.uint16), r"train/cat/a\.png: expected an image of 8 bits"),
        ("val/dog/e.png", np.zeros((4, 4), np.uint8), "val/dog: expected a class that is in .*train too"),
        ("train/dog/e.txt", b"", "train/dog: expected images in it"),
    ],
    ids=["damaged", "16 bits", "unknown class", "empty class"],
)
def test_what_cannot_be_read_is_named(folder, name, content, said):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else write(path, content)
    with pytest.raises(DataError, match=said):
        data.load("folder", folder)


def test_a_pipe_is_named_and_not_waited_for(folder):
    os.mkfifo(folder / "train" / "cat" / "pipe.png")
    with pytest.raises(DataError, match=r"train/cat/pipe\.png: cannot be read as an image: .*expected a regular file"):
        data.load("folder", folder)


def test_what_does_not_fit_into_memory_and_folders_that_are_not_there_are_named(folder, tmp_path):
    for place, size, said in (
        (folder, 10**6, r"^image_size: expected one at which 4 images, .* got 1000000, which takes"),
        (tmp_path / "train", 4, "expected the folders train and val, or train and test"),
        (None, 4, "^folder: expected the folder that holds the files"),
    ):
        with pytest.raises(DataError, match=said):
            data.load("folder", place, size)
