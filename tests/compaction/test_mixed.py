"""Compacted layers whose kernels of all sizes are computed at once, by mixed_conv2d."""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from loco_ext import sparsity
from loco_ext.fx.in_place import is_in_place
from loco_ext.fx.operations import operation
from loco_ext.ops import backends, mixed_conv2d
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.convolution import Bucket, Convolution
from loco_ext.sparsity.compaction.macs import macs_of
from tests.compaction.cases import Network, same
from tests.covering import covering, slow

pytestmark = pytest.mark.skipif(backends.library is None, reason="needs the compiled library")


def network_of_sizes() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 5, padding=2), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 3, stride=2), nn.ReLU()
    ).eval()
    with torch.no_grad():
        model[0].weight[:4, :, [0, 4]] = 0
        model[0].weight[4:7, :, :, 1:] = 0
        model[0].weight[7] = 0
        model[3].weight[::2, :, 0] = 0
    return model


def calls(network: nn.Module) -> list[Any]:
    return [node for node in network.graph.nodes if node.target is mixed_conv2d]


@pytest.mark.usefixtures("always_mixed")
def test_layers_keep_their_parameters() -> None:
    model, x = network_of_sizes(), torch.randn(2, 3, 9, 9)
    network, report = sparsity.compact(model, x)
    assert len(calls(network)) == 2
    assert all(module.inplace for module in network.modules() if isinstance(module, nn.ReLU))
    kinds = {name: tuple(m.weight.shape) for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {
        "0_0": (3, 3, 5, 1),
        "0_1": (4, 3, 3, 5),
        "0_2": (4, 3, 5, 5),
        "3_0": (3, 11, 2, 3),
        "3_1": (3, 11, 3, 3),
    }
    assert report.macs_executed == report.macs_after
    network(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.usefixtures("always_mixed")
def test_kernels_that_others_sum_up_with_live_ones_take_one_tap_when_dead() -> None:
    layers = {name: nn.Conv2d(3, 6, 3, padding=1) for name in "ab"}
    model = Network(lambda net, x: net.a(x) + net.b(x), **layers).double().eval()
    x = torch.randn(2, 3, 7, 5, dtype=torch.double)
    with torch.no_grad():
        model.a.weight[1:4] = 0
    network, report = sparsity.compact(model, x)
    shapes = {tuple(weight.shape) for weight in network.parameters() if weight.dim() == 4}
    assert shapes == {(3, 3, 1, 1), (3, 3, 3, 3), (6, 3, 3, 3)}
    assert report.macs_executed == 7 * 5 * 3 * (3 + 3 * 9 + 6 * 9)
    with torch.no_grad():
        same(network, model, x)


class Block(nn.Module):
    """Residual block whose sum is written in one of several ways."""

    def __init__(self, way: str, projection: bool = True) -> None:
        super().__init__()
        self.way = way
        self.conv1, self.conv2 = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(6, 6, 1) if projection else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv2(self.relu(self.conv1(x)))
        if self.way == "plus":
            return self.relu(y + self.shortcut(x))
        if self.way == "reversed":
            return torch.relu_(torch.add(self.shortcut(x), y))
        y += self.shortcut(x)
        return nn.functional.relu(y, inplace=True)


def network_of_blocks(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), Block(way), Block(way, projection=False)).eval()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                layer.weight[:2, :, 0] = 0
                layer.weight[2, :, :, 1:] = 0
    return model


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize("way", ["plus", "reversed", "in place"])
def test_sums_and_relus_of_blocks_overwrite_the_results_of_convolutions(way: str) -> None:
    model = network_of_blocks(way).double()
    inputs = [torch.randn(2, 3, *size, dtype=torch.double) for size in ((9, 8), (5, 14))]
    network, report = sparsity.compact(model, inputs[0])
    assert "model" not in report.notes
    assert [node.target for node in network.graph.nodes].count(operator.iadd) == 2
    relus = [node for node in network.graph.nodes if operation(node) == "relu"]
    assert len(relus) == 5
    assert all(is_in_place(node) for node in relus)
    again, _ = sparsity.compact(network, inputs[0])
    same(network, model, *inputs)  # torch's convolutions compute these
    with torch.no_grad():
        same(network, model, *inputs)
        same(again, model, *inputs)
        kept = inputs[0].clone()
        network(inputs[0])
    assert torch.equal(inputs[0], kept)


def read_a_term(net: Network, x: torch.Tensor) -> torch.Tensor:
    a, b = net.a(x), net.b(x)
    return (a + b) * a


def read_both_terms(net: Network, x: torch.Tensor) -> torch.Tensor:
    a, b = net.a(x), net.b(x)
    return (a + b) * a * b


def read_before_the_relu(net: Network, x: torch.Tensor) -> torch.Tensor:
    y = net.a(x)
    return y.relu() * y


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize(("function", "sums"), [(read_a_term, 1), (read_both_terms, 0), (read_before_the_relu, 0)])
def test_what_others_read_is_not_overwritten(function: Callable[..., torch.Tensor], sums: int) -> None:
    model, x = Network(function, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3)).double().eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model.a.weight[:2, :, 0] = 0
        model.b.weight[1:3, :, :, 2] = 0
        network, report = sparsity.compact(model, x.double())
        assert "model" not in report.notes
        assert [node.target for node in network.graph.nodes].count(operator.iadd) == sums
        same(network, model, x.double())


# Sums of several terms, or of a term with itself, also once a block between them adds nothing.
SUMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "several": lambda net, x, a: torch.relu(a + net.b(x) + a.detach() + net.c(torch.relu(a))),
    "twice": lambda net, x, a: (a + net.c(a)) + a,
    "itself": lambda net, x, a: torch.relu(a + a),
    "rectified": lambda net, x, a: mixed_conv2d(x, [net.a.weight], [], [(0,) * 4], relu=True) + net.b(x),
}


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize(
    ("way", "memory_format"), covering(SUMS, [torch.contiguous_format, torch.channels_last], strength=1), ids=str
)
def test_no_term_of_a_sum_is_lost(way: str, memory_format: torch.memory_format) -> None:
    layers = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3), "c": nn.Conv2d(4, 4, 3, padding=1)}
    model = Network(lambda net, x: SUMS[way](net, x, net.a(x)), **layers).double().eval()
    x = torch.randn(2, 3, 6, 7, dtype=torch.double).contiguous(memory_format=memory_format)
    with torch.no_grad():
        model.a.weight[:2, :, 0] = 0
        model.b.weight[1:3, :, :, 2] = 0
        if way == "twice":
            model.c.weight.zero_()
            model.c.bias.zero_()
        network, report = sparsity.compact(model, x)
        assert "model" not in report.notes
        same(network, model, x)


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize("channels", [1, 6])
def test_sums_broadcast_at_other_sizes_as_the_models_do(channels: int) -> None:
    def function(net: Network, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(net.conv(x) + net.other(net.pool(x)[:1]) + net.position)

    layers = {"conv": nn.Conv2d(3, 6, 3), "pool": nn.AdaptiveAvgPool2d(4), "other": nn.Conv2d(3, 6, 1)}
    model = Network(function, position=nn.Parameter(torch.randn(1, channels, 4, 4)), **layers).double().eval()
    with torch.no_grad():
        model.conv.weight[:2, :, 0] = 0
        network, report = sparsity.compact(model, torch.randn(1, 3, 6, 6).double())
        assert "model" not in report.notes
        same(network, model, torch.randn(5, 3, 6, 6).double())


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize("make", [network_of_sizes, slow(lambda: network_of_blocks("plus"))])
def test_files_and_onnx(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = make(), torch.randn(2, 3, 9, 9)
    network, _ = sparsity.compact(model, x)
    with torch.no_grad():
        expected = model(x)
        sparsity.save(network, tmp_path / "saved")
        loaded = sparsity.load(tmp_path / "saved")
        assert torch.equal(loaded(x), network(x))
    sparsity.export_onnx(network, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always_mixed")
def test_compaction_again_removes_what_has_died_since() -> None:
    model, x = network_of_sizes(), torch.randn(2, 3, 9, 9)
    network, _ = sparsity.compact(model, x)
    with torch.no_grad():
        network.get_submodule("0_2").weight[1] = 0
        network.get_submodule("0_2").bias[1] = -1
        network.get_submodule("0_1").weight[..., 0] = 0
        expected = network(x)
        again, report = sparsity.compact(network, x)
        torch.testing.assert_close(again(x), expected)
    assert not report.notes
    weight = next(layer.weight for name, layer in again.named_modules() if name.startswith("3"))
    assert weight.shape[1] == 10
    assert {tuple(layer.kernel_size) for layer in again.modules() if isinstance(layer, nn.Conv2d)} >= {(3, 4), (5, 5)}


@pytest.mark.usefixtures("always_mixed")
def test_sums_and_relus_within_a_call_are_computed_after_it_by_a_compaction_again() -> None:
    """Networks of earlier versions have them there, as graphs of others may."""
    layers = {name: nn.Conv2d(3, 4, 3) for name in "ab"}
    model = Network(lambda net, x: torch.relu(net.a(x) + net.b(x)), **layers).double().eval()
    x = torch.randn(2, 3, 6, 7).double()
    with torch.no_grad():
        model.a.weight[:2, :, 0] = 0
        network, _ = sparsity.compact(model, x)
        first = calls(network)[0]
        (added,) = (node for node in network.graph.nodes if node.target is operator.iadd)
        (relu,) = (node for node in network.graph.nodes if node.target is torch.relu_)
        other = next(term for term in added.args if term is not first)
        other.append(first)
        first.kwargs = {**first.kwargs, "add": other, "relu": True}
        for node in (relu, added):
            node.replace_all_uses_with(first)
            network.graph.erase_node(node)
        network.recompile()
        same(network, model, x)
        again, report = sparsity.compact(network, x)
        assert "model" not in report.notes
        same(again, model, x)


@pytest.mark.usefixtures("always_mixed")
@pytest.mark.parametrize("part_of_another", [False, True])
def test_compaction_again_is_the_network_itself_if_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, part_of_another: bool
) -> None:
    x = torch.randn(2, 3, 9, 9)
    network, report = sparsity.compact(network_of_sizes(), x)
    model = nn.Sequential(network) if part_of_another else network
    monkeypatch.setattr(cost, "latencies", lambda networks, *_: [1.0 + i for i in range(len(networks))])
    again, its_report = sparsity.compact(model, x)
    assert "stays as it is" in its_report.notes["model"]
    assert sum(len(calls(module)) for module in again.modules() if isinstance(module, fx.GraphModule)) == 2
    assert torch.equal(again(x), network(x))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert its_report.macs_executed == report.macs_executed == macs_of(network, [x])


@pytest.mark.usefixtures("later_is_faster")
@pytest.mark.parametrize("faster", [False, True])
def test_the_clock_decides(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    def times(convolution: Convolution, ways: Sequence[Sequence[Bucket]], kind: object, free: bool) -> list[float]:
        return [(0.5 if faster else 2.0) if way[0].mixed else 1.0 for way in ways]

    monkeypatch.setattr(cost, "_times", times)
    network, _ = sparsity.compact(network_of_sizes(), torch.randn(2, 3, 9, 9))
    assert len(calls(network)) == (2 if faster else 0)


@pytest.mark.usefixtures("later_is_faster")
@pytest.mark.parametrize(
    "changed", [{"groups": 3}, {"padding_mode": "reflect"}, {"dtype": torch.bfloat16}, {"shape": (3, 9, 9)}]
)
def test_layers_that_the_kernels_do_not_serve_stay_torchs(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(cost, "_times", lambda _, ways, *__: [0.5 if way[0].mixed else 1.0 for way in ways])
    options = {key: value for key, value in changed.items() if key in ("groups", "padding_mode")}
    dtype = changed.get("dtype", torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, **options), nn.Tanh()).to(dtype).eval()
    with torch.no_grad():
        model[0].weight[:2, :, 0] = 0
    network, _ = sparsity.compact(model, torch.randn(*changed.get("shape", (2, 3, 9, 9)), dtype=dtype))
    assert not hasattr(network, "graph") or not calls(network)
