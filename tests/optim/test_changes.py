"""Tests of single changes between two steps: of options, parameters, states, or where an optimizer is made."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import loco_ext
from loco_ext import geometry, optim, sparsity
from tests.optim.stepping import CLASSES, LOCALITY, RICH, assert_same, set_gradients, train
from tests.tolerances import assert_within_ulps, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

PENALTY = sparsity.RingPenalty(0.1)
MAP_AND_PENALTY = {"weight_decay": 1.0, "locality": LOCALITY, "penalty": PENALTY}


def stepped(param, grad=1.0, name="SGD", **options):
    """Return an optimizer of the parameter that has made one step."""
    optimizer = getattr(optim, name)([param], lr=0.1, **options)
    step_alone(optimizer, param, grad)
    return optimizer


def step_alone(optimizer, param, grad=1.0):
    param.grad = torch.full_like(param, grad)
    optimizer.step()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", CLASSES)
def test_only_parameters_without_a_penalty_may_have_gradients(name, backend):
    weight, bias = nn.Parameter(torch.ones(2, 2, 3, 3)), nn.Parameter(torch.ones(2))
    optimizer = getattr(optim, name)([weight, bias], lr=0.1, penalty=PENALTY)
    with loco_ext.backend(backend):
        step_alone(optimizer, bias)
    assert bool((bias < 1).all())
    assert bool((weight == 1).all())


def made_in_a_compiled_function(param, options):
    @torch.compile(backend="eager")
    def function():
        return optim.SGD([param], lr=0.1, **options)

    return function()


CONTEXTS = {"fake": FakeTensorMode, "device": lambda: torch.device("meta"), "inference": torch.inference_mode}


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_state_that_lost_a_part_is_no_new_one(name):
    param = nn.Parameter(torch.ones(2, 1, 3))
    optimizer = stepped(param, name=name)
    before, lost = param.detach().clone(), optimizer.state[param].pop("exp_avg_sq")
    with pytest.raises(KeyError, match=r"state: expected step, exp_avg, exp_avg_sq .* got only exp_avg, step"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.state[param]["exp_avg_sq"] = lost
    optimizer.step()


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_of_lazy_parameters_loads_states_and_steps_as_torchs(name):
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}

    def steps(optimizer):
        for param in optimizer.param_groups[0]["params"]:
            step_alone(optimizer, param)

    sums = []
    for package in (optim, torch.optim):
        earlier = getattr(package, name)(nn.Linear(3, 2).parameters(), **options)
        steps(earlier)
        layer = nn.LazyLinear(2)
        optimizer = getattr(package, name)(layer.parameters(), **options)
        optimizer.load_state_dict(earlier.state_dict())
        layer(torch.ones(1, 3))
        for param in layer.parameters():
            nn.init.ones_(param)
        steps(optimizer)
        sums.append(sum(param.sum() for param in layer.parameters()))
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("first", ["compiled", *CONTEXTS])
def test_an_optimizer_made_anywhere_steps_as_any_other(first):
    options = {**MAP_AND_PENALTY, "locality": (0.5, 2.0 + len(first) / 16)}  # factors for which no map is cached yet
    params = [nn.Parameter(torch.ones(1, 1, 3, 3)) for _ in range(2)]
    if first == "compiled":
        optimizer = made_in_a_compiled_function(params[0], options)
    else:
        with CONTEXTS[first]():
            optimizer = optim.SGD([params[0]], lr=0.1, **options)
    step_alone(optimizer, params[0])
    stepped(params[1], **options)
    assert torch.equal(*params)
    alone = nn.Parameter(torch.ones(1, 1, 3, 3))
    stepped(alone, **{**options, "penalty": None})
    decay_map = geometry.decay_map((3, 3), options["locality"])
    assert_within_ulps(alone.detach()[0, 0], 1 - 0.1 * (1 + decay_map), scale=1.0)


def test_a_step_of_fake_tensors_leaves_nothing_behind():
    param = nn.Parameter(torch.ones(1, 1, 3, 3))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(param)
        optimizer = stepped(fake, **MAP_AND_PENALTY)
        for _ in range(3):
            step_alone(optimizer, fake)
        assert optimizer._cache is None
    optimizer = stepped(param, **MAP_AND_PENALTY)
    assert type(optimizer._current_plans()[0].maps[0]) is torch.Tensor


@pytest.mark.parametrize(
    "count", [torch.ones((), dtype=torch.int64), torch.ones((), dtype=torch.float16), 1.0], ids=repr
)
def test_step_counts_of_other_types_are_loaded_and_refused_in_states(count):
    param = nn.Parameter(torch.ones(2))
    optimizer = stepped(param, name="Adam")
    checkpoint = optimizer.state_dict()
    checkpoint["state"][0]["step"] = count
    optimizer.load_state_dict(checkpoint)
    step_alone(optimizer, param)
    assert optimizer.state[param]["step"].tolist() == 2
    optimizer.state[param]["step"] = count
    with pytest.raises((TypeError, ValueError), match=r"steps\[0\]: expected"):
        optimizer.step()


def test_gradients_without_memory_are_refused():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch._efficientzerotensor(2)
    with pytest.raises(TypeError, match=r"grads\[0\]: expected a tensor of its own memory"):
        optim.SGD([param]).step()


def test_amsgrad_is_switched_on_beside_a_foreign_state():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    ours, theirs = (stepped(p, name="Adam") for p in params)
    for optimizer, p in zip((ours, theirs), params, strict=True):
        optimizer.state[p]["foreign"] = "kept"
        optimizer.param_groups[0]["amsgrad"] = True
    theirs.state[params[1]]["max_exp_avg_sq"] = torch.zeros(2)
    for optimizer, p in zip((ours, theirs), params, strict=True):
        step_alone(optimizer, p, 0.5)
    assert torch.equal(*params)
    assert ours.state[params[0]]["foreign"] == "kept"


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["sparse", "complex"])
@pytest.mark.parametrize("apart", [False, True], ids=["one rule", "two rules"])
@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "cached step"])
def test_a_refused_step_changes_nothing_and_the_next_goes_on(name, kind, apart, steps):
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = getattr(optim, name)([{"params": params[:1], "maximize": apart}, {"params": params[1:]}], **RICH[name])
    train(optimizer, steps)
    before = copy.deepcopy(optimizer)
    set_gradients(params, steps)
    params[1].grad = params[1].grad.to_sparse() if kind == "sparse" else None
    if kind == "complex":
        params[1].data = params[1].detach().to(torch.complex64)
        params[1].grad = torch.ones_like(params[1])
    with pytest.raises(TypeError, match="sparse" if kind == "sparse" else "complex64"):
        optimizer.step()
    params[1].grad = None
    params[1].data = params[1].detach().real.contiguous()
    assert_same(optimizer, before, same_bits)
    for each in (optimizer, before):
        train(each, 1, start=steps)
    assert_same(optimizer, before, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_that_torchs_functions_would_make_in_part_is_refused_as_a_whole(name):
    params = [nn.Parameter(torch.ones(2, 1, 3, 3)) for _ in range(3)]
    groups = [{"params": params[:1], "lr": 0.2}, {"params": params[1:]}]
    optimizer = getattr(optim, name)(groups, foreach=True, weight_decay=1.0, locality=LOCALITY)
    set_gradients(params, 0)
    params[-1].grad = params[-1].grad.to_sparse()
    with pytest.raises(TypeError, match=r"locality, norm: expected a dense gradient .* got a sparse one"):
        optimizer.step()
    assert all(bool((param == 1).all()) for param in params)
    assert not any(optimizer.state.values())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": torch.tensor(0.1)}, "lr: expected no tensor"),
        ({"betas": (0.9, torch.tensor(0.99))}, "betas: expected no tensor"),
        ({"capturable": True}, "capturable: expected False"),
        ({"differentiable": True}, "foreach, differentiable: expected only one"),
        ({}, "expected a dense gradient"),
    ],
    ids=str,
)
def test_a_decoupled_decay_is_not_written_if_torch_refuses_the_step(changes, named):
    kernel, other = nn.Parameter(torch.ones(2, 1, 3, 3)), nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([kernel, other], foreach=True, weight_decay=1.0, locality=LOCALITY)
    set_gradients([kernel, other], 0)
    other.grad = other.grad if changes else other.grad.to_sparse()
    optimizer.param_groups[0].update(changes)
    with pytest.raises((TypeError, ValueError), match=named):
        optimizer.step()
    assert bool((kernel == 1).all())
    assert not any(optimizer.state.values())
    optimizer.param_groups[0].update({name: optimizer.defaults[name] for name in changes})
    set_gradients([kernel, other], 0)
    optimizer.step()
    stepped = kernel.clone()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="expected max_exp_avg_sq"):
        optimizer.step()
    assert torch.equal(kernel, stepped)
