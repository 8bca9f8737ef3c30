"""``loco-ext efcn``: the paper's protocol, its training, measurements and files, and resuming a run."""

import contextlib
import copy
import io
import json
import math
import re
import shutil
from dataclasses import asdict

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext import analysis
from loco_ext import nn as loco_nn
from loco_ext.cli import main
from loco_ext.experiments import efcn, efcn_figures, figures
from loco_ext.experiments.efcn_settings import efcn_preset, switch_times
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import MODELS, vanilla_cnn
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import evaluate, make_model
from tests.experiments.runs import CPU, digits, written_out

SAMPLES, BATCH, SEED = 100, 8, 3  # the last batch has 4
TINY = ["--model", "plain8", "--width", "0.25", "--dataset", "digits", "--samples", str(SAMPLES), "--seed", str(SEED)]
TINY += ["--epochs", "2", "--lr", "0.1", "--batch-size", str(BATCH), "--branch-epochs", "2", "--fcn-epochs", "1"]
TINY += ["--landscape-samples", "50", "--power-iterations", "2", "--interpolation-points", "3", "--string-steps", "2"]
RUN = [*TINY, "--switch", "0,2", "--relax", "lcn,1,full"]
FIGURES = {"dynamics", "landscape", "deviations", "filters", "fcn_filters", "masked", "corners", "interpolations"}


def settings(**overrides):
    options = {"model": "plain8", "width": 0.25, "data": "digits", "epochs": 2, "learning_rate": 0.1, "seed": SEED}
    return efcn_preset("paper", **options | {"batch_size": BATCH, "branch_epochs": 2} | overrides)


def test_the_preset_is_the_papers_protocol():
    """The preset follows section 4, figure 2, and the authors' code: fixed order of samples, no crops or flips."""
    setting = efcn_preset("paper")
    times = (0, 1, 2, 3, 4, 6, 8, 10, 13, 18, 23, 30, 40, 52, 67, 88, 115, 150)
    assert setting.switch_times == switch_times(150) == times
    assert (setting.branch_epochs, setting.branch_learning_rate, setting.fcn_epochs) == (100, 0.01, 100)
    assert setting.relaxations == ("full",)
    expected = {"model": "vanilla", "data": "cifar10", "epochs": 150, "batch_size": 250, "optimizer": "sgd"}
    expected |= {"momentum": 0, "weight_decay": 0, "augment": False, "shuffle": False}
    assert asdict(setting.training).items() >= expected.items()
    assert {setting.training.learning_rate_of(epoch) for epoch in range(150)} == {0.1}
    assert {setting.branch(100).learning_rate_of(epoch) for epoch in range(100)} == {0.01}
    assert efcn_preset("quick", epochs=9).switch_times == (0, 3)


def test_the_vanilla_cnn_has_the_papers_numbers_of_parameters():
    model = vanilla_cnn()
    assert sum(p.numel() for p in model.parameters()) == 143_178
    # Live pairs are counted by hand: all pixels with all, 3x32x32 to 64x17x17, 64x8x8 to itself, 64x3x3 to itself.
    whole = 17**2 * 32**2 * 3 * 64 + 8**4 * 64**2 + 3**4 * 64**2
    biases = 64 * (17**2 + 8**2 + 3**2)
    lifted = loco_nn.to_efcn(model, torch.zeros(1, 3, 32, 32), "all")
    assert sum(p.numel() for p in lifted.parameters()) == whole + biases + 650 == 73_952_522
    layers = [module for module in MODELS["alexnet"].make().modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in layers] == [64, 192, 384, 256, 256]


@pytest.mark.parametrize(
    ("conv", "size", "inputs"), [((3, 8, 4, 2, 2), 32, 3 * 36**2), ((64, 16, 5, 1, 2), 8, 64 * 12**2)]
)
def test_the_fully_connected_network_starts_with_the_padding_among_its_inputs(conv, size, inputs):
    layer = loco_nn.LocallyConnected2d.from_conv(nn.Conv2d(*conv), size).grow(size)
    efcn.reset_as_padded(layer)
    for parameter in layer.parameters():
        assert 0.99 < parameter.abs().max().item() * inputs**0.5 <= 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):  # for slow tests; those of the report run the command, too
    """Run a whole experiment without drawing its figures; return its folder and what it printed."""
    torch.set_num_threads(1)
    out, drawn = tmp_path_factory.mktemp("efcn") / "out", []
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(efcn_figures, "draw", lambda record: drawn.append(record) or [])
        assert main(["efcn", *RUN, "--out", str(out), "--json"]) == 0
    record = json.loads(printed.getvalue(), parse_constant=pytest.fail)
    assert drawn == [record]
    return out, record


@pytest.mark.slow
def test_the_record_has_every_network_and_figures_are_drawn_from_it_alone(finished, tmp_path):
    out, record = finished
    figures.save(efcn_figures.draw(record), tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == FIGURES
    for path in tmp_path.glob("*.png"):
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 300
        assert picture.std() > 0.02
    assert json.loads((out / "efcn.json").read_text()) == record
    assert record["settings"] == json.loads((out / "settings.json").read_text())["settings"]
    assert record["settings"]["training"]["model"] == "plain8"
    assert (record["training_samples"], record["test_samples"]) == (SAMPLES, 997)
    assert [epoch["epoch"] for epoch in record["cnn"]["epochs"]] == [1, 2]
    found = [(branch["switch_time"], branch["relax"]) for branch in record["branches"]]
    assert found == [(time, relax) for time in (0, 2) for relax in ("cnn", "lcn", "1", "full")]
    for network in [*record["branches"], record["fcn"]]:
        relax = network["relax"]
        deviations = set() if relax == "cnn" else {"delta_locality", "delta_sharing"}
        masked = set() if relax in ("cnn", "lcn") else {"local_accuracy", "off_local_accuracy"}
        start = {"train_loss", "train_accuracy", "test_loss", "test_accuracy"} | deviations
        assert network["start"].keys() == start
        assert all(epoch.keys() == start | {"epoch"} | masked for epoch in network["epochs"])
        assert len(network["epochs"]) == (1 if relax == "fcn" else 2)
        for when in ("before", "after"):
            assert network[when].keys() == {"gradient_norm", "top_eigenvalue", "residual", "iterations"}
        assert network["interpolations"].keys() == (set() if relax == "fcn" else {"linear", "string", "outputs"})
        for points in network["interpolations"].values():
            assert [point["alpha"] for point in points] == [0, 0.5, 1]
    assert not list(out.rglob("branches/*/checkpoint.pt"))


def lifted(branch, out, trained):
    """Return a branch's network, before or after its training, rebuilt from the files."""
    model = make_model(settings().training, digits(SAMPLES))
    if branch["switch_time"]:
        model.load_state_dict(load_file(out / "cnn" / f"weights-{branch['switch_time']:03}.safetensors"))
    how = {"lcn": "sharing", "full": "all", "1": 1, "cnn": None}[branch["relax"]]
    if how is not None:
        model = loco_nn.to_efcn(model, torch.zeros(1, 1, 8, 8), how)
    if trained:
        folder = out / "branches" / f"{branch['switch_time']:03}-{branch['relax']}"
        model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


@pytest.mark.slow
def test_branches_start_where_the_network_was_and_are_trained_by_plain_gradient_descent(finished):
    out, record = finished
    samples, normalization = digits(SAMPLES), Normalization(digits(SAMPLES).train)
    for branch in record["branches"]:
        model = lifted(branch, out, trained=False)
        loss, accuracy = evaluate(model, samples.train, normalization, CPU)
        found = branch["start"]["train_loss"], branch["start"]["train_accuracy"]
        assert found == pytest.approx((loss, accuracy), rel=1e-5)
        assert branch["parameters"] == sum(p.numel() for p in model.parameters())
        training = settings().branch(2)
        assert (training.learning_rate, training.momentum, training.weight_decay) == (0.01, 0, 0)
        written_out(training, samples, model)
        trained = lifted(branch, out, trained=True)
        for ours, theirs in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_what_is_measured_is_that_of_the_trained_networks(finished):
    out, record = finished
    samples = digits(SAMPLES)
    normalization = Normalization(samples.train)
    batch = normalization(samples.train.images[:50]), samples.train.labels[:50]
    assert record["cnn"]["epochs"][-1]["test_accuracy"] > 0.2
    for branch in record["branches"]:
        model, last = lifted(branch, out, trained=True), branch["epochs"][-1]
        _, accuracy = evaluate(model, samples.test, normalization, CPU)
        assert last["test_accuracy"] == pytest.approx(accuracy)
        norm = analysis.gradient_norm(model, cross_entropy, [batch])
        assert branch["after"]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert branch["after"]["iterations"] in (2, 4)
        if branch["relax"] != "cnn":
            assert last["delta_locality"] == pytest.approx(loco_nn.deviation(model).delta_locality)
            assert last["delta_sharing"] == pytest.approx(loco_nn.deviation(model).delta_sharing)
            assert branch["start"]["delta_sharing"] == pytest.approx(0, abs=1e-6)
        if "local_accuracy" in last:
            alone = copy.deepcopy(model)
            for layer in alone.modules():
                if isinstance(layer, loco_nn.LocallyConnected2d):
                    layer.prune(radius=0)
            _, accuracy = evaluate(alone, samples.test, normalization, CPU)
            assert last["local_accuracy"] == pytest.approx(accuracy)
            assert 0 < last["delta_locality"] < last["delta_sharing"]
        ends = branch["interpolations"]["linear"]
        assert ends[-1]["test_accuracy"] == last["test_accuracy"]
        assert ends[0]["test_loss"] == pytest.approx(record["cnn"]["epochs"][-1]["test_loss"], rel=1e-5)
        assert {method[0]["test_loss"] for method in branch["interpolations"].values()} == {ends[0]["test_loss"]}
    assert record["fcn"]["start"]["delta_locality"] > 0.5
    assert record["fcn"]["parameters"] == record["branches"][-1]["parameters"]


@pytest.mark.slow
def test_pictures_are_weights_of_the_first_layer(finished):
    """Pictures are rows of the layer's dense matrix; at first each holds the convolution's kernel among zeros."""
    out, record = finished
    for branch in record["branches"]:
        if branch["relax"] == "cnn":
            assert branch["filters"] == {}
            assert branch["corners"] == []
            continue
        assert list(branch["filters"]) == ["0", "1", "2"] if branch["relax"] != "fcn" else ["0", "1"]
        start, end = (lifted(branch, out, trained=trained)[0] for trained in (False, True))
        kernel = make_model(settings().training, digits(SAMPLES))[0].weight[0, 0]
        if branch["switch_time"] == 0:
            picture = torch.tensor(branch["filters"]["0"])
            # With padding 1, the first output pixel whose taps are all in the image is (1, 1).
            torch.testing.assert_close(picture[:3, :3], kernel, rtol=1e-6, atol=0)
            assert picture.count_nonzero() == 9
        dense = end.to_dense().weight
        torch.testing.assert_close(torch.tensor(branch["filters"]["2"]).flatten(), dense[9], rtol=1e-6, atol=0)
        if branch["switch_time"] == 2:
            for corner, layer in zip(branch["corners"], (start, end), strict=True):
                torch.testing.assert_close(torch.tensor(corner), layer.to_dense().weight[:64], rtol=1e-2, atol=0)
        else:
            assert branch["corners"] == []


@pytest.mark.slow
def test_less_is_measured_where_less_is_asked_for(tmp_path, capsys):
    options = [*TINY, "--switch", "1", "--relax", "lcn", "--fcn-epochs", "0", "--epochs", "1", "--branch-epochs", "1"]
    options += ["--power-iterations", "0", "--interpolation-points", "0", "--out"]
    assert main(["efcn", *options, str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "efcn.json").read_text(), parse_constant=pytest.fail)
    assert record["fcn"] is None
    assert list(record["branches"][1]["before"]) == ["gradient_norm"]
    assert record["branches"][1]["interpolations"] == {}
    figures = {"dynamics", "landscape", "deviations", "filters", "corners"}
    assert {path.stem for path in tmp_path.glob("run/*.png")} == figures
    assert "efcn.json and figures are in" in capsys.readouterr().out
    assert main(["efcn", *options, str(tmp_path / "diverged"), "--lr", "1e30"]) == 2
    assert "weights-001.safetensors: not the weights of this network (NaN or inf" in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_weights_are_named_and_not_trained_on(finished, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "cnn" / "weights-002.safetensors"
    (tmp_path / "branches" / "002-lcn" / "after.json").unlink()
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert main(["efcn", *RUN, "--out", str(tmp_path), "--resume"]) == 2
    assert "weights-002.safetensors: not the weights of this network (changed since" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_experiment_is_not_trained_again_and_its_table_is_the_same(finished, capsys, monkeypatch):
    out, record = finished
    monkeypatch.setattr(efcn_figures, "draw", lambda record: [])
    before = (out / "efcn.json").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("branches/*/*")}
    assert main(["efcn", *RUN, "--out", str(out)]) == 2
    assert "holds an experiment already" in capsys.readouterr().err
    assert main(["efcn", *RUN, "--out", str(out), "--resume"]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(r"^│ lcn +│ +[02] │", table, re.MULTILINE)) == 2
    assert f"{record['fcn']['epochs'][-1]['delta_sharing']:.2%}" in table
    assert {path: path.stat().st_mtime_ns for path in out.rglob("branches/*/*")} == times
    assert (out / "efcn.json").read_bytes() == before


def test_a_filter_that_has_diverged_is_drawn_as_missing():
    figure = efcn_figures.fcn_filters({"filters": {"0": [[1.0, 2.0]], "1": [[4.0, 5.0]], "2": [[None, 6.0]]}})
    *_, difference = (axes.images[0].get_array() for axes in figure.axes if axes.images)
    assert difference.mask.tolist() == [[True, False]]
    assert difference[0, 1] == pytest.approx(math.log(4))


BAD = {
    "stiffness": 0.5,
    "penalty": "rings",
    "switch_times": (),
    "power_iterations": -1,
    "distillation": 1.5,
    "norm": "l3",
}


@pytest.mark.parametrize("bad", [{name: value} for name, value in BAD.items()], ids=str)
def test_impossible_settings_are_named(bad):
    with pytest.raises(SettingsError, match=next(iter(bad))):
        settings(**bad)


def test_a_network_that_is_too_large_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("loco_ext.nn.efcn.free_memory", lambda device: 1 << 20)
    assert main(["efcn", *TINY, "--relax", "full", "--out", str(tmp_path / "run")]) == 2
    assert "expected layers of at most 0.52 MB in all, got" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
