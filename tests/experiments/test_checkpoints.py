"""Files of checkpoints and weights: a changed bit is detected, and other readers can read them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from loco_ext.checkpoints import DamagedFileError, load_checkpoint, load_weights, save_checkpoint, save_weights

WEIGHTS = {"a": torch.randn(5, 3), "b": torch.arange(4)}


@pytest.mark.parametrize(
    ("save", "load", "others"),
    [
        (save_checkpoint, load_checkpoint, lambda path: torch.load(path, weights_only=True)),
        (save_weights, load_weights, load_file),
    ],
    ids=["torch", "safetensors"],
)
def test_a_changed_bit_is_noticed_wherever_it_is(save, load, others, tmp_path):
    path = tmp_path / "file"
    save(path, WEIGHTS)
    for read in (load, others):
        found = read(path)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
    content = path.read_bytes()
    damaged = [
        content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(0, len(content), 17)
    ]
    for bad in (b"", content[:-1], content + b" ", *damaged):
        path.write_bytes(bad)
        with pytest.raises(DamagedFileError):
            load(path)


def test_weights_of_others_have_no_checksum(tmp_path):
    save_file(WEIGHTS, tmp_path / "file")
    assert load_weights(tmp_path / "file", foreign=True).keys() == WEIGHTS.keys()
    with pytest.raises(DamagedFileError, match="or of another kind"):
        load_weights(tmp_path / "file")
