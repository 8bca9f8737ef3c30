"""Compaction by measured cost: with any way to compute a layer, outputs agree."""

import copy
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from loco_ext import sparsity
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution, by_size, partitions
from tests.compaction.cases import random_case, seeds

compact = sys.modules["loco_ext.sparsity.compaction.compact"]


def any_way(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> list[Bucket]:
    """Return a random one of the ways that :func:`cost.fastest` may choose."""
    choose = random.Random(convolution.weight.numel())
    return [Bucket(*part) for part in choose.choice(list(partitions(by_size(convolution, most=3))))]


def smaller_is_faster(calls: Sequence[object], device: torch.device, budget: float) -> list[float]:
    """Return made-up latencies in place of measured ones: the first call is the slowest."""
    return [1.0, *(0.5 for _ in calls[1:])]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("seed", seeds(range(30, 32), range(32, 50)))
def test_any_choice_gives_the_same_outputs(monkeypatch: pytest.MonkeyPatch, seed: int, dims: int) -> None:
    monkeypatch.setattr(cost, "fastest", any_way)
    monkeypatch.setitem(compact.COSTS, "measured", any_way)
    monkeypatch.setattr(cost, "VECTOR", 4)
    monkeypatch.setattr(cost, "latencies", smaller_is_faster)
    model, inputs, expected = random_case(seed, dims)
    network, report = sparsity.compact(model, inputs[0], fold_norms=seed % 2 == 0)
    assert "model" not in report.notes
    for x, y in zip(inputs, expected, strict=True):
        assert (network(x) - y).abs().max() <= 1e-10 * y.abs().max()


def test_the_clock_of_candidates_leaves_random_states_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    with torch.no_grad():
        model[0].weight[2:, :, 0] = 0
    before, python = torch.get_rng_state(), random.getstate()
    sparsity.compact(model, torch.zeros(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_layers_of_one_shape_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def clock(calls: Sequence[object], device: torch.device, budget: float) -> list[list[float]]:
        measured.append(len(calls))
        return [[1.0] for _ in calls]

    def measurements(depth: int) -> int:
        measured.clear()
        monkeypatch.setattr(cost, "latencies", smaller_is_faster)
        sparsity.compact(nn.Sequential(*[copy.deepcopy(layer) for _ in range(depth)]).eval(), x)
        return sum(measured)

    monkeypatch.setattr(cost, "_samples", clock)
    layer, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()), torch.zeros(2, 8, 6, 6)
    with torch.no_grad():
        layer[0].weight[2:, :, 0] = 0
    inner = measurements(3) - measurements(2)
    assert measurements(2) > 0
    assert inner == 0
