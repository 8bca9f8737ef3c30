"""Compaction is correct at sizes other than the example's: of tokens, sequences, NHWC images and broadcast operands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loco_ext import sparsity
from loco_ext.fx.sizes import Inference
from loco_ext.sparsity.compaction.agreement import Pair, is_right
from loco_ext.sparsity.compaction.other_sizes import pairs_of_other_sizes
from tests.compaction.cases import Network, Two, compacted, same, strike
from tests.covering import slow

Operation = Callable[[nn.Module, Tensor], Tensor]


def takes(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the model takes inputs that may be too small for a kernel, or of a size that a layer binds."""
    try:
        model(*(x.clone() for x in inputs))
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def check(
    model: nn.Module, example: tuple[Tensor, ...], others: Sequence[tuple[Tensor, ...]], at_least: int = 1
) -> Any:
    """Assert equal outputs on the example and the others, ``at_least`` of which the model takes; return the report."""
    model = model.double().eval()
    taken = [inputs for inputs in others if takes(model, inputs)]
    assert len(taken) >= at_least
    return compacted(model, example, *taken)[1]


def images(*shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(shape, dtype=torch.double),) for shape in shapes]


# Random models are made of these operations, which take tensors whose axis 1 is channels or is not.

ALONG_1: dict[str, Operation] = {
    "all but the first": lambda net, t: t[:, 1:],
    "all but the last": lambda net, t: t[:, :-1],
    "three": lambda net, t: t[:, 1:4],
    "every second": lambda net, t: t[:, ::2],
    "first chunk": lambda net, t: t.chunk(2, 1)[0],
    "last chunk": lambda net, t: torch.chunk(t, 3, dim=1)[-1],
    "swapped chunks": lambda net, t: torch.cat([t.chunk(2, 1)[1], t.chunk(2, 1)[0]], 1),
    "parts of three": lambda net, t: torch.split(t, 3, 1)[0],
    "the first again": lambda net, t: torch.cat([t[:, :1], t], 1),
    "backwards": lambda net, t: t.flip(1),
    "without the first's": lambda net, t: t - t[:, :1],
    "with the mean": lambda net, t: t + t.mean(1, keepdim=True),
    "half": lambda net, t: t[:, : t.shape[1] // 2],
    "narrow": lambda net, t: t.narrow(1, 1, 3),
    "running sums": lambda net, t: t.cumsum(1),
    "selected": lambda net, t: t.index_select(1, net.places),
    "rolled": lambda net, t: t.roll(1, 1),
    "relu": lambda net, t: functional.relu(t),
    "shifted by a row": lambda net, t: t + net.row,
    "softmax": lambda net, t: t.softmax(1),
}
OF_CHANNELS: dict[str, Operation] = {
    "normalised": lambda net, t: net.layer_norm(t),
    "linear": lambda net, t: net.linear(t),
    "residual": lambda net, t: t + functional.relu(net.linear(t)),
    "gelu": lambda net, t: functional.gelu(t),
    "last half": lambda net, t: torch.cat([t[..., 4:], t[..., :4]], -1),
    "chunks": lambda net, t: torch.cat([t.chunk(2, -1)[1], t.chunk(2, -1)[0]], dim=-1),
}
OF_TIME: dict[str, Operation] = {
    "causal by padding": lambda net, y: net.middle(functional.pad(y, (2, 0))),
    "causal by cropping": lambda net, y: net.wide(y)[..., :-2],
    "causal residual": lambda net, y: y + functional.relu(net.wide(y)[:, :, :-2]),
    "first chunk": lambda net, y: y.chunk(2, -1)[0],
    "every second": lambda net, y: y[:, :, ::2],
    "first half": lambda net, y: y[:, :, : y.size(-1) // 2],
    "running sums": lambda net, y: y.cumsum(2),
    "halves of channels": lambda net, y: torch.cat([y[:, 4:], y[:, :4]], 1),
    "parts of channels": lambda net, y: torch.cat(y.split([3, 5], 1)[::-1], 1),
    "gated": lambda net, y: y * torch.sigmoid(y.mean(-1, keepdim=True)),
    "steps": lambda net, y: y - y[..., :1],
    "relu": lambda net, y: functional.relu(y),
}


def parts(dims: int) -> dict[str, nn.Module | Tensor]:
    kind: Any = (nn.Conv1d, nn.Conv2d)[dims - 1]
    return {
        "first": kind(3, 8, 3, padding=1),
        "middle": kind(8, 8, 3),
        "wide": kind(8, 8, 3, padding=2),
        "last": kind(8, 4, 1),
        "linear": nn.Linear(8, 8),
        "layer_norm": nn.LayerNorm(8),
        "places": torch.tensor([2, 0, 2]),
        "row": nn.Parameter(torch.randn(1, 1, 8) if dims == 1 else torch.randn(1, 1, 1, 8)),
    }


def layer(name: str) -> Operation:
    """Return a layer of the network and a ReLU."""
    return lambda net, t: functional.relu(getattr(net, name)(t))


def across(operation: Operation) -> Operation:
    """Return an operation along axis 2 instead of 1."""
    return lambda net, t: operation(net, t.transpose(1, 2)).transpose(1, 2)


def random_model(seed: int) -> tuple[Network, Sequence[tuple[int, ...]]]:
    """Return a model, and shapes of inputs, of which the first is the example's."""
    choose, of_tokens = random.Random(seed), [*ALONG_1.values(), *OF_CHANNELS.values()]
    some = choose.sample([*OF_TIME.values()] if seed % 3 == 1 else of_tokens, choose.choice([1, 2, 3, 4]))
    if seed % 3 == 0:  # patches of images become tokens (N, T, C): as many as channels, or more
        stride = choose.choice([2, 3])
        layers = {**parts(2), "patches": nn.Conv2d(8, 8, stride, stride), "head": nn.Linear(8, 5)}
        layers["row"] = nn.Parameter(torch.randn(1, 1, 8))
        mean = choose.choice([[], [lambda net, t: t.mean(1)]])
        steps = [layer("first"), layer("patches"), lambda net, t: t.flatten(2).transpose(1, 2), *some, *mean]
        last, sizes = "head", [(13, 14), (12, 6), (9, 17)]
        size = choose.choice([(4 * stride, 2 * stride), (3 * stride, 4 * stride)])
    elif seed % 3 == 1:  # sequences (N, C, T), sometimes (N, T, C) in between
        layers, last, sizes = parts(1), "last", [(24,), (17,), (30,)]
        steps = [layer("first"), *some[:2], *map(across, choose.sample(of_tokens, choose.choice([0, 2]))), *some[2:]]
        size = (choose.choice([8, 16, 21]),)
    else:  # images (N, H, W, C) between two convolutions, two pixels larger there: with 6, as many as channels
        layers, last, sizes = parts(2), "last", [(13, 11), (8, 14), (17, 9)]
        moved = choose.choice([[], *([across(operation)] for operation in ALONG_1.values())])
        steps = [layer("first"), layer("wide"), lambda net, y: y.permute(0, 2, 3, 1), *some, *moved]
        steps += [lambda net, y: y.permute(0, 3, 1, 2), layer("middle")]
        size = choose.choice([(6, 6), (14, 8), (9, 12)])

    def function(net: Network, x: Tensor) -> Tensor:
        for step in steps:
            x = step(net, x)
        return getattr(net, last)(x)

    return Network(function, **layers), [(n, 3, *each) for n, each in zip((2, 1, 3, 4), (size, *sizes), strict=True)]


def check_random(seed: int) -> None:
    choose = random.Random(-seed)
    torch.manual_seed(seed)
    model, (shape, *others) = random_model(seed)
    strike(model, seed, inputs=choose.choice([0.0, 0.2]))
    if choose.random() < 0.3:  # no kernel is zero, so nothing is removed
        model.apply(lambda module: nn.init.normal_(module.weight) if hasattr(module, "kernel_size") else None)
    (example,) = images(shape)
    if takes(model.double().eval(), example):  # else there are too few tokens for one of the operations
        check(model, example, images(*others), at_least=0)


@pytest.mark.parametrize("seeds", [range(16), slow(range(1000, 1050))], ids=str)
def test_random_models_at_every_size(seeds: range) -> None:
    for seed in seeds:
        check_random(seed)


# The operands below broadcast on other inputs than the example.


def dead(channels: int = 8) -> nn.Conv2d:
    """Return a convolution whose kernels are zero, so that its output is its bias everywhere."""
    convolution = nn.Conv2d(3, channels, 3, padding=1)
    nn.init.zeros_(convolution.weight)
    return convolution


def live(channels: int = 3, kernels: int = 8) -> nn.Conv2d:
    return nn.Conv2d(channels, kernels, 3, padding=1)


SHAPES = ((1, 3, 6, 5), (3, 3, 6, 5), (2, 3, 9, 8), (4, 3, 1, 1))
ONE, PIXEL = (1, 3, 6, 5), (2, 3, 1, 1)  # shapes of the example
BROADCASTS: dict[str, tuple[tuple[int, ...], Operation]] = {
    "a dead branch and a map of parameters": (ONE, lambda net, x: net.last(net.dead(x) + net.map)),
    "a dead branch times a map": (ONE, lambda net, x: net.last(net.fixed_map * net.dead(x))),
    "a map of one pixel": (PIXEL, lambda net, x: net.last(functional.relu(net.first(x)) + net.map)),
    "a dead branch and a gate of one pixel": (
        PIXEL,
        lambda net, x: net.last(net.dead(x) * torch.sigmoid(net.first(functional.adaptive_avg_pool2d(x, 1)))),
    ),
    "a live branch, added up with a gate": (
        PIXEL,
        lambda net, x: net.last(functional.relu(net.first(x)) + functional.relu(net.gate(x.mean((2, 3), True)))),
    ),
    "a gate that is a view": (
        PIXEL,
        lambda net, x: net.last(net.first(x) * net.linear(x.mean((2, 3))).view(x.size(0), 8, 1, 1)),
    ),
    "a dead branch and what all samples have": (
        ONE,
        lambda net, x: net.last(net.dead(x) + net.first(x).mean(0, keepdim=True)),
    ),
    "one sample's gate": (ONE, lambda net, x: net.last(net.first(x) * net.gate(x[:1]))),
    "a transposed number": (ONE, lambda net, x: net.last(net.dead(x) * net.first(x).mean().transpose(0, -1))),
    "parameters of channels": (
        ONE,
        lambda net, x: net.last(functional.relu(net.first(x) * net.scale + net.shift) + net.dead(x) * net.shift[0]),
    ),
    "parameters of pixels": (
        ONE,
        lambda net, x: net.last((net.first(x) + net.pixels + net.dead(x)) * net.one + 2 - net.number),
    ),
    "as many features as pixels": (
        (2, 3, 2, 4),
        lambda net, x: net.dead(x).flatten(2) + net.first(x).flatten(2).mean(2, keepdim=True),
    ),
    "written in place": (
        ONE,
        lambda net, x: net.last(net.first(x).mul_(net.fixed_map).add_(net.dead(x).mean((2, 3), keepdim=True))),
    ),
}


def broadcasting(name: str) -> tuple[Network, tuple[int, ...]]:
    """Return a network, and the shape of the example."""
    example, function = BROADCASTS[name]
    layers = {"dead": dead(), "first": live(), "gate": live(), "last": live(8, 4), "linear": nn.Linear(3, 8)}
    parameters = {"map": nn.Parameter(torch.randn(1, 8, 6, 5)), "shift": nn.Parameter(torch.randn(1, 8, 1, 1))}
    buffers = {"fixed_map": torch.randn(1, 8, 6, 5), "scale": torch.randn(8, 1, 1), "pixels": torch.randn(1, 1, 6, 5)}
    numbers = {"one": torch.ones(1, 1, 1, 1), "number": torch.tensor(3.0)}
    return Network(function, **layers, **parameters, **buffers, **numbers), example


@pytest.mark.parametrize("name", BROADCASTS)
def test_operands_that_broadcast_on_other_inputs(name: str) -> None:
    model, example = broadcasting(name)
    check(strike(model, 1, sizes=0.3), *(images(example)), images(*SHAPES, (2, 3, 6, 5), (1, 3, 2, 4), (3, 3, 4, 4)))


@pytest.mark.parametrize("which", [0, 1])
def test_inputs_of_which_one_may_have_a_single_sample(which: int) -> None:
    def function(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.last(functional.relu(net.dead(x) + net.first(y)) + net.gate(x) * net.dead(y))

    layers = {"dead": dead(), "first": live(), "gate": live(), "last": live(8, 4)}
    one, five = torch.randn(1, 3, 6, 5).double(), torch.randn(5, 3, 6, 5).double()
    others = [(five, one), (one, five), (five, five), (five[:, :, :1, :1], one), (one, five[:, :, :1, :1])]
    check(strike(Two(function, **layers), 1), (one, one), others, at_least=5)
    check(strike(Two(function, **layers), 2), ((five, one), (one, five))[which], others, at_least=5)


# Images and sequences below have no batch: axis 0 is their channels, axis 1 their rows.

UNBATCHED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layers": lambda net, x: net.last(functional.relu(net.first(x))),
    "rows": lambda net, x: net.last(functional.relu(net.first(x))[:, 1:5]),
    "chunks": lambda net, x: net.last(net.first(x).chunk(2, 1)[1]),
    "dead": lambda net, x: net.last(net.dead(x) + net.first(x)[:, :1]),
    "pooled": lambda net, x: net.last(net.pool(net.relu(net.first(x)))),
    "means": lambda net, x: net.last(net.first(x).mean((1, 2), keepdim=True) - net.dead(x)),
    "flat": lambda net, x: net.first(x).flatten(1)[:, ::2],
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_images_without_a_batch(name: str) -> None:
    layers = {"first": live(), "dead": dead(), "last": live(8, 4), "pool": nn.MaxPool2d(2), "relu": nn.ReLU()}
    model = strike(Network(UNBATCHED[name], **layers), 1)
    report = check(model, *images((3, 8, 8)), images((3, 9, 12), (3, 13, 6), (2, 3, 9, 12)), at_least=2)
    assert "no batch" in report.notes["first"]


# The tests below check what is demanded of sizes, and which sizes are tried.


def test_features_of_images_are_numbers_where_a_linear_layer_demands_them() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        both = torch.cat([net.first(x).flatten(1), net.dead(x).flatten(1)], 1)
        return net.linear(functional.relu(both))

    model = strike(Network(function, first=live(), dead=dead(), linear=nn.Linear(16 * 12, 5)), 1)
    report = check(model, *images((2, 3, 3, 4)), images((5, 3, 3, 4), (1, 3, 4, 3), (2, 3, 6, 2)), at_least=3)
    assert not report.notes
    assert report.layers[2].channels_after < 16 * 12


@pytest.mark.parametrize("measure", ["measured", "macs"])
def test_a_network_that_is_wrong_on_inputs_of_other_sizes_alone_is_not_returned(
    monkeypatch: pytest.MonkeyPatch, measure: str
) -> None:
    """A wrong rule of sizes is simulated by trusting the sizes of the example."""
    monkeypatch.setattr(Inference, "same", lambda self, one, other: one.meta["shape"] == other.meta["shape"])
    model, example = broadcasting("a dead branch and a map of parameters")
    model = strike(model, 1).double().eval()
    network, report = sparsity.compact(model, *images(example), cost=measure)
    assert "on inputs of other sizes" in report.notes["model"]
    same(network, model, *images((3, 3, 6, 5)))


def rounded_to(size: float) -> Network:
    """Return a network that rounds float32 to multiples of ``size * 2**-23``; ``size`` is a power of 2."""
    return Network(lambda net, x: (x + 1.5 * size) - 1.5 * size).eval()


def test_a_badly_conditioned_model_allows_for_its_own_rounding_alone() -> None:
    x, step = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), 2.0**-5
    model = rounded_to(step * 2**23)
    pair = Pair(model, [x], model(x))
    assert (pair.expected - x).abs().max() > 2e-3 * x.abs().max()
    for error, right in ((0.0, True), (0.5 * step, True), (2 * step, False), (float("nan"), False)):
        assert is_right(Network(lambda net, x, error=error: x + error), [pair]) == right
    for wrong in (lambda net, x: x[:1], lambda net, x: x.double(), lambda net, x: (x, x), lambda net, x: None):
        assert not is_right(Network(wrong), [pair])
    worse = rounded_to(64 * step * 2**23)  # it says nothing about other networks
    assert not is_right(Network(lambda net, x: x), [Pair(worse, [x], worse(x))])
    binary = Network(lambda net, x: x + 1.5e6 - 1.5e6 if x.dtype == torch.float32 else net.fails)
    assert not is_right(Network(lambda net, x: x), [Pair(binary, [x], binary(x))])


def shapes_tried(function: Callable[..., object], *shapes: tuple[int, ...], **options: bool) -> list[Any]:
    pairs = pairs_of_other_sizes(
        Two(function) if len(shapes) > 1 else Network(function), [*map(torch.randn, shapes)], **options
    )
    tried = [[tuple(x.shape) for x in pair.inputs] for pair in pairs]
    return [one if len(one) > 1 else one[0] for one in tried]


def test_two_batch_sizes_and_sizes_are_tried_that_the_model_takes() -> None:
    convolve = nn.Conv2d(3, 2, 3, stride=2)
    assert shapes_tried(lambda net, x: convolve(x), (2, 3, 8, 9)) == [(1, 3, 13, 14), (3, 3, 6, 6)]
    assert shapes_tried(lambda net, x: convolve(x), (2, 3, 8, 9), batch_alone=True) == [(1, 3, 8, 9), (3, 3, 8, 9)]
    bound = shapes_tried(lambda net, x: convolve(x).flatten(1) @ torch.ones(24, 2), (2, 3, 8, 9))
    assert bound == [(1, 3, 8, 10), (3, 3, 8, 9)]
    assert shapes_tried(lambda net, x: x @ x.transpose(-1, -2) + x, (1, 6, 6)) == [(3, 12, 12), (2, 6, 6)]
    assert shapes_tried(lambda net, x: x.view(2, 18), (2, 3, 6)) == []
    of_two = shapes_tried(lambda net, x, y: x * y, (1, 4), (1, 1))
    assert [(3, 4), (1, 1)] in of_two
    assert [(1, 4), (3, 1)] in of_two
    assert any(one[0] == other[0] > 1 for one, other in of_two)


def test_a_traced_model_prints_no_error_of_a_size_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.fx.symbolic_trace(Network(lambda net, x: x.view(2, 12)))
    assert not pairs_of_other_sizes(model, [torch.randn(2, 3, 4)])
    assert capsys.readouterr() == ("", "")


def test_new_arguments_are_like_those_of_the_example() -> None:
    seen: list[Tensor] = []
    example = torch.tensor([[5, 7], [9, 7]]), torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    pairs_of_other_sizes(Two(lambda net, x, y: seen.extend([x, y])), example)
    assert all(set(x.flatten().tolist()) <= {5, 7, 9} and x.dtype == torch.int64 for x in seen[::2])
    assert all(y.is_contiguous(memory_format=torch.channels_last) and len(y.unique()) > 1 for y in seen[1::2])
