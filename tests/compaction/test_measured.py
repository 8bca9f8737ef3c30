"""Compaction by measured cost: with any way to compute a layer, outputs agree."""

import contextlib
import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from loco_ext import sparsity
from loco_ext.experiments import models
from loco_ext.ops import backends
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution, by_size, join
from loco_ext.sparsity.compaction.rewrite import Choose
from tests.compaction.cases import mixed, random_case, same, strike
from tests.covering import covering, slow


def any_way(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> list[Bucket]:
    """Return a random one of the ways with torch's convolutions that :func:`cost.fastest` may choose."""
    buckets, choose = by_size(convolution, most=3), random.Random(convolution.weight.numel())
    return choose.choice([buckets, [join(buckets)]])


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("way", "memory_format"), covering([any_way, mixed], [torch.contiguous_format, torch.channels_last])
)
@pytest.mark.parametrize("seeds", [range(30, 34), slow(range(34, 40))], ids=str)
def test_any_choice_gives_the_same_outputs(
    choosing: Callable[[Choose], None], way: Choose, seeds: range, memory_format: torch.memory_format
) -> None:
    """Images become channels_last inside the network, because what comes later is timed as faster."""
    if way is mixed and backends.library is None:
        pytest.skip("needs the compiled library")
    choosing(way)
    for seed in seeds:
        dims = 2 if way is mixed or memory_format is torch.channels_last else 1 + seed % 3
        with contextlib.suppress(pytest.skip.Exception):
            model, inputs, expected = random_case(seed, dims, memory_format)
            network, report = sparsity.compact(model, inputs[0], fold_norms=seed % 2 == 0)
            assert "model" not in report.notes
            same(network, model, *inputs)
            with torch.no_grad():  # mixed_conv2d has no kernels where gradients are recorded
                same(network, model, *inputs)
            if memory_format is torch.contiguous_format and dims > 1:
                assert [node.target for node in network.graph.nodes][1] == "clone"
                outputs = [(network(x), y) for x, y in zip(inputs, expected, strict=True) if y.is_contiguous()]
                assert all(result.stride() == y.stride() for result, y in outputs)


@pytest.mark.parametrize("channels_last", [False, slow(True)])
def test_the_measured_network_gives_the_same_outputs_and_leaves_random_states_alone(channels_last: bool) -> None:
    model = strike(models.cifar_resnet(3, 10, 8, blocks=1), 1).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    before, python = torch.get_rng_state(), random.getstate()
    network, report = sparsity.compact(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
    same(network, model, x)
    assert report.latency_after <= report.latency_before
    assert str(round(report.latency_after * 1e3, 3)) in str(report)


@pytest.mark.usefixtures("later_is_faster")
def test_layers_of_one_shape_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def clock(calls: Sequence[object], device: torch.device, budget: float) -> list[list[float]]:
        measured.append(len(calls))
        return [[1.0] for _ in calls]

    def measurements(depth: int) -> int:
        measured.clear()
        sparsity.compact(nn.Sequential(*[copy.deepcopy(layer) for _ in range(depth)]).eval(), x)
        return sum(measured)

    monkeypatch.setattr(cost, "_samples", clock)
    layer, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()), torch.zeros(2, 8, 6, 6)
    with torch.no_grad():
        layer[0].weight[2:, :, 0] = 0
    assert measurements(3) == measurements(2) > 0
