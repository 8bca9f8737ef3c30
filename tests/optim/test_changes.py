"""Tests of single changes between two steps: of options, parameters, states, or where an optimizer is made."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import loco_ext
from loco_ext import geometry, optim, sparsity
from tests.optim.stepping import CLASSES, LAYOUTS, assert_same, params_of
from tests.tolerances import assert_within_ulps

pytestmark = pytest.mark.usefixtures("one_thread")

PENALTY = sparsity.RingPenalty(0.1)
MAP_AND_PENALTY = {"weight_decay": 1.0, "locality": (0.5, 2.0), "penalty": PENALTY}


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


@pytest.mark.parametrize("flag", ["foreach", "differentiable"])
def test_a_scaler_unscales_for_torchs_path_switched_on_late(flag):
    param = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([param], lr=1.0)
    optimizer.param_groups[0][flag] = True
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shapes", [((1, 1, 3, 3), (1, 1, 5, 5)), ((1, 1, 1, 9), (1, 1, 3, 3))], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_another_kernel_size_has_its_own_map_and_rings(name, shapes):
    param, fresh = nn.Parameter(torch.ones(shapes[0])), nn.Parameter(torch.ones(shapes[1]))
    optimizer = stepped(param, 0.0, name, **MAP_AND_PENALTY)
    optimizer.state.clear()
    param.data = torch.ones(shapes[1])
    step_alone(optimizer, param, 0.0)
    stepped(fresh, 0.0, name, **MAP_AND_PENALTY)
    assert torch.equal(param, fresh)


@pytest.mark.parametrize("name", CLASSES)
def test_modules_are_converted_by_swapping(name):
    conv = nn.Conv2d(2, 2, 3)
    optimizer = getattr(optim, name)(conv.parameters(), **MAP_AND_PENALTY)
    for _ in range(3):
        for p in conv.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        conv.to(torch.float64).to(memory_format=torch.channels_last)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    step_alone(optimizer, conv.weight)
    assert conv.weight.dtype == torch.float64


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("penalty", [PENALTY, sparsity.KernelPenalty(0.1, power=2)], ids=str)
def test_a_penalised_weight_may_be_laid_out_anew(penalty, layout):
    param, fresh = (nn.Parameter(torch.arange(36.0).view(2, 2, 3, 3)) for _ in range(2))
    optimizer, other = (stepped(p, penalty=penalty) for p in (param, fresh))
    param.data = LAYOUTS[layout](param.detach())
    step_alone(optimizer, param)
    step_alone(other, fresh)
    torch.testing.assert_close(param, fresh)


@pytest.mark.parametrize("shape", [(2, 2, 65), (2, 2, 65, 1), (2, 1, 70, 70)], ids=str)
def test_more_rings_than_kernels_know_are_refused_at_once(shape):
    with pytest.raises(ValueError, match="rings: expected 1 to 64 of them, got"):
        optim.SGD([nn.Parameter(torch.ones(shape))], penalty=[PENALTY])


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("AdamW", {"norm": "l1"}, "norm: expected 'l2' for AdamW"),
        ("SGD", {"norm": "l7"}, "norm: expected 'l2' or 'l1'"),
        ("SGD", {"state_dtype": torch.int8}, "state_dtype: expected"),
        ("Adam", {"stochastic_rounding": 3, "foreach": True}, "stochastic_rounding: expected None"),
        ("SGD", {"momentum": 1.0, "penalty": PENALTY}, "momentum: expected less than 1"),
        ("Adam", {"differentiable": True, "penalty": PENALTY}, "penalty: expected None"),
        ("Adam", {"betas": (1.0, 0.9)}, r"betas\[0\]: expected a number of at least 0 and less than 1, got 1.0"),
        ("Adam", {"betas": (0.9,)}, "betas: expected .* got"),
        ("AdamW", {"eps": math.nan}, "eps: expected a finite number of at least 0, got nan"),
        ("SGD", {"lr": -0.1}, "lr: expected a finite number of at least 0, got -0.1"),
        ("SGD", {"weight_decay": math.inf}, "weight_decay: expected a finite number of at least 0, got inf"),
        ("SGD", {"dampening": math.nan}, "dampening: expected a finite number, got nan"),
    ],
)
def test_options_set_late_are_checked_as_at_first(name, changes, error):
    param = nn.Parameter(torch.ones(2, 1, 3))
    optimizer = stepped(param, name=name)
    before = param.detach().clone()
    optimizer.param_groups[0].update(changes)
    with pytest.raises(ValueError, match=error):
        optimizer.step()
    assert torch.equal(param, before)


def made_in_a_compiled_function(param, options):
    @torch.compile(backend="eager")
    def function():
        return optim.SGD([param], lr=0.1, **options)

    return function()


CONTEXTS = {"fake": FakeTensorMode, "device": lambda: torch.device("meta"), "inference": torch.inference_mode}


def test_a_schedule_may_round_below_zero():
    param = nn.Parameter(torch.ones(2, 1, 3))
    optimizer = stepped(param, name="SGD")
    for lr in (-2e-19, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_state_that_lost_a_part_is_no_new_one(name):
    param = nn.Parameter(torch.ones(2, 1, 3))
    optimizer = stepped(param, name=name)
    before, lost = param.detach().clone(), optimizer.state[param].pop("exp_avg_sq")
    with pytest.raises(
        KeyError, match="state: expected step, exp_avg, exp_avg_sq of a parameter, got only exp_avg, step"
    ):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.state[param]["exp_avg_sq"] = lost
    optimizer.step()


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


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_of_fake_tensors_leaves_nothing_behind(name):
    param = nn.Parameter(torch.ones(1, 1, 3, 3))
    with FakeTensorMode() as mode:
        stepped(mode.from_tensor(param), name=name, **MAP_AND_PENALTY)
    optimizer = stepped(param, name=name, **MAP_AND_PENALTY)
    assert type(optimizer._current_plans()[0].maps[0]) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_step_counts_of_other_dtypes_are_loaded_and_refused_in_states(name, dtype):
    param = nn.Parameter(torch.ones(2))
    optimizer = stepped(param, name=name)
    checkpoint = optimizer.state_dict()
    checkpoint["state"][0]["step"] = torch.ones((), dtype=dtype)
    optimizer.load_state_dict(checkpoint)
    step_alone(optimizer, param)
    assert optimizer.state[param]["step"].tolist() == 2
    for wrong in (torch.ones((), dtype=dtype), 2):
        optimizer.state[param]["step"] = wrong
        with pytest.raises((TypeError, ValueError), match=r"steps\[0\]: expected"):
            optimizer.step()


def test_lazily_negated_and_zero_tensors_are_read_right_or_refused():
    param = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([param], lr=0.5)
    param.grad = torch._neg_view(torch.ones(2))
    optimizer.step()
    assert param.tolist() == [0.5, 0.5]
    param.grad = torch._efficientzerotensor(2)
    with pytest.raises(TypeError, match=r"grads\[0\]: expected a tensor of its own memory"):
        optimizer.step()


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
def test_a_refused_step_changes_nothing_and_the_next_goes_on(name):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = getattr(optim, name)(params, lr=0.1, weight_decay=0.1)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer)
    params[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"grads\[1\]"):
        optimizer.step()
    assert_same(optimizer, before)
    for o in (optimizer, before):
        for p in params_of(o):
            p.grad = torch.ones(3)
        o.step()
    assert_same(optimizer, before)


@pytest.mark.parametrize("name", CLASSES)
def test_states_that_are_moved_between_steps_are_found(name):
    params, others = ([nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2))
    ours = getattr(optim, name)(params, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    theirs = getattr(torch.optim, name)(others, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    for optimizer, group in ((ours, params), (theirs, others)):
        a, b = group
        for step in range(4):
            a.grad, b.grad = torch.full_like(a, 1.0), torch.full_like(b, -2.0)
            optimizer.step()
            state = optimizer.state
            if step == 0:
                state[a], state[b] = state[b], state[a]
            elif step == 1:
                state.pop(b)
            else:
                state[b] = {key: value.clone() for key, value in state.pop(a).items()}
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
