"""Tests of StepCache: whatever happens between steps, an optimizer steps like one that collects all tensors anew."""

import copy
import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loco_ext
from loco_ext import optim, sparsity
from loco_ext.geometry import BlockPattern
from loco_ext.geometry.attached_pattern import attach_pattern
from loco_ext.ops import backends
from tests.covering import covering
from tests.optim.stepping import params_of, set_gradients, train
from tests.triton_runs import let_triton_serve_cpus, needs_triton

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "SGD without momentum": {"lr": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adam with a penalty": {"lr": 0.01, "penalty": sparsity.RingPenalty(0.1)},
    "SGD of two rules": {"lr": 0.1, "momentum": 0.9},
}
SHAPES = {5: (3, 2, 5, 5), 3: (3, 2, 3, 3)}
LIBRARIES = ("cpu", "cuda_on_cpu")


def make(name):
    """Return a model and its optimizer of two groups, each with a decay map."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "weight_decay": 0.3}]
    if "two rules" in name:
        groups[1] |= {"momentum": 0.0, "maximize": True}
    options = {"weight_decay": 0.1, "locality": (0.5, 2.0), **OPTIONS[name]}
    return model, getattr(optim, name.split()[0])(groups, **options)


def step(optimizer):
    """Make a step and return the type of the error that it raises, or None."""
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)
    return None


def first(optimizer):
    return optimizer.param_groups[0]["params"][0]


def states_of_first(optimizer):
    """Return the states of the first parameter; an empty dict if it has none."""
    return optimizer.state.get(first(optimizer), {})


def moments(optimizer):
    """Return the names and tensors of the first parameter's states, without its step count."""
    return [(name, value) for name, value in states_of_first(optimizer).items() if name != "step"]


# ---- events: each takes a model and its optimizer; the gradients of the next step are set


def swapping_tensors(model, optimizer):
    p = first(optimizer)
    grad, p.grad = p.grad, None
    torch.utils.swap_tensors(p, nn.Parameter(p.detach() + 1))
    p.grad = grad


def data(change):
    """Return an event that gives the first parameter the data ``change(its data)``."""

    def event(model, optimizer):
        first(optimizer).data = change(first(optimizer).detach())

    return event


def irregular(tensor):
    return tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def data_of_another_shape(model, optimizer):
    data_of_another_shape_alone(model, optimizer)
    for name, value in moments(optimizer):
        optimizer.state[first(optimizer)][name] = torch.zeros(SHAPES[5]) + value.mean()


def data_of_another_shape_alone(model, optimizer):
    first(optimizer).grad = None
    first(optimizer).data = torch.linspace(0, 1, 150).view(SHAPES[5])
    first(optimizer).grad = torch.ones(SHAPES[5])


def bias_that_becomes_a_kernel(model, optimizer):
    bias = model[0].bias
    bias.grad = None
    bias.data = torch.linspace(0, 1, 54).view(SHAPES[3])
    bias.grad = torch.ones(SHAPES[3])
    optimizer.state.pop(bias, None)


def storage(tensors_of, nbytes=0):
    """Return an event that makes the storage of ``tensors_of(optimizer)`` smaller."""

    def event(model, optimizer):
        for tensor in tensors_of(optimizer):
            tensor.untyped_storage().resize_(nbytes)

    return event


def gradient(make):
    """Return an event that gives the first parameter the gradient ``make(model, optimizer)``."""

    def event(model, optimizer):
        first(optimizer).grad = make(model, optimizer)

    return event


def no_gradient_in_a_group(model, optimizer):
    model[1].weight.grad = None


def shared_gradient(model, optimizer):
    """The gradients of two parameters overlap."""
    model[1].weight.grad = torch.ones_like(model[1].weight)
    first(optimizer).grad = model[1].weight.grad.flatten()[4:58].view(SHAPES[3])


def shared_gradient_of_a_scaled_step(model, optimizer):
    """Steps that divide gradients by their scale write them."""
    scaler(0.0)(model, optimizer)
    optimizer.step()
    optimizer.step()
    shared_gradient(model, optimizer)


def gradients_in_one_buffer(model, optimizer):
    params = params_of(optimizer)
    buffer = torch.cat([p.grad.flatten() for p in params])
    for p, part in zip(params, buffer.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)


def scaler(found_inf):
    def event(model, optimizer):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found_inf)

    return event


def transposed_states(model, optimizer):
    for _, value in moments(optimizer):
        value.data = value.transpose(2, 3)


def states_of_other_memory(model, optimizer):
    """Give the states new memory in the same tensors, as moving them to another device and back does."""
    optimizer.old_memory = []  # it stays allocated, so that writing to it goes unpunished
    for states in optimizer.state.values():
        for value in states.values():
            optimizer.old_memory.append(value.detach())
            value.data = value + 1


def states_of_half_the_width(model, optimizer):
    """Make the states bfloat16 in the same memory, with the same shapes and strides."""
    for name, value in moments(optimizer):
        value.view(torch.int32).bitwise_and_(0x3FFF3FFF)
        narrow = value.view(torch.bfloat16).flatten()[: value.numel()].view(value.shape)
        optimizer.state[first(optimizer)][name] = narrow


def replaced_states(model, optimizer):
    if first(optimizer) in optimizer.state:
        optimizer.state[first(optimizer)] = {name: value + 1 for name, value in states_of_first(optimizer).items()}


def replaced_tensors_of_states(model, optimizer):
    for name, value in states_of_first(optimizer).items():
        states_of_first(optimizer)[name] = value + 1


def state_of_another(model, optimizer):
    """The dicts of states stay, in the same order, but one belongs to another parameter."""
    last = params_of(optimizer)[-1]
    if last in optimizer.state:
        optimizer.state[nn.Parameter(torch.ones(()))] = optimizer.state.pop(last)


def exchanged_states(model, optimizer):
    """Two parameters of one shape exchange their states."""
    a, b = (p for p in params_of(optimizer) if p.dim() == 1)
    state = optimizer.state
    if a in state:
        state[a], state[b] = state[b], state[a]


def no_buffer(model, optimizer):
    if "momentum_buffer" in states_of_first(optimizer):
        optimizer.state[first(optimizer)]["momentum_buffer"] = None


def loaded_state(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for states in state["state"].values():
        for value in states.values():
            value.add_(1)
    optimizer.load_state_dict(state)


def new_parameter():
    p = nn.Parameter(torch.ones(SHAPES[3]))
    p.grad = torch.ones(SHAPES[3])
    return p


def replaced_parameter(model, optimizer):
    optimizer.param_groups[0]["params"][0] = new_parameter()


def stochastic_rounding(model, optimizer):
    for p in model.parameters():
        grad, p.grad = p.grad, None
        p.data, p.grad = p.detach().bfloat16(), grad.bfloat16()
    for group in optimizer.param_groups:
        group["stochastic_rounding"] = 1


EVENTS = {
    "nothing": lambda model, optimizer: None,
    "moving to double": lambda model, optimizer: model.double(),
    "data of other memory": data(lambda p: p.clone(memory_format=torch.channels_last)),
    "transposed data": data(lambda p: p.transpose(2, 3)),
    "irregular data": data(irregular),
    "freed parameter": storage(lambda optimizer: [first(optimizer)]),
    "freed states": storage(lambda optimizer: states_of_first(optimizer).values()),
    "shortened gradient": storage(lambda optimizer: [first(optimizer).grad], nbytes=8),
    "no gradient": gradient(lambda model, optimizer: None),
    "no gradients": lambda model, optimizer: optimizer.zero_grad(),
    "strided gradient": gradient(lambda model, optimizer: irregular(first(optimizer).grad)),
    "negated gradient": gradient(lambda model, optimizer: torch._neg_view(first(optimizer).grad)),
    "sparse gradient": gradient(lambda model, optimizer: first(optimizer).grad.to_sparse()),
    "gradient that is the parameter": gradient(lambda model, optimizer: first(optimizer).detach()),
    "gradient that overlaps another parameter": gradient(
        lambda model, optimizer: model[1].weight.detach().flatten()[1:55].view(SHAPES[3])
    ),
    "gradient that is a state": gradient(
        lambda model, optimizer: next((value for _, value in moments(optimizer)), None)
    ),
    "infinite gradients": scaler(1.0),
    "scaled gradients": scaler(0.0),
    "missing state": lambda model, optimizer: optimizer.state.pop(first(optimizer), None),
    "cleared state": lambda model, optimizer: states_of_first(optimizer).clear(),
    "added group": lambda model, optimizer: optimizer.add_param_group({"params": [new_parameter()]}),
    "removed group": lambda model, optimizer: optimizer.param_groups.pop(),
    "removed groups": lambda model, optimizer: optimizer.param_groups.clear(),
    **{
        event.__name__: event
        for event in (
            *(swapping_tensors, data_of_another_shape, data_of_another_shape_alone),
            *(bias_that_becomes_a_kernel, no_gradient_in_a_group, shared_gradient, shared_gradient_of_a_scaled_step),
            *(gradients_in_one_buffer, transposed_states, states_of_other_memory, states_of_half_the_width),
            *(replaced_states, replaced_tensors_of_states, state_of_another, exchanged_states, no_buffer),
            *(loaded_state, replaced_parameter, stochastic_rounding),
        )
    },
}
# Changes of options, first of one group and then of all.
CHANGES = {
    f"{next(iter(changes.items()))}": changes
    for changes in (
        *({"lr": 0.5}, {"lr": torch.tensor(0.5)}, {"weight_decay": 0.0}, {"locality": None}, {"norm": "l1"}),
        *({"maximize": True}, {"momentum": 0.0}, {"momentum": 0.5}, {"nesterov": True, "momentum": 0.9}),
        *({"amsgrad": False}, {"decoupled_weight_decay": False}, {"fused": False}, {"foreach": True}),
        *({"penalty": sparsity.RingPenalty(0.2)}, {"penalty": None}, {"state_dtype": torch.float32}),
    )
}


def compare(cached, anew):
    for p, q in zip(params_of(cached), params_of(anew), strict=True):
        if p.untyped_storage().nbytes() > 0:
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0)
    assert len(cached.state) == len(anew.state)
    for states, others in zip(cached.state.values(), anew.state.values(), strict=True):
        assert states.keys() == others.keys()
        for name, value in states.items():
            if value.untyped_storage().nbytes() > 0:
                torch.testing.assert_close(value, others[name], rtol=0, atol=0)


@pytest.mark.parametrize(("event", "name", "native"), covering(EVENTS, OPTIONS, LIBRARIES), indirect=["native"])
def test_steps_after_an_event_are_those_of_a_new_collection(event, name, native):
    pairs = (_, cached), (_, anew) = two_that_have_stepped(name)
    for changed, optimizer in pairs:
        EVENTS[event](changed, optimizer)
    step_and_compare(cached, anew)
    step_and_compare(cached, anew)
    for optimizer in (cached, anew):
        for p in params_of(optimizer):
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
    step_and_compare(cached, anew)


@pytest.mark.parametrize(("change", "name", "native"), covering(CHANGES, OPTIONS, LIBRARIES), indirect=["native"])
def test_options_count_from_the_next_step_on(change, name, native):
    pairs = (_, cached), (_, anew) = two_that_have_stepped(name)
    for groups in (slice(1), slice(None)):
        for _, optimizer in pairs:
            for group in optimizer.param_groups[groups]:
                group.update({key: value for key, value in CHANGES[change].items() if key in group})
        step_and_compare(cached, anew)
        step_and_compare(cached, anew)


@pytest.mark.parametrize("number", [torch.tensor, np.array])
def test_momentum_changed_in_place_counts_from_the_next_step_on(number):
    momentum = number(0.9)
    cached, anew = (optim.SGD([nn.Parameter(torch.ones(3))], momentum=momentum, dampening=0.5) for _ in range(2))
    for value in (0.9, 0.9, 0.9, 0.0, 0.0, 0.0, 0.5, 0.5):
        momentum[()] = value
        for optimizer in (cached, anew):
            set_gradients(params_of(optimizer), 0)
        step_and_compare(cached, anew)


@pytest.mark.parametrize("penalty", [None, sparsity.RingPenalty(0.1)], ids=str)
def test_a_schedule_of_momentum_keeps_the_calls(penalty):
    """Collecting them anew in each step of OneCycleLR would take the host many times as long as the step."""
    cached, anew = (optim.SGD([nn.Parameter(torch.ones(3, 2, 3, 3))], momentum=0.9, penalty=penalty) for _ in range(2))
    calls = []
    for momentum in (0.9, 0.9, 0.9, 0.85, 0.95, 0.5):
        for optimizer in (cached, anew):
            optimizer.param_groups[0]["momentum"] = momentum
            set_gradients(params_of(optimizer), 0)
        step_and_compare(cached, anew)
        calls.append(cached._cache)
    assert calls[2] is not None
    assert {*calls[2:]} == {calls[2]}


def test_another_pattern_of_as_many_blocks_has_its_own_map():
    whole = BlockPattern.from_conv(4, kernel_size=3, padding=1)
    first_pattern, second_pattern = (whole.prune(torch.arange(whole.nnz) != i)[0] for i in (0, 1))
    weights = [nn.Parameter(torch.ones(whole.nnz - 1, 1, 1, 1)) for _ in range(2)]
    cached, anew = (optim.SGD([w], lr=0.1, weight_decay=1.0, locality=(0.5, 2.0)) for w in weights)
    for pattern in (None, None, None, first_pattern, first_pattern, second_pattern, second_pattern):
        for weight in weights:
            if pattern is not None:
                attach_pattern(weight, pattern)
            weight.grad = torch.ones_like(weight)
        step_and_compare(cached, anew)


def two_that_have_stepped(name):
    """Return two equal pairs of model and optimizer that have repeated a cached step; their next gradients are set."""
    pairs = make(name), make(name)
    for _, optimizer in pairs:
        train(optimizer, 4)
        assert all(batch._cached is not None for batch in optimizer._cache.batches)
        set_gradients(params_of(optimizer), 0)
    return pairs


def step_and_compare(cached, anew):
    anew._refresh()
    assert step(cached) == step(anew)
    compare(cached, anew)


@needs_triton
@pytest.mark.parametrize(
    ("event", "name"), covering(EVENTS, ["SGD", "SGD without momentum", "AdamW"], strength=1), ids=str
)
def test_after_an_event_triton_kernels_get_the_table_of_a_new_collection(event, name, monkeypatch):
    """No kernel runs here: a step changes no tensor, and the next one makes the same table."""
    from loco_ext.triton_kernels import optim_step as triton_steps

    tables = []
    let_triton_serve_cpus(monkeypatch)
    monkeypatch.setattr(triton_steps, "prepare", lambda table, args: None)
    monkeypatch.setattr(triton_steps, "launch", lambda table, args, scalars: tables.append(table))
    with loco_ext.backend("triton"):
        (model, optimizer), _ = two_that_have_stepped(name)
        EVENTS[event](model, optimizer)
        before = states_of(optimizer)
        tables.clear()
        error = step(optimizer)
        if states_of(optimizer) != before:
            return  # the step has made states, which the next one finds
        optimizer._refresh()
        assert step(optimizer) == error
    assert len(tables) in (0, 2)
    for table in tables[1:]:
        assert torch.equal(table.memory, tables[0].memory)
        assert table.launches == tables[0].launches


def states_of(optimizer):
    return [id(value) for states in optimizer.state.values() for value in states.values()]


def test_a_step_that_is_none_is_refused():
    operators, hyper = backends.operators(), torch.zeros(1, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="cached: expected the result of optim_step_cached"):
        operators.optim_step_again(torch.zeros(4096), [torch.ones(1)], hyper, [], [], None, None, False)


def test_a_step_with_other_groups_is_refused_each_time():
    _, optimizer = make("SGD of two rules")
    train(optimizer, 3)
    batch = optimizer._cache.batches[0]
    grads = [param.grad for param in batch.args.params]
    groups, columns = batch.hyper.shape
    hyper = torch.zeros(groups + 1, columns, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"hyper: expected {groups} rows, got {groups + 1}"):
            backends.operators().optim_step_again(batch._cached[1], grads, hyper, [], [], None, None, True)


@pytest.mark.parametrize("name", ["SGD of two rules", "Adam with a penalty"])
def test_nothing_outlives_its_owner(name):
    """Gradients end with zero_grad, states when they are dropped, and parameters with the step that lacks them."""
    model, optimizer = make(name)
    train(optimizer, 3)
    assert optimizer._cache is not None
    gradient = weakref.ref(first(optimizer).grad)
    optimizer.zero_grad()
    assert gradient() is None
    states = [weakref.ref(value) for states in optimizer.state.values() for value in states.values()]
    optimizer.state.clear()
    assert all(state() is None for state in states)
    parameter, owner = weakref.ref(first(optimizer)), weakref.ref(optimizer)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(SHAPES[3]))]
    del model
    train(optimizer, 1)
    gc.collect()
    assert parameter() is None
    del optimizer
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize(
    ("function", "steps", "name"), [("run_and_cache", 2, "SGD"), ("run_again", 3, "AdamW")], ids=str
)
def test_an_interrupted_step_is_not_repeated(name, function, steps, monkeypatch):
    """An error of the operator with arguments that are right, as of a GPU, is the caller's: parts may be written."""
    _, optimizer = make(name)
    train(optimizer, steps)
    made = []

    def broken(*args):
        made.append(args)
        raise RuntimeError("the GPU refused a kernel")

    monkeypatch.setattr(f"loco_ext.optim.step_cache.{function}", broken)
    before = [p.detach().clone() for p in params_of(optimizer)]
    with pytest.raises(RuntimeError, match="refused a kernel"):
        optimizer.step()
    assert len(made) == 1
    assert all(map(torch.equal, params_of(optimizer), before))


@pytest.mark.parametrize("native", LIBRARIES, indirect=True)
@pytest.mark.usefixtures("native")
def test_a_learning_rate_that_one_call_refuses_keeps_the_others_from_stepping(monkeypatch):
    """The second group's learning rate becomes a tensor of integers, as it may on a GPU."""
    rates = {0.9: torch.tensor(0.1), 0.0: torch.tensor(0.1)}  # learning rate for each momentum
    monkeypatch.setattr("loco_ext.optim.base.device_lr", lambda group, device: rates[group["momentum"]])
    (_, optimizer), _ = two_that_have_stepped("SGD of two rules")
    before = [p.detach().clone() for p in params_of(optimizer)]
    rates[0.0] = torch.tensor(1)
    with pytest.raises(ValueError, match=r"lrs\[0\]: expected one float32 or float64 element"):
        optimizer.step()
    assert all(map(torch.equal, params_of(optimizer), before))


class Recording(TorchDispatchMode):
    """Keeps our operator's calls, as tracers do."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "loco_ext":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["SGD of two rules", "Adam with a penalty"])
def test_recorded_calls_step_parameters_that_have_moved_since(name):
    (_, cached), (_, anew) = two_that_have_stepped(name)
    recording = Recording()
    for optimizer, mode in ((cached, recording), (anew, nullcontext())):
        with mode:
            optimizer.step()
    old_memory = [p.detach() for p in params_of(cached)]  # it stays allocated, so that writing to it goes unpunished
    for p, old in zip(params_of(cached), old_memory, strict=True):
        p.data = old.clone()
    with torch.no_grad():
        for operator, args in recording.calls:
            operator(*args)
    anew.step()
    compare(cached, anew)
