"""Compaction of what code writes in several ways: extrema, norms, gates, masks, concatenations with zeros, sizes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.sparsity.budget.structure import structure_of
from tests.compaction.cases import IMAGES, Network, compacted, convolution, same

Operation = Callable[[Network, Tensor, Tensor], Tensor]
DEAD = [0, 1, 2, 4, 5]  # channels of zeros among eight


def in_turn(net: Network, x: Tensor, y: Tensor) -> Tensor:
    """Assign both results of a maximum, in code that branches on sizes."""
    if y.shape[2] > 1:
        y, _ = y.max(2)
    values, _ = torch.min(y, dim=-1)
    return values


# Functions of a network, its input and an image of eight channels, and how many of these are left if others are zeros.
GOING: dict[str, tuple[Operation, int]] = {
    "largest of each row": (lambda net, x, y: torch.max(torch.max(y, 3)[0], 2)[0], 3),
    "smallest by name": (lambda net, x, y: y.min(dim=-1, keepdim=True).values.sigmoid_() * y, 3),
    "assigned to two names": (in_turn, 3),
    "largest of two": (lambda net, x, y: torch.max(y, other=net.other(y)), 3),
    "largest and smallest of two": (lambda net, x, y: torch.maximum(y.min(net.other(y)), y.mean((2, 3), True)), 3),
    "padded by what is missing": (lambda net, x, y: functional.pad(y, (0, 0, 0, 0, 0, 13 - y.shape[1])), 3),
    "padded on both sides": (lambda net, x, y: functional.pad(y, [0, 0, 0, 0, y.size(1) // 3, 12 - y.size(1)]), 3),
    "beside new zeros": (lambda net, x, y: torch.cat([y, y.new_zeros(y.size(0), 11 - y.size(1), *y.shape[2:])], 1), 3),
    "between zeros": (
        lambda net, x, y: torch.cat(
            (y.new_zeros(z := (y.size(0), 2, 1, 1)), y.mean((2, 3), True), torch.zeros(z).to(y)), 1
        ),
        3,
    ),
    "gated by the second half": (lambda net, x, y: functional.glu(y, dim=1), 1),
    "gated by a layer": (lambda net, x, y: net.gate(y), 1),
    "gated features": (lambda net, x, y: functional.glu(y.mean((2, 3))), 1),
    "gated by itself": (lambda net, x, y: functional.glu(torch.cat([y, y[:, :]], 1), 1), 3),
    "mean of a stack": (lambda net, x, y: torch.stack([y, net.other(y), y.tanh()]).mean(0), 3),
    "largest of a stack": (lambda net, x, y: torch.stack((y, net.other(y)), -1).max(4)[0], 3),
    "one of two by a mask": (lambda net, x, y: torch.where(x[:, :1] > 0, y, net.other(y)), 3),
    "one of two by a buffer": (lambda net, x, y: torch.where(net.mask, net.other(y), y), 3),
    "filled with an image of zeros": (lambda net, x, y: torch.where(x[:, :1] > 0, torch.zeros_like(y), y), 3),
    "filled with zeros": (
        lambda net, x, y: torch.where(x[:, 1:2].lt(0.5), 0.0, y.masked_fill((x[:, :1] > 0).bool(), 0)),
        3,
    ),
    "deviations": (lambda net, x, y: y / (1 + y.std((2, 3), keepdim=True)) + torch.var(y, (-1, 2), False, True), 3),
    "norms": (lambda net, x, y: y.norm(1, (2, 3)) + torch.norm(y, dim=(2, 3)), 3),
    "norms of vectors": (lambda net, x, y: torch.linalg.vector_norm(y.flatten(2), dim=-1), 3),
    "scaled by the number of channels": (lambda net, x, y: y / y.shape[1] - y * y.size(1), 3),
}
KEPT: dict[str, Operation] = {
    "places": lambda net, x, y: y + y.max(2, keepdim=True)[1],
    "both results": lambda net, x, y: (both := y.max(2, keepdim=True))[0] * both.indices,
    "largest of the channels": lambda net, x, y: y - y.max(1, keepdim=True)[0],
    "largest of all": lambda net, x, y: y - torch.max(y),
    "largest of a channel and all": lambda net, x, y: torch.maximum(y[:, 2:3], y),
    "norms of pixels": lambda net, x, y: y / (1 + y.norm(p=2, dim=1, keepdim=True)),
    "deviations of rows and channels": lambda net, x, y: y - y.std((1, 2), keepdim=True),
    "gated by the right half": lambda net, x, y: functional.glu(functional.interpolate(y, (4, 6))),
    "filled with another number": lambda net, x, y: torch.where(x[:, :1] > 0, y, 1.5),
    "filled with numbers of channels": lambda net, x, y: torch.where(x[:, :1] > 0, y, net.row),
    "a mask with channels": lambda net, x, y: torch.where(net.other(y) > 0, y, y.tanh()),
    "a mask with more axes": lambda net, x, y: torch.where((x[:, :1] > 0)[None], y, 0.0)[0],
    "beside ones": lambda net, x, y: torch.cat([y, torch.ones((y.size(0), 3, y.size(2), y.size(3))).to(y)], 1),
    "sum by name": lambda net, x, y: torch.add(y[:, :1], other=y),
}


def network(operation: Operation) -> Network:
    """Return a network that applies the operation between its layers, which have filters of zeros."""
    parts: dict[str, nn.Module | Tensor] = {"first": convolution(3, 8), "other": convolution(8, 8), "gate": nn.GLU(-3)}
    parts |= {"mask": torch.tensor([True]), "row": nn.Parameter(torch.rand(1, 8, 1, 1))}
    shape = operation(Network(lambda net, x: x, **parts), torch.ones(2, 3, 4, 3), torch.ones(2, 8, 4, 3)).shape
    parts["last"] = nn.Linear(shape[1], 4) if len(shape) == 2 else convolution(shape[1], 4)
    model = Network(lambda net, x: net.last(operation(net, x, functional.relu(net.first(x)))), **parts).double().eval()
    for layer in (model.first, model.other):
        layer.weight.data[DEAD] = layer.bias.data[DEAD] = 0
        layer.weight.data[6, :, 0] = layer.weight.data[6, :, :, 0] = 0  # filters of two sizes change places
    return model


@pytest.mark.parametrize("name", GOING)
def test_channels_go_through(name: str, tmp_path: Path) -> None:
    operation, left = GOING[name]
    model = network(operation)
    structure = structure_of(model, IMAGES[:1], "half", "filters")
    assert structure.fixed[structure.layers[0].writes].sum() == (operation is in_turn)  # one for the size that it reads
    smaller, _ = compacted(model, *IMAGES)
    assert smaller.get_submodule("last").weight.shape[1] == left
    sparsity.save(smaller, tmp_path)
    same(sparsity.load(tmp_path), model, *IMAGES)
    model.first.bias.data.normal_()  # constants other than zero
    model.other.bias.data.normal_()
    compacted(model, *IMAGES)


@pytest.mark.parametrize("operation", KEPT.values(), ids=KEPT)
def test_channels_stay_around(operation: Operation) -> None:
    model = network(operation)
    structure = structure_of(model, IMAGES[:1], "half", "rings")
    assert structure.fixed[structure.layers[0].writes].all()
    smaller, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert str(report.layers[0].kept).startswith("5 dead filters")
    same(smaller, model, *IMAGES)
