"""Compacted layers whose kernels of all sizes are computed at once, by mixed_conv2d."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compact_cases import random_network
from torch import nn

from loco_ext import sparsity
from loco_ext.ops import backends, mixed_conv2d
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.convolution import MIXED, Bucket, Convolution

compact = sys.modules["loco_ext.sparsity.compaction.compact"]
pytestmark = pytest.mark.skipif(backends.library is None, reason="needs the compiled library")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that can be are computed so; of the smaller networks the last, with the fewest channels, is fastest."""
    torchs = cost._fastest_of_torch

    def choose(convolution: Convolution, kind: Mapping[str, Any], free: bool) -> Sequence[Bucket]:
        if not cost.takes_mixed(convolution, kind):
            return torchs(convolution, kind, free)
        return cost.all_at_once(convolution)

    monkeypatch.setattr(cost, "fastest", choose)
    monkeypatch.setitem(compact.COSTS, "measured", choose)
    monkeypatch.setattr(cost, "latencies", lambda calls, device: [1.0 / (1 + i) for i in range(len(calls))])


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


@pytest.mark.usefixtures("always")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("seed", range(100, 130))
def test_the_same_outputs_at_every_size(seed: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(seed)
    model = random_network(seed, 2)
    inputs = [torch.randn(2, 3, *size, dtype=torch.double) for size in ((12, 11), (9, 13))]
    inputs = [x.contiguous(memory_format=memory_format) for x in inputs]
    try:
        expected = [model(x) for x in inputs]
    except RuntimeError:  # the image has become too small for a kernel or a padding on its way
        pytest.skip("no image of this size")
    network, report = sparsity.compact(model, inputs[0], fold_norms=seed % 2 == 0)
    assert "model" not in report.notes
    for x, y in zip(inputs, expected, strict=True):
        with torch.no_grad():
            assert (network(x) - y).abs().max() <= 1e-10 * y.abs().max()
        assert (network(x) - y).abs().max() <= 1e-10 * y.abs().max()


@pytest.mark.usefixtures("always")
def test_layers_keep_their_parameters_and_take_the_relu_in() -> None:
    model, x = network_of_sizes(), torch.randn(2, 3, 9, 9)
    network, report = sparsity.compact(model, x)
    first, second = calls(network)
    assert first.kwargs["relu"]
    assert second.kwargs["relu"]
    assert not any(isinstance(module, nn.ReLU) for module in network.modules())
    kinds = {name: tuple(m.weight.shape) for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {
        "0_0": (3, 3, 5, 1),
        "0_1": (4, 3, 3, 5),
        "0_2": (4, 3, 5, 5),
        "3_0": (3, 11, 2, 3),
        "3_1": (3, 11, 3, 3),
    }
    assert report.multiply_adds_executed == report.multiply_adds_after
    loss = network(x).square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.usefixtures("always")
def test_kernels_that_others_sum_up_with_live_ones_take_one_tap_when_dead() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    model, x = Sum().double().eval(), torch.randn(2, 3, 7, 5, dtype=torch.double)
    with torch.no_grad():
        model.a.weight[1:4] = 0
    network, report = sparsity.compact(model, x)
    shapes = {tuple(weight.shape) for weight in network.parameters() if weight.dim() == 4}
    assert shapes == {(3, 3, 1, 1), (3, 3, 3, 3), (6, 3, 3, 3)}
    assert report.multiply_adds_executed == 7 * 5 * 3 * (3 + 3 * 9 + 6 * 9)
    with torch.no_grad():
        assert (network(x) - model(x)).abs().max() <= 1e-12


@pytest.mark.usefixtures("always")
def test_relus_that_others_see_past_stay() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.relu(y) + y

    model, x = Seen().eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model.conv.weight[:2, :, 0] = 0
        network, _ = sparsity.compact(model, x)
        assert not calls(network)[0].kwargs.get("relu")
        torch.testing.assert_close(network(x), model(x))


@pytest.mark.usefixtures("always")
def test_files_and_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = network_of_sizes(), torch.randn(2, 3, 9, 9)
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.parametrize("faster", [False, True])
def test_the_clock_decides(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    def times(convolution: Convolution, ways: Sequence[Sequence[Bucket]], kind: object, free: bool) -> list[float]:
        return [(0.5 if faster else 2.0) if way[0].style == MIXED else 1.0 for way in ways]

    monkeypatch.setattr(cost, "_times", times)
    monkeypatch.setattr(cost, "latencies", lambda calls, device: [1.0, *(0.5 for _ in calls[1:])])
    network, _ = sparsity.compact(network_of_sizes(), torch.randn(2, 3, 9, 9))
    assert len(calls(network)) == (2 if faster else 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": 3},
        {"padding_mode": "reflect"},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"shape": (3, 9, 9)},
    ],
)
def test_layers_that_the_kernels_do_not_serve_stay_torchs(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(cost, "_times", lambda convolution, ways, kind, free: [1.0 for _ in ways])
    monkeypatch.setattr(cost, "latencies", lambda calls, device: [1.0, *(0.5 for _ in calls[1:])])
    options = {key: value for key, value in changed.items() if key in ("groups", "padding_mode")}
    dtype = changed.get("dtype", torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, **options), nn.Tanh()).to(dtype).eval()
    with torch.no_grad():
        model[0].weight[:2, :, 0] = 0
    network, _ = sparsity.compact(model, torch.randn(*changed.get("shape", (2, 3, 9, 9)), dtype=dtype))
    assert not hasattr(network, "graph") or not calls(network)
