"""Tests of stepping blocks during backward: optimizer.step()'s bits, without storing the blocks' gradients."""

import copy
import importlib
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from bench import harness
from loco_ext import ops, optim
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d
from loco_ext.sparsity import RingPenalty
from tests.covering import covering, slow
from tests.optim.stepping import through_a_file
from tests.tolerances import same_bits

block_sparse = importlib.import_module("loco_ext.ops.block_sparse")

OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, "norm": "l1"}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": torch.tensor(0.01)}),
    "reference": (optim.AdamW, {"lr": 0.01, "fused": False}),
}


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use parts of a few blocks; the number of blocks in a row is not a multiple of a part's."""
    monkeypatch.setattr(block_sparse, "_CPU_PART", 500)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    grown = LocallyConnected2d(3, 8, 3, padding=1, input_size=6).grow(2)
    grouped = LocallyConnected2d(8, 4, 3, stride=2, groups=2, bias=False, input_size=6)
    return nn.Sequential(grown, nn.ReLU(), grouped, nn.Flatten(), nn.Linear(16, 3)).to(dtype)


def batches(dtype: torch.dtype = torch.float32, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 3, 6, 6, generator=generator).to(dtype), torch.randint(3, (5,), generator=generator))
        for _ in range(count)
    ]


def train(model, optimizer, data) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def results(model, optimizer) -> list[torch.Tensor]:
    states = [state for p in model.parameters() for state in optimizer.state[p].values()]
    return [*model.parameters(), *(state for state in states if isinstance(state, torch.Tensor))]


def make(name, dtype=torch.float32, in_backward=True, **more):
    model = make_model(dtype)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(optim.parameter_groups(model, 0.1, locality=(0.5, 2.0)), **options | more)
    return model, optimizer, optim.step_in_backward(optimizer, model) if in_backward else None


def assert_steps_alike(run, name="nesterov", dtype=torch.float32) -> None:
    """Assert that ``run(model, optimizer, steps)`` ends with the bits of ordinary steps, where ``steps`` is None."""
    found = []
    for in_backward in (True, False):
        model, optimizer, steps = make(name, dtype, in_backward)
        run(model, optimizer, steps)
        found.append(results(model, optimizer))
    assert all(map(same_bits, *found))
    assert not same_bits(found[0][0], make_model(dtype)[0].weight)


@pytest.mark.parametrize(
    ("name", "dtype"), covering(OPTIMIZERS, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
def test_weights_and_states_are_those_of_ordinary_steps(name, dtype):
    def run(model, optimizer, steps):
        train(model, optimizer, batches(dtype))
        assert (model[0].weight.grad is None) == (steps is not None)

    assert_steps_alike(run, name, dtype)


def train_checkpointed(model, optimizer, data, reentrant) -> None:
    for x, y in data:
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(model[:3], x.requires_grad_(), use_reentrant=reentrant)
        nn.functional.cross_entropy(model[3:](hidden), y).backward()
        optimizer.step()


def train_in(context, model, optimizer, data) -> None:
    with context():
        train(model, optimizer, data)


LOOPS = {
    "compiled": lambda model, *rest: train(torch.compile(model, backend="eager"), *rest),
    "checkpointed": partial(train_checkpointed, reentrant=False),
    "checkpointed, reentrant": partial(train_checkpointed, reentrant=True),
    "autocast": partial(train_in, partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    "channels last": lambda model, optimizer, data: train(
        model, optimizer, [(x.contiguous(memory_format=torch.channels_last), y) for x, y in data]
    ),
    "reference": partial(train_in, partial(ops.backend, "reference")),
}


@pytest.mark.parametrize("loop", [slow(loop) if loop == "compiled" else loop for loop in LOOPS])
def test_training_loops_of_all_kinds_are_those_of_ordinary_steps(loop):
    assert_steps_alike(lambda model, optimizer, steps: LOOPS[loop](model, optimizer, batches()), "nesterov")


def test_schedules_growth_and_removal_between_steps():
    def run(model, optimizer, steps):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for turn, data in enumerate(batches()):
            train(model, optimizer, [data])
            schedule.step()
            if turn == 0:
                model[0].grow(2, optimizer)
            if turn == 1:
                model[0].prune(radius=1, optimizer=optimizer)
            if turn == 2 and steps is not None:
                assert model[0].weight.grad is None
                steps.remove()
                steps.remove()
        assert model[0].weight.grad is not None

    assert_steps_alike(run, "Adam")


def test_a_checkpoint_goes_on():
    model, optimizer, _ = make("nesterov")
    train(model, optimizer, batches()[:2])
    resumed, other, _ = make("nesterov")
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((model, optimizer), (resumed, other)):
        train(*each, batches()[2:])
    assert all(map(same_bits, results(model, optimizer), results(resumed, other)))


def test_copies_have_gradients():
    model, _, _ = make("SGD")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(batches()[0][0]).sum().backward()
        assert other[0].weight.grad is not None
        assert same_bits(other[0].weight, model[0].weight)


@pytest.mark.slow
def test_the_gradient_takes_little_memory(monkeypatch):
    monkeypatch.undo()
    extra = harness.in_fresh_process(growth_in_backward)
    if extra is None:
        pytest.skip("this system does not tell a process' peak memory")
    assert extra["in backward"] < 0.4 < 0.95 < extra["ordinary"]


def growth_in_backward() -> dict[str, float] | None:
    """Return the peak memory of a backward as a multiple of the values' size: 256 MiB of values, parts of 8 MiB."""
    layer = LocallyConnected2d(32, 32, 3, padding=1, input_size=16).grow(16)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 32, 16, 16).to(memory_format=torch.channels_last)
    steps = optim.step_in_backward(optimizer, layer)
    extra = {}
    for name in ("in backward", "ordinary"):
        layer(x).sum().backward()
        optimizer.zero_grad()
        found = harness.peak_extra_memory(layer(x).sum().backward)
        if found is None:
            return None
        extra[name] = found / (4 * layer.weight.numel())
        steps.remove()
    return extra


REFUSED = [
    (lambda model: torch.optim.SGD(model.parameters()), TypeError, "optimizer: expected an SGD, Adam or AdamW of loco"),
    (lambda model: optim.SGD(model[2].parameters()), ValueError, "optimizer: expected one that has the weights"),
    (lambda model: optim.SGD(model.parameters(), foreach=True), ValueError, "foreach, differentiable: expected None"),
    (lambda model: optim.SGD(model.parameters(), stochastic_rounding=1), ValueError, "stochastic_rounding: expected"),
    (
        lambda model: optim.SGD(model.parameters(), penalty=[RingPenalty(1e-3), *[None] * 4]),
        ValueError,
        "penalty: expected",
    ),
]


def test_what_is_refused():
    model = make_model()
    for make_optimizer, error, said in REFUSED:
        with pytest.raises(error, match=said):
            optim.step_in_backward(make_optimizer(model), model)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="model: expected a module with locally connected layers, found none"):
        optim.step_in_backward(sgd, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model: expected a module, got int"):
        optim.step_in_backward(sgd, 3)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(ValueError, match=r"0.weight: expected no gradient yet"):
        optim.step_in_backward(sgd, model)
    model[0].weight.grad = None
    optim.step_in_backward(sgd, model)
    with pytest.raises(ValueError, match="0: expected a layer whose steps are not in backward already"):
        optim.step_in_backward(sgd, model)
    with pytest.raises(TypeError, match="consume: expected None or a callable, got int"):
        ops.block_sparse_matmul(torch.randn(3, 36, 3), model[0].weight, model[0].pattern, consume=3)


def test_what_is_refused_later():
    model, optimizer, _ = make("SGD")
    ((x, _),) = batches(count=1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="consume or step_in_backward: expected a backward without create_graph"):
        torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True, allow_unused=True)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"consume: expected a call that torch\.compile leaves alone"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(RuntimeError, match="expected one process, as no gradients are averaged"):
            model(x).sum().backward()
    optimizer.param_groups[0]["foreach"] = True
    with pytest.raises(ValueError, match="foreach, differentiable: expected None or False"):
        model(x).sum().backward()
    optimizer.param_groups[0]["foreach"] = None
    assert all(map(same_bits, before, model.parameters()))


@pytest.mark.parametrize("foreach", [None, True], ids=["kernels", "torch"])
def test_a_grad_scaler_is_seen_whatever_steps_the_other_groups(foreach):
    model = make_model()
    values = [model[0].weight, model[2].weight]
    others = [p for p in model.parameters() if all(p is not other for other in values)]
    optimizer = optim.SGD([{"params": values}, {"params": others, "foreach": foreach}], lr=0.1)
    optim.step_in_backward(optimizer, model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batches()[0][0]).sum()).backward()
    with pytest.raises(RuntimeError, match="expected gradients without a GradScaler's factor"):
        scaler.step(optimizer)


def test_gradients_of_the_input_alone_step_nothing():
    model, _, _ = make("SGD")
    ((x, _),) = batches(count=1)
    before = [p.detach().clone() for p in model.parameters()]
    x.requires_grad_()
    model(x).square().sum().backward(inputs=[x])
    for network in (model, make_model()):
        (found,) = torch.autograd.grad(network(x).square().sum(), x)
        assert same_bits(found, x.grad)
    assert all(map(same_bits, before, model.parameters()))


def test_other_values_in_a_layers_place_have_gradients():
    model, _, _ = make("SGD")
    ((x, _),) = batches(count=1)
    layer, before = model[0], model[0].weight.detach().clone()
    other = before.clone().requires_grad_()
    torch.func.functional_call(layer, {"weight": other}, (x,)).sum().backward()
    assert other.grad is not None
    assert same_bits(layer.weight, before)
    layer.weight = nn.Parameter(before.clone())
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_a_loss_that_uses_the_values_otherwise_is_refused():
    model, optimizer, _ = make("SGD")
    ((x, y),) = batches(count=1)
    (nn.functional.cross_entropy(model(x), y) + model[2].weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="expected weights that the loss depends on by their layer alone"):
        optimizer.step()


def test_states_of_another_size_are_refused_before_anything_is_written():
    for change in (lambda layer: layer.grow(1), lambda layer: layer.prune(radius=1)):
        model, optimizer, _ = make("nesterov")
        train(model, optimizer, batches(count=1))
        change(model[0])
        before = model[0].weight.detach().clone()
        with pytest.raises(RuntimeError, match="optimizer: expected one that was given to grow and prune"):
            model(batches()[0][0]).sum().backward()
        assert same_bits(model[0].weight, before)


def test_a_layer_without_blocks_steps_its_bias():
    model, optimizer, _ = make("Adam")
    model[0].prune(keep=torch.zeros(model[0].pattern.nnz, dtype=torch.bool), optimizer=optimizer)
    before = model[0].bias.detach().clone()
    train(model, optimizer, batches())
    assert len(model[0].weight) == 0
    assert not torch.equal(model[0].bias, before)


def segment(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


USES = {
    "plainly": (nullcontext, lambda layer, x: layer(layer(x))),
    "under autocast": (partial(torch.autocast, "cpu", dtype=torch.bfloat16), lambda layer, x: layer(layer(x))),
    "saved on the CPU": (torch.autograd.graph.save_on_cpu, lambda layer, x: layer(layer(x))),
    "in one checkpoint": (nullcontext, lambda layer, x: segment(lambda t: layer(layer(t)), x)),
    "in two": (nullcontext, lambda layer, x: segment(layer, segment(layer, x))),
}


@pytest.mark.parametrize(("context", "use"), USES.values(), ids=USES)
def test_a_layer_used_twice_is_stepped_once_at_most(context, use):
    layer = LocallyConnected1d(2, 2, 3, padding=1, input_size=5)
    optim.step_in_backward(optim.SGD(layer.parameters(), lr=0.1), layer)
    with context():
        y = use(layer, torch.randn(1, 2, 5, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|got a second use"):
        y.sum().backward()


def test_consume_is_given_each_block_once():
    layer = make_model()[0]
    x = torch.randn(3, 36, 3)
    taken = []
    y = ops.block_sparse_matmul(x, layer.weight, layer.pattern, consume=lambda parts: taken.extend(parts))
    y.square().sum().backward()
    assert layer.weight.grad is None
    assert len(taken) > 5
    assert [blocks.stop for blocks, _ in taken[:-1]] == [blocks.start for blocks, _ in taken[1:]]
    ops.block_sparse_matmul(x, layer.weight, layer.pattern).square().sum().backward()
    assert same_bits(torch.cat([gradient for _, gradient in taken]), layer.weight.grad)
