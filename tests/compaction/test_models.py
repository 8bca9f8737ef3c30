"""Compaction of operations other than convolutions: those not understood stay, and outputs are the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from tests.compaction.cases import Network, Residual, strike
from tests.compaction.computed_weights import WAYS


def convolution(channels: int, kernels: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, kernels, size, padding=size // 2)


def check(model: nn.Module, *inputs: Tensor, seed: int = 0) -> sparsity.Report:
    """Zero parts of the model, compact it, and assert equal outputs; return the last report."""
    model = strike(model, seed).double().eval()
    for options in ({"fixed_size": True}, {"fold_norms": False}, {}):
        network, report = sparsity.compact(model, inputs[0], cost="macs", **options)
        assert "model" not in report.notes
        for x in inputs[:1] if options.get("fixed_size") else inputs:
            results, expected = network(x.clone()), model(x.clone())
            for result, right in zip(
                *((y if isinstance(y, tuple) else (y,)) for y in (results, expected)), strict=True
            ):
                assert result.shape == right.shape
                assert (result - right).abs().max() <= 1e-10 * right.abs().max()
    return report


IMAGES = torch.randn(2, 3, 12, 11).double(), torch.randn(1, 3, 9, 13).double()
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by a size": lambda y: y / y.size(2),
    "divided by the number of channels": lambda y: y / y.shape[1],
    "concatenated by keyword": lambda y: torch.cat(tensors=[y[:, 2:], -y], dim=1)[:, :8],
    "chunks by keyword": lambda y: torch.cat(torch.chunk(input=y, chunks=2, dim=1)[::-1], 1),
    "chunks": lambda y: torch.cat(y.chunk(2, 1)[::-1], 1) + torch.cat(torch.split(y, [3, 5], dim=1)[::-1], dim=1),
    "uneven chunks": lambda y: torch.cat([torch.chunk(y, 3, dim=1)[k].relu() for k in (2, 0, 1)], 1),
    "sums of parts": lambda y: torch.cat([y[:, :4] + y[:, 4:], y[:, ::2], y[:, :] + y], 1)[:, 1:9, :],
    "cropped and padded": lambda y: functional.pad(y[:, :, 1:, :-1], [1, 0, 2, 1]) + functional.pad(y, [0, 0, 1, 1]),
    "reflected": lambda y: functional.pad(y[..., 1:, 2:], [1, 1, 0, 2], mode="reflect"),
    "normalised": lambda y: functional.normalize(y, dim=1),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations(operation: Callable[[Tensor], Tensor]) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last(operation(functional.relu(net.middle(functional.relu(net.first(x))))))

    layers = {"first": convolution(3, 8), "middle": convolution(8, 8), "last": convolution(8, 4)}
    report = check(Network(function, **layers), *IMAGES)
    assert report.macs_executed < report.macs_before


def test_shuffled_channels() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last(functional.relu(net.shuffle(net.middle(functional.relu(net.first(x))))))

    layers = {"first": convolution(3, 8), "middle": convolution(8, 8), "last": convolution(8, 4)}
    report = check(Network(function, shuffle=nn.ChannelShuffle(4), **layers), *IMAGES)
    assert not report.notes


def test_weights_that_are_read_outside_their_layer_stay() -> None:
    def function(net: Network, x: Tensor) -> tuple[Tensor, Tensor]:
        return net.last(functional.relu(net.middle(functional.relu(net.first(x))))), net.middle.weight * 2

    layers = {"first": convolution(3, 8), "middle": convolution(8, 8), "last": convolution(8, 4)}
    report = check(Network(function, **layers), *IMAGES)
    assert "read outside" in report.notes["middle"]


def test_a_normalisation_without_weights_that_is_called_twice() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last(functional.relu(net.norm(net.middle(functional.relu(net.norm(net.first(x)))))))

    norm = nn.BatchNorm2d(8, affine=False)
    layers = {"first": convolution(3, 8), "middle": convolution(8, 8), "last": convolution(8, 4)}
    report = check(Network(function, norm=norm, **layers), *IMAGES)
    assert "more than once" in report.notes["norm"]


@pytest.mark.parametrize("seed", range(3))
def test_new_modules_do_not_take_the_names_of_others(seed: int) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.conv_1(functional.relu(net.conv_0(functional.relu(net.conv(x)))))

    layers = {"conv": convolution(3, 8), "conv_0": convolution(8, 8), "conv_1": convolution(8, 4)}
    check(Network(function, **layers), *IMAGES, seed=seed)


def test_hooks_of_layers_without_weights_see_all_channels() -> None:
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, x, y: y + torch.arange(8).reshape(1, 8, 1, 1))
    report = check(nn.Sequential(convolution(3, 8), relu, convolution(8, 4)), *IMAGES)
    assert "hooks" in report.notes["1"]


class Optional(nn.Module):
    """Module whose forward has optional arguments that change its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = convolution(3, 8), convolution(8, 4)

    def forward(self, x: Tensor, skip: Tensor | None = None, twice: bool = False, *, mode: str = "relu") -> Tensor:
        y = self.first(x)
        y = self.last(functional.relu(y) if mode == "relu" else y)
        if skip is not None:
            y = y + skip
        return y * 2 if twice else y


def test_arguments_that_are_left_out_keep_their_defaults() -> None:
    report = check(Optional(), *IMAGES)
    assert report.parameters_after < report.parameters_before
    assert not report.notes


class Asking(nn.Module):
    """Module that checks the type of its input, which torch.fx does not record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = convolution(3, 8), convolution(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(functional.relu(self.first(x)))
        return y * 2 if isinstance(x, Tensor) else y


def test_a_graph_that_is_not_the_model_is_not_believed() -> None:
    model = strike(Asking()).double().eval()
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "other outputs" in report.notes["model"]
    assert (network(IMAGES[1]) - model(IMAGES[1])).abs().max() <= 1e-10 * model(IMAGES[1]).abs().max()
    assert report.macs_executed < report.macs_before


class Choosing(Asking):
    """Module that cannot be traced, and that can read an attribute of a layer."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype).to(self.last.weight.dtype) if self.reads else x
        y = self.last(functional.relu(self.first(x)))
        return y if y.sum() > 0 else y * 2


def test_layers_whose_attributes_the_model_reads_stay() -> None:
    model = strike(Choosing(reads=True)).double().eval()
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "stays as it is" in report.notes["model"]
    assert torch.equal(network(IMAGES[1]), model(IMAGES[1]))


def test_kernels_are_cropped_for_inputs_without_a_batch_too() -> None:
    model = strike(Choosing(reads=False)).double().eval()
    for example, measure in itertools.product((IMAGES[0], IMAGES[0][0]), ("macs", "measured")):
        network, report = sparsity.compact(model, example, cost=measure)
        assert report.layers[0].macs_before == 12 * 11 * 8 * 3 * 9
        for x in (*IMAGES, IMAGES[0][0]):
            assert (network(x) - model(x)).abs().max() <= 1e-10 * model(x).abs().max()


@pytest.mark.parametrize("layer", [nn.MultiheadAttention(8, 2), nn.Bilinear(8, 8, 3)])
def test_single_layers_of_several_arguments_stay(layer: nn.Module) -> None:
    inputs = [torch.randn(4, 8) for _ in range(3 if isinstance(layer, nn.MultiheadAttention) else 2)]
    network, report = sparsity.compact(layer.eval(), inputs, cost="macs")
    torch.testing.assert_close(network(*inputs), layer(*inputs))
    assert "model" in report.notes


def test_what_pools_an_image_without_a_batch_is_not_taken_for_channels() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(functional.max_pool2d(functional.relu(net.first(x)), 2).flatten(1))

    check(Network(function, first=convolution(3, 8), linear=nn.Linear(36, 5)), torch.randn(3, 12, 12).double())


def test_a_graph_that_loses_a_write_is_not_believed() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = functional.relu(net.first(x))
        y.__setitem__((slice(None), 0), 0.0)
        return net.last(y)

    model = strike(Network(function, first=convolution(3, 8), last=convolution(8, 4))).double().eval()
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "stays as it is" in report.notes["model"]
    assert torch.equal(network(IMAGES[1]), model(IMAGES[1]))


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_computed_weights_become_plain_ones(compute: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(convolution(3, 8), nn.ReLU(), convolution(8, 6), nn.ReLU(), convolution(6, 4, 1)).double()
    compute(model[2])
    model(IMAGES[0]).sum().backward()
    model[0].weight.data[:4] = 0
    kept, kind = copy.deepcopy(model.state_dict()), type(model[2])
    network, _ = sparsity.compact(model, IMAGES[0], cost="macs")
    layer = network.get_submodule("2")
    assert type(layer) is nn.Conv2d
    assert not layer._forward_pre_hooks
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.weight.shape[0] == (3 if compute is WAYS["pruning"] else 6)
    assert type(model[2]) is kind
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    result, expected = network.eval()(IMAGES[1]), model.eval()(IMAGES[1])
    assert (result - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_blocks_with_hooks_keep_them() -> None:
    seen: list[Tensor] = []
    model = strike(nn.Sequential(convolution(3, 8), nn.Sequential(convolution(8, 8), nn.ReLU()), convolution(8, 4)))
    model = model.double().eval()
    model[1].register_forward_hook(lambda module, x, y: seen.append(y))
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "hooks" in report.notes["1"]
    assert all(type(y) is Tensor for y in seen)
    model(IMAGES[1])
    network(IMAGES[1])
    assert (seen[-1] - seen[-2]).abs().max() <= 1e-10 * seen[-2].abs().max()


def test_a_normalisation_that_is_frozen_stays_frozen() -> None:
    model = nn.Sequential(convolution(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)).double()
    model[1].eval()
    network, _ = sparsity.compact(model, IMAGES[0], cost="macs", fold_norms=False)
    assert network.training
    assert [m.training for m in network.modules() if isinstance(m, nn.BatchNorm2d)] == [False, True]


def test_scripted_models_stay() -> None:
    model = nn.Sequential(convolution(3, 8), nn.ReLU(), convolution(8, 4)).double().eval()
    network, report = sparsity.compact(torch.jit.trace(model, IMAGES[0]), IMAGES[0], cost="macs")
    assert torch.equal(network(IMAGES[0]), model(IMAGES[0]))
    assert "model" in report.notes


FLATTENINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "by features": lambda y: y.view(-1, 8),
    "by features, reshaped": lambda y: torch.reshape(y, (-1, 8)),
    "by the batch": lambda y: y.reshape(y.shape[0], -1),
}


@pytest.mark.parametrize("flatten", FLATTENINGS.values(), ids=FLATTENINGS)
def test_rows_of_features_are_samples_only_where_the_code_says_so(flatten: Callable[[Tensor], Tensor]) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(flatten(functional.relu(net.first(x))))

    model = strike(Network(function, first=convolution(3, 8, 1), linear=nn.Linear(8, 5))).double().eval()
    network, _ = sparsity.compact(model, torch.randn(2, 3, 1, 1).double(), cost="macs")
    for size in ((2, 3, 1, 1), (5, 3, 1, 1), (2, 3, 4, 6)):
        x = torch.randn(*size).double()
        try:
            expected = model(x)
        except RuntimeError:  # the rows have become too long for the linear layer
            continue
        assert network(x).shape == expected.shape
        assert (network(x) - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_rows_of_features_are_samples_after_pooling_to_one_pixel() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(functional.adaptive_avg_pool2d(functional.relu(net.first(x)), 1).view(-1, 8))

    report = check(Network(function, first=convolution(3, 8), linear=nn.Linear(8, 5)), *IMAGES)
    assert not report.notes
    assert report.layers[1].channels_after < 8


PATTERNS = ({"sizes": 0.0}, {"dead": 0.0}, {})


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_what_compaction_writes_it_reads(seed: int, pattern: dict[str, float]) -> None:
    block = nn.Sequential(convolution(8, 6), nn.BatchNorm2d(6), nn.ReLU(), convolution(6, 8), nn.BatchNorm2d(8))
    blocks = [nn.Sequential(Residual(copy.deepcopy(block)), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(convolution(3, 8, 5), nn.ReLU(), *blocks, convolution(8, 4))
    model = strike(model, seed, **pattern).double().eval()
    once, first = sparsity.compact(model, IMAGES[0], cost="macs")
    with torch.no_grad():
        for node in once.graph.nodes:
            if node.op == "call_module" and node.target.startswith("2.0.function.0"):
                once.get_submodule(node.target).weight[0] = 0
                once.get_submodule(node.target).bias[0] = 0
    twice, second = sparsity.compact(once, IMAGES[0], cost="macs")
    for x in IMAGES:
        expected = once(x)
        assert (twice(x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert all(name.startswith("pad") for name in second.notes)  # the pads are zero channels for sums, which stay
    assert second.macs_executed < first.macs_executed
