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
    assert printed["macs_before"] == printed["macs_after"]  # the weights have no zeros to remove
    assert json.loads((out / "report.json").read_text()).items() >= printed.items()
    assert sparsity.load(out).training is False


def test_a_checkpoint_gives_the_network_with_the_same_answers(tmp_path, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = strike(models.small_cnn(), 1).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    names = ["--model", "small", "--dataset", "digits", "--cost", "macs"]
    assert main(["compact", str(tmp_path / "weights.pt"), *names, "--onnx", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "MACs 1,788,544 -> " in printed
    assert "test accuracy" in printed
    assert (tmp_path / "out" / "model.onnx").stat().st_size > 1000
    images = data.digits()[1].images[:32]
    torch.testing.assert_close(sparsity.load(tmp_path / "out")(images), model(images), rtol=1e-4, atol=1e-4)
