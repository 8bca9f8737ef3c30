"""The command line and its demo, run in this process on a few epochs."""

import contextlib
import io
import json
import shutil
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from loco_ext import sparsity
from loco_ext.analysis import locality_statistics
from loco_ext.cli import main
from loco_ext.experiments import data, demo
from loco_ext.experiments.data import digits
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import small_cnn
from tests.experiments.runs import CPU

FILES = {".lock", "demo.json", "demo.png", "ordinary.pt", "locality.pt", "smaller"}


def run_demo(out, *options):
    """Run two epochs; return the text printed on stdout, and the record in the folder."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(["demo", "--out", str(out), "--seed", "3", "--epochs", "2", *options]) == 0
    return stdout.getvalue(), json.loads((out / "demo.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a finished run, the text that it printed, and its record."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return out, *run_demo(out)


def repeatable(record):
    """Return the record without latencies and what depends on them: whether and how the smaller network is smaller."""
    record = dict(record)
    chosen = ("accuracy", "accuracy_compacted", "macs_before", "parameters_before")
    record["smaller"] = {key: value for key, value in record["smaller"].items() if key in chosen}
    return record


def load(path):
    return torch.load(path, weights_only=True)


def test_files_and_record(finished):
    out, _, record = finished
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (record["settings"]["seed"], record["settings"]["epochs"]) == (3, 2)
    assert [network["name"] for network in record["networks"]] == ["ordinary", "locality"]
    assert [network["optimizer"] for network in record["networks"]] == ["torch.optim.SGD", "loco_ext.optim.SGD"]
    for network in record["networks"]:
        assert len(network["accuracy_by_epoch"]) == 2
        assert network["accuracy_by_epoch"][-1] == network["accuracy"] > 0.2  # chance is 0.1


def test_lifting_changes_no_output_and_training_on_leaves_the_convolutions(finished):
    record = finished[2]
    lifted = record["lifted"]
    assert lifted["accuracy_lifted"] == lifted["accuracy_before"] == record["networks"][1]["accuracy"]
    assert 0 < lifted["deviation"]["delta_locality"] <= lifted["deviation"]["delta_sharing"] < 0.1
    assert lifted["parameters_after"] > 10 * lifted["parameters_before"]


def accuracy(model):
    train, test = digits()
    with torch.no_grad():
        correct = model.eval()(Normalization(train)(test.images)).argmax(1) == test.labels
    return correct.sum().item() / len(correct)


@pytest.mark.parametrize("number", [0, 1])
def test_checkpoint_gives_the_reported_numbers(finished, number):
    out, _, record = finished
    network = record["networks"][number]
    state = load(out / f"{network['name']}.pt")
    model = small_cnn()
    model.load_state_dict(state)
    assert accuracy(model) == network["accuracy"]
    filters = [value.numpy().astype(np.float64).reshape(-1, 3, 3) for value in state.values() if value.dim() == 4]
    taps = np.abs(np.concatenate(filters)).mean(axis=0)
    np.testing.assert_allclose(network["mean_abs_weight_by_tap"], taps, rtol=1e-12)
    assert network["statistics"] == json.loads(json.dumps(asdict(locality_statistics(state))))
    edge = (taps[0, 1] + taps[1, 0] + taps[1, 2] + taps[2, 1]) / 4
    corner = (taps[0, 0] + taps[0, 2] + taps[2, 0] + taps[2, 2]) / 4
    assert network["mean_abs_weight"] == pytest.approx({"centre": taps[1, 1], "edge": edge, "corner": corner})


def trained(**settings):
    """Train the two networks, without compaction; return their state dicts and the report on them."""
    samples, chosen = data.load("digits", None), demo.DemoSettings(seed=0, device="cpu", **settings)
    models, networks = demo.train_both(chosen, samples, CPU)
    return [model.state_dict() for model in models], networks


def test_locality_moves_weight_from_the_corners_to_the_centre():
    _, networks = trained(epochs=2, weight_decay=0.2)
    ordinary, local = (network.mean_abs_weight for network in networks)
    assert local["centre"] > 1.3 * ordinary["centre"]
    assert local["corner"] < 0.85 * ordinary["corner"]


@pytest.mark.slow
def test_same_seed_same_result_in_the_place_of_another(finished, tmp_path):
    out, _, record = finished
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*.*"):
        path.write_bytes(b"of a run before")
    torch.rand(5)  # random numbers that the caller drew before must have no influence
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    printed, again = run_demo(tmp_path, "--json")
    assert json.loads(printed) == again
    assert repeatable(again) == repeatable(record)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    for name in ("ordinary.pt", "locality.pt"):
        first, second = load(out / name), load(tmp_path / name)
        assert all(torch.equal(first[key], second[key]) for key in first)
    sparsity.load(tmp_path / "smaller")
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_trainings_differ_by_the_decay_map_only():
    """With the locality (1, 1), our optimizer makes the same steps as torch's own."""
    (ordinary, local), _ = trained(epochs=1, locality=(1.0, 1.0))
    for key in ordinary:
        torch.testing.assert_close(local[key], ordinary[key], rtol=1e-3, atol=1e-5)


def test_the_smaller_network_answers_as_the_trained_one(finished):
    out, _, record = finished
    smaller = record["smaller"]
    assert smaller["accuracy"] == smaller["accuracy_compacted"]
    assert smaller["latency_after"] <= smaller["latency_before"]
    assert 0.48 * smaller["macs_before"] < smaller["macs_after"] <= 0.5 * smaller["macs_before"]
    dense, narrow, _ = smaller["networks"]
    assert dense["macs"] == smaller["macs_before"]
    assert 0.48 * dense["macs"] < narrow["macs"] <= 0.5 * dense["macs"]
    assert accuracy(sparsity.load(out / "smaller")) == smaller["accuracy_compacted"]


def test_table(finished):
    out, printed, record = finished
    for network in record["networks"]:
        row = next(line for line in printed.splitlines() if network["name"] in line)
        assert f"{network['accuracy']:.1%}" in row
        assert all(f"{value:.4f}" in row for value in network["mean_abs_weight"].values())
    assert str(out) in printed
    smaller = record["smaller"]
    for layer in smaller["layers"]:
        assert f"{layer['macs_before']:,}" in printed
    assert f"{smaller['accuracy_compacted']:.1%}, compacted" in printed


def test_missing_libraries_are_named_with_the_extra(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("loco_ext.experiments")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("sklearn", "matplotlib", "tqdm", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo", "--out", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "needs scikit-learn, matplotlib, tqdm, rich: install them with `pip install --no-build-isolation" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
