"""Tests of the copies that DeviceCopies keeps, without a device."""

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loco_ext.ops import device_copies
from loco_ext.ops.device_copies import DeviceCopies
from loco_ext.ops.penalties import StepPenalty
from loco_ext.penalties.filters import ConvFilters

GPU = torch.device("cuda", 99)  # which no machine has


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Replace copies to a GPU by copies on the CPU, and list them; those of unpinned memory fail."""
    found = []

    class Pinned:
        def __init__(self, tensor):
            self.tensor = tensor

        def to(self, device, non_blocking):
            assert (device, non_blocking) == (GPU, True)
            found.append(self.tensor.clone())
            return found[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned(tensor))
    monkeypatch.setattr(device_copies, "is_capturing", lambda device: False)
    monkeypatch.setattr(device_copies, "current_stream", lambda device: 7)
    return found


def test_each_stream_has_one_copy(made, monkeypatch):
    copies = DeviceCopies(torch.arange(3.0))
    assert copies.on(torch.device("cpu")) is copies.tensor
    first = copies.on(GPU)
    assert first is copies.on(GPU) is made[0]
    assert torch.equal(first, copies.tensor)
    monkeypatch.setattr(device_copies, "current_stream", lambda device: 8)
    assert copies.on(GPU) is made[1]
    assert len(made) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda penalty: pickle.loads(pickle.dumps(penalty))])
def test_penalties_that_are_copied_or_pickled_leave_their_copies_behind(made, copied):
    penalty = StepPenalty([0, 1, 0], torch.tensor([0.5, 0.25], dtype=torch.float64))
    before, _ = penalty.scaled(2.0, GPU)
    after, _ = copied(penalty).scaled(2.0, GPU)
    assert torch.equal(before, after)
    assert len(made) == 2


def test_each_capture_of_a_graph_has_its_own_and_leaves_those_of_eager_calls(made, monkeypatch):
    copies = DeviceCopies(torch.arange(3.0))
    with monkeypatch.context() as patch:
        patch.setattr(device_copies, "is_capturing", lambda device: True)
        captured = [copies.on(GPU), copies.on(GPU)]
    assert all(a is b for a, b in zip(captured, made, strict=True))
    assert copies.on(GPU) is made[2]  # what a capture copies is not there before the graph is replayed


def test_the_factors_of_filters_are_ordinary_tensors_whatever_the_first_call_was_in(made):
    filters = ConvFilters(torch.Size([3, 3, 3]), "half", "auto")
    # Under a mode nothing is kept: the factors go to the GPU, which is not there.
    with FlopCounterMode(display=False), pytest.raises((RuntimeError, AssertionError)):
        filters.factors_on(GPU, "plain")
    assert not made
    with torch.inference_mode():
        first = filters.factors_on(GPU, "plain")
    assert first is filters.factors_on(GPU, "plain")
    assert not first.is_inference()
    assert torch.equal(first, filters.factors("plain"))
    assert len(made) == 1
