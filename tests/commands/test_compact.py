"""``loco-ext compact``: it reads a run or a checkpoint and writes the smaller network to files; errors are one line."""

import json
import os
from contextlib import nullcontext

import pytest
import torch

from loco_ext import sparsity
from loco_ext.cli import main
from loco_ext.errors import UserError
from loco_ext.experiments import compacting, data, models
from tests.compaction.cases import strike

TRAIN = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--epochs", "1", "--lr", "0.05"]


def test_a_run_is_compacted(tmp_path, capsys):
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert main([*TRAIN, "--out", run, "--quiet"]) == 0
    assert main(["compact", run, "--out", str(out), "--batch-size", "4", "--json"]) == 0
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


@pytest.mark.slow
def test_a_network_that_onnx_cannot_hold_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "from torch import nn\ndef make():\n    layers = nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(4), nn.Flatten()\n"
    code += "    return nn.Sequential(*layers, nn.Linear(32, 10))\n"
    (tmp_path / "pools_of_this_test.py").write_text(code)
    name = ["--model", "pools_of_this_test:make"]
    assert main(["train", *name, *TRAIN[3:], "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["compact", "run", *name, "--cost", "macs", "--onnx", "--out", "out"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("loco-ext: --model: cannot be exported to ONNX: ")
    assert not (tmp_path / "out" / "model.onnx").exists()


@pytest.fixture
def small(one_thread):
    """Return a network, and what compaction makes of it."""
    trained = compacting.Trained(models.small_cnn().eval(), "small", "digits", data.ImageFormat(1, 8, 10))
    return compacting.compact(trained, batch_size=2, cost="macs"), trained


def test_a_killed_process_leaves_a_folder_that_is_compacted_into_again(small, tmp_path, monkeypatch):
    save = sparsity.save
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(sparsity, "save", lambda *given: (save(*given), os._exit(9)))
            compacting.save(*small, tmp_path / "out", onnx=False)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / "report.json").exists()
    compacting.check_folder(tmp_path / "out")
    save(small[0].network, tmp_path / "other")
    with pytest.raises(UserError, match=r"^out: expected .* without other results, .*other, which has manifest"):
        compacting.check_folder(tmp_path / "other")


def test_a_former_networks_onnx_goes_with_it(small, tmp_path, monkeypatch):
    def fail(*given):
        raise sparsity.ModelFileError("model: cannot be exported")

    monkeypatch.setattr(sparsity, "export_onnx", fail)
    path = tmp_path / "model.onnx"
    path.write_text("of something else")
    compacting.save(*small, tmp_path, onnx=False)
    assert path.exists()
    for onnx in (False, True):
        path.write_text("of the former network")
        (tmp_path / "report.json").write_text("{}")
        with pytest.raises(sparsity.ModelFileError) if onnx else nullcontext():
            compacting.save(*small, tmp_path, onnx=onnx)
        assert not path.exists()
        compacting.check_folder(tmp_path)
        assert json.loads((tmp_path / "report.json").read_text())["model"] == "small"
