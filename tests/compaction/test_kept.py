"""Compaction of in-place changes, of models without a graph, and of parts that it does not understand and keeps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.sparsity.compaction.atoms import Atoms
from tests.compaction.cases import compacted, same, sizes_of, strike


class InPlace(nn.Module):
    """Module that reads a value after it was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        shortcut = x
        y = self.second(self.relu(x))
        y += shortcut
        return functional.relu(y, inplace=True).mul_(2.0) + shortcut


def test_operations_in_place_are_seen_through() -> None:
    model = strike(InPlace(), 3).double().eval()
    x = torch.randn(2, 2, 6, 6).double()
    network, _ = compacted(model, x)
    same(network, model, x)


class InPlaceAfterTheIdentity(nn.Module):
    """Module that changes a sum in place and reads one of the sum's operands later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dead = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = functional.relu(x + self.dead(x), inplace=True)
        return torch.cat([x, y], 1)


def test_a_sum_that_is_gone_protects_no_operand_from_changes_in_place() -> None:
    model = InPlaceAfterTheIdentity().double().eval()
    with torch.no_grad():
        model.dead.weight.zero_()
    x = torch.randn(2, 2, 6, 6).double()
    network, report = compacted(model, x)
    same(network, model, x)
    assert not report.notes
    assert sizes_of(network) == [(4, 2, 3, 3)]


class OnAView(nn.Module):
    """Module that changes a view of a value that is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        x.flatten(1).relu_()
        return x


class ByValue(nn.Module):
    """Module whose forward torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x) if x.sum() > 0 else self.convolution(-x)


@pytest.mark.parametrize("kind", [OnAView, ByValue])
def test_models_without_a_graph_keep_their_channels_and_are_cropped(kind: type[nn.Module]) -> None:
    model = strike(kind(), 1, dead=0.0, sizes=1.0).double().eval()
    with torch.no_grad():
        model.convolution.weight[:, :, 0] = 0
    x = torch.randn(2, 2, 8, 8).double()
    network, report = compacted(model, x)
    same(network, model, x, -x)
    assert "all channels are kept" in report.notes["model"]
    assert type(network) is kind
    assert report.multiply_adds_executed < report.multiply_adds_before


class Shared(nn.Module):
    """Module that calls one convolution twice, one with hooks, and one inside an unknown operation."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.hooked, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.hooked.register_forward_hook(lambda module, x, y: y * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.twice(self.twice(x)))
        return self.last(torch.fft.fft2(x).real.softmax(1))


def test_what_is_not_understood_is_kept_and_named() -> None:
    model = strike(Shared(), 2).double().eval()
    x = torch.randn(2, 4, 8, 8).double()
    network, report = compacted(model, x)
    same(network, model, x)
    assert "called more than once" in report.notes["twice"]
    assert "hooks" in report.notes["hooked"]
    assert "softmax" in report.notes
    assert "fft_fft2" in report.notes


def test_classes_that_meet_twice_in_one_union_become_one() -> None:
    atoms = Atoms()
    atoms.new(6)
    atoms.unite([5, 5, 3], [2, 3, 3])
    assert atoms.roots(range(6)).tolist() == [0, 1, 2, 2, 4, 2]


def test_notes_of_one_reason_are_one_line() -> None:
    notes = dict.fromkeys((f"softmax_{i}" for i in range(6)), "all channels are kept: unknown")
    text = str(sparsity.Report(notes={**notes, "cat": "all channels are kept: hooks", "model": "as it is"}))
    assert "6 operations (softmax_0, softmax_1, softmax_2, softmax_3, ...): all channels are kept: unknown\n" in text
    assert "cat: all channels are kept: hooks\nmodel: as it is\n" in text
