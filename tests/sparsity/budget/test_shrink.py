"""Networks of a given cost: the cost counted by hooks, and what has to stay."""

import copy
import importlib
import itertools
import math
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import loco_ext
from loco_ext import sparsity
from loco_ext.experiments import models
from loco_ext.sparsity.budget import layer_time, shrink
from loco_ext.sparsity.budget import structure as structure_module
from loco_ext.sparsity.budget.importance import by_norm
from loco_ext.sparsity.budget.structure import structure_of
from loco_ext.sparsity.compaction import cost as cost_module
from loco_ext.sparsity.compaction.macs import macs_of
from tests.compaction.cases import Network, Two, mixed
from tests.covering import covering, slow
from tests.sparsity.budget.networks import (
    IMAGE,
    IMAGES_OF_8,
    NETWORKS,
    batches,
    between,
    conv,
    fake_times,
    macs,
    network,
)

X = torch.zeros(2, *IMAGE)
compact_module = importlib.import_module("loco_ext.sparsity.compaction.compact")  # the package has its function


@pytest.mark.parametrize(
    ("of", "name"),
    covering([("macs", "rings"), ("macs", "filters"), ("parameters", "rings")], NETWORKS, strength=1),
)
def test_the_result_costs_the_budget(of: tuple[str, str], name: str) -> None:
    model, (budget, granularity) = network(name), of
    before = copy.deepcopy(model.state_dict())
    for share in (0.7, 0.35):
        options: Any = {budget: share, "granularity": granularity}
        smaller, report = sparsity.shrink_to(model, X, batches=batches(), **options)
        if budget == "macs":
            reached = macs(smaller) / macs(model)
            assert reached == report.macs_after / report.macs_before
        else:
            reached = sum(p.numel() for p in smaller.parameters()) / sum(p.numel() for p in model.parameters())
        assert 0.9 * share <= reached <= share  # filters are few
        assert smaller(X).shape == (2, 4)
        for parameter in smaller.parameters():
            parameter.data.normal_()
        assert macs(smaller) <= share * macs(model) or budget != "macs"  # zeros may be trained
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def flops(network: nn.Module, x: Tensor) -> int:
    """Return torch's count of all operators, two for each multiply-accumulate of each sample."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x)
    return counter.get_total_flops()


def split(net: Any, x: Tensor) -> Tensor:
    """One half of the channels matters little, but the layer that reads it does."""
    one, other = F.relu(net.first(x)).chunk(2, 1)
    return net.last(torch.cat([F.relu(net.one(one)), F.relu(net.other(other))], 1))


def unread(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.first(x))
    net.unread(x)
    return net.last(x)


def squared(net: Any, x: Tensor) -> Tensor:
    y = net.inner(F.relu(net.first(x))).flatten(2)
    return (y @ y.transpose(1, 2)).flatten(1)


def twice(net: Any, x: Tensor) -> Tensor:
    return net.again(F.relu(net.again(net.inner(F.relu(net.first(x))))))


def of_two_sizes(net: Any, x: Tensor) -> list[Tensor]:
    y = F.relu(net.first(x))
    return [net.last(F.relu(net.norm(net.head(each)))) for each in (y, F.avg_pool2d(y, 2))]


def time_first(net: Any, x: Tensor) -> Tensor:
    """Reads (batch, time, features)."""
    return net.last(F.relu(net.middle(net.first(x.transpose(0, 1)))).mean(0))


OF_THE_BATCH = [nn.BatchNorm2d(32, affine=affine, track_running_stats=False) for affine in (True, False)]
LINEAR = {"first": nn.Linear(8, 64), "middle": nn.Linear(64, 512), "last": nn.Linear(512, 10)}
STRUCTURES: dict[str, tuple[nn.Module, Tensor, float]] = {
    "groups of a transposed layer": (
        nn.Sequential(conv(3, 32), nn.ReLU(), conv(32, 16), nn.ConvTranspose2d(16, 4, 4, 2, 1, groups=2)),
        IMAGES_OF_8,
        0.8,
    ),
    "transposed": (
        nn.Sequential(conv(3, 16), nn.ConvTranspose2d(16, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), conv(24, 3)),
        IMAGES_OF_8,
        0.3,
    ),
    "called twice": (Network(twice, first=conv(3, 64, 0), inner=conv(64, 16, 0), again=conv(16, 16)), IMAGES_OF_8, 0.8),
    "heads": (
        Network(of_two_sizes, first=conv(3, 32), head=conv(32, 24), norm=nn.BatchNorm2d(24), last=conv(24, 4)),
        IMAGES_OF_8,
        0.3,
    ),
    "group norms": (between(nn.GroupNorm(8, 32)), IMAGES_OF_8, 0.3),
    "pixels made from channels": (
        nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 48), nn.PixelShuffle(2), nn.ReLU(), conv(12, 3)),
        IMAGES_OF_8,
        0.3,
    ),
    "time first": (Network(time_first, **LINEAR), torch.randn(2, 20, 8), 0.8),
    "product": (Network(squared, first=conv(3, 32, 0), inner=conv(32, 6, 0)), IMAGES_OF_8, 0.8),
    "norms of the batch at hand": (between(OF_THE_BATCH[0]), IMAGES_OF_8, 0.25),
    "the same without weights": (between(OF_THE_BATCH[1]), IMAGES_OF_8, 0.25),
    "norms of each image": (between(nn.InstanceNorm2d(32, affine=True)), IMAGES_OF_8, 0.25),
    "a norm of fewer tokens than features": (between(nn.BatchNorm1d(5)), torch.randn(3, 5, 8), 0.8),
    "a norm of as many": (between(nn.BatchNorm1d(12)), torch.randn(3, 12, 8), 0.8),
    "a split": (
        Network(split, first=conv(3, 16), one=conv(8, 8), other=conv(8, 8), last=conv(16, 10, 0)),
        IMAGES_OF_8,
        0.3,
    ),
    "unread": (Network(unread, first=conv(3, 16), last=conv(16, 10, 0), unread=nn.Conv2d(16, 10, 1)), IMAGES_OF_8, 0.5),
}


def test_layers_cost_as_often_as_they_are_called() -> None:
    model, x, _ = STRUCTURES["heads"]
    structure = structure_of(model, [x], "half", "rings")
    head = next(layer for layer in structure.layers if layer.name == "head")
    assert [kind["shape"] for kind in head.inputs] == [(2, 32, 8, 8), (2, 32, 4, 4)]
    assert not head.rings.any()  # one module computes both calls, whatever size the filters have
    lost = by_norm(structure)
    assert structure.problem("macs", lost, dict.fromkeys(lost, 1)).whole_cost * 2 * len(x) == flops(model, x)
    assert structure.macs_elsewhere == 0
    parameters = sum(p.numel() for p in model.parameters())
    assert structure.problem("parameters", lost, dict.fromkeys(lost, 1)).whole_cost == parameters


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_budget_is_met_whatever_a_network_has(name: str) -> None:
    """MACs that cannot be removed count, and every layer keeps a channel to read."""
    model, x, share = STRUCTURES[name]
    if name == "a split":
        model.first.weight.data[:8] *= 1e-4
    smaller, report = sparsity.shrink_to(model, x, macs=share, importance="norm", granularity="filters")
    assert report.macs_before * 2 * len(x) == flops(model, x)
    assert report.macs_executed * 2 * len(x) == flops(smaller, x)
    assert 0.85 * share < flops(smaller, x) / flops(model, x) <= share
    alive = [layer.filters_after > 0 and layer.channels_after > 0 for layer in report.layers]
    assert all(alive) or name == "unread"
    assert ("elsewhere" in str(report)) == (report.macs_elsewhere > 0)
    assert report.macs_elsewhere > 0 or name not in ("groups of a transposed layer", "product")
    if report.macs_elsewhere > 0:
        outside = f"{report.macs_elsewhere / report.macs_before:.1%} are outside of layers that can be made smaller"
        with pytest.raises(ValueError, match=f"macs: expected at least .*{outside}"):
            sparsity.shrink_to(model, x, macs=0.01, importance="norm")


def first_result(net: Any, x: Tensor) -> Tensor:
    return net.layer(x, x, x)[0] if isinstance(net.layer, nn.MultiheadAttention) else net.layer(x)[0]


@pytest.mark.filterwarnings("error")
def test_attention_and_recurrent_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens of 16 numbers, in torch's fused operators too, and with flags of torch.backends that are frozen."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    x, projections, products = torch.randn(3, 5, 16), 4 * 16 * 16 * 5, 2 * 5 * 5 * 16
    block = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    for layer, expected in (
        (nn.MultiheadAttention(16, 2, batch_first=True), projections + products),
        (nn.TransformerEncoder(block, 2), 2 * (projections + products + 2 * 16 * 24 * 5)),
        (nn.LSTM(16, 12, batch_first=True), 5 * 4 * 12 * (16 + 12)),
        (nn.GRU(16, 12, 2, batch_first=True), 5 * 3 * 12 * (16 + 12 + 12 + 12)),
    ):
        whole = isinstance(layer, nn.TransformerEncoder)
        model = nn.Sequential(nn.Linear(16, 16), layer if whole else Network(first_result, layer=layer))
        for training in (False, True):
            assert macs_of(model.train(training), [x]) == expected + 16 * 16 * 5
        settings = (
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.mha.get_fastpath_enabled(),
        )
        assert settings == (True, True, True)
        _, report = sparsity.compact(model, x, cost="macs")
        assert report.macs_before == expected + 16 * 16 * 5


def test_a_vector_is_one_sample_and_one_inside_is_none() -> None:
    layers = {"first": nn.Linear(30, 8), "scale": nn.Linear(5, 8), "vector": nn.Parameter(torch.randn(5))}
    model = Network(lambda net, x: net.first(x) * net.scale(net.vector), **layers)
    assert macs_of(model, [torch.randn(4, 30)]) == 30 * 8 + 5 * 8 / 4
    assert macs_of(nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(30)]) == 30 * 8 + 8 * 4


def test_locally_connected_layers_count_and_stay_among_smaller_ones() -> None:
    layer = loco_ext.nn.LocallyConnected2d(8, 4, 3, input_size=(8, 8))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), layer, nn.Conv2d(4, 16, 1), nn.Conv2d(16, 2, 1))
    smaller, report = sparsity.shrink_to(model, IMAGES_OF_8, macs=0.9, importance="norm", granularity="filters")
    assert report.macs_elsewhere == smaller.get_submodule("2").weight.numel() == layer.weight.numel()
    assert report.macs_before == layer.weight.numel() + 64 * 8 * 27 + 36 * 16 * (4 + 2)
    assert report.layers[1].filters_after < 16


def test_what_torch_cannot_count_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("heads differ")

    for module in (compact_module, structure_module):
        monkeypatch.setattr(module, "macs_of", refuse)
    with pytest.warns(UserWarning, match="macs: those outside of layers .* are not counted: heads differ"):
        _, report = sparsity.shrink_to(network("plain"), X, macs=0.5, importance="norm")
    assert report.notes["MACs"] == "those outside of these layers are not counted: heads differ"


@pytest.mark.parametrize(("groups", "filters"), [(16, 16), (4, 16), (4, 8), (8, 48), (2, 4)])
def test_convolutions_lose_whole_groups(groups: int, filters: int) -> None:
    grouped = nn.Conv2d(16, filters, 5, padding=2, groups=groups)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), grouped, nn.ReLU(), nn.Conv2d(filters, 8, 3)).eval()

    def by_group(name: str, weight: Tensor) -> Tensor:  # the last ones are the most important
        count = torch.arange(len(weight)) * groups // len(weight)
        return (count + 1.0)[:, None].expand(-1, 3 if name == "4" else 1)  # rings: the others' filters have one size

    smaller, report = sparsity.shrink_to(model, X, macs=0.5, importance=by_group, skip=["4"])
    left: Any = smaller.get_submodule("2")
    kept, (height, width) = left.groups, (filters // groups, 16 // groups)
    assert 0 < kept < groups
    assert left.weight.shape == (kept * height, width, 5, 5)
    assert report.layers[0].filters_after == kept * width
    of_a_group = 81 * (3 * width + 25 * width * height) + 49 * 9 * 8 * height
    assert report.macs_before == groups * of_a_group
    assert report.macs_after == kept * of_a_group <= 0.5 * report.macs_before < report.macs_after + of_a_group
    for layer, size in ((model[0], width), (model[2], height)):
        for parameter in layer.parameters():
            parameter.data[: (groups - kept) * size] = 0
    x = torch.randn(2, *IMAGE)
    torch.testing.assert_close(smaller(x), model(x))


def test_in_inference_mode_the_result_can_be_trained_with_its_batch_norms_in_the_mode_of_the_model() -> None:
    with torch.inference_mode():
        model, pairs = network("plain").train(), batches(2)
        smaller, _ = sparsity.shrink_to(model, X.clone(), macs=0.5, batches=pairs)
    assert any(isinstance(module, nn.BatchNorm2d) for module in smaller.modules())
    assert all(module.training for module in smaller.modules())
    smaller(torch.randn(2, *IMAGE)).sum().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())


def test_two_functional_layers_of_one_module() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, net.one)), net.other)

    gate = Network(function, **{name: nn.Parameter(torch.randn(32, 32)) for name in ("one", "other")})
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), gate, nn.ReLU(), nn.Linear(32, 10)), torch.randn(4, 8)
    with torch.no_grad():
        gate.one[::2] = 0.0
    _, report = sparsity.compact(model, x, cost="macs")
    assert report.notes == {}
    assert [layer.filters_after for layer in report.layers] == [32, 16, 32, 10]
    smaller, report = sparsity.shrink_to(model, x, macs=0.8, importance="norm")
    assert report.macs_executed <= 0.8 * report.macs_before
    assert smaller(x).shape == (4, 10)


def test_models_may_keep_what_they_computed() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        net.features = F.relu(net.first(x))  # for a caller to look at
        return net.last(net.features).mean((2, 3))

    model = Network(function, first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1))
    _, report = sparsity.shrink_to(model, X, macs=0.5, batches=batches())
    assert report.macs_executed <= 0.5 * report.macs_before


@pytest.mark.parametrize("kind", [tuple, list])
def test_batches_have_as_many_inputs_as_the_example(kind: type) -> None:
    model = Two(lambda net, x, added: net.network(x) + added, network=network("plain"))
    several = [(kind((x, torch.zeros(len(x), 4))), target) for x, target in batches()]
    smaller, report = sparsity.shrink_to(model, (X, torch.zeros(len(X), 4)), macs=0.5, batches=several)
    expected, of_one = sparsity.shrink_to(model.network, X, macs=0.5, batches=batches())
    assert report.macs_executed == of_one.macs_executed
    torch.testing.assert_close(smaller(X, torch.zeros(len(X), 4)), expected(X))


def test_batches_are_read_one_by_one() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def images() -> Iterator[tuple[Tensor, Tensor]]:
        for x, target in batches(5):
            alive.append(weakref.ref(given := x.clone()))
            assert sum(each() is not None for each in alive) <= 2
            yield given, target
            del given

    model = network("plain")
    found, expected = (sparsity.shrink_to(model, X, macs=0.5, batches=each)[0] for each in (images(), batches(5)))
    assert len(alive) == 5
    assert torch.equal(found(X), expected(X))


def test_a_network_with_filters_of_several_sizes_in_one_call_shrinks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compact_module.COSTS, "measured", mixed)
    model = nn.Sequential(conv(3, 12), nn.ReLU(), conv(12, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model[0].weight.data[:5, :, 0] = 0  # type: ignore[index]
    first, _ = compact_module.compacted(model.eval(), [X], may_stay=False)
    assert "mixed_conv2d" in first.code
    smaller, report = sparsity.shrink_to(first, X, macs=0.5, batches=batches())
    assert macs_of(smaller, [X]) == report.macs_executed <= 0.5 * report.macs_before
    assert 0.9 * macs_of(first, [X]) < report.macs_before <= macs_of(first, [X])


def own_convolution(channels: int, filters: int) -> nn.Module:
    """Return a convolution by a function, without the attribute for a bias."""
    weight = nn.Parameter(torch.randn(filters, channels, 3, 3) / 9)
    return Network(lambda net, x: F.conv2d(x, net.weight, padding=1), weight=weight)


def own_group_norm(channels: int) -> nn.Module:
    """Return a group norm by a function, without the attributes of torch's."""
    weights = {"weight": nn.Parameter(torch.ones(channels)), "bias": nn.Parameter(torch.zeros(channels))}
    return Network(lambda net, x: F.group_norm(x, 4, net.weight, net.bias), **weights)


@pytest.mark.parametrize("cost", ["macs", "parameters"])
@pytest.mark.parametrize("importance", ["norm", "taylor"])
def test_layers_and_norms_with_their_own_code_shrink(cost: str, importance: str) -> None:
    model = nn.Sequential(own_convolution(3, 16), own_group_norm(16), nn.ReLU(), own_convolution(16, 4)).eval()
    structure = structure_of(model, [IMAGES_OF_8], "half", "rings")
    lost = by_norm(structure)
    counted = structure.problem("parameters", lost, dict.fromkeys(lost, 1)).whole_cost
    assert counted == sum(p.numel() for p in model.parameters())
    given: Any = {cost: 0.6, "importance": importance, "batches": [(IMAGES_OF_8, torch.zeros(2, 4, 8, 8))]}
    _, report = sparsity.shrink_to(model, IMAGES_OF_8, loss=F.mse_loss, **given)
    assert report.parameters_after < report.parameters_before


class OwnPadding(nn.Conv2d):
    """A convolution whose own code pads, with more than its attribute says."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (2, 2, 2, 2)), self.weight, self.bias, self.stride)


def own_linear(inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer by a function, without torch's attributes."""
    return Network(lambda net, x: F.linear(x, net.weight), weight=nn.Parameter(torch.randn(outputs, inputs)))


def test_layers_with_their_own_code_take_the_time_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def record(layer: Any, kind: Any) -> float:
        module = getattr(layer, "module", layer)
        seen.append((type(module), getattr(module, "padding", None), layer.weight.shape, tuple(kind["shape"])))
        return 1.0

    monkeypatch.setattr(layer_time, "seconds_of", record)
    monkeypatch.setattr(layer_time, "seconds_of_layer", record)
    tail = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    own = nn.Sequential(own_convolution(3, 8), OwnPadding(8, 8, 3, padding=1), *tail, own_linear(8, 4))
    pad, linear = nn.ZeroPad2d(2), nn.Linear(8, 4, bias=False)
    torchs = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), pad, nn.Conv2d(8, 8, 3), *tail, linear)
    found = []
    for model in (own, torchs):
        seen.clear()
        assert len(structure_of(model.eval(), [X], "half", "rings").times()) == 3
        found.append(list(seen))
    assert found[0] == found[1]


def test_bounds_and_layers_left_alone() -> None:
    _, report = sparsity.shrink_to(network("plain"), X, macs=0.86, importance="norm", skip=["0"], least={"4": 5})
    layers = {layer.name: layer for layer in report.layers}
    assert layers["0"].sizes == {"5x5": 6}
    assert layers["4"].filters_after >= 5


def test_a_function_decides() -> None:
    """Filters numbered highest are the most important; their rings are equally so."""
    numbered = lambda name, weight: torch.arange(1.0, 1 + len(weight), requires_grad=True)[:, None]  # noqa: E731
    model = network("depthwise")
    structure = structure_of(model, [X], "half", "filters")
    assert {layer.name for layer in structure.layers} == {"0", "3", "6", "11"}
    smaller, _ = sparsity.shrink_to(model, X, macs=0.4, importance=numbered, granularity="filters")
    kept = smaller.get_submodule("6").weight
    assert torch.equal(kept, model[6].weight[-len(kept) :, -kept.shape[1] :])  # type: ignore[index]


def test_where_there_are_many_filters_the_budget_is_met_within_a_hundredth() -> None:
    model = models.small_cnn(3, 4, 9, width=2).eval()
    for share in (0.75, 0.25):
        smaller, _ = sparsity.shrink_to(model, X, macs=share, importance="norm")
        assert 0.99 * share <= macs(smaller) / macs(model) <= share


def test_groups_of_a_norm_count_as_their_channels_when_numbers_are_rounded() -> None:
    model = nn.Sequential(conv(3, 32), nn.GroupNorm(4, 32), nn.ReLU(), conv(32, 32), nn.GroupNorm(4, 32), conv(32, 4))
    how: Any = {"macs": 0.5, "importance": "norm", "granularity": "filters"}
    _, report = sparsity.shrink_to(model, IMAGES_OF_8, round_to=8, **how)
    assert {layer.filters_after for layer in report.layers[:2]} <= {8, 16, 24, 32}
    assert report.macs_executed <= 0.5 * report.macs_before
    shuffled, x, _ = STRUCTURES["pixels made from channels"]  # four filters are one channel for the layer behind them
    _, report = sparsity.shrink_to(shuffled, x, round_to=2, **how)
    assert all(layer.channels_after % 2 == 0 for layer in report.layers[1:])


@pytest.mark.parametrize("method", ["shrink_to", "pruning", "penalty"])
def test_numbers_of_channels_are_rounded(method: str) -> None:
    model = models.small_cnn(3, 4, 9, width=2).eval()
    how: Any = {"macs": 0.5, "importance": "norm", "granularity": "filters", "round_to": 4}
    if method == "shrink_to":
        smaller, report = sparsity.shrink_to(model, X, **how)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        budget = sparsity.Budget(model, optimizer, example_inputs=X, begin=0, end=2, method=method, **how)
        for _ in range(2):
            budget.step()
        smaller, report = sparsity.compact(model, X, cost="macs", fold_norms=False)
    widths = [module.out_channels for module in smaller.modules() if isinstance(module, nn.Conv2d)]
    assert all(width % 4 == 0 for width in widths)
    assert any(layer.filters_after < layer.filters_before for layer in report.layers)
    assert macs(smaller) <= 0.5 * macs(models.small_cnn(3, 4, 9, width=2))


@pytest.mark.parametrize("together", [1, slow(4)])
def test_a_latency_loses_no_more_importance_than_other_numbers_of_channels(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Other numbers are those for nearly as many MACs, rounded or not; fewer lose more importance.

    Numbers between those that are timed count as the next.
    """
    model = models.small_cnn(3, 4, 9, width=0.5).eval()
    filters = [m.weight.detach().double().flatten(1) for m in model.modules() if isinstance(m, nn.Conv2d)]
    parts = [(each.square().sum(1) / each.square().sum()).sort(descending=True)[0] for each in filters]
    how: Any = {"importance": "norm", "granularity": "filters"}
    fake_times(monkeypatch.setattr, 0.1, together)

    def lost(network: nn.Module) -> float:
        widths = [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]
        return -sum(math.log(float(part[:width].sum())) for part, width in zip(parts, widths, strict=True))

    def executed(network: nn.Module) -> float:
        report = shrink.compact(network, X, fold_norms=False)[1]
        return (report.latency_after - 0.1) / 0.9 * report.macs_before

    smaller, report = sparsity.shrink_to(model, X, latency=0.6, **how)
    assert report.latency_after is not None
    assert 0.55 < report.latency_after <= 0.6
    for round_to, share in itertools.product((1, 4), (0.5, 0.55)):
        other = sparsity.shrink_to(model, X, macs=share, round_to=round_to, **how)[0]
        is_slower = 0.1 + 0.9 * executed(other) / executed(model) > 0.6
        assert is_slower or lost(other) >= 0.97 * lost(smaller)


def test_a_network_that_was_fast_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network takes 0.8 of its time when it is timed for the first time."""
    fake_times(monkeypatch.setattr, 0.1)
    honest, seen = shrink.compact, set()

    def lucky(model: nn.Module, inputs: Any, **options: Any) -> tuple[nn.Module, sparsity.Report]:
        smaller, report = honest(model, inputs, **options)
        if report.latency_after in seen:
            return smaller, report
        seen.add(report.latency_after)
        return smaller, replace(report, latency_after=0.8 * report.latency_after)

    monkeypatch.setattr(shrink, "compact", lucky)
    how: Any = {"latency": 0.6, "importance": "norm", "granularity": "filters"}
    _, report = sparsity.shrink_to(network("plain"), X, **how)
    assert report.latency_after in seen
    assert 0.5 < report.latency_after <= 0.6


def test_for_a_latency_a_smaller_network_is_returned_though_it_is_slower_with_its_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_times(monkeypatch.setattr, 0.25)
    monkeypatch.setattr(cost_module, "latencies", lambda networks, *_: list(range(1, 1 + len(networks))))
    model = network("plain")
    smaller, report = sparsity.shrink_to(model, X, latency=0.6, batches=batches(), granularity="filters")
    assert report.parameters_after < sum(p.numel() for p in smaller.parameters())  # norms that are not folded
    assert macs(smaller) < 0.6 * macs(model)
    assert all(p.flatten(1).any(1).all() for p in smaller.parameters() if p.dim() > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "macs, parameters, latency: expected exactly one of them, got none"),
        ({"macs": 0.5, "latency": 0.5}, "got macs, latency"),
        ({"macs": 1.5}, "macs: expected a share"),
        ({"macs": 0.5}, "batches: expected at least one pair"),
        ({"macs": 0.5, "importance": "size"}, "importance: expected one of 'taylor', 'norm', got 'size'"),
        ({"macs": 0.5, "importance": lambda _, weight: weight}, "importance: expected finite numbers of at least 0 of"),
        ({"macs": 0.5, "importance": "norm", "kind": "quarter"}, "kind: expected one of"),
        ({"macs": 0.5, "importance": "norm", "skip": ["conv"]}, "skip: expected names of the model's modules, got 'co"),
        (
            {"macs": 0.5, "importance": lambda name, weight: torch.full((len(weight), 5), torch.inf)},
            r"importance: expected finite numbers .* for '0', got shape \(6, 5\), from inf to inf",
        ),
        (
            {"macs": 0.5, "batches": batches(), "loss": lambda out, _: torch.nan * out.sum()},
            "batches: expected some for which all gradients of the loss are finite, got none",
        ),
        (
            {"macs": 0.5, "batches": batches(), "loss": lambda out, _: 0 * out.sum()},
            "batches: expected some that depend on the weights, got gradients that are all zero",
        ),
        ({"macs": 0.5, "batches": [(X[:, :, 5:], torch.zeros(2))]}, "batches: expected inputs of the model and tar"),
        ({"macs": 0.5, "importance": "norm", "round_to": 0}, "round_to: expected at least 1, got 0"),
        ({"macs": 0.5, "importance": "norm", "least": {"1": 3}}, "least: expected names of convolution or linear"),
        ({"macs": 0.5, "importance": "norm", "least": -1}, "least: expected at least 0, got -1"),
        ({"macs": 0.01, "importance": "norm", "least": 6}, r"macs: expected at least 0\.\d+, .*, got 0.01"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparsity.shrink_to(network("plain"), X, **options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "loss: expected a function of the model's output and targets, got NoneType"),
        (lambda output, _: output, r"loss: expected a function that returns a scalar .*, got shape \(8, 4\)"),
        (lambda output, _: output.detach().sum(), r"loss: expected .* with a gradient, got shape \(\)"),
        (lambda *_: 1.0, "loss: expected .*, got float"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sparsity.shrink_to(network("plain"), X, macs=0.5, batches=batches(), loss=loss)


def test_weights_that_are_not_finite_and_nothing_that_can_be_removed() -> None:
    model = network("plain")
    model[4].weight.data[0] = torch.nan  # type: ignore[index]
    message = "model: expected convolutions or linear layers that can be made smaller, got none"
    mixing, reads = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)), "; all channels .* read or return: 1"
    cases = [(model, "model: expected finite weights, got others in '4'"), (nn.ReLU(), message)]
    for each, said in (*cases, (mixing, message + reads)):
        with pytest.raises(ValueError, match=said):
            sparsity.shrink_to(each, X, macs=0.5, importance="norm")


def test_models_that_cannot_be_traced_are_refused_with_the_reason_once() -> None:
    hooked = network("plain")
    hooked.register_forward_hook(lambda module, inputs, output: output)
    branching = nn.Sequential(network("plain"), Network(lambda _, x: x if x.mean() > 0 else -x))
    said = r"^model: expected one that torch\.fx can trace"
    for model, why in (
        (hooked, "; the model has forward hooks"),
        (branching, r", got TraceError in .* \(Network\): its code depends on numbers"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=said + why):
            sparsity.shrink_to(model, X, macs=0.5, importance="norm")
        with pytest.raises(ValueError, match=said + why):
            sparsity.Budget(model, optimizer, example_inputs=X, macs=0.5, begin=1, end=2)


def test_inputs_that_the_model_refuses_are_named() -> None:
    said = "model, example_inputs: expected a model that takes these arguments, got "
    for inputs, why in ((X[:, :2], "RuntimeError: .* to have 3 channels"), ((X, X), "TypeError: .* 3 were given")):
        model = network("plain")
        with pytest.raises(ValueError, match=said + why):
            sparsity.shrink_to(model, inputs, macs=0.5, importance="norm")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=said + why):
            sparsity.Budget(model, optimizer, example_inputs=inputs, macs=0.5, begin=1, end=2)


def test_the_reason_why_a_model_stays_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Network(lambda _, x: x + random.random()), nn.Conv2d(8, 4, 3))
    with pytest.raises(ValueError, match=r"got 0\.2; the model: it stays as it is: the outputs .* would differ"):
        sparsity.shrink_to(model, X, macs=0.2, importance="norm")


@pytest.mark.slow
def test_the_least_latency_is_that_of_the_cheapest_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch.setattr, 0.25)
    optimizer = torch.optim.SGD((model := network("plain")).parameters(), lr=0.1)
    _, cheapest = sparsity.shrink_to(network("plain"), X, latency=0.2501 + 0.75 * 0.0063, importance="norm")
    assert cheapest.latency_after is not None
    message = f"latency: expected at least {1.0005 * cheapest.latency_after:.4g}, the least reached, got 0.2"
    with pytest.raises(ValueError, match=message):
        sparsity.shrink_to(network("plain"), X, latency=0.2, importance="norm")
    with pytest.raises(ValueError, match=message):
        sparsity.Budget(model, optimizer, example_inputs=X, latency=0.2, begin=0, end=3)


def test_the_least_that_is_named_can_be_reached() -> None:
    for name, budget in (("plain", "macs"), ("residual", "parameters"), ("depthwise", "macs")):
        options: Any = {"importance": "norm", "least": 2}
        with pytest.raises(
            ValueError, match=f"{budget}: expected at least .*, the least reached, got 0.0001"
        ) as caught:
            sparsity.shrink_to(network(name), X, **{budget: 1e-4}, **options)
        least = float(str(caught.value).split()[4].strip(","))
        _, report = sparsity.shrink_to(network(name), X, **{budget: least}, **options)
        after, before = (getattr(report, f"{budget}_{state}") for state in ("after", "before"))
        assert 0.99 * least <= after / before <= least


@pytest.mark.parametrize("mask", [False, True])
def test_the_most_filters_that_meet_a_budget_are_kept_where_compaction_reaches_another_cost(mask: bool) -> None:
    """Shifts keep one constant channel for all that are removed; a mask has removed channels before."""

    def function(net: Network, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(y * net.mask if mask else (y + net.shift).relu())

    parts = {"first": nn.Conv2d(3, 8, 3, padding=1), "last": nn.Conv2d(8, 4, 3, padding=1)}
    numbers = {"mask": (torch.arange(8.0) % 2).view(8, 1, 1)} if mask else {"shift": nn.Parameter(torch.rand(8, 1, 1))}
    model = Network(function, **parts, **numbers)
    model.first.weight.data *= torch.arange(1.0, 9.0).view(8, 1, 1, 1)
    reached = []
    for removed in range(8):
        smaller = copy.deepcopy(model)
        smaller.first.weight.data[:removed], smaller.first.bias.data[:removed] = 0, 0
        report = sparsity.compact(smaller, X, cost="macs", fold_norms=False)[1]
        reached.append(report.parameters_after / report.parameters_before)
    _, report = sparsity.shrink_to(model, X, parameters=0.5, importance="norm", granularity="filters")
    assert report.parameters_after / report.parameters_before == max(share for share in reached if share <= 0.5)


@pytest.mark.parametrize(("share", "filters"), [(0.126, 1), (0.2, 5), (0.3, 8)])
def test_a_budget_below_the_count_is_met_where_compaction_removes_more(share: float, filters: int) -> None:
    """Most filters of the first layer are zeros; they count, because they are not removed."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    ).eval()
    model[0].weight.data[2:] = 0
    options: Any = {"macs": share, "skip": ["0"], "granularity": "filters", "importance": "norm"}
    _, report = sparsity.shrink_to(model, X, **options)
    assert [layer.filters_after for layer in report.layers[:2]] == [2, filters]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"macs: expected at least 0.4955, the least reached, got {share}"):
        sparsity.Budget(model, optimizer, example_inputs=X, begin=0, end=6, **options)  # zeros may be trained
