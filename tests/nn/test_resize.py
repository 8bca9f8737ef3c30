"""Growing and pruning layers during training, with the optimizers' states, and converting back to convolutions."""

import copy
import io
import pickle
import random
import tracemalloc

import pytest
import torch
from torch import nn

from loco_ext import optim
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, deviation
from tests.covering import covering
from tests.nn.cases import layer_class, random_conv, random_layer
from tests.tolerances import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

OPTIMIZERS = {
    "torch SGD": lambda params: torch.optim.SGD(params, 0.1),
    "torch SGD, momentum": lambda params: torch.optim.SGD(params, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    "torch Adam": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "torch RMSprop": lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.5, centered=True),
    "SGD": lambda params: optim.SGD(params, 0.1),
    "SGD, momentum": lambda params: optim.SGD(params, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda params: optim.Adam(params, 0.01, weight_decay=0.01, amsgrad=True),
    "AdamW, reference": lambda params: optim.AdamW(params, 0.01, fused=False),
}


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float64), (2, torch.float32)], ids=str)
def test_growth_changes_no_bit_of_the_output(seed, dtype):
    generator = random.Random(seed)
    for _ in range(20):
        layer, case = random_layer(generator, dtype)
        x = torch.randn(3, layer.in_channels, *case.input_size, dtype=dtype)
        y, blocks, parameter = layer(x), layer.pattern.nnz, layer.weight
        before = layer.weight.detach().clone()
        radius = generator.choice((0, 1, 2, max(case.input_size)))
        assert layer.grow(radius) is layer
        assert layer.weight is parameter
        assert layer.pattern.nnz == len(layer.weight) >= blocks
        if radius == max(case.input_size):
            assert layer.pattern.nnz == layer.pattern.n_in * layer.pattern.n_out
        assert same_bits(layer(x), y)
        if all(a == b for a, b in case.padding):
            assert deviation(layer).delta_locality == 0
        layer.prune(threshold=0.0)
        assert layer.pattern.nnz <= blocks
        assert same_bits(layer.weight[layer.weight != 0], before[before != 0])


@pytest.mark.parametrize(
    ("channels", "width", "kernel", "image", "batch"),
    [(64, 64, 3, (12, 12), 5), (16, 3, 5, (9, 7), 64), (3, 64, 3, 8, 1)],
)
def test_growth_of_layers_as_large_as_the_kernels_vectors_changes_no_bit(channels, width, kernel, image, batch):
    layer = LocallyConnected2d(channels, width, kernel, padding=1, input_size=image)
    x = torch.randn(batch, channels, *layer.input_size)
    y = layer(x)
    for radius in (1, 12):
        assert same_bits(layer.grow(radius)(x), y)


def make_training(name):
    torch.manual_seed(1)
    layer = LocallyConnected2d(2, 3, 3, padding=1, input_size=(6, 5), dtype=torch.float64)
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(90, 4, dtype=torch.float64))
    return model, OPTIMIZERS[name](model.parameters())


def train(model, optimizer, steps, keep=None):
    """Make steps whose images depend only on the step number; ``keep`` masks the gradient of the layer's blocks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 2, 6, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        if keep is not None:
            model[0].weight.grad.mul_(keep.view(-1, 1, 1, 1))
        optimizer.step()
    return loss  # holding it keeps the graph alive


def states_of(optimizer):
    return [state for param in optimizer.param_groups[0]["params"] for state in optimizer.state[param].values()]


def assert_same_training(one, other):
    for ours, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(states_of(one[1]), states_of(other[1]), strict=True):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_growth_in_training_is_as_if_the_new_blocks_had_been_there_and_not_been_trained(name):
    grown, full = make_training(name), make_training(name)
    full[0][0].grow(2, full[1])
    local = full[0][0].pattern.local_mask()
    scheduler, other = (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for _, optimizer in (grown, full))
    for steps in (range(3), range(3, 6)):
        kept = train(*grown, steps)
        train(*full, steps, local if steps.start == 0 else None)
        scheduler.step()
        other.step()
        if steps.start == 0:
            grown[0][0].grow(2, grown[1])
            assert not any(t.count_nonzero() for p in grown[1].param_groups[0]["params"][:1] for t in [p[~local]])
    assert kept.grad_fn is not None
    assert grown[0][0].weight[~local].count_nonzero()
    assert grown[1].param_groups[0]["lr"] == full[1].param_groups[0]["lr"]
    assert_same_training(grown, full)


# The states of all optimizers are resized alike.
SOME = ("torch SGD, momentum", "torch RMSprop", "Adam", "AdamW, reference")


@pytest.mark.parametrize("name", SOME)
def test_pruning_in_training_is_as_if_the_blocks_were_held_at_zero(name):
    pruned, full = make_training(name), make_training(name)
    for model, optimizer in (pruned, full):
        model[0].grow(1, optimizer)
        train(model, optimizer, range(3))
    keep = torch.rand(full[0][0].pattern.nnz) < 0.6
    pruned[0][0].prune(keep, optimizer=pruned[1])
    assert pruned[0][0].pattern.nnz == keep.sum()
    with torch.no_grad():
        full[0][0].weight[~keep] = 0
        for state in full[1].state[full[0][0].weight].values():
            if isinstance(state, torch.Tensor) and state.dim():
                state[~keep] = 0
    train(*pruned, range(3, 6))
    train(*full, range(3, 6), keep)
    full[0][0].prune(keep, optimizer=full[1])
    assert_same_training(pruned, full)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (LocallyConnected2d(2, 2, 3, padding=1, input_size=4) for _ in range(2))
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x).relu())


def loaded(model):
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    return fresh


def called_with_clones(model):
    clones = {name: parameter.clone() for name, parameter in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, clones, (x,))


ROUTES = {
    "itself": lambda model: model,
    "functional_call": called_with_clones,
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "dtype": lambda model: model.double().float(),
    "state_dict": loaded,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "export": lambda model: torch.export.export(model, (torch.ones(3, 2, 4, 4),)).module(),
}


@pytest.mark.parametrize(("route", "resized", "groups"), covering(ROUTES, ["one", "other"], [False, True]))
def test_layers_that_share_a_weight_share_its_blocks_before_they_run(route, resized, groups):
    model, x = Tied(), torch.randn(3, 2, 4, 4)
    if groups:
        optim.parameter_groups(model, weight_decay=0.1, locality=(0.5, 2.0))
    layer, local = getattr(model, resized), model.one.pattern.nnz
    layer.grow(1).prune(torch.arange(layer.pattern.nnz) >= layer.pattern.nnz - local)  # as many blocks, of other pixels
    with torch.no_grad():
        model.one.weight.normal_()
    result = ROUTES[route](model)(x)
    assert model.one.pattern is model.other.pattern
    apart = copy.deepcopy(model)
    apart.other.weight = nn.Parameter(apart.one.weight.detach().clone())
    apart.one.grow(1)
    assert apart.other.pattern.nnz == local == len(apart.other.weight) < apart.one.pattern.nnz
    dense = [getattr(model, name).to_dense() for name in ("one", "other")]
    torch.testing.assert_close(result, dense[1](dense[0](x.flatten(1)).relu()).view_as(x))


def test_a_weight_lends_its_blocks_for_a_call():
    layer, lent = (LocallyConnected2d(2, 2, 3, padding=1, bias=False, input_size=4) for _ in range(2))
    x, local = torch.randn(3, 2, 4, 4), layer.pattern.nnz
    before = layer(x)
    lent.grow(1).weight.data.normal_()
    assert same_bits(torch.func.functional_call(layer, dict(lent.named_parameters()), (x,)), lent(x))
    assert layer.pattern.nnz == local
    assert same_bits(layer(x), before)


def test_a_layer_made_in_inference_mode_stays_as_it_is():
    with torch.inference_mode():
        layer = LocallyConnected2d(2, 4, 3, padding=1, input_size=4)
    with pytest.raises(TypeError, match="weight: expected a parameter that can be trained"):
        layer.grow(1)
    assert layer.pattern.nnz == len(layer.weight)


def test_resizing_in_inference_mode_is_resizing():
    inside, outside = make_training("torch Adam"), make_training("torch Adam")
    for (model, optimizer), mode in ((inside, torch.inference_mode), (outside, torch.no_grad)):
        train(model, optimizer, range(2))
        with mode():
            model[0].grow(2, optimizer)
        train(model, optimizer, range(2, 4))
        with mode():
            model[0].prune(radius=1, optimizer=optimizer)
        train(model, optimizer, range(4, 6))
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model[0].prune(radius=0, optimizer=optimizer)
        with mode():
            model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        train(model, optimizer, range(6, 8))
    assert_same_training(inside, outside)


@pytest.mark.parametrize("name", SOME)
def test_a_checkpoint_of_a_grown_layer_goes_on_in_a_fresh_one(name):
    model, optimizer = make_training(name)
    train(model, optimizer, range(2))
    model[0].grow(1, optimizer).prune(torch.rand(model[0].pattern.nnz) < 0.8, optimizer=optimizer)
    train(model, optimizer, range(2, 4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    other, other_optimizer = make_training(name)
    parameter = other[0].weight
    train(other, other_optimizer, range(1))  # makes states of the old shape, which load_state_dict replaces
    other.load_state_dict(saved["model"])
    assert other[0].weight is parameter
    other_optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(4, 6))
    train(other, other_optimizer, range(4, 6))
    assert_same_training((other, other_optimizer), (model, optimizer))


UNTOLD = {name: make for name, make in OPTIMIZERS.items() if name not in ("torch SGD", "SGD")} | {
    "torch SGD, fused": lambda params: torch.optim.SGD(params, 0.1, 0.9, fused=True),
    "torch Adam, fused": lambda params: torch.optim.Adam(params, 0.01, fused=True),
    "torch Adagrad, fused": lambda params: torch.optim.Adagrad(params, 0.01, fused=True),
}


@pytest.mark.parametrize(("name", "way"), covering(UNTOLD, ["grow", "prune", "load"], strength=1))
def test_an_optimizer_that_was_not_told_fails_in_its_next_step(name, way):
    """The step fails before anything is written; torch's fused optimizers do not check sizes themselves."""
    model, _ = make_training("SGD")
    optimizer = UNTOLD[name](model.parameters())
    train(model, optimizer, range(2))
    other = copy.deepcopy(model)
    if way == "prune":
        model[0].prune(torch.arange(model[0].pattern.nnz) % 3 > 0)
    else:
        (other if way == "load" else model)[0].grow(1)
    if way == "load":
        model.load_state_dict(other.state_dict())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="optimizer: expected one that was given to grow and prune, got"):
        train(model, optimizer, range(1))
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["torch SGD", "SGD"])
def test_an_optimizer_without_states_need_not_be_told(name):
    model, optimizer = make_training(name)
    train(model, optimizer, range(2))
    model[0].grow(1)
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(2))
    assert (model[0].weight != before).any((1, 2, 3)).all()


def test_a_gradient_of_the_old_blocks_goes_and_a_backward_pass_through_them_is_an_error():
    layer, x = LocallyConnected1d(2, 3, 3, input_size=6), torch.randn(4, 2, 6)
    for change in (lambda: layer.grow(1), lambda: layer.prune(radius=0)):
        layer(x).sum().backward()
        y = layer(x.requires_grad_())
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        layer(x).sum().backward()
        assert layer.weight.grad.shape == layer.weight.shape


def test_what_may_not_be_resized_is_refused_and_left_alone():
    layer = LocallyConnected1d(2, 3, 3, input_size=6)
    layer(torch.randn(4, 2, 6)).sum().backward()
    adafactor = torch.optim.Adafactor(layer.parameters())
    adafactor.step()
    before = copy.deepcopy(layer)
    other_optimizer = torch.optim.SGD(before.parameters(), 0.1)
    wrong = r"prune: expected exactly one of keep, threshold and radius, got"
    for error, message, change in (
        (
            TypeError,
            r"optimizer: expected states of the shape of weight, .* got row_var",
            lambda: layer.grow(1, adafactor),
        ),
        (ValueError, "optimizer: expected the one that steps this layer's", lambda: layer.grow(1, other_optimizer)),
        (TypeError, "optimizer: expected None or a torch.optim.Optimizer, got list", lambda: layer.grow(1, [])),
        (ValueError, "radius: expected at least 0, got -1", lambda: layer.grow(-1)),
        (TypeError, "radius: expected an int, got 1.5", lambda: layer.prune(radius=1.5)),
        (TypeError, wrong, layer.prune),
        (TypeError, wrong, lambda: layer.prune(radius=0, threshold=0.1)),
        (TypeError, wrong, lambda: layer.prune(torch.ones(12, dtype=torch.bool), radius=1)),
        (ValueError, r"keep: expected shape \(12,\), one for", lambda: layer.prune(torch.ones(11, dtype=torch.bool))),
        (TypeError, "keep: expected a bool tensor", lambda: layer.prune(torch.ones(12))),
        (ValueError, "threshold: expected at least 0, got -1", lambda: layer.prune(threshold=-1)),
        (ValueError, "threshold: expected at least 0, got nan", lambda: layer.prune(threshold=float("nan"))),
        (TypeError, "threshold: expected a number, got '1'", lambda: layer.prune(threshold="1")),
    ):
        with pytest.raises(error, match=message):
            change()
    assert layer.pattern is before.pattern
    assert same_bits(layer.weight, before.weight)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("seed", range(2))
def test_pruning_by_radius_undoes_growth_and_leaves_gaps_as_they_are(seed):
    generator = random.Random(seed)
    for _ in range(20):
        conv, case = random_conv(generator)
        layer = layer_class(case).from_conv(conv, case.input_size)
        patterns = [layer.pattern, layer.grow(1).pattern, layer.grow(1).pattern]
        layer.grow(5)
        for radius in (2, 1, 0):
            layer.prune(radius=radius)
            assert torch.equal(layer.crow_indices, patterns[radius].crow_indices)
            assert torch.equal(layer.col_indices, patterns[radius].col_indices)
        assert layer.deviation() == pytest.approx((0, 0), abs=1e-12)
        local = layer.grow(2).pattern.local_mask()
        keep = torch.rand(layer.pattern.nnz) < 0.7
        expected = layer.pattern.prune(keep & local)[0]
        layer.prune(keep).prune(radius=0)
        assert torch.equal(layer.crow_indices, expected.crow_indices)
        assert torch.equal(layer.col_indices, expected.col_indices)


def test_pruning_by_a_large_radius_takes_memory_for_the_blocks_of_the_layer_alone():
    layer = LocallyConnected1d(1, 1, 3, padding=1, bias=False, input_size=2000)
    tracemalloc.start()
    try:
        layer.prune(radius=2000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layer.pattern.nnz == 3 * 2000 - 2
    assert peak < 100 * 8 * layer.pattern.nnz


def test_pruning_by_threshold_takes_weak_blocks_and_keeps_what_is_no_number():
    layer = LocallyConnected1d(2, 2, 1, input_size=4)
    with torch.no_grad():
        layer.weight[:] = torch.tensor([0.5, 1.0, 2.0, float("nan")]).view(4, 1, 1, 1)
    layer.prune(threshold=2.0)  # norms are 1, 2, 4 and NaN
    assert layer.col_indices.tolist() == [2, 3]
    assert layer.crow_indices.tolist() == [0, 0, 0, 1, 2]
    layer.prune(torch.zeros(2, dtype=torch.bool))
    assert same_bits(layer(torch.randn(3, 2, 4)), layer.bias.t().expand(3, 2, 4).contiguous())


def test_loading_names_what_does_not_fit():
    layer = LocallyConnected2d(2, 3, 3, input_size=6)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "crow_indices", "col_indices"}
    state["col_indices"] += 1  # a copy, not the layer's own
    assert layer.col_indices[0] == 0
    model = nn.Sequential(LocallyConnected2d(2, 3, 3, input_size=6))
    before = copy.deepcopy(model)

    def load(state, match, strict=True):
        with pytest.raises(RuntimeError, match=match):
            model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=strict)
        assert same_bits(model[0].weight, before[0].weight)
        assert model[0].pattern is before[0].pattern

    good, larger = (LocallyConnected2d(2, 3, 3, input_size=size).grow(1).state_dict() for size in (6, 7))
    load(larger, r"blocks of 0: crow_indices: expected 17, as in the layer, got shape \(26,\)")
    load({**good, "col_indices": good["col_indices"].flip(0)}, "blocks of 0: col_indices: expected each row to ascend")
    load({**good, "col_indices": good["col_indices"] + 30}, "blocks of 0: col_indices: expected input pixels from 0")
    fewer = r"blocks of 0: weight: expected 324 blocks, as the indices say, of shape \(1, 2, 3\), got"
    load({**good, "weight": good["weight"][1:]}, fewer)
    load({**good, "weight": good["weight"][:, :, :1]}, fewer)
    load({k: v for k, v in good.items() if k != "weight"}, fewer + " none")
    load({**good, "weight": good["weight"].to("meta")}, "blocks of 0: Cannot copy out of meta tensor")
    load({k: v for k, v in good.items() if "indices" not in k}, "Missing key.*0.crow_indices")
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0.kernel\"\. $"):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in {**good, "kernel": good["bias"]}.items()})
