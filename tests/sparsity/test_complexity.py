"""The complexity of eq. 34 against explicit sums over whole networks, and its penalties layer by layer."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from loco_ext import geometry, optim, sparsity
from tests.compaction.cases import Network
from tests.tolerances import EQ_34_OBJECTIVE, same_bits

STRENGTH = 0.25
EXPONENTS = {"plain": 0.0, "normalized": -0.5, "scaled": 0.5}


def lengths(weight, norm="l2"):
    """Return the norm of each filter, or of each filter's masked group."""
    flat = weight.flatten(1)
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def squared_sizes(weight, kind="half", weighting="plain", norm="l2"):
    """Return the sum over j of s'_ij^2, eq. 21, by masks."""
    index = geometry.ring_index(tuple(weight.shape[2:]), kind)
    sizes = 0.0
    for n in range(int(index.max()) + 1):
        number = int((index <= n).sum()) * weight.shape[1]
        sizes = sizes + number ** EXPONENTS[weighting] * lengths(weight * (index <= n), norm)
    return sizes.square().sum()


def assert_gradient_of_sum(model, penalties, total):
    """Assert that the gradient of the layers' summed values is that of ``total``, for all layers at once."""
    weights = [model.get_submodule(name).weight for name in penalties]
    ours = sum(p.value(w) for p, w in zip(penalties.values(), weights, strict=True))
    torch.testing.assert_close(*(torch.autograd.grad(each, weights) for each in (ours, total)))


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "full", "weighting": "normalized"}, {"norm": "linf", "weighting": "scaled"}], ids=str
)
def test_all_layers_together_have_the_gradient_of_eq_34(settings):
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.Tanh(), nn.Conv2d(4, 2, 1)),
    ).double()
    penalties = sparsity.complexity_penalties(model, (torch.zeros(3, 3, 31, 23).double(),), STRENGTH, **settings)
    assert list(penalties) == ["0", "4", "6"]
    norm = settings.get("norm", "l2")
    for scale in (1.0, 0.3):  # the penalties follow the weights
        model[4].weight.data *= scale
        first, second, third = (model[i].weight for i in (0, 4, 6))
        total = STRENGTH * (
            14 * 10 * 3 * squared_sizes(first, **settings)
            + 7 * 5 * lengths(first, norm).sum() * squared_sizes(second, **settings)
            + 7 * 5 * lengths(second, norm).sum() * squared_sizes(third, **settings)
        )
        assert_gradient_of_sum(model, penalties, total)


class Branches(nn.Module):
    """Network with a residual, a concatenation, groups, a layer that runs twice, and channels no convolution makes.

    Its code branches on sizes.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 3, padding=1)
        self.inner = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(4)
        self.twice = nn.Conv1d(4, 4, 1)
        self.wide = nn.Conv1d(14, 6, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(6, 5, 2)
        self.after = nn.Conv1d(5, 3, 3)

    def forward(self, x):
        a = self.stem(x if x.shape[1] == 2 else x[:, :2])
        b = relu(self.norm(self.inner(a))) + a
        c = self.twice(self.twice(b))
        d = self.wide(torch.cat([c, b, x, c], dim=1))
        return self.after(self.up(d))

    def eq_34(self):
        stem, inner, twice, wide, after = (
            module.weight for module in (self.stem, self.inner, self.twice, self.wide, self.after)
        )
        added = lengths(torch.cat([inner.flatten(1), stem.flatten(1)], 1)).sum()
        return STRENGTH * (
            16 * 2 * squared_sizes(stem)
            + 16 * lengths(stem).sum() / 2 * squared_sizes(inner)
            + 16 * (added + lengths(twice).sum()) * squared_sizes(twice)
            + 16 * (2 * lengths(twice).sum() + added + 2) / 2 * squared_sizes(wide)
            + 15 * 5 * squared_sizes(after)
        )


def test_residual_connections_concatenations_groups_and_repetitions():
    model = Branches().double()
    penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 2, 16).double(),), STRENGTH)
    assert set(penalties) == {"stem", "inner", "twice", "wide", "after"}
    assert_gradient_of_sum(model, penalties, model.eq_34())
    model.inner.weight.data[1] = model.stem.weight.data[1] = 0
    assert all(penalties[name].filter_strengths[1] > 0 for name in ("inner", "stem"))
    model.stem.weight.data[1] = 1
    assert penalties["inner"].filter_strengths[1] == 0  # the channel is alive without it


def between(operation):
    """Return two convolutions of four channels, an operation on their results, and a convolution that reads it."""
    layers = {"a": nn.Conv2d(2, 4, 1), "b": nn.Conv2d(2, 4, 1), "read": nn.Conv2d(4, 3, 1)}
    return Network(lambda net, x: net.read(operation(net.a(x), net.b(x))), **layers)


@pytest.mark.parametrize(
    ("producers", "operation"),
    [
        ("a", lambda a, b: b.mean((2, 3), keepdim=True).sigmoid() * a),
        ("a", lambda a, b: a * b.mean((2, 3), keepdim=True).sigmoid()),
        ("b", lambda a, b: b / (1 + a.square().sum((2, 3), keepdim=True))),
        ("ab", lambda a, b: a - b),
        ("ab", lambda a, b: torch.lerp(a, b, 0.3)),
        ("ab", torch.maximum),
        ("a", lambda a, b: torch.where(a > 0, a, 0.1 * a)),
        ("a", lambda a, b: a.flip(2).transpose(2, 3).permute(0, 1, 3, 2).relu()),
        ("", lambda a, b: a.flip(1)),
        ("", lambda a, b: torch.flip(a, (-3,))),
        ("", lambda a, b: a.flip(a.dim() - 2)),
        ("", lambda a, b: a.roll(1, 1)),
        ("", lambda a, b: a.transpose(1, 2)),
        ("", lambda a, b: a.permute(0, 2, 1, 3)),
        ("", lambda a, b: torch.nn.functional.channel_shuffle(a, 2)),
        ("", lambda a, b: torch.cat(a.chunk(2, 1), 1)),
        ("", lambda a, b: a[:, [3, 2, 1, 0]]),
        ("", lambda a, b: a.index_select(1, torch.arange(4))),
        ("a", lambda a, b: a[:, :, 1:, ::2]),
        ("", lambda a, b: torch.nn.functional.conv2d(a, torch.ones(4, 4, 1, 1))),
    ],
)
def test_a_channel_has_the_norm_of_what_produces_it(producers, operation):
    penalties = sparsity.complexity_penalties(between(operation), (torch.zeros(1, 2, 4, 4),), 1.0)
    (read,) = [call for call in penalties["read"].network.calls if call.layer == "read"]
    assert sorted(name for name, _, _ in read.channels.writers) == list(producers)
    assert read.channels.constant.tolist() == [0.0 if producers else 1.0] * 4


def test_the_prox_is_the_minimum_over_one_layer():
    """Subgradient descent from the prox, with small steps, finds nothing lower."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3, padding=1)).double()
    penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 2, 6, 6).double(),), 1e-3)
    weight = model[0].weight.detach()
    metric = torch.rand_like(weight) + 0.5

    def objective(w):
        own = 16 * 2 * squared_sizes(w) + 16 * lengths(w).sum() * squared_sizes(model[1].weight.detach())
        return (metric * (w - weight).square()).sum() / 2 + 0.7e-3 * own

    x = penalties["0"].prox(weight, 0.7, metric).requires_grad_()
    assert 0 < (x == 0).sum() < x.numel() or bool(x.all())
    best = objective(x)
    (gradient,) = torch.autograd.grad(best, x)
    for step in (1e-4, 1e-6):
        assert objective((x - step * gradient * (x != 0)).detach()) >= best - 1e-12 * best.abs()
        for seed in range(4):
            off = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            assert objective((x + step * off).detach()) >= best - 1e-12 * best.abs()


def two_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(4, 3, 3, padding=1, bias=False)).double()
    for conv in model:
        size = torch.linspace(0.1, 1, len(conv.weight)).view(-1, 1, 1, 1)
        conv.weight.data = torch.randn_like(conv.weight.detach()) * size
    return model, [conv.weight.detach().clone() for conv in model]


def whole_objective(model, targets, strength):
    loss = sum((conv.weight - target).square().sum() / 2 for conv, target in zip(model, targets, strict=True))
    first, second = (conv.weight for conv in model)
    return loss + strength * (16 * 2 * squared_sizes(first) + 16 * lengths(first).sum() * squared_sizes(second))


def test_coordinate_descent_does_not_beat_the_optimizer():
    """The loss is quadratic in each layer; coordinate descent minimises over one layer after the other."""
    strength, images = 2e-4, (torch.zeros(1, 2, 6, 6).double(),)
    model, targets = two_layers()
    penalties = sparsity.complexity_penalties(model, images, strength)
    optimizer = optim.SGD(optim.parameter_groups(model, 0.0, penalty=penalties), 0.3, momentum=0.5)
    for _ in range(150):
        optimizer.zero_grad()
        sum((conv.weight - target).square().sum() / 2 for conv, target in zip(model, targets, strict=True)).backward()
        optimizer.step()
    by_blocks, _ = two_layers()
    of_blocks = sparsity.complexity_penalties(by_blocks, images, strength)
    for _ in range(20):
        for name, target in zip(of_blocks, targets, strict=True):
            conv = by_blocks.get_submodule(name)
            conv.weight.data = of_blocks[name].prox(target, 1.0)
    ours, theirs = (whole_objective(each, targets, strength).item() for each in (model, by_blocks))
    start = whole_objective(two_layers()[0], targets, strength).item()
    assert theirs < 0.95 * start
    assert ours <= theirs * (1 + EQ_34_OBJECTIVE)
    assert not bool(model[0].weight.all())  # some rings are zero


def test_dead_channels_cost_nothing_and_numbers_that_are_none_count_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model[0].weight.data[1:] = 0
    penalties = sparsity.complexity_penalties(model, torch.zeros(2, 3, 9, 9), 1.0)
    assert penalties["2"].strength == pytest.approx(25 * model[0].weight[0].detach().norm().item())
    model[0].weight.data[2] = torch.nan
    assert penalties["2"].strength == pytest.approx(25 * model[0].weight[0].detach().norm().item())


def test_a_model_whose_convolutions_are_no_modules():
    exported = torch.export.export(nn.Sequential(nn.Conv2d(1, 2, 3)), (torch.zeros(1, 1, 5, 5),)).module()
    with pytest.raises(ValueError, match=r"model: expected convolutions that torch\.fx traces as modules, got none"):
        sparsity.complexity_penalties(exported, torch.zeros(1, 1, 5, 5), 1.0)


class AsksForTensors(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x) if isinstance(x, torch.Tensor) else x


def test_a_model_whose_graph_would_leave_out_a_layer():
    model = AsksForTensors(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1))
    with pytest.raises(ValueError, match=r"model: expected one .* whose graph lacks a call of '1'"):
        sparsity.complexity_penalties(model, torch.ones(1, 1, 5, 5), 1.0)


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Conv2d(2, 2, 3))
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sparsity.complexity_penalties(model, (torch.randn(2, 1, 9, 9),), 1.0)
    assert [module.training for module in model] == [True, False, True, True]
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def make_training():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.ConvTranspose2d(2, 1, 3))
    penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 1, 9, 9),), 1e-4)
    return model, optim.Adam(optim.parameter_groups(model, 0.0, penalty=penalties), lr=1e-2)


def steps(model, optimizer, begin, end):
    for step in range(begin, end):
        images = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_all_strengths_are_those_ahead_of_the_step(options):
    """A copy of the model is stepped without a penalty, then shrunk by hand, also in steps that repeat."""
    model, optimizer = make_training()
    optimizer.param_groups[0].update(options)
    for step in range(3):
        plain = copy.deepcopy(model)
        other = optim.Adam(optim.parameter_groups(plain, 0.0), lr=1e-2)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        other.load_state_dict({"state": state, "param_groups": other.state_dict()["param_groups"]})
        penalties = optimizer.param_groups[0]["penalty"]
        before = [None if penalty is None else (penalty.strength, penalty.filter_strengths) for penalty in penalties]
        steps(model, optimizer, step, step + 1)
        steps(plain, other, step, step + 1)
        for name, penalty, strengths in zip(("0", "2"), penalties, before, strict=False):
            weight = plain.get_submodule(name).weight
            state = other.state[weight]
            metric = (state["exp_avg_sq"].sqrt() / (1 - 0.999 ** state["step"].item()) ** 0.5 + 1e-8) / 1e-2
            expected = penalty._shrink(weight.detach(), 1.0, metric, *strengths)
            torch.testing.assert_close(model.get_submodule(name).weight.detach(), expected)


def test_a_run_that_is_resumed_goes_on_to_the_same_bits():
    whole, optimizer = make_training()
    steps(whole, optimizer, 0, 4)
    half, optimizer = make_training()
    steps(half, optimizer, 0, 2)
    file = io.BytesIO()
    torch.save((half.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed, optimizer = make_training()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    steps(resumed, optimizer, 2, 4)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected an optimizer with a ComplexityPenalty where the checkpoint has one"):
        optim.Adam(optim.parameter_groups(resumed, 0.0), lr=1e-2).load_state_dict(state)


def test_another_model_than_the_penalties_is_an_error():
    model, optimizer = make_training()
    penalties = dict(zip(("0", "2"), optimizer.param_groups[0]["penalty"], strict=False))
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="expected the weight of the model's '0' that complexity_penalties was given"):
        optim.SGD(optim.parameter_groups(other, 0.0, penalty=penalties), lr=0.1)
    with pytest.raises(ValueError, match=r"weight: expected shape \(4, 1, 3, 3\) as '0', got \(2, 4, 3, 3\)"):
        penalties["0"].value(model[2].weight)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strength": -1.0}, ValueError, "strength: expected a finite number of at least 0"),
        ({"strength": "1"}, TypeError, "strength: expected a number"),
        ({"strength": 1.0, "kind": "third"}, ValueError, "kind: expected one of 'half', 'full'"),
        ({"strength": 1.0, "power": 1}, TypeError, "power"),
        ({"example_inputs": 5, "strength": 1.0}, TypeError, "example_inputs: expected a tensor, or a tuple with one"),
        ({"example_inputs": torch.zeros(1, 5, 5), "strength": 1.0}, ValueError, r"expected a batch, got one sample.*$"),
    ],
)
def test_a_bad_argument_is_a_typed_error(arguments, error, message):
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(error, match=message):
        sparsity.complexity_penalties(model, **{"example_inputs": torch.zeros(1, 1, 5, 5), **arguments})


def test_a_convolution_alone_is_refused():
    with pytest.raises(ValueError, match="model: expected a network, got a single Conv2d"):
        sparsity.complexity_penalties(nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 5, 5), 1.0)


def test_a_model_that_cannot_be_traced_is_an_error_and_keeps_its_modes():
    model = Network(lambda net, x: x if x.sum() > 0 else -x)
    with pytest.raises(ValueError, match=r"model: expected one that torch\.fx can trace"):
        sparsity.complexity_penalties(model, (torch.zeros(1),), 1.0)
    assert model.training
