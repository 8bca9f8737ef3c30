"""Output folders: one process at a time writes to a folder, and a full disk is a one-line error."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from loco_ext.cli import main
from loco_ext.experiments import demo_budget, lifting, models
from loco_ext.folders import owned

TRAINING = ["--model", "plain8", "--dataset", "digits", "--width", "0.25"]
COMMANDS = {
    "demo": ["demo", "--epochs", "1"],
    "train": ["train", *TRAINING, "--preset", "quick", "--epochs", "1"],
    "frontier": ["frontier", *TRAINING, "--samples", "100", "--dense-epochs", "1"],
    "efcn": [
        "efcn",
        "--preset",
        "quick",
        "--model",
        "small",
        "--dataset",
        "digits",
        "--relax",
        "lcn",
        "--samples",
        "100",
    ],
    "landscapes": ["landscapes", "--preset", "short", "--model", "small", "--dataset", "digits", "--samples", "100"],
    "analyze": ["analyze", "model.pt"],
    "compact": ["compact", "model.pt", "--model", "small", "--dataset", "digits", "--cost", "macs"],
    "shrink": [
        "shrink",
        "model.pt",
        "--model",
        "small",
        "--dataset",
        "digits",
        "--macs",
        "0.9",
        "--importance",
        "norm",
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_command_is_refused_in_one_line_and_writes_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(models.small_cnn().state_dict(), "model.pt")
    with owned(tmp_path / "out"):
        assert main([*COMMANDS[command], "--out", "out"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "loco-ext: --out: expected a folder that can be written to, got 'out': another process is writing to it"
    ]
    assert os.listdir("out") == [".lock"]


@pytest.fixture
def small_files():
    """Limit files to 3 KB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line_and_leaves_no_half_written_file(command, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    torch.save(models.small_cnn().state_dict(), "model.pt")
    for part in (demo_budget.shrink, lifting.lift):  # these take longer than the rest of the demo
        monkeypatch.setattr(sys.modules[part.__module__], part.__name__, lambda *_: None)
    request.getfixturevalue("small_files")
    assert main([*COMMANDS[command], "--out", "out"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("loco-ext: ")]
    assert said == ["loco-ext: --out: expected a folder that can be written to, got 'out': File too large"]
    left = {path.name for path in Path("out").rglob("*") if path.is_file()}
    assert left <= {".lock", "settings.json", "at_first.json"}


def test_a_killed_process_leaves_a_folder_that_can_be_written_to(tmp_path):
    child = os.fork()
    if child == 0:
        with owned(tmp_path):
            (tmp_path / ".file.1.part").touch()
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(os.listdir(tmp_path)) == 2
    with owned(tmp_path):
        assert os.listdir(tmp_path) == [".lock"]
        with pytest.raises(BlockingIOError, match="another process"), owned(tmp_path):
            pass
    with owned(tmp_path):
        pass
