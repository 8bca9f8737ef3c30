"""``loco-ext landscapes``: the paper's protocol, paired training, measurements and files, and resuming a run."""

import contextlib
import io
import json
from dataclasses import asdict

import matplotlib.image
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext import analysis, regularizers
from loco_ext.cli import main
from loco_ext.experiments import figures, landscapes, landscapes_figures
from loco_ext.experiments.landscapes_settings import Arm, landscapes_preset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import MODELS
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import make_model
from tests.experiments.runs import digits, written_out

SAMPLES, SEED = 90, 5
ARMS = ("plain", "target:0.5", "curvature:2", "noise:0.3")
RUN = ["--preset", "short", "--model", "small", "--dataset", "digits", "--samples", str(SAMPLES), "--seed", str(SEED)]
RUN += ["--epochs", "3", "--lr", "0.1", "--batch-size", "24", "--seeds", "2", "--arms", ",".join(ARMS)]
RUN += ["--landscape-images", "40", "--corrupted-images", "20", "--ablated-images", "20", "--baseline-images", "4"]
RUN += ["--resampled-inputs", "6", "--resampling-images", "20"]


def settings(**overrides):
    options = {"model": "small", "data": "digits", "epochs": 3, "learning_rate": 0.1, "seed": SEED}
    return landscapes_preset("short", **options | {"batch_size": 24, "arms": ARMS, "seeds": 2} | overrides)


def test_the_preset_is_the_papers_protocol():
    """It follows section 4 and appendix D.1."""
    setting = landscapes_preset("paper")
    assert setting.arms == ("plain", *(f"{mode}:{alpha}" for mode in ("target", "curvature") for alpha in (1, 10, 100)))
    assert (setting.seeds, setting.ablated_images, setting.baseline_images) == (1, 512, 1000)
    expected = {"model": "resnet50", "data": "cifar100", "epochs": 200, "batch_size": 128}
    expected |= {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-5}
    assert asdict(setting.training).items() >= expected.items()
    assert [setting.training.learning_rate_of(epoch) for epoch in (0, 100)] == pytest.approx([0.1, 0.05])


def test_resnet50_has_the_numbers_of_the_original_but_for_its_stem():
    """He et al. (2015) have 25,557,032 parameters, with a stem of 3*64*7*7 weights and 1000 classes."""
    model = MODELS["resnet50"].make(3, 1000, 32)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 - 3 * 64 * (7 * 7 - 3 * 3)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 1000)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):  # for slow tests; those of the report run the command, too
    """Run a whole experiment; return its folder, and what it printed."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("landscapes") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["landscapes", *RUN, "--out", str(out), "--json"]) == 0
    return out, json.loads(printed.getvalue(), parse_constant=pytest.fail)


def trained(record, out):
    """Return a network from its files, and the training that it had."""
    setting = settings().training_of(Arm.parse(record["arm"]), record["seed"] - SEED)
    model = make_model(setting, digits(SAMPLES))
    weights = load_file(out / f"{record['arm'].replace(':', '-')}-{record['seed']}" / "model.safetensors")
    model.load_state_dict(weights)
    return model.eval(), setting


@pytest.mark.slow
def test_the_record_has_every_network_and_figures_are_drawn_from_it_alone(finished, tmp_path):
    out, record = finished
    figures.save(landscapes_figures.draw(record), tmp_path)
    assert {path.stem for path in out.glob("*.png")} == {"landscapes", "training", "robustness", "ablation"}
    for path in out.glob("*.png"):
        assert matplotlib.image.imread(path).std() > 0.02
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert json.loads((out / "landscapes.json").read_text()) == record
    assert record["settings"] == json.loads((out / "settings.json").read_text())["settings"]
    assert (record["training_samples"], record["test_samples"]) == (SAMPLES, 997)
    found = [(network["arm"], network["seed"]) for network in record["networks"]]
    assert found == [(arm, seed) for seed in (SEED, SEED + 1) for arm in ARMS]
    first = [network["at_first"] for network in record["networks"]]
    assert all(each == first[0] for each in first[:4])  # arms of a seed start from the same weights
    assert first[4] != first[0]
    assert len({network["test"]["loss"] for network in record["networks"]}) == 8
    for network in record["networks"]:
        assert len(network["test_accuracies"]) == 3
        assert network["test"]["top1"] == network["test_accuracies"][-1]


@pytest.mark.slow
def test_arms_are_trained_on_their_losses(finished):
    """The reference is a loop written out, with PILCRO's loss added at every tenth step."""
    out, record = finished
    samples = digits(SAMPLES)
    smoothness = regularizers.data_smoothness(Normalization(samples.train)(samples.train.images))
    torch.testing.assert_close(torch.tensor(record["smoothness"]), smoothness, rtol=1e-4, atol=0)
    for network in record["networks"][4:7]:
        arm = Arm.parse(network["arm"])
        reached, setting = trained(network, out)
        model = make_model(setting, samples)
        options = {"target": smoothness, "reduction": "mean"} if arm.kind == "target" else {}
        mode = arm.kind if arm.kind != "plain" else "curvature"
        written_out(setting, samples, model, extra=regularizers.PILCRO(mode, arm.value, seed=setting.seed, **options))
        for ours, theirs in zip(reached.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-4)


def test_noise_and_decay_are_what_their_names_say():
    setting = settings()
    assert setting.training_of(Arm.parse("decay:0.1"), 1).weight_decay == 0.1
    assert setting.training_of(Arm.parse("decay:0.1"), 1).seed == SEED + 1
    model = landscapes.Noisy(nn.Identity(), noise=0.3)
    images = torch.zeros(50, 1, 20, 20)
    assert model(images).std().item() == pytest.approx(0.3, rel=0.05)
    assert torch.equal(model.eval()(images), images)


@pytest.mark.slow
def test_what_is_measured_is_that_of_the_trained_networks(finished):
    out, record = finished
    data = digits(SAMPLES)
    normalization = Normalization(data.train)
    order = torch.randperm(997, generator=torch.Generator().manual_seed(0))
    for network in record["networks"][:2]:
        model, _ = trained(network, out)
        logits = model(normalization(data.test.images))
        assert network["test"]["loss"] == pytest.approx(cross_entropy(logits, data.test.labels).item(), rel=1e-4)
        ranks = (logits > logits.gather(1, data.test.labels[:, None])).sum(1)
        assert network["test"]["top5"] == pytest.approx((ranks < 5).double().mean().item())
        landscape = regularizers.importance_landscape(model, normalization(data.test.images[order[:40]]))
        torch.testing.assert_close(torch.tensor(network["landscape"]["map"]), landscape, rtol=1e-3, atol=1e-4)
        variation = regularizers.total_variation(landscape).item()
        assert network["landscape"]["total_variation"] == pytest.approx(variation, rel=1e-3)
        images, labels = data.test.images[order[:20]], data.test.labels[order[:20]]
        corrupted = normalization(analysis.corrupt(images, "fog", 3))
        before, after = (model(x).softmax(1) for x in (normalization(images), corrupted))
        found = network["robustness"]
        assert found["clean_accuracy"] == pytest.approx((before.argmax(1) == labels).double().mean().item())
        assert found["accuracy"]["fog"][2] == pytest.approx((after.argmax(1) == labels).double().mean().item())
        kept = [after[i, y] / before[i, y] for i, y in enumerate(labels) if before[i].argmax() == y]
        assert found["kept_probability"]["fog"][2] == pytest.approx(torch.stack(kept).mean().item(), rel=1e-3)
        assert network["ablation"]["images"] == 20
        assert network["ablation"]["kept_probability"][0] == 1
        area = np.trapezoid(network["ablation"]["kept_probability"], network["ablation"]["shares"])
        assert network["ablation"]["area"] == pytest.approx(area)
        assert network["resampling"].keys() == {"spearman", "pearson_of_roots", "ratio"}


@pytest.mark.slow
def test_arms_are_compared_seed_by_seed(finished):
    record = finished[1]
    networks = {(network["arm"], network["seed"]): network for network in record["networks"]}
    for arm in ARMS[1:]:
        pairs = [[networks[name, seed]["test"]["top1"] for name in (arm, "plain")] for seed in (SEED, SEED + 1)]
        ours, theirs = np.array(pairs).T
        found = record["arms"][arm]["accuracy"]
        assert found["mean"] == pytest.approx(ours.mean())
        assert found["standard_error"] == pytest.approx(stats.sem(ours))
        assert found["difference"] == pytest.approx((ours - theirs).mean())
        assert found["difference_standard_error"] == pytest.approx(stats.sem(ours - theirs))
    assert record["arms"]["plain"]["accuracy"].keys() == {"mean", "standard_error"}
    noise = [
        record["networks"][0]["robustness"]["accuracy"][f"{kind}_noise"] for kind in ("gaussian", "shot", "impulse")
    ]
    assert landscapes.family_accuracy(record["networks"][0], "noise") == pytest.approx(np.mean(noise))
    assert landscapes.family_accuracy(record["networks"][0], "noise", 4) == pytest.approx(np.mean(noise, 0)[3])


def test_less_is_measured_where_less_is_asked_for_and_a_finished_run_is_kept(tmp_path, capsys):
    options = [*RUN, "--epochs", "1", "--seeds", "1", "--arms", "target:1", "--corrupted-images", "0"]
    options += ["--ablated-images", "0", "--resampled-inputs", "0", "--out", str(tmp_path / "run")]
    assert main(["landscapes", *options]) == 0
    record = json.loads((tmp_path / "run" / "landscapes.json").read_text(), parse_constant=pytest.fail)
    assert record["arms"]["target:1"]["ablation"] == {"mean": None, "standard_error": None}
    assert record["arms"]["target:1"]["accuracy"]["standard_error"] is None
    assert {path.stem for path in tmp_path.glob("run/*.png")} == {"landscapes", "training"}
    assert "landscapes.json and figures are in" in capsys.readouterr().out
    assert main(["landscapes", *options]) == 2
    assert main(["landscapes", *options, "--resume", "--lr", "0.2"]) == 2
    said = capsys.readouterr().err
    assert "holds an experiment already" in said
    assert "of another experiment" in said
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/*/*.json")}
    assert main(["landscapes", *options, "--resume"]) == 0
    same = {path for path, time in times.items() if path.stat().st_mtime_ns == time}
    assert {path.name for path in same} >= {"at_first.json", "test.json", "landscape.json"}
    folder = tmp_path / "run" / f"target-1-{SEED}"
    for name, content, said in (
        ("test", "{", "test.json: expected JSON"),
        ("test", "3", "test.json, content: expected dict, got 3; remove it"),
        ("test", '{"loss": 1.0}', "test.json, content: expected an entry 'top1', got {'loss': 1.0}"),
        ("at_first", '{"landscape": {"map": [[[]]]}}', "json, content['landscape']['map'][0][0]: expected int | float"),
    ):
        path = folder / f"{name}.json"
        before = path.read_text()
        path.write_text(content)
        assert main(["landscapes", *options, "--resume"]) == 2
        assert said in capsys.readouterr().err
        path.write_text(before)


def test_a_network_without_logits_is_a_typed_error(tmp_path, monkeypatch):
    monkeypatch.setattr(landscapes, "make_model", lambda *_: nn.Conv2d(1, 2, 3))
    with pytest.raises(SettingsError, match=r"^model: expected an output of shape \(40, classes\), got"):
        landscapes.measure(settings(landscape_images=40), digits(SAMPLES), tmp_path, "cpu")


def test_networks_that_diverge_are_left_out(tmp_path, capsys):
    options = [*RUN, "--arms", "plain,decay:1e30", "--seeds", "1", "--epochs", "2", "--corrupted-images", "0"]
    options += ["--ablated-images", "0", "--resampled-inputs", "0", "--out", str(tmp_path / "run")]
    assert main(["landscapes", *options]) == 0
    assert "the run has diverged" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "landscapes.json").read_text(), parse_constant=pytest.fail)
    assert [network["diverged"] for network in record["networks"]] == [False, True]
    figures = record["arms"]["decay:1e30"]["accuracy"]
    assert set(figures.values()) == {None}
    assert record["arms"]["plain"]["accuracy"]["mean"] == record["networks"][0]["test"]["top1"]
    assert (tmp_path / "run" / "landscapes.png").exists()


@pytest.mark.parametrize(
    "bad",
    [
        *({"arms": arms} for arms in [(), ("target",), ("noise:-1",), ("decay:nan",), ("target:1", "target:1.0")]),
        {"penalty": "rings"},
        {"pilcro": "curvature", "alpha": 1.0},
    ],
    ids=str,
)
def test_impossible_settings_are_named(bad):
    with pytest.raises(SettingsError, match=f"{next(iter(bad))}: expected"):
        settings(**bad)
