"""``loco-ext compact``: it reads a run or a checkpoint and writes the smaller network to files; errors are one line."""

import json

import pytest
import torch

from loco_ext import sparsity
from loco_ext.cli import main
from loco_ext.experiments import data, models
from tests.compaction.cases import strike

TRAIN = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--epochs", "1", "--lr", "0.05"]


def test_a_run_is_compacted(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([*TRAIN, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["compact", str(run), "--out", str(out), "--batch-size", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["accuracy_before"] == printed["accuracy_after"]
    assert printed["multiply_adds_before"] == printed["multiply_adds_after"]  # the weights have no zeros to remove
    assert json.loads((out / "report.json").read_text()).items() >= printed.items()
    assert sparsity.load(out).training is False


def test_a_checkpoint_gives_the_network_with_the_same_answers(tmp_path, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = strike(models.small_cnn(), 1).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    names = ["--model", "small", "--dataset", "digits", "--cost", "multiply_adds"]
    assert main(["compact", str(tmp_path / "weights.pt"), *names, "--onnx", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "multiply-adds 1,788,544 -> " in printed
    assert "test accuracy" in printed
    assert (tmp_path / "out" / "model.onnx").stat().st_size > 1000
    images = data.digits()[1].images[:32]
    torch.testing.assert_close(sparsity.load(tmp_path / "out")(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.pt"], "model: expected one of small"),
        (["nowhere.pt", "--model", "small"], "--dataset: expected one of digits"),
        (["nowhere.pt", "--model", "small", "--dataset", "digits"], "nowhere.pt"),
        (["nowhere.pt", "--model", "vgg13", "--dataset", "digits"], "needs images of at least 32x32"),
        (["FOLDER"], "found no settings.json in it"),
        (["OWN"], "--model: expected my_networks:make, as for the training"),
        (["WEIGHTS", "--model", "small", "--dataset", "cifar10"], "weights of another network"),
        (["WEIGHTS", "--model", "small", "--dataset", "digits", "--batch-size", "0"], "--batch-size"),
        (["WEIGHTS", "--model", "small", "--dataset", "digits", "--data", "nowhere", "--cost", "guess"], "--cost"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys, arguments, said):
    torch.save(models.small_cnn().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "own").mkdir()
    images = {"channels": 3, "size": 8, "classes": 2}
    record = {"settings": {"model": "my_networks:make", "data": "folder"}, "dataset": images}
    (tmp_path / "own" / "settings.json").write_text(json.dumps(record))
    places = {"OWN": str(tmp_path / "own"), "WEIGHTS": str(tmp_path / "weights.pt"), "FOLDER": str(tmp_path / "empty")}
    out = tmp_path / "out"
    assert main(["compact", *[places.get(a, a) for a in arguments], "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("loco-ext: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert not out.exists()
