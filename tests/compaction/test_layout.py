"""Memory layout of the channels of smaller networks: order, memory formats, and in-place overwrites."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.experiments import models
from loco_ext.ops.channels import take_channels
from loco_ext.ops.memory_format import FORMATS, is_channels_last
from loco_ext.sparsity.compaction import cost
from loco_ext.sparsity.compaction.channels import analyse
from loco_ext.sparsity.compaction.channels_last import in_channels_last
from loco_ext.sparsity.compaction.graph import annotated_graph, record
from loco_ext.sparsity.compaction.rewrite import Choose, Rewriter
from tests.compaction.cases import Network, Residual, Two, compacted, conv, same, strike


@pytest.mark.parametrize(
    "shape", [(2, 5), (2, 5, 7), (2, 5, 3, 4), (2, 5, 1, 1), (1, 5, 3, 4), (2, 1, 3, 4), (2, 5, 3, 1, 4)]
)
def test_channels_are_taken_in_any_format(shape: tuple[int, ...]) -> None:
    x, index = torch.randn(shape, dtype=torch.double), torch.tensor([4, 0, 0, 2]) % shape[1]
    for memory_format in (torch.contiguous_format, FORMATS.get(len(shape), torch.contiguous_format)):
        y = x.to(memory_format=memory_format).requires_grad_()
        result = take_channels(y, index)
        assert torch.equal(result, x[:, index])
        assert result.is_contiguous(memory_format=memory_format)
        assert is_channels_last(result) == (memory_format is FORMATS.get(len(shape)))
        (gradient,) = torch.autograd.grad(result.sum(), y)
        counts = torch.bincount(index, minlength=shape[1]).double()
        assert torch.equal(gradient.sum((0, *range(2, len(shape)))), counts * x[:, 0].numel())
    whole = torch.randn(2, 8, 6, 7)[:, ::2, 1:, ::3]
    assert torch.equal(take_channels(whole, index[1:]), whole[:, index[1:]])
    assert torch.equal(take_channels(x[0], index, -len(shape) + 1), x[0][index])


def test_taking_channels_is_one_call_of_a_graph() -> None:
    graph = fx.symbolic_trace(fx.symbolic_trace(Two(lambda net, x, index: take_channels(x, index))))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [take_channels]
    with pytest.raises((IndexError, RuntimeError), match=r"index|INDICES"):
        take_channels(torch.zeros(2, 3, 4, 4), torch.tensor([3]))


def test_only_images_in_other_formats_are_converted() -> None:
    def function(net: Network, x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.relu(net.first(x))
        return net.last(y.view(y.size(0), -1)), y.view(-1, 9)

    model = Network(function, first=nn.Conv2d(2, 4, 3), last=nn.Linear(36, 2)).double().eval()
    x = torch.randn(2, 2, 5, 5).double()
    converted = in_channels_last(annotated_graph(model, [x]), [x])
    assert converted is not None
    same(converted, model, x)
    formats = [node.kwargs["memory_format"] for node in converted.graph.nodes if node.target == "clone"]
    assert formats == [torch.channels_last, torch.contiguous_format]
    assert in_channels_last(converted, [x]) is None
    pixels = x.contiguous(memory_format=torch.channels_last)
    assert in_channels_last(annotated_graph(nn.Conv2d(2, 4, 3).double(), [pixels]), [pixels]) is None
    assert in_channels_last(annotated_graph(nn.Linear(2, 4).double(), [x[:, :, 0, 0]]), [x[:, :, 0, 0]]) is None


def test_images_of_one_channel_are_converted_too(choosing: Callable[[Choose], None]) -> None:
    choosing(cost.fewest_macs)
    first = [nn.BatchNorm2d(1), nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU()]
    model = strike(nn.Sequential(*first, nn.Conv2d(5, 1, 1), nn.ReLU(), nn.Conv2d(1, 3, 1)), dead=0, sizes=0, inputs=0)
    model, x = model.double().eval(), torch.randn(2, 1, 12, 12).double()
    network, _ = sparsity.compact(model, x)
    same(network, model, x)
    assert network(x).stride() == model(x).stride()
    record(network, [x])
    nodes = [node for node in network.graph.nodes if node.op != "get_attr" and len(node.meta.get("shape", ())) == 4]
    *images, back, result = [node.meta["channels_last"] for node in nodes if node.meta["shape"][1] > 1]
    assert len(images) >= 4
    assert all(images)
    assert not back
    assert not result


def test_gradients_of_what_is_overwritten() -> None:
    model = strike(models.cifar_resnet(3, 10, 8, blocks=1), 3).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    for options in ({}, {"fold_norms": False}):
        network, _ = compacted(model, x, **options)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(one).square().sum(), one)
        (expected,) = torch.autograd.grad(model(other).square().sum(), other)
        assert (gradient - expected).abs().max() <= 1e-9 * expected.abs().max()
        modules = dict(network.named_modules())
        relus = [node for node in network.graph.nodes if isinstance(modules.get(str(node.target)), nn.ReLU)]
        assert relus
        assert all(modules[str(node.target)].inplace for node in relus)
        network.train()(x).sum().backward()


def test_gradients_that_need_results_keep_them() -> None:
    rectified = Network(lambda net, x: functional.relu(torch.sigmoid(x)) + torch.tanh(x).relu())
    model = strike(nn.Sequential(nn.Conv2d(3, 6, 3), rectified, nn.Conv2d(6, 2, 1)), 1).double()
    x = torch.randn(2, 3, 5, 5).double()
    network, _ = compacted(model, x)
    network(x).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_what_hooks_and_others_read_is_not_overwritten() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.first(x)
        z = net.second(torch.relu(y)).relu()
        return torch.cat([y + z, functional.relu(torch.sigmoid(net.second.bias[:, None, None] + z))], 1)

    twice = Network(function, first=nn.Conv2d(3, 4, 3, padding=1), second=nn.Conv2d(4, 4, 1))
    for hooked in range(3):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), copy.deepcopy(twice), nn.ReLU(), nn.Conv2d(8, 3, 3)).double().eval()
        if hooked == 0:  # a layer directly before a ReLU
            model[1] = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 1)).double()
        seen: list[Tensor] = []
        model[hooked].register_forward_hook(lambda module, x, y, seen=seen: seen.append(y))
        x = torch.randn(2, 3, 6, 6).double()
        network, _ = compacted(model, x)
        network(x)
        values = seen[-1].clone()
        model(x)
        assert hooked == 2 or (seen[-1] < 0).any()
        assert (values - seen[-1]).abs().max() <= 1e-12


def test_dead_channels_of_sums_give_their_constants() -> None:
    first = torch.randn(6, 3, 1, 1).double()
    first[:2] = 0
    second = torch.randn(8, 6, 1, 1).double()
    second[:3] = 0
    second[3, 2:] = 0  # this kernel reads constants only
    block = nn.Sequential(conv(first, [1.5, -2.0, 0.1, 0.2, 0.3, 0.4]), nn.Tanh(), conv(second, [0.5] * 8))
    layers = {
        "stem": nn.Conv2d(3, 8, 1).double(),
        "block": block,
        "last": conv(torch.randn(3, 8, 3, 3).double(), padding=1),
    }
    model = Network(lambda net, x: net.last(torch.relu(net.stem(x) + net.block(x))), **layers).eval()
    x = torch.randn(2, 3, 5, 6).double()
    traced = annotated_graph(model, [x])
    channels = analyse(traced, analyse(traced).scatterable())
    assert channels.scatter
    network = Rewriter(channels, cost.fewest_macs).build()
    same(network, model, x)


def test_a_sum_whose_terms_have_other_channels_needs_no_channel_of_zeros() -> None:
    block = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Residual(block), nn.Conv2d(4, 2, 1)).double()
    with torch.no_grad():
        block.weight[1:3] = 0
    network, _ = compacted(model, torch.randn(2, 3, 5, 5).double())
    assert network.get_submodule("1.function").weight.shape == (2, 4, 3, 3)


@pytest.mark.parametrize("seed", range(4))
def test_terms_of_a_sum_whose_channels_come_in_different_orders_are_aligned(seed: int) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        first = net.first(x)
        return net.last(torch.cat([first, net.second(x)], 1)[:, :8] + first)

    layers = {name: nn.Conv2d(3, 8, 3, padding=1) for name in ("first", "second")}
    model = strike(Network(function, last=nn.Conv2d(8, 2, 1), **layers), seed, dead=0.2).double().eval()
    compacted(model, torch.randn(2, 3, 7, 6).double())
