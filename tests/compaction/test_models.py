"""Compaction of operations other than convolutions: those not understood stay, and outputs are the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.sparsity.compaction.macs import macs_of
from loco_ext.sparsity.compaction.spellings import spell_out_operations
from tests.compaction.cases import IMAGES, Network, Residual, compacted, convolution, same, strike
from tests.compaction.computed_weights import WAYS
from tests.covering import covering, slow


def chain() -> dict[str, nn.Module]:
    return {"first": convolution(3, 8), "middle": convolution(8, 8), "last": convolution(8, 4)}


def check(model: nn.Module, *inputs: Tensor, seed: int = 0) -> sparsity.Report:
    """Zero parts of the model, and assert that it is compacted as a graph to equal outputs; return the last report."""
    model = strike(model, seed).double().eval()
    for options in ({"fixed_size": True}, {"fold_norms": False}, {}):
        _, report = compacted(model, *(inputs[:1] if options.get("fixed_size") else inputs), **options)
        assert "model" not in report.notes
    return report


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
    "sizes of no channels": lambda y: torch.cat([y, y[:, 8:].view(*y[:, 8:].shape)], 1),
    "scaled by a number without axes": lambda y: y * (y.mean().sum(0).squeeze(0) + y.amax().flatten()),
    "squeezed if one channel is left": lambda y: torch.cat([y[:, k : k + 2].squeeze(1) for k in (0, 2, 4, 6)], 1),
    "expanded, which arithmetic would not do": lambda y: (
        y * (y[:, :1].expand(-1, 8, -1, -1) * 2) + y[:, :1].expand_as(other=y) * y[:, 1:2].expand_as(y)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations(operation: Callable[[Tensor], Tensor]) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last(operation(functional.relu(net.middle(functional.relu(net.first(x))))))

    report = check(Network(function, **chain()), *IMAGES)
    assert report.macs_executed < report.macs_before


def between(*names: str) -> Callable[[Network, Tensor], Tensor]:
    """Return a function that calls layers in turn, with ReLUs between them."""

    def function(net: Network, x: Tensor) -> Tensor:
        for name in names[:-1]:
            x = functional.relu(getattr(net, name)(x))
        return getattr(net, names[-1])(x)

    return function


def read_outside(net: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    return between("first", "middle", "last")(net, x), net.middle.weight * 2


def read_before_its_norm(net: Network, x: Tensor) -> Tensor:
    y = net.first(x)
    return net.last(functional.relu(net.norm(y)) + y)


def pooled_to_a_pixel(net: Network, x: Tensor) -> Tensor:
    return net.linear(functional.adaptive_avg_pool2d(functional.relu(net.first(x)), 1).view(-1, 8))


def shuffled_by_views(net: Network, x: Tensor) -> Tensor:
    y = functional.relu(net.first(x))
    n, c, height, width = y.size()
    y = torch.transpose(y.view(n, 2, c // 2, height, width), 1, 2).contiguous().view(n, -1, height, width)
    y = functional.relu(net.middle(y)).unflatten(1, (4, 2)).permute(0, 2, 1, 3, 4)
    return net.last(y.reshape(n, c, height, width))


def adding() -> nn.Module:
    """Return a ReLU with a hook that adds another number to each of eight channels."""
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, x, y: y + torch.arange(8).reshape(1, 8, 1, 1))
    return relu


# Functions of a network, layers beside those of a chain, and parts of the notes that compaction makes.
NOTED: dict[str, tuple[Callable[..., object], dict[str, nn.Module], dict[str, str]]] = {
    "shuffled channels": (between("first", "middle", "shuffle", "last"), {"shuffle": nn.ChannelShuffle(4)}, {}),
    "channels that are shuffled by views": (shuffled_by_views, {}, {}),
    "weights that are read outside": (read_outside, {}, {"middle": "read outside"}),
    "a norm that is called twice": (
        between("first", "norm", "middle", "norm", "last"),
        {"norm": nn.BatchNorm2d(8, affine=False)},
        {},
    ),
    "a norm of groups of any number of channels": (
        between("first", "norm", "middle", "wide", "norm", "narrow", "last"),
        {"norm": nn.GroupNorm(2, 8, affine=False), "wide": convolution(8, 16), "narrow": convolution(16, 8)},
        {"norm": "more than once"},
    ),
    "a sum of what is given by its name": (
        lambda net, x: net.last(net.middle(net.first(x)) * torch.sum(input=net.first(x), dim=(2, 3), keepdim=True)),
        {},
        {"sum_1": "nothing is known", "mul": "nothing is known"},
    ),
    "a layer that is called twice": (between("first", "middle", "middle", "last"), {}, {}),
    "a layer with groups that is called twice": (
        between("first", "groups", "middle", "groups", "last"),
        {"groups": nn.Conv2d(8, 8, 3, padding=1, groups=4)},
        {"groups": "more than once"},
    ),
    "a layer that is called on an image without a batch as well": (
        lambda net, x: (net.last(net.middle(net.first(x))), net.middle(net.first(x[:1]).squeeze(0))),
        {},
        {"middle": "no batch", "getitem": "nothing is known", "squeeze": "nothing is known"},
    ),
    "a layer that its norm and others read": (read_before_its_norm, {"norm": nn.BatchNorm2d(8)}, {}),
    "a norm of the batch at hand": (
        between("first", "norm", "last"),
        {"norm": nn.BatchNorm2d(8, track_running_stats=False)},
        {},
    ),
    "hooks that see channels": (between("first", "relu", "last"), {"relu": adding()}, {"relu": "hooks"}),
    "names that new layers would have": (
        between("first", "first_0", "first_1", "last"),
        {"first_0": convolution(8, 8), "first_1": convolution(8, 8)},
        {},
    ),
    "rows that are samples": (pooled_to_a_pixel, {"linear": nn.Linear(8, 5)}, {}),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_kept_is_noted(name: str) -> None:
    function, layers, notes = NOTED[name]
    found = check(Network(function, **(chain() | layers)), *IMAGES).notes
    assert found.keys() == notes.keys()
    assert all(text in found[where] for where, text in notes.items())


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


def of_two(function: Callable[[Network, Tensor, Tensor], Tensor]) -> Network:
    """Return a network of two layers with zeros, whose forward is a function of itself, its input and their result."""

    def forward(net: Network, x: Tensor) -> Tensor:
        return function(net, x, net.last(functional.relu(net.first(x))))

    return strike(Network(forward, first=convolution(3, 8), last=convolution(8, 4))).double().eval()


def test_a_graph_that_is_not_the_model_is_not_believed() -> None:
    """The model asks for the type of its input, which torch.fx does not record."""
    model = of_two(lambda net, x, y: y * 2 if isinstance(x, Tensor) else y)
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "other outputs" in report.notes["model"]
    assert report.macs_executed < report.macs_before
    same(network, model, IMAGES[1])


def test_models_that_draw_random_numbers_shrink(tmp_path: Path) -> None:
    def latent(net: Network, x: Tensor) -> Tensor:
        mean = net.encoder(x).relu().mean((2, 3))
        return net.decoder(mean + torch.randn_like(mean))

    model = Network(latent, encoder=nn.Sequential(convolution(3, 8), convolution(8, 4)), decoder=nn.Linear(4, 2))
    strike(model, sizes=0.0).double().eval()
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert report.layers[0].filters_after < 8
    sparsity.save(network, tmp_path)
    results = []
    for each in (model, network, sparsity.load(tmp_path)):
        torch.manual_seed(5)
        results.append(each(IMAGES[1]))
    torch.testing.assert_close(results[1:], results[:1] * 2)


def loses_a_write(net: Network, x: Tensor, y: Tensor) -> Tensor:
    y.__setitem__((slice(None), 0), 0.0)
    return y


def reads_attributes_and_values(net: Network, x: Tensor, y: Tensor) -> Tensor:
    return y.to(net.first.weight.dtype).to(net.last.weight.dtype) * (1 if y.sum() > 0 else 2)


@pytest.mark.parametrize("function", [loses_a_write, reads_attributes_and_values])
def test_what_no_smaller_network_can_do_stays(function: Callable[..., Tensor]) -> None:
    model = of_two(function)
    network, report = sparsity.compact(model, IMAGES[0], cost="macs")
    assert "stays as it is" in report.notes["model"]
    assert torch.equal(network(IMAGES[1]), model(IMAGES[1]))


def test_filters_are_cropped_for_inputs_without_a_batch_too() -> None:
    model = of_two(lambda net, x, y: y if y.sum() > 0 else y * 2)
    for example, measure in itertools.product((IMAGES[0], IMAGES[0][0]), ("macs", "measured")):
        network, report = sparsity.compact(model, example, cost=measure)
        assert report.layers[0].macs_before == 12 * 11 * 8 * 3 * 9
        same(network, model, *IMAGES, IMAGES[0][0])


@pytest.mark.parametrize("layer", [nn.MultiheadAttention(8, 2), nn.Bilinear(8, 8, 3)])
def test_single_layers_of_several_arguments_stay(layer: nn.Module) -> None:
    inputs = [torch.randn(4, 8) for _ in range(3 if isinstance(layer, nn.MultiheadAttention) else 2)]
    network, report = sparsity.compact(layer.eval(), inputs, cost="macs")
    torch.testing.assert_close(network(*inputs), layer(*inputs))
    assert "model" in report.notes


def test_scripted_models_stay() -> None:
    model = nn.Sequential(convolution(3, 8), nn.ReLU(), convolution(8, 4)).double().eval()
    network, report = sparsity.compact(torch.jit.trace(model, IMAGES[0]), IMAGES[0], cost="macs")
    assert torch.equal(network(IMAGES[0]), model(IMAGES[0]))
    assert "model" in report.notes


def test_what_pools_an_image_without_a_batch_is_not_taken_for_channels() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(functional.max_pool2d(functional.relu(net.first(x)), 2).flatten(1))

    check(Network(function, first=convolution(3, 8), linear=nn.Linear(36, 5)), torch.randn(3, 12, 12).double())


@pytest.mark.parametrize(("name", "dim"), [("mean", "dim"), ("amax", "axis"), ("amin", "dim")])
def test_constants_vanish_ahead_of_reductions_of_whole_images(name: str, dim: str) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.linear(getattr(torch, name)(net.first(x), **{dim: (-1, 2)}))

    model = Network(function, first=convolution(3, 8), linear=nn.Linear(8, 5)).double().eval()
    model.first.weight.data[::2] = 0
    network, _ = compacted(model, *IMAGES)
    assert network.get_submodule("linear").in_features == 4


class OwnGroupNorm(nn.GroupNorm):
    """Group normalisation with an activation inside, by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).relu_()


# Functions of an image of eight channels, the first five of them zeros, and how many channels are left behind them.
TOGETHER: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "groups of a norm": (nn.GroupNorm(4, 8), 4),
    "groups of a norm without weights": (nn.GroupNorm(2, 8, affine=False), 4),
    "groups of a norm of its own code": (OwnGroupNorm(4, 8), 4),
    "one group": (nn.GroupNorm(1, 8), 8),
    "pixels of a channel": (nn.PixelShuffle(2), 1),
    "pixels that become channels": (lambda y: functional.pixel_unshuffle(torch.pixel_shuffle(y, 2)[:, :, 2:], 2), 4),
    "tensors that are stacked and summed": (lambda y: torch.stack([y, y.relu(), y.tanh()], 1).sum(dim=(1,)), 3),
    "tensors that are stacked and summed by rows": (lambda y: torch.stack((y, y)).sum(0).sum(2, keepdim=True), 3),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_channels_vanish_together(name: str) -> None:
    function, left = TOGETHER[name]
    for parameter in function.parameters() if isinstance(function, nn.Module) else ():
        nn.init.uniform_(parameter, 0.5, 1.5)
    layers = {"operation": function} if isinstance(function, nn.Module) else {}
    width = function(torch.zeros(1, 8, 4, 4)).shape[1]
    layers |= {"first": convolution(3, 8), "last": convolution(width, 4, 1)}
    model = Network(lambda net, x: net.last(getattr(net, "operation", function)(net.first(x))), **layers)
    model.first.weight.data[:5], model.first.bias.data[:5] = 0, 0
    network, report = compacted(model.double().eval(), *IMAGES, fold_norms=False)
    assert not report.notes
    assert network.get_submodule("last").weight.shape[1] == left


def test_groups_of_a_norm_stay_whole() -> None:
    """Channels that nothing reads change the mean and variance of their group."""
    model = nn.Sequential(convolution(3, 8), nn.GroupNorm(4, 8), convolution(8, 4)).double().eval()
    model[2].weight.data[:, :3] = 0
    network, report = compacted(model, *IMAGES)
    assert not report.notes
    assert network.get_submodule("1").num_groups == 3
    assert network.get_submodule("0").weight.shape[0] == 6


def attended(net: Network, x: Tensor) -> Tensor:
    """Attend to channels as CBAM does, by the same layers for means and maxima."""
    y = functional.relu(net.first(x))
    gates = [net.gate(functional.adaptive_avg_pool2d(y, 1).flatten(1)), net.gate(y.amax((2, 3)))]
    return net.last(y * torch.sigmoid(gates[0] + gates[1])[:, :, None, None])


def of_two_sizes(net: Network, x: Tensor) -> list[Tensor]:
    """Apply the same head to two images, of which only the second has constant channels other than zero."""
    y = functional.relu(net.first(x))
    small = torch.sigmoid(net.middle(functional.avg_pool2d(y, 2)))
    return [net.last(net.act(net.norm(net.head(each)))) for each in (y, small)]


# Functions of a network, and the layers that it calls again, beside those of a chain.
AGAIN: dict[str, tuple[Callable[[Network, Tensor], object], Callable[[], dict[str, nn.Module | Tensor]]]] = {
    "attention": (attended, lambda: {"gate": nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))}),
    "heads": (
        of_two_sizes,
        lambda: {"head": convolution(8, 8), "norm": nn.BatchNorm2d(8), "act": nn.PReLU()},
    ),
    "recurrence": (
        lambda net, x: net.last(net.middle(torch.sigmoid(net.middle(torch.tanh(net.first(x)))))),
        dict[str, nn.Module | Tensor],
    ),
    "the same channels along two ways": (
        lambda net, x: net.last(net.middle(y := net.first(x)) + net.middle(torch.cat([y[:, :4], y[:, 4:]], 1).tanh())),
        dict[str, nn.Module | Tensor],
    ),
    "activations": (
        between("first", "norm", "act", "middle", "act", "norm", "last"),
        lambda: {"norm": nn.GroupNorm(4, 8, affine=False), "act": nn.PReLU(8)},
    ),
    "one size after another": (
        lambda net, x: net.last(functional.interpolate(net.up(net.up(net.middle(net.first(x)))), scale_factor=0.5)),
        lambda: {"up": nn.ConvTranspose2d(8, 8, 2, 2)},
    ),
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_layers_that_are_called_again(name: str, seed: int) -> None:
    function, layers = AGAIN[name]
    model = Network(function, **(chain() | layers()))
    report = check(model, *IMAGES, seed=seed)
    assert not report.notes
    assert report.macs_before == macs_of(model, IMAGES[:1])
    assert report.macs_executed < report.macs_before
    network, _ = sparsity.compact(model, IMAGES[0], cost="macs")
    assert report.macs_executed == macs_of(network, IMAGES[:1])


def test_calls_that_nothing_reads_any_more_do_not_count() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(net.middle(torch.tanh(y))) + net.unread(net.middle(y))

    model = Network(function, **chain(), unread=convolution(8, 4)).double().eval()
    model.unread.weight.data.zero_()
    network, report = compacted(model, *IMAGES)
    assert report.macs_before == macs_of(model, IMAGES[:1])
    assert report.macs_executed == macs_of(network, IMAGES[:1])


def test_constants_are_folded_only_if_all_calls_read_them() -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(net.middle(y) * net.middle(y + net.shift))

    shift = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1]).reshape(1, 8, 1, 1)
    model = Network(function, **chain(), shift=shift).double().eval()
    model.first.weight.data[4:] = 0
    network, report = compacted(model, *IMAGES)
    assert not report.notes
    assert network.get_submodule("middle").weight.shape[1] == 6  # one constant for three, and one that differs


def test_channels_vanish_with_attention_of_published_code() -> None:
    gate = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    model = Network(attended, first=convolution(3, 8), gate=gate, last=convolution(8, 4)).double().eval()
    model.first.weight.data[::2], model.first.bias.data[::2] = 0, 0
    network, report = compacted(model, *IMAGES)
    assert not report.notes
    assert [network.get_submodule(f"gate.{k}").weight.shape for k in (0, 2)] == [(4, 4), (4, 4)]


def test_sums_over_pixels_keep_constants_other_than_zero() -> None:
    model = Network(lambda net, x: net.last(net.first(x).sum((2, 3))), first=convolution(3, 8), last=nn.Linear(8, 5))
    model.first.weight.data[:6], model.first.bias.data[:4] = 0, 0
    network, _ = compacted(model.double().eval(), *IMAGES)
    assert network.get_submodule("last").in_features == 4


def test_transposed_convolutions_shrink() -> None:
    """Behind constants other than zero, with and without a norm, and with as many filters as channels."""
    layers = [nn.ConvTranspose2d(8, 8, 3, 2, 1, 1), nn.BatchNorm2d(8), nn.Tanh(), nn.ConvTranspose2d(8, 6, (2, 3))]
    report = check(nn.Sequential(convolution(3, 8), nn.Sigmoid(), *layers, nn.ReLU(), convolution(6, 4)), *IMAGES)
    assert not report.notes
    assert all(layer.filters_after < layer.filters_before for layer in report.layers[:-1])


def gate_of_published_code(net: Network, y: Tensor) -> Tensor:
    n, c, _, _ = y.size()
    return net.gate(functional.adaptive_avg_pool2d(y, 1).view(n, c)).view(n, c, 1, 1).expand_as(y)


GATES: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "by the sizes of the image": gate_of_published_code,
    "by an index": lambda net, y: net.gate(y.mean((2, 3)))[:, :, None, None],
    "by numbers": lambda net, y: net.gate(y.reshape(-1, 8, y.shape[2] * y.shape[3]).mean(2)).view(-1, 8, 1, 1),
    "by a shape": lambda net, y: net.gate(y.flatten(2).mean(-1)).view(*y.shape[:2], 1, 1).expand(-1, -1, *y.shape[2:]),
    "of each row": lambda net, y: net.gate(y.amax(3).transpose(1, 2)).transpose(1, 2)[..., None],
    "of unflattened pixels": lambda net, y: (
        y.flatten(2).sigmoid().view(y.shape[0], 8, *y.shape[2:]) * net.gate(y.mean((2, 3))).unflatten(1, (8, 1, 1))
    ),
    "of channels at the end": lambda net, y: (
        net.gate(y.permute(0, 2, 3, 1).flatten(1, 2).mean(1, True)).unsqueeze(1).squeeze(2).transpose(1, 2)[..., None]
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_channels_vanish_with_their_gates(name: str) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        y = functional.relu(net.first(x))
        return net.last(y * GATES[name](net, y))

    gate = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8), nn.Sigmoid())
    model = Network(function, first=convolution(3, 8), gate=gate, last=convolution(8, 4)).double().eval()
    model.first.weight.data[::2], model.first.bias.data[::2] = 0, 0
    network, report = compacted(model, *IMAGES)
    assert not report.notes
    assert [network.get_submodule(f"gate.{k}").weight.shape for k in (0, 2)] == [(3, 4), (4, 3)]
    assert network.get_submodule("last").in_channels == 4


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
    same(network.eval(), model.eval(), IMAGES[1])


def test_blocks_with_hooks_keep_them() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(convolution(3, 8), nn.Sequential(convolution(8, 8), nn.ReLU()), convolution(8, 4))
    model = strike(model).double().eval()
    model[1].register_forward_hook(lambda module, x, y: seen.append(y))
    _, report = compacted(model, *IMAGES)
    assert "hooks" in report.notes["1"]
    assert all(type(y) is Tensor for y in seen)
    torch.testing.assert_close(seen[-1], seen[-2])  # the network's and the model's, on the last input


def test_a_normalisation_that_is_frozen_stays_frozen() -> None:
    model = nn.Sequential(convolution(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)).double()
    model[1].eval()
    network, _ = sparsity.compact(model, IMAGES[0], cost="macs", fold_norms=False)
    assert network.training
    assert [m.training for m in network.modules() if isinstance(m, nn.BatchNorm2d)] == [False, True]


def test_a_normalisation_frozen_in_a_module_of_its_own_code_stays_frozen() -> None:
    class Activated(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(8)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            norm = (self.running_mean, self.running_var, self.weight, self.bias)
            return self.act(functional.batch_norm(x, *norm, self.training, self.momentum or 0.0, self.eps))

    model = nn.Sequential(convolution(3, 8), Activated(), convolution(8, 8), Activated()).double()
    model[1].eval()
    network, _ = sparsity.compact(model, IMAGES[0], cost="macs", fold_norms=False)
    assert [m.training for m in network.modules() if isinstance(m, nn.BatchNorm2d)] == [False, True]


@pytest.mark.parametrize(
    ("seed", "pattern"), covering(range(3), [{"sizes": 0.0}, {"dead": 0.0}, {}], strength=1), ids=str
)
def test_what_compaction_writes_it_reads(seed: int, pattern: dict[str, float]) -> None:
    block = nn.Sequential(convolution(8, 6), nn.BatchNorm2d(6), nn.ReLU(), convolution(6, 8), nn.BatchNorm2d(8))
    blocks = [nn.Sequential(Residual(copy.deepcopy(block)), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(convolution(3, 8, 5), nn.ReLU(), *blocks, convolution(8, 4))
    once, first = sparsity.compact(strike(model, seed, **pattern).double().eval(), IMAGES[0], cost="macs")
    with torch.no_grad():
        for node in once.graph.nodes:
            if node.op == "call_module" and node.target.startswith("2.0.function.0"):
                once.get_submodule(node.target).weight[0] = 0
                once.get_submodule(node.target).bias[0] = 0
    _, second = compacted(once, *IMAGES)
    assert all(name.startswith("pad") for name in second.notes)  # the pads are zero channels for sums, which stay
    assert second.macs_executed < first.macs_executed


def instance_norm(**options: bool) -> nn.Module:
    """Return an instance normalisation of eight channels, with random statistics and scales and without shifts."""
    norm = nn.InstanceNorm2d(8, **options)
    for tensor in (norm.running_mean, norm.running_var, norm.weight):
        if tensor is not None:
            nn.init.uniform_(tensor, 0.5, 2.0)
    return norm


def gated(net: Network, y: Tensor) -> Tensor:
    return y * torch.sigmoid(net.gate(y))


def channels_last(net: Network, y: Tensor) -> Tensor:
    return (y.permute(0, 2, 3, 1) / net.scale).permute(0, 3, 1, 2)


def numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 + torch.rand(shape))


# Functions of a network and a value of eight channels, and parts of the network.
PASSING: dict[str, tuple[Callable[[Network, Tensor], Tensor], dict[str, nn.Module | Tensor]]] = {
    "instance norm": (lambda net, y: net.norm(y), {"norm": instance_norm()}),
    "instance norm with weights": (lambda net, y: net.norm(y), {"norm": instance_norm(affine=True)}),
    "padding layer": (lambda net, y: net.pad(y), {"pad": nn.ZeroPad2d((1, 0, -1, 2))}),
    "reflecting layer": (lambda net, y: net.pad(y), {"pad": nn.ReflectionPad2d(1)}),
    "one trained number": (lambda net, y: net.scale * y, {"scale": nn.Parameter(torch.full((1,), 3.0))}),
    "one number": (lambda net, y: y / net.scale, {"scale": torch.tensor(0.3)}),
    "gate for each pixel": (gated, {"gate": convolution(8, 1)}),
    "scale of each channel": (lambda net, y: y.mul_(net.scale), {"scale": numbers(8, 1, 1)}),
    "view of scales": (lambda net, y: net.scale.view(1, 8, 1, 1) * y, {"scale": numbers(8)}),
    "scale of the last axis": (channels_last, {"scale": numbers(8)}),
    "mask": (lambda net, y: y * net.mask, {"mask": (torch.arange(8.0) != 2).view(8, 1, 1)}),
    "slope of each channel": (lambda net, y: functional.prelu(y, net.slope), {"slope": numbers(8)}),
    "one slope": (lambda net, y: functional.prelu(y, net.slope), {"slope": numbers(1)}),
    "casts": (lambda net, y: y.to(torch.float64).double().type_as(y), {}),
    "powers": (lambda net, y: y**3 + y.pow(2), {}),
    "means of all pixels": (lambda net, y: y * functional.avg_pool2d(y, y.shape[2:]), {}),
    "maxima of columns": (lambda net, y: y * functional.max_pool2d(y, (y.size(2), 1)), {}),
    "casts by type": (lambda net, y: y.type("torch.FloatTensor").type(torch.half).type(dtype=y.dtype), {}),
}


@pytest.mark.parametrize("name", PASSING)
def test_channels_of_zeros_do_not_outlast_what_keeps_zeros(name: str, tmp_path: Path) -> None:
    operation, parts = PASSING[name]
    model = Network(lambda net, x: net.last(functional.relu(operation(net, net.first(x)))), **(chain() | parts))
    del model.middle
    model = model.double().eval()
    model.first.weight.data[:5] = model.first.bias.data[:5] = 0
    network, report = compacted(model, *IMAGES, fold_norms=False)
    assert network.get_submodule("last").weight.shape[1] == 3
    assert not report.notes
    sparsity.save(network, tmp_path)
    same(sparsity.load(tmp_path), model, *IMAGES)
    compacted(model.train(), *IMAGES, fold_norms=False)


def test_a_cast_to_the_type_of_any_gpu_is_no_move_to_one_of_them() -> None:
    graph = fx.symbolic_trace(Network(lambda _, x: x.type("torch.cuda.HalfTensor")))
    for node in graph.graph.nodes:
        node.meta = {"shape": (2, 3), "dtype": torch.float32}
    spell_out_operations(graph)
    assert graph.graph.find_nodes(op="call_method", target="type")


def test_zeros_in_a_mask_remove_channels() -> None:
    mask = (torch.arange(8.0) % 2).view(8, 1, 1)
    model = Network(lambda net, x: net.last(net.first(x) * net.mask), **chain(), mask=mask)
    network, _ = compacted(model.double().eval(), *IMAGES)
    assert network.get_submodule("first").weight.shape[0] == network.mask.numel() == 4


def test_shifts_of_dead_filters_are_folded_and_those_of_others_still_train(tmp_path: Path) -> None:
    def function(net: Network, x: Tensor) -> Tensor:
        return net.last((net.shift - net.scale.view(-1, 1, 1) * net.first(x)).relu())

    parts = {"last": nn.Conv2d(8, 4, 3), "scale": numbers(8), "shift": numbers(1, 8, 1, 1)}
    model = Network(function, first=convolution(3, 8), **parts).double().eval()
    model.first.weight.data[::2] = 0
    network, _ = compacted(model, *IMAGES)
    assert network.get_submodule("last").weight.shape[1] == 4
    for each in (model, network):
        each(IMAGES[0]).square().sum().backward()
    torch.testing.assert_close(network.scale.grad, model.scale.grad[1::2])
    torch.testing.assert_close(network.shift.grad, model.shift.grad[:, 1::2])
    sparsity.save(network, tmp_path)
    same(sparsity.load(tmp_path), model, *IMAGES)


def read_by_a_view_as_well(net: Network, x: Tensor) -> Tensor:
    scale = net.scale.view(1, 8)
    return net.last(net.first(x) * scale[..., None, None]) * scale.mean()


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda net, x: net.last(net.scale * net.first(x) * net.scale), (8, 1, 1)),
        (read_by_a_view_as_well, (8,)),
        (lambda net, x: net.last(net.first(x) * net.scale.view(1, 8, 1, 1)), (2, 4)),
    ],
    ids=["read twice", "read by a view", "of several axes"],
)
def test_numbers_that_cannot_be_cut_keep_their_channels(
    function: Callable[[Network, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    report = check(Network(function, **chain(), scale=numbers(*shape)), *IMAGES)
    assert "dead filters" in report.layers[0].kept


def test_a_view_of_a_number_without_axes_scales_one_channel() -> None:
    layers = {"first": convolution(3, 1), "last": convolution(1, 4)}
    check(Network(lambda net, x: net.last(net.first(x) * net.scale.view(1, 1, 1)), **layers, scale=numbers()), *IMAGES)


@pytest.mark.parametrize("zero", [nn.Parameter(torch.zeros(1)), torch.tensor(0.0)], ids=["parameter", "buffer"])
def test_branches_behind_a_number_that_is_zero_stay(zero: Tensor) -> None:
    """It may be trained or changed."""
    model = Network(lambda net, x: net.last(net.first(x) + net.zero * net.middle(net.first(x))), **chain(), zero=zero)
    network, report = sparsity.compact(model.double().eval(), IMAGES[0], cost="macs", fold_norms=False)
    assert report.macs_executed == report.macs_before
    assert "zero" in network.state_dict()


def test_padding_layers_have_their_names_in_the_report() -> None:
    pad = nn.ConstantPad2d(1, 0.5)
    model = strike(nn.Sequential(nn.Sequential(convolution(3, 8), pad), nn.ReLU(), convolution(8, 4))).double().eval()
    _, report = compacted(model, *IMAGES)
    assert "0.1" in report.notes


def test_running_statistics_of_instance_norms_are_folded() -> None:
    norm = instance_norm(affine=True, track_running_stats=True)
    model = strike(nn.Sequential(convolution(3, 8), norm, nn.ReLU(), convolution(8, 4))).double().eval()
    network, _ = compacted(model, *IMAGES)
    assert not any(isinstance(module, nn.InstanceNorm2d) for module in network.modules())
