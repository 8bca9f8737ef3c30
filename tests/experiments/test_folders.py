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

OF_DIGITS = "--model plain8 --dataset digits --width 0.25"
SMALL = "--model small --dataset digits"
COMMANDS = {
    "demo": "--epochs 1",
    "train": f"{OF_DIGITS} --preset quick --epochs 1",
    "frontier": f"{OF_DIGITS} --samples 100 --dense-epochs 1",
    "efcn": f"--preset quick {SMALL} --relax lcn --samples 100 --epochs 1",
    "landscapes": f"--preset short {SMALL} --samples 100 --epochs 1",
    "regions": "--epochs 1 --units 8 --layers 1 --samples 50 --seeds 1 --no-toy",
    "analyze": "model.pt",
    "compact": f"model.pt {SMALL} --cost macs",
    "shrink": f"model.pt {SMALL} --macs 0.9 --importance norm",
}


@pytest.fixture
def small_files():
    """Return a function that limits files to 3 KB, as if the disk were full, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_command_and_a_full_disk_are_one_line(command, tmp_path, monkeypatch, capsys, small_files):
    """The second command writes nothing, and a full disk leaves no half written file."""
    monkeypatch.chdir(tmp_path)
    torch.save(models.small_cnn().state_dict(), "model.pt")
    for part in (demo_budget.shrink, lifting.lift):  # these take longer than the rest of the demo
        monkeypatch.setattr(sys.modules[part.__module__], part.__name__, lambda *_: (None, None, None))
    line = [command, *COMMANDS[command].split(), "--out", "out"]
    with owned(tmp_path / "out"):
        assert main(line) == 2
    refused = "loco-ext: --out: expected a folder that can be written to, got 'out': "
    assert capsys.readouterr().err.splitlines() == [f"{refused}another process is writing to it"]
    assert os.listdir("out") == [".lock"]
    small_files()
    assert main(line) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("loco-ext: ")]
    assert said == [f"{refused}File too large"]
    left = {path.name for path in Path("out").rglob("*") if path.is_file()}
    assert left <= {".lock", "settings.json", "at_first.json", "vanilla-0.json", "roll-0.5-0.25-100-0.json"}


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
