"""``loco-ext regions``: its files and record, resuming, and errors."""

import json
import math

import pytest
import torch

from loco_ext import regularizers
from loco_ext.cli import main
from loco_ext.experiments import data, files, region_pictures, regions
from loco_ext.experiments.models import fully_connected
from loco_ext.experiments.samples import Samples
from tests.experiments import image_files

OPTIONS = ["--epochs", "1", "--units", "8", "--layers", "2", "--strengths", "0.5", "--hinges", "0,1", "--probes", "1"]


@pytest.fixture
def small_pictures(monkeypatch):
    for name, value in (("TOY_POINTS", 6), ("TOY_UNITS", 4), ("PIXELS", 20)):
        monkeypatch.setattr(region_pictures, name, value)
    monkeypatch.setattr(region_pictures, "TOY_STEPS", 2)


@pytest.mark.usefixtures("small_pictures", "drawn")
def test_networks_are_trained_measured_and_resumed(tmp_path, capsys, monkeypatch):
    arguments = ["regions", "--out", str(tmp_path), *OPTIONS, "--seeds", "2", "--samples", "100"]
    assert main([*arguments, "--json"]) == 0
    record = json.loads((tmp_path / "regions.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    assert [network["seed"] for network in record["networks"]] == [0] * 3 + [1] * 3
    names = ["vanilla", "roll-0.5-0-100", "roll-0.5-1-100"]
    assert [arm["name"] for arm in record["arms"]] == names
    for file in ("regions.png", "toy.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        # The record, by which an experiment counts as done, comes after everything else.
        assert (tmp_path / file).stat().st_mtime_ns <= (tmp_path / "regions.json").stat().st_mtime_ns
    for arm in record["arms"]:
        networks = [network for network in record["networks"] if network["name"] == arm["name"]]
        vanilla = [network for network in record["networks"] if network["name"] == "vanilla"]
        assert all(0 < low <= mid <= high for network in networks for low, mid, high in network["radii"].values())
        ratios = [a["radii"]["2"][1] / b["radii"]["2"][1] for a, b in zip(networks, vanilla, strict=True)]
        assert arm["ratio"]["2"]["mean"] == pytest.approx(sum(ratios) / 2)
        error = abs(ratios[0] - ratios[1]) / 2  # standard error of the mean of two
        assert arm["ratio"]["2"]["standard_error"] == pytest.approx(error)
    assert main(arguments) == 2
    assert "holds an experiment already" in capsys.readouterr().err
    lost = tmp_path / "runs" / "roll-0.5-1-100-1.json"
    content = lost.read_text()
    lost.unlink()
    assert main([*arguments, "--resume"]) == 0
    assert lost.read_text() == content
    assert "*" in capsys.readouterr().out
    for damaged in ("[]", content.replace("100", "50")):
        lost.write_text(damaged)
        assert main([*arguments, "--resume"]) == 2
        assert "roll-0.5-1-100-1.json: expected the record of roll-0.5-1-100, seed 1" in capsys.readouterr().err
    digits = data.digits()
    monkeypatch.setattr(data, "digits", lambda: [Samples(1 - part.images, part.labels) for part in digits])
    assert main([*arguments, "--resume"]) == 2
    assert "settings.json: of another experiment" in capsys.readouterr().err


@pytest.mark.usefixtures("small_pictures")
def test_networks_that_diverge_are_left_out(tmp_path, capsys):
    arguments = ["regions", "--out", str(tmp_path), *OPTIONS, "--strengths", "0.5,1e6", "--hinges", "0", "--seeds", "1"]
    arguments += ["--epochs", "2", "--samples", "100"]
    for resume in ([], ["--resume"]):
        assert main([*arguments, *resume]) == 0
        record = json.loads((tmp_path / "regions.json").read_text(), parse_constant=pytest.fail)
        assert [network["diverged"] for network in record["networks"]] == [False, False, True]
        wide, diverged = record["arms"][1:]
        assert {diverged[name]["mean"] for name in ("accuracy", "points_lost")} == {None}
        assert {diverged[name][p]["mean"] for name in ("median_radius", "ratio") for p in regions.NORMS} == {None}
        assert wide["ratio"]["2"]["mean"] > 0
    assert "roll-1e+06-0-100, seed 0: the training has diverged" in capsys.readouterr().err
    assert regions.best([diverged]) is None


def test_an_infinite_median_is_no_ratio():
    networks = [
        {"name": name, "strength": 1.0, "hinge": None, "top_percent": None, "seed": 0, "diverged": False}
        | {"accuracy": 0.5, "radii": {p: [1.0, median, None] for p in regions.NORMS}}
        for name, median in (("vanilla", 2.0), ("dead", None))
    ]
    arms = regions.summarise(networks)
    assert arms[1]["ratio"]["2"]["mean"] is None
    assert arms[1]["accuracy"]["mean"] == 0.5
    assert regions.best(arms)["name"] == "vanilla"
    assert [cells[-1] for cells in regions.rows({"arms": arms})[1]] == ["1.0", ""]


def test_networks_of_strengths_that_are_nearly_the_same_have_files_of_their_own(tmp_path, monkeypatch):
    def measured(settings, samples, arm, seed, name, device):
        return {"name": name, "seed": seed, "strength": arm[0]}

    monkeypatch.setattr(regions, "_measured", measured)
    for strength in (0.5, 0.5000001):
        record = regions._network(None, None, (strength, 1.0, "100"), 0, tmp_path, None)
        assert record["strength"] == strength
    assert {path.name for path in tmp_path.iterdir()} == {"roll-0.5-1-100-0.json", "roll-0.5000001-1-100-0.json"}


def test_radii_are_in_units_of_pixels(tmp_path):
    """If the normalisation is folded into the network, so that it takes pixels, it has these radii itself."""
    setting = regions.settings_of("quick", epochs=1, units=8, layers=1, strengths=(0.5,), hinges=(1.0,))
    samples = regions.load(setting, None).first(64)
    record = regions._network(setting, samples, None, 3, tmp_path, torch.device("cpu"))
    scale = regions.Scale(samples.train)
    torch.manual_seed(3)
    model = fully_connected([64, 8], 10)
    regions.fit(model, scale(samples.train.images).flatten(1), samples.train.labels, setting, 3, None, "")
    with torch.no_grad():
        model[0].weight /= scale.deviation
        model[0].bias -= model[0].weight.sum(1) * scale.mean
    radii = regularizers.region_radius(model.double(), samples.test.images.flatten(1).double(), math.inf)
    torch.testing.assert_close(record["radii"]["inf"][1], radii.quantile(0.5).item(), rtol=1e-3, atol=0)


def test_the_preset_is_the_papers_training():
    """The paper reports strength 2 and 100 percent with the hinges 0.25 and 1."""
    setting = regions.settings_of("paper")
    assert (setting.data, setting.layers, setting.units, setting.seeds) == ("mnist", 4, 300, 1)
    assert (setting.learning_rate, setting.momentum, setting.batch_size, setting.epochs) == (0.01, 0.5, 64, 20)
    assert setting.strengths == (0.25, 0.5, 1, 2, 4)
    assert setting.hinges == (0.25, 0.5, 1, 2, 4, 8)
    assert setting.percents == ("max", "25", "50", "75", "100")
    assert setting.probes == 0


def test_mnist_is_read_from_its_files(tmp_path):
    images, labels = map(torch.from_numpy, image_files.fashion_mnist(tmp_path / "MNIST" / "raw"))
    train, test = files.mnist(tmp_path)
    assert torch.equal(torch.cat([train.images, test.images]).squeeze(1), images)
    assert torch.equal(torch.cat([train.labels, test.labels]), labels.long())
    setting = regions.settings_of("paper")
    assert regions.load(setting, tmp_path).size == 28
