"""Tests of networks made by a user's function, and of the errors for functions that make none."""

import sys

import pytest
from torch import nn

from loco_ext.experiments.models import find_model
from loco_ext.experiments.own_model import ModelError

MODULE = """
from torch import nn
def make(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(num_classes))
def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 7))
def number():
    return 3
def fails(**options):
    raise RuntimeError(f"no network of {options['num_classes']} classes")
class Counted(nn.Sequential):
    def get_extra_state(self):
        return {"steps": 0}
def counted(num_classes):
    return Counted(nn.Flatten(), nn.Linear(48, num_classes))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Create a module in the working directory."""
    (tmp_path / "my_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)


def test_the_function_is_called_with_the_classes_if_it_takes_them(module):
    model = find_model("my_networks:make").make(3, 5, 4)
    assert model[2].weight.shape == (5, 16)
    assert model.training
    assert isinstance(find_model("my_networks:fixed").make(3, 7, 4)[1], nn.Linear)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_networks:fixed", r"expected logits of shape \(2, 5\) .* for two images of 3x4x4, got \(2, 7\)"),
        ("my_networks:number", "expected a torch.nn.Module from my_networks:number, got int"),
        ("my_networks:fails", r"RuntimeError: no network of 5 classes \(my_networks.py, line 10\)"),
        ("my_networks:counted", "expected tensors in the state dict of .*, got dict at '_extra_state'"),
        ("my_networks:absent", "found no function 'absent' in my_networks"),
        ("nowhere_at_all:make", "ModuleNotFoundError"),
    ],
)
def test_what_makes_no_network_is_named(module, name, said):
    with pytest.raises(ModelError, match=f"^model: .*{said}"):
        find_model(name).make(3, 5, 4)
