"""One process at a time writes to a folder."""

import os
import subprocess
import sys

import pytest
import torch

from loco_ext.cli import main
from loco_ext.folders import owned

TRAINING = ["--model", "plain8", "--dataset", "digits", "--width", "0.25"]
COMMANDS = {
    "demo": ["demo"],
    "train": ["train", *TRAINING],
    "frontier": ["frontier", *TRAINING],
    "efcn": ["efcn", "--preset", "quick", "--model", "small", "--dataset", "digits", "--relax", "lcn"],
    "analyze": ["analyze", "model.pt"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_command_is_refused_in_one_line_and_writes_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": torch.ones(2, 2, 3, 3)}, "model.pt")
    with owned(tmp_path / "out"):
        assert main([*COMMANDS[command], "--out", "out"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "loco-ext: --out: expected a folder that can be written to, got 'out': another process is writing to it"
    ]
    assert os.listdir("out") == [".lock"]


def test_a_killed_process_leaves_a_folder_that_can_be_written_to(tmp_path):
    program = "import os, sys; from pathlib import Path; from loco_ext.folders import owned\n"
    program += "with owned(Path(sys.argv[1])):\n    Path(sys.argv[1], '.file.1.part').touch(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
    assert len(os.listdir(tmp_path)) == 2
    with owned(tmp_path):
        assert os.listdir(tmp_path) == [".lock"]
        with pytest.raises(BlockingIOError, match="another process"), owned(tmp_path):
            pass
    with owned(tmp_path):
        pass
