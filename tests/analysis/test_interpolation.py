"""Paths between models against the same recursions on plain numbers, and against closed forms."""

import copy
import math
import weakref
from collections import UserList

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from loco_ext import analysis, regularizers
from loco_ext import nn as loco_nn


def pair(make):
    torch.manual_seed(1)
    return make(), make()


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def efcn():
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    return nn.Sequential(loco_nn.LocallyConnected2d.from_conv(conv, (3, 4)).grow(1), nn.Flatten())


def complex_layer():
    return nn.Linear(2, 3, dtype=torch.complex128)


@pytest.mark.parametrize("make", [mlp, efcn, complex_layer])
def test_linear_paths_mix_weights_and_floating_buffers(make):
    first, second = pair(make)
    if make is mlp:
        second[1].running_mean.fill_(8.0)
        second[1].num_batches_tracked.fill_(7)
    kept = [copy.deepcopy(model.state_dict()) for model in (first, second)]
    found = [(alpha, copy.deepcopy(model)) for alpha, model in analysis.interpolate(first, second, 5)]
    assert [alpha for alpha, _ in found] == [0, 0.25, 0.5, 0.75, 1]
    for alpha, model in found:
        assert not model.training
        for name, tensor in model.state_dict().items():
            a, b = (state[name] for state in kept)
            whole = b if alpha == 1 else a
            expected = (1 - alpha) * a + alpha * b if tensor.dtype != torch.int64 else whole
            torch.testing.assert_close(tensor, expected, rtol=1e-14, atol=1e-15)
    for (_, model), state in ((found[0], kept[0]), (found[-1], kept[1])):
        assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
    assert all(torch.equal(first.state_dict()[name], kept[0][name]) for name in kept[0])
    assert all(torch.equal(second.state_dict()[name], kept[1][name]) for name in kept[1])
    assert first.training
    assert second.training


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, torch.optim.swa_utils.AveragedModel])
@pytest.mark.parametrize("method", ["linear", "string"])
def test_wrappers_are_ignored(wrap, method):
    (first, second), x = pair(mlp), torch.randn(2, 3, dtype=torch.float64)
    data = [(x, torch.tensor([0, 1]))]
    options = {"loss": cross_entropy, "data": data, "steps": 1} if method == "string" else {}
    paths = (analysis.interpolate(*ends, 3, method, **options) for ends in ((wrap(first), second), (first, second)))
    for (_, wrapped), (_, plain) in zip(*paths, strict=True):
        assert torch.equal(wrapped(x), plain(x))


class Scaled(nn.Module):
    """A model of several inputs, to the first of which it writes."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, parts, *, shift):
        return self.factor * x.add_(shift) * parts["mask"]


def test_outputs_of_models_in_evaluation_mode_are_mixed():
    linear, x, mask = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0.0, 1.0, 1.0])
    dropping = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    for ends in ((dropping, linear), [torch.jit.trace(end, x) for end in (dropping[0], linear)]):
        for alpha, model in analysis.interpolate(*ends, 4, "outputs"):
            torch.testing.assert_close(model(x), (1 - alpha) * dropping[0](x) + alpha * linear(x))
    assert dropping.training
    for alpha, model in analysis.interpolate(Scaled(2.0), Scaled(-1.0), 3, "outputs"):
        torch.testing.assert_close(model(x.clone(), {"mask": mask}, shift=0.5), (2 - 3 * alpha) * (x + 0.5) * mask)


class Several(nn.Module):
    """A model that returns two tensors in a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return {"logits": self.layer(x), "features": (x, self.layer.weight), "loss": None}


def test_outputs_in_dicts_and_tuples_are_mixed():
    ends, x = (Several(), Several()), torch.randn(4, 3)
    for alpha, model in analysis.interpolate(*ends, 3, "outputs"):
        logits, (same, weight), loss = model(x).values()
        assert loss is None
        torch.testing.assert_close(logits, (1 - alpha) * ends[0].layer(x) + alpha * ends[1].layer(x))
        torch.testing.assert_close(weight, (1 - alpha) * ends[0].layer.weight + alpha * ends[1].layer.weight)
        torch.testing.assert_close(same, x)


def test_mixed_outputs_of_one_input_can_be_traced():
    first, second = (nn.Sequential(nn.Linear(3, 4), nn.ReLU()) for _ in range(2))
    (_, model), *_ = analysis.interpolate(first, second, 2, "outputs")
    x = torch.randn(5, 3)
    both = [regularizers.region_radius(end, x) for end in (first, second)]
    torch.testing.assert_close(regularizers.region_radius(model, x), torch.minimum(*both))


class Masked(nn.Module):
    """A linear layer with numbers that are infinite or so large that their sum is."""

    def __init__(self, *changed):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("lowest", torch.full((2, 2), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("changed", torch.tensor(changed))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("method", ["linear", "string"])
def test_infinite_numbers_stay(method):
    first, second = Masked(2.0, -math.inf, 1.0), Masked(4.0, 3.0, math.inf)
    options = {"loss": cross_entropy, "data": DATA, "steps": 2} if method == "string" else {}
    path = [(alpha, copy.deepcopy(model)) for alpha, model in analysis.interpolate(first, second, 5, method, **options)]
    for end, (_, model) in ((first, path[0]), (second, path[-1])):
        assert all(torch.equal(tensor, end.state_dict()[name]) for name, tensor in model.state_dict().items())
    for alpha, model in path[1:-1]:
        assert torch.equal(model.mask, first.mask)
        assert torch.equal(model.lowest, first.lowest)
        assert model.changed.tolist() == pytest.approx([2 + 2 * alpha, -math.inf, math.inf])
        assert model.layer.weight.isfinite().all()


class Point(nn.Module):
    def __init__(self, *x):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x, dtype=torch.float64))

    def forward(self, centre):
        return (self.x - centre).square().sum() / 2


def at_once(outputs, targets):
    return outputs


def string(points, steps, rate, stiffness, centres, dtype=torch.float64):
    data = [(torch.tensor(centre, dtype=dtype), torch.zeros(1)) for centre in centres]
    options = {"loss": at_once, "data": data, "steps": steps, "learning_rate": rate, "stiffness": stiffness}
    ends = Point(0.0, 0.0).to(dtype), Point(1.0, -2.0).to(dtype)
    path = analysis.interpolate(*ends, points, "string", **options)
    return np.array([model.x.tolist() for _, model in path])


@pytest.mark.parametrize(("points", "steps"), [(2, 3), (7, 40)])
def test_a_string_is_the_recursion_written_out(points, steps):
    centres, rate, stiffness = [(2.0, 1.0), (0.5, -3.0), (0.0, 0.0)], 0.1, 0.3
    x = np.linspace([0.0, 0.0], [1.0, -2.0], points)
    for step in range(steps):
        for i in range(1, points - 1):
            x[i] -= rate * (x[i] - centres[step % 3])
            x[i] += stiffness * (x[i - 1] + x[i + 1] - 2 * x[i])
    np.testing.assert_allclose(string(points, steps, rate, stiffness, centres), x, rtol=1e-13, atol=1e-14)


def test_steps_of_a_string_add_up_in_half_precision():
    arguments = 5, 300, 1e-3, 1e-3, [(3.0, 1.0)]
    found = string(*arguments, torch.bfloat16)
    np.testing.assert_allclose(found, string(*arguments), rtol=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("method", ["linear", "string", "outputs"])
def test_paths_made_in_inference_mode_can_be_trained(method):
    options = {"loss": cross_entropy, "data": DATA, "steps": 1} if method == "string" else {}
    with torch.inference_mode():
        path = analysis.interpolate(nn.Linear(3, 4), nn.Linear(3, 4), 3, method, **options)
        _, model = next(path)
    for _, each in path:
        assert each is model or method == "outputs"
        each(torch.ones(2, 3)).sum().backward()


def test_blocks_in_other_places_are_not_mixed():
    layers = [loco_nn.LocallyConnected1d(1, 1, 2, input_size=3) for _ in range(2)]
    for place, layer in enumerate(layers):
        keep = torch.ones(4, dtype=torch.bool)
        keep[place] = False
        layer.prune(keep)
    with pytest.raises(ValueError, match="second: expected the blocks of first, got others in 1"):
        analysis.interpolate(*(nn.Sequential(nn.ReLU(), layer) for layer in layers))


class Fresh(UserList):
    """Sequence that makes its batches on access, and counts those that exist."""

    def __getitem__(self, index):
        batch = super().__getitem__(index).clone(), torch.zeros(2, dtype=torch.int64)
        alive.add(batch[0])
        return batch


alive = weakref.WeakSet()


def test_a_string_holds_one_batch_at_a_time():
    held = []

    def loss(outputs, targets):
        held.append(len(alive))
        return cross_entropy(outputs, targets)

    ends, data = (nn.Linear(3, 4), nn.Linear(3, 4)), Fresh(torch.ones(5, 2, 3))
    list(analysis.interpolate(*ends, 3, "string", loss=loss, data=data, steps=12))
    assert len(held) == 12
    assert max(held) <= 2  # the next batch is made before the last one is freed


DATA = [(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"first": 3}, TypeError, "first: expected a module, got int"),
        ({"second": nn.Linear(3, 5)}, ValueError, r"second: .* shape \(5, 3\) for .* shape \(4, 3\) in weight"),
        ({"second": nn.Linear(3, 4, bias=False)}, ValueError, "second: .* got none for torch.float32 .* in bias"),
        ({"second": nn.Linear(3, 4).double()}, ValueError, "second: .* got torch.float64 .* for torch.float32 .*"),
        ({"points": 1}, ValueError, "points: expected at least 2, got 1"),
        ({"method": "curved"}, ValueError, "method: expected one of 'linear', 'string', 'outputs', got 'curved'"),
        ({"method": "string", "data": DATA}, TypeError, "loss: expected one for the method 'string'"),
        ({"method": "string", "loss": cross_entropy}, TypeError, "data: expected one for the method 'string'"),
        ({"method": "string", "loss": cross_entropy, "data": []}, ValueError, "data: expected at least one sample"),
        ({"steps": -1}, ValueError, "steps: expected at least 0, got -1"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate: expected a finite number"),
        ({"stiffness": 0.5}, ValueError, "stiffness: expected less than 0.5, got 0.5"),
    ],
    ids=range(12),
)
def test_bad_arguments_are_named_at_once(change, error, said):
    arguments = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 4)}
    if change.keys() & {"steps", "learning_rate", "stiffness"}:
        arguments |= {"method": "string", "loss": cross_entropy, "data": DATA}
    with pytest.raises(error, match=said):
        analysis.interpolate(**arguments | change)
