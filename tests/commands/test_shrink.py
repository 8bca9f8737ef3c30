"""``loco-ext shrink``: a checkpoint becomes a small network in a folder, also where it was killed and resumed."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loco_ext import sparsity
from loco_ext.cli import main
from loco_ext.experiments import compacting, data, models, run, settings, shrinking
from loco_ext.experiments.loader import Normalization
from tests.experiments.runs import CPU, killed_after, quick

LINE = ["shrink", "weights.pt", "--model", "small", "--dataset", "digits"]
COSTS = ("before", "before"), ("after", "before"), ("after", "after")


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Change to a folder with the weights of an untrained network; return the network."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = models.small_cnn()
    torch.save(network.state_dict(), "weights.pt")
    return network


@pytest.mark.slow
@pytest.mark.usefixtures("dense")
def test_a_killed_run_is_resumed_to_the_same_small_network(capsys):
    line = [*LINE, "--macs", "0.3", "--epochs", "2"]
    assert main([*line, "--json", "--out", "whole"]) == 0
    whole = json.loads(capsys.readouterr().out)
    with killed_after(1):
        main([*line, "--out", "cut"])
    assert main([*line, "--out", "cut"]) == 2
    assert "cut: holds a run already" in capsys.readouterr().err
    assert main([*line, "--out", "cut", "--resume", "--lr", "0.2"]) == 2
    said = "expected the options and the network of the run to resume, got another learning_rate"
    assert said in capsys.readouterr().err
    record = json.loads(Path("cut/shrink.json").read_text())
    for option in ("round_to", "distillation", "temperature"):  # an earlier version had none of these options
        del record["shrinking"][option]
    Path("cut/shrink.json").write_text(json.dumps(record))
    assert main([*line, "--out", "cut", "--resume"]) == 0
    assert "and trained further" in capsys.readouterr().out

    dense, small, final = (whole[place][f"macs_{state}"] for place, state in COSTS)
    assert 0.29 * dense < small <= 0.3 * dense
    assert final <= small
    networks = [sparsity.load(name) for name in ("whole", "cut")]
    assert sum(p.numel() for p in networks[0].parameters()) == whole["after"]["parameters_after"]
    train, test = data.digits()
    outputs = [network(Normalization(train)(test.images)) for network in networks]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3)  # layouts are chosen by timing
    right = float((outputs[0].argmax(1) == test.labels).double().mean())
    assert right == pytest.approx(whole["after"]["accuracy_after"])


DAMAGES = (
    ("shrink.json", "{", "cut/shrink.json: expected JSON"),
    ("shrink.json", "[]", "shrink.json: expected the record of a run to resume (list indices must be"),
    ("shrink.json", '{"shrinking": {"speed": 1}}', "shrink.json: expected the record of a run to resume ("),
    ("start/manifest.json", "{", "start/manifest.json: not a network that save has written"),
    ("start/manifest.json", None, "start/manifest.json: cannot be read: No such file"),
)


@pytest.mark.usefixtures("dense")
def test_a_training_that_diverges_is_an_error_and_leaves_what_else_is_there(capsys):
    options = "--macs 0.5 --importance norm --epochs 1 --lr 1e30 --batch-size 2 --out cut"
    line = [*LINE, *options.split()]
    Path("cut/start").mkdir(parents=True)
    Path("cut/start/.model.safetensors.1.part").touch()  # of a killed run
    assert main(line) == 1
    assert capsys.readouterr().err.startswith("loco-ext: cut/training: the run has diverged, the loss of epoch 1")
    assert sorted(path.name for path in Path("cut").iterdir()) == [".lock", "shrink.json", "start", "training"]
    assert sorted(path.name for path in Path("cut/start").iterdir()) == ["manifest.json", "model.safetensors"]
    for other in (["compact", *LINE[1:]], ["train", *LINE[2:]]):
        assert main([*other, "--out", "cut"]) == 2
        assert "--out: expected a folder without other results, got cut, which has shrink" in capsys.readouterr().err
    for name, text, said in DAMAGES:
        path = Path("cut") / name
        before = path.read_text()
        path.unlink() if text is None else path.write_text(text)
        assert main([*line, "--resume"]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert said in printed
        path.write_text(before)


def test_training_on_augments_as_the_run_did():
    settings = asdict(quick(crop=False, batch_size=50))
    trained = compacting.Trained(models.small_cnn(), "small", "digits", data.ImageFormat(1, 8, 10), settings)
    found = shrinking._settings(trained, shrinking.Shrinking(macs=0.5))
    assert (found.crop, found.augment, found.batch_size) == (False, True, 50)


def test_the_network_as_it_was_teaches_the_small_one(dense, tmp_path):
    line = [*LINE, "--importance", "norm", "--quiet"]
    line += ["--macs", "0.3", "--epochs", "1", "--lr", "0.02", "--distillation", "0.6", "--temperature", "2"]
    assert main([*line, "--out", "out"]) == 0
    recorded = json.loads(Path("out/training/settings.json").read_text())["settings"]
    assert {"distillation": 0.6, "temperature": 2.0, "teacher": models.digest(dense)}.items() <= recorded.items()
    setting = settings.Settings(**recorded | {"milestones": ()})
    networks = {"model": sparsity.load("out/start"), "teacher": dense}
    run.run(setting, data.load("digits", None), tmp_path / "again", CPU, **networks)
    found, expected = (load_file(f"{name}/model.safetensors") for name in ("out/training", "again"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("dense")
def test_a_budget_that_cannot_be_met(capsys):
    line = [*LINE, "--importance", "norm"]
    assert main([*line, "--macs", "1e-6", "--out", "out"]) == 2
    assert "--macs: expected at least 8." in capsys.readouterr().err
    assert main([*line, "--macs", "0.5", "--round-to", "65", "--out", "out"]) == 2
    assert "--round-to: expected at most 64, the channels of the widest layer" in capsys.readouterr().err
    assert os.listdir("out") == [".lock"]
