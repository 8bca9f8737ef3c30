"""Models whose code branches on sizes: the graph takes the example's branches, and refuses inputs with others."""

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.fx.branches import BranchError, same_as_on_example
from loco_ext.sparsity.compaction.graph import annotated_graph

X = torch.randn(2, 3, 16, 12)


class Network(nn.Module):
    """Two convolutions, the first with filters of zeros, and code between them."""

    def __init__(self, between: Callable[[Tensor, "Network"], Tensor], first: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.first, self.second, self.between = first(3, 8, 3), nn.Conv2d(8, 4, 3), between
        for tensor in (self.first.weight, self.first.bias):
            tensor.data[::2] = 0.0  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).relu(), self))


class PaddedConv2d(nn.Conv2d):
    """A convolution that pads for as many results as the input's size over the stride, rounded up."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        pads: list[Any] = []
        for size, kernel_size in zip(x.size()[-2:], self.weight.shape[-2:], strict=True):
            pad = max((-(-size // 2) - 1) * 2 + kernel_size - size, 0)
            pads = [pad // 2, pad - pad // 2, *pads]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


def padded_to_even(x: Tensor, network: Network) -> Tensor:
    return F.pad(x, (0, x.shape[-1] % 2, 0, 1)) if x.shape[-2] % 2 else x


def without_autocast(x: Tensor, network: Network) -> Tensor:
    if x.device.type == "meta":
        return x
    with torch.autocast(device_type=x.device.type, enabled=False):
        return x.float().square()


def checked(x: Tensor, network: Network) -> Tensor:
    if x.ndim != 4 or x.shape[1] != network.second.in_channels or len(x.shape) != 4:
        raise ValueError(f"expected {network.second.in_channels} channels, got {x.shape[1]}")
    return x


def enlarged(x: Tensor, network: Network) -> Tensor:
    return F.interpolate(x, size=[2 * n for n in x.shape[-2:]], mode="bilinear") + F.interpolate(x, scale_factor=2)


def in_parts(x: Tensor, network: Network) -> Tensor:
    return torch.cat([part.sigmoid() for part in x.split(5, dim=3)], 3)


def of_numbers(x: Tensor, network: Network) -> Tensor:
    return x[:, :, : int(x.shape[2]) - 1, : range(x.shape[3])[-2]] * float(x.shape[3])


def of_bools(x: Tensor, network: Network) -> Tensor:
    rest = x.shape[3] % 3
    return x * int(rest) if rest else x


def of_halves(x: Tensor, network: Network) -> Tensor:
    half = x.shape[2] / 2
    return x * int(half) * float(half)


def pooled(x: Tensor, network: Network) -> Tensor:
    pooled = F.pad(F.adaptive_avg_pool2d(x, 4), (0, x.shape[3] % 2))
    return 2 * pooled if pooled.shape[3] == 4 else pooled


def by_dtype(x: Tensor, network: Network) -> Tensor:
    return x.clamp(-1, 1) if x.dtype == torch.float16 or x.dim() != 4 else x


def by_channels_of_weights(x: Tensor, network: Network) -> Tensor:
    kernel = network.second.weight.size()[-2:]
    if x.shape[1] != network.second.weight.shape[1]:
        raise ValueError("channels")
    return F.pad(x, (kernel[1] - 1, 0, x.shape[2] & 1, 0))


def smaller_of(model: nn.Module) -> tuple[nn.Module, sparsity.Report]:
    """Return the smaller network, seen to have half of the first layer's channels and the model's results."""
    network, report = sparsity.compact(model.eval(), X, cost="macs")
    assert [layer.filters_after for layer in report.layers if layer.name == "first"] == [4]
    torch.testing.assert_close(network(X), model(X))
    return network, report


@pytest.mark.parametrize(
    ("between", "same", "others"),
    [
        (padded_to_even, [(16, 13), (20, 12)], [(15, 12)]),
        (checked, [(5, 9)], []),
        (enlarged, [(5, 9)], []),
        (without_autocast, [(5, 9)], []),
        (in_parts, [(5, 12), (5, 8)], [(5, 5)]),
        (of_numbers, [], [(16, 13), (17, 12)]),
        (of_bools, [(9, 9), (9, 15)], [(16, 13), (16, 14)]),
        (of_halves, [(16, 5)], [(17, 13), (18, 13)]),
        (pooled, [(9, 10)], [(16, 13)]),
        (by_dtype, [(5, 9)], []),
        (by_channels_of_weights, [(6, 9), (7, 9)], []),
    ],
)
def test_inputs_with_the_same_branches_give_the_models_results_and_others_are_refused(
    between: Any, same: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    network, report = smaller_of(model := Network(between))
    for size in same:
        torch.testing.assert_close(network(x := torch.randn(3, 3, *size)), model(x))
    for size in others:
        model(x := torch.randn(1, 3, *size))
        again, _ = sparsity.compact(network, X)
        for each in (network, pickle.loads(pickle.dumps(network)), copy.deepcopy(network), again):
            with pytest.raises(BranchError, match=r"inputs: expected sizes for which what the code of .* reads is"):
                each.forward(x)
    assert ("branches" in report.notes) == bool(others)
    assert between is in_parts or {*report.notes} <= {"branches"}


def test_inputs_with_other_channels_or_axes_than_the_example_are_refused() -> None:
    class OfImages(Network):
        def forward(self, x: Tensor) -> Tensor:
            if len(x.shape) == 3:
                x = x[None]
            if x.shape[1] == 4:
                x = x[:, :3] * x[:, 3:]
            return super().forward(x)

    model = OfImages(checked)
    model.first.weight.data[:, 1:] = 0.0
    network, _ = smaller_of(model)
    for shape in [(3, 16, 12), (2, 4, 16, 12)]:
        model(x := torch.randn(shape))
        with pytest.raises(BranchError):
            network.forward(x)
    assert "branches" not in sparsity.compact(Network(checked), X, cost="macs")[1].notes


def test_arguments_that_are_no_tensors_are_those_of_the_example() -> None:
    class Repeating(Network):
        def forward(self, x: Tensor, flag: bool = True, count: int = 3, *more: Tensor) -> Tensor:
            for each in more:
                x = x + each
            for _ in range(count):
                x = 2 * x if flag else -x
            return super().forward(x)

    model = Repeating(checked).eval()
    network, _ = sparsity.compact(model, (X, False, 1, X), cost="macs")
    assert network.first.weight.shape[0] == 4  # type: ignore[union-attr, index]
    torch.testing.assert_close(network(X, False, 1, X), model(X, False, 1, X))
    for other in [(X, True, 1, X), (X, False, 2, X), (X, False, 1)]:
        with pytest.raises(BranchError):
            network.forward(*other)


def test_code_without_branches_takes_all_sizes() -> None:
    network, report = sparsity.compact(model := Network(lambda x, _: x * torch.ones(x.shape[-1])).eval(), X)
    assert "branches" not in report.notes
    torch.testing.assert_close(network(x := torch.randn(5, 3, 9, 9)), model(x))


def test_checks_that_no_input_of_as_many_axes_can_fail_are_not_in_the_graph() -> None:
    def checked_of(between: Any) -> list[Any]:
        graph = annotated_graph(Network(between), [X]).graph
        return [check.args[0].target for check in graph.find_nodes(op="call_function", target=same_as_on_example)]

    assert checked_of(checked) == ["dim"]
    assert checked_of(padded_to_even) == [operator.mod]


@pytest.mark.parametrize("size", [(16, 12), (15, 13), (21, 8)])
def test_layers_whose_padding_is_computed_from_sizes_lose_channels(size: tuple[int, int]) -> None:
    network, _ = smaller_of(model := Network(lambda x, _: x, PaddedConv2d))
    x = torch.randn(1, 3, *size)
    torch.testing.assert_close(network(x), model(x))


def test_shrink_to_and_budgets_take_models_with_branches() -> None:
    model = nn.Sequential(Network(checked), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model.append(nn.Sequential(nn.Flatten(), nn.LazyLinear(5)))
    model(X)
    network, _ = sparsity.shrink_to(model, X, macs=0.5, importance="norm")
    whole, half = (sparsity.compact(each, X, cost="macs")[1].macs_before for each in (model, network))
    assert 0.4 < half / whole <= 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsity.Budget(model, optimizer, example_inputs=X, macs=0.5, begin=1, end=2)


def test_branches_on_numbers_of_tensors_are_not_traced() -> None:
    def parted(x: Tensor, _: nn.Module) -> Tensor:
        return x[: int(x.argmax().item()) + 1]

    for code in (lambda x, _: x if x.mean() > 0 else -x, lambda x, _: x * int(x.sum()), parted):
        network, report = sparsity.compact(Network(code), X, cost="macs")
        assert "its code depends on numbers of tensors" in report.notes["model"]
        assert network.first.weight.shape[0] == 8  # type: ignore[union-attr, index]


def test_branches_on_an_input_without_axes_are_not_traced() -> None:
    class Scheduled(Network):
        def forward(self, x: Tensor, step: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x if step.item() > 1 else -x)

    network, report = sparsity.compact(model := Scheduled(lambda x, _: x), (X, torch.tensor(2)), cost="macs")
    assert "its code depends on numbers of tensors" in report.notes["model"]
    for step in (torch.tensor(2), torch.tensor(0)):
        torch.testing.assert_close(network(X, step), model(X, step))


def test_the_checks_are_saved_and_exported(tmp_path: Path) -> None:
    network, _ = smaller_of(Network(padded_to_even))
    sparsity.save(network, tmp_path / "network")
    loaded = sparsity.load(tmp_path / "network")
    torch.testing.assert_close(loaded(X), network(X))
    with pytest.raises(BranchError):
        loaded.forward(torch.randn(1, 3, 15, 12))
    exported = torch.export.export(network, (X,)).module()
    torch.testing.assert_close(exported(X), network(X))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), network(X))
    compiled = torch.compile(network, backend="eager", fullgraph=True, dynamic=True)
    for size in [(16, 12), (18, 9)]:
        torch.testing.assert_close(compiled(x := torch.randn(3, 3, *size)), network(x))


@pytest.mark.slow
def test_files_for_images_of_any_size_hold_no_network_with_branches(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    branching, _ = smaller_of(Network(padded_to_even))
    with pytest.raises(sparsity.ModelFileError, match="for images of any size: it takes the branches of one size in"):
        sparsity.export_onnx(branching, X, tmp_path / "model.onnx", dynamic_size=True)
    constant, _ = smaller_of(Network(checked))
    sparsity.export_onnx(constant, X, tmp_path / "model.onnx", dynamic_size=True)


@dataclass
class Output(dict):  # type: ignore[type-arg]
    """A dict whose entries are attributes as well."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        self.update(vars(self))


class Wrapped(Network):
    """A network with options by keyword, which returns an instance of a class."""

    def forward(self, x: Tensor, *, hidden: bool = False, **options: Any) -> Any:
        assert not options.pop("unknown", None)
        first = self.first(x).relu()
        return Output(self.second(first), (first,) if hidden else None)


def test_results_keep_their_class(tmp_path: Path) -> None:
    model = Wrapped(padded_to_even).eval()
    network, _ = sparsity.compact(model, X, cost="macs")
    sparsity.save(network, tmp_path)
    with pytest.raises(sparsity.ModelFileError, match=r"test_branches.Output' .* see .*add_safe_globals"):
        sparsity.load(tmp_path)
    with torch.serialization.safe_globals([Output]):
        loaded = sparsity.load(tmp_path)
    for each in (network, loaded, pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
        result = each(X)
        assert type(result) is Output
        assert result.hidden is None
        torch.testing.assert_close(result.logits, model(X).logits)
    assert network.first.weight.shape[0] == 4  # type: ignore[union-attr, index]


@pytest.mark.slow
def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MobileNetV1Config(depth_multiplier=0.25, num_labels=5)
    model = transformers.MobileNetV1ForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    network, report = sparsity.shrink_to(model, x, macs=0.5, importance="norm", granularity="filters")
    assert 0.49 < report.macs_after / report.macs_before <= 0.5
    assert network.eval()(x).logits.shape == (2, 5)
