"""Steps that repeat the one before take a shortcut; whatever changes between steps must be noticed all the same."""

import copy
import gc
import weakref
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from stepping import CLASSES, RICH, assert_same, make_params, params_of, set_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loco_ext
from loco_ext import optim

SHAPES = [(17,), (4, 2, 3, 3), (), (5, 2, 5, 5), (4, 2, 3, 3)]
FROZEN = 2  # a parameter that never has a gradient


def make_optimizer(name, **options):
    """Two groups that share a rule, three steps in: the last took the shortcut."""
    params = make_params(SHAPES)
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "locality": (0.5, 2.0)}]
    optimizer = getattr(optim, name)(groups, **{**RICH[name], **options})
    for i in range(3):
        step(optimizer, i)
    return optimizer


def step(optimizer, seed, frozen=(FROZEN,)):
    set_gradients(params_of(optimizer), seed, frozen)
    optimizer.step()


def copied(optimizer):
    """A copy with parameters and states of its own, that has no step to repeat."""
    params = copy.deepcopy(params_of(optimizer))
    fresh = copy.deepcopy(optimizer)
    for own, p in zip(params_of(fresh), params, strict=True):
        assert torch.equal(own, p)
    return fresh


@pytest.fixture
def collections(monkeypatch):
    """Counts the steps that collected their tensors anew."""
    count = []
    original = optim.base.LocalityOptimizer._step_anew

    def counted(self, plans):
        count.append(self)
        return original(self, plans)

    monkeypatch.setattr(optim.base.LocalityOptimizer, "_step_anew", counted)
    return count


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": 3, "maximize": True}], ids=str)
def test_repeated_steps_give_the_bits_of_collected_ones(name, options, collections):
    repeating, anew = make_optimizer(name, **options), make_optimizer(name, **options)
    for optimizer in (repeating, anew):
        for p in params_of(optimizer):
            p.data = p.data.bfloat16()
    collections.clear()
    for i in range(6):
        for group in (*repeating.param_groups, *anew.param_groups):
            group["lr"] *= 0.9
        anew._repeat = None
        step(repeating, 10 + i)
        step(anew, 10 + i)
        assert_same(repeating, anew)
    assert collections == [anew] * 6


def replace_state(optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = torch.full_like(value, 0.5)


def replace_one_state_of_adams_step(optimizer):
    state = list(optimizer.state.values())[-1]
    key = list(state)[-1]
    state[key] = state[key].clone() + 1


def replace_state_dicts(optimizer):
    for p, state in list(optimizer.state.items()):
        optimizer.state[p] = {key: value * 2 for key, value in state.items()}


def replace_all_states(optimizer):
    optimizer.state = defaultdict(dict, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})
    replace_state(optimizer)


def exchange_owners_of_states(optimizer):
    first, second = params_of(optimizer)[1], params_of(optimizer)[4]
    other = {first: second, second: first}
    optimizer.state = defaultdict(dict, {other.get(p, p): state for p, state in optimizer.state.items()})


def remove_a_state(optimizer):
    del optimizer.state[params_of(optimizer)[1]]


def empty_a_state(optimizer):
    optimizer.state[params_of(optimizer)[1]].clear()


def move_data(optimizer):
    for p in params_of(optimizer):
        p.data = p.data * 2


def move_to_channels_last(optimizer):
    p = params_of(optimizer)[3]
    p.data = p.detach().clone(memory_format=torch.channels_last)


def change_dtype(optimizer):
    for p in params_of(optimizer):
        p.grad = None
        p.data = p.data.double()


def replace_a_parameter(optimizer):
    optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.ones(SHAPES[3]))


def swap_parameters(optimizer):
    first, second = optimizer.param_groups
    first["params"][1], second["params"][1] = second["params"][1], first["params"][1]


def add_a_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 5))], "weight_decay": 0.5})


def load_own_state(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def set_in_all_groups(**values):
    def change(optimizer):
        for group in optimizer.param_groups:
            group.update({key: value for key, value in values.items() if key in group})

    change.__name__ = f"set {values}"
    return change


def set_in_one_group(**values):
    def change(optimizer):
        optimizer.param_groups[1].update({k: v for k, v in values.items() if k in optimizer.param_groups[1]})

    change.__name__ = f"set in one group {values}"
    return change


CHANGES = [
    replace_state,
    replace_one_state_of_adams_step,
    replace_state_dicts,
    replace_all_states,
    exchange_owners_of_states,
    remove_a_state,
    empty_a_state,
    move_data,
    move_to_channels_last,
    change_dtype,
    replace_a_parameter,
    swap_parameters,
    add_a_group,
    load_own_state,
    set_in_one_group(lr=0.5),
    set_in_one_group(weight_decay=0.0),
    set_in_one_group(locality=None),
    set_in_one_group(locality=[None, (0.1, 3.0)]),
    set_in_one_group(maximize=True),
    set_in_one_group(momentum=0.0, amsgrad=False),
    set_in_one_group(foreach=True),
    set_in_one_group(fused=False),
    set_in_one_group(rounding_step=7, stochastic_rounding=1),
    set_in_all_groups(momentum=0.0, amsgrad=False),
    set_in_all_groups(nesterov=True, betas=(0.5, 0.6)),
    set_in_all_groups(dampening=0.5, eps=0.1),
    set_in_all_groups(maximize=True),
    set_in_all_groups(foreach=True),
    set_in_all_groups(norm="l1"),
    set_in_all_groups(stochastic_rounding=5),
]


@pytest.mark.parametrize("frozen", [(FROZEN,), (), (0, FROZEN), range(5)], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", CLASSES)
def test_what_changes_between_steps_is_noticed(name, change, frozen):
    """Ours takes the shortcut where it may; the same optimizer without any past is what it must equal."""
    optimizer = make_optimizer(name)
    assert optimizer._repeat is not None
    change(optimizer)
    for i in range(3):
        fresh = copied(optimizer)
        for o in (optimizer, fresh):
            step(o, 20 + i, frozen)
        assert_same(optimizer, fresh)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_that_come_and_go_are_noticed(name):
    optimizer = make_optimizer(name)
    for i, frozen in enumerate([(), (), (FROZEN,), (FROZEN,), range(5), (0, 4), (0, 4), (4,), (FROZEN,)]):
        fresh = copied(optimizer)
        for o in (optimizer, fresh):
            step(o, 20 + i, frozen)
        assert_same(optimizer, fresh)


@pytest.mark.parametrize("name", CLASSES)
def test_a_backend_forced_for_one_step_is_the_one_that_runs(name, monkeypatch):
    optimizer = make_optimizer(name)
    names = []
    for operator in ("optim_step_sgd", "optim_step_adam"):
        original = getattr(loco_ext.reference.optim_step, operator)
        monkeypatch.setattr(
            loco_ext.reference.optim_step, operator, lambda *a, f=original: (names.append("reference"), f(*a))
        )
    for i, context in enumerate([nullcontext(), loco_ext.backend("reference"), nullcontext(), nullcontext()]):
        names.append(i)
        with context:
            step(optimizer, i)
    assert names == [0, 1, "reference", 2, 3]


class Watch(TorchDispatchMode):
    """Keeps the names of the operators that run inside."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), str(operator)]
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CLASSES)
def test_who_watches_operators_sees_all_tensors_of_the_step(name):
    optimizer = make_optimizer(name)
    with Watch() as watch:
        step(optimizer, 5)
    assert f"loco_ext.optim_step_{'sgd' if name == 'SGD' else 'adam'}.default" in watch.seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to move to")
@pytest.mark.parametrize("name", CLASSES)
def test_parameters_moved_to_another_device_are_noticed(name):
    optimizer, stays = make_optimizer(name), make_optimizer(name)
    for p in params_of(optimizer):
        p.grad = None
        p.data = p.data.cuda()
    optimizer.load_state_dict(optimizer.state_dict())
    set_gradients(params_of(stays), 20, (FROZEN,))
    for p, q in zip(params_of(optimizer), params_of(stays), strict=True):
        p.grad = None if q.grad is None else q.grad.cuda()
    optimizer.step()
    stays.step()
    for p, q in zip(params_of(optimizer), params_of(stays), strict=True):
        torch.testing.assert_close(p.cpu(), q)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_freed_when_their_owner_lets_go(name):
    optimizer = make_optimizer(name)
    for i in range(2):
        set_gradients(params_of(optimizer), i, (FROZEN,))
        grads = [weakref.ref(p.grad) for p in params_of(optimizer) if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert all(grad() is None for grad in grads)


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_that_has_repeated_steps_is_freed_with_its_states(name):
    optimizer = make_optimizer(name)
    states = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    assert states
    del optimizer
    gc.collect()
    assert all(state() is None for state in states)


@pytest.mark.parametrize("name", CLASSES)
def test_a_refused_step_changes_nothing_and_the_next_goes_on(name):
    optimizer = make_optimizer(name)
    before = copied(optimizer)
    set_gradients(params_of(optimizer), 7, (FROZEN,))
    last = params_of(optimizer)[-1]
    last.grad = torch.zeros_like(last).to_sparse()
    with pytest.raises(TypeError, match=r"grads\[3\]"):
        optimizer.step()
    assert_same(optimizer, before)
    for o in (optimizer, before):
        step(o, 8)
    assert_same(optimizer, before)


def test_a_reload_lets_go_of_parameters_that_are_to_be_swapped():
    """torch.utils.swap_tensors wants tensors that nothing else refers to; a step to be repeated does."""
    optimizer = make_optimizer("SGD")
    p = params_of(optimizer)[0]
    p.grad = None
    other = nn.Parameter(torch.ones(SHAPES[0]))
    optimizer.load_state_dict(optimizer.state_dict())
    torch.utils.swap_tensors(p, other)
    assert torch.equal(p, torch.ones(SHAPES[0]))
    fresh = copied(optimizer)
    for o in (optimizer, fresh):
        step(o, 20)
    assert_same(optimizer, fresh)
