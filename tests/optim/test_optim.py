"""Tests of SGD, Adam and AdamW as drop-in replacements: their options, compared with torch.optim's for-loop."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import loco_ext
from loco_ext import optim
from tests.optim.stepping import (
    CLASSES,
    RICH,
    SHAPES,
    assert_same,
    clones,
    follow,
    make_params,
    pair,
    params_of,
    set_gradients,
    torch_loop,
    train,
)
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("native")

# These options are missing from torch's database, which test_db.py steps through.
OPTIONS = [
    ("SGD", {"lr": 0.3, "dampening": 0.3}),
    ("SGD", {"lr": 0.3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.03, "betas": (0.3, 0.5), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.03, "betas": (0.0, 0.0), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.03, "betas": (0.3, 0.5), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_option_steps_as_torchs_loop(name, options):
    ours, theirs = pair(name, make_params(seed=2), **options)
    for step in range(4):
        follow(ours, theirs, seed=20 + step)


def test_arguments_and_their_defaults_are_torchs():
    for name in CLASSES:
        ours, theirs = (getattr(module, name)([nn.Parameter(torch.ones(2))]) for module in (optim, torch.optim))
        assert isinstance(ours, getattr(torch.optim, name))
        assert {key: ours.defaults[key] for key in theirs.defaults} == theirs.defaults
        assert set(ours.defaults) - set(theirs.defaults) >= {"locality", "norm", "state_dtype", "stochastic_rounding"}


@pytest.mark.parametrize("arguments", [(0.1, 0.9, 0.0, 0.2, True), (0.1, 0.9, 0.5, 0.2)])
def test_positional_arguments_mean_what_they_mean_in_torch(arguments):
    params = make_params()
    follow(optim.SGD(params, *arguments), torch.optim.SGD(clones(params), *arguments, foreach=False))


def test_named_parameters_are_taken():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))
    ours = optim.SGD(model.named_parameters(), lr=0.5)
    assert ours.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    theirs = torch_loop("SGD", clones(model.parameters()), lr=0.5)
    follow(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_schedulers_change_a_tensor_lr(name):
    ours, theirs = pair(name, make_params(), theirs={"lr": 0.5}, **{**RICH[name], "lr": torch.tensor(0.5)})
    schedulers = [lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch) for opt in (ours, theirs)]
    for step in range(4):
        follow(ours, theirs, seed=step)
        for each in schedulers:
            each.step()
    assert isinstance(ours.param_groups[0]["lr"], torch.Tensor)
    assert ours.param_groups[0]["lr"] == 0.5**5


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_betas_may_be_tensors(name):
    betas = (0.875, 0.96875)  # both are exact in float32
    tensors = tuple(torch.tensor(beta) for beta in betas)
    options = {**RICH[name], "betas": tensors}
    ours, theirs = pair(name, make_params(), theirs={"betas": betas}, **options)
    follow(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_the_step_leaves_grad_mode_and_returns_nothing_without_a_closure(name):
    ours = getattr(optim, name)(make_params())
    set_gradients(params_of(ours), 0)
    assert ours.step() is None
    assert torch.is_grad_enabled()
    assert all(p.requires_grad and p.is_leaf for p in params_of(ours))


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_unfrozen_later_start_their_own_states(name):
    """Each step has other parameters frozen; momentum starts at the first gradient, Adam counts steps per parameter."""
    options = {**RICH[name], **({"dampening": 0.5} if name == "SGD" else {})}
    ours, theirs = pair(name, make_params(), **options)
    for step, frozen in enumerate([(3, 5), (3,), (), (0, 6), ()]):
        follow(ours, theirs, seed=step, frozen=frozen)


@pytest.mark.parametrize("name", CLASSES)
def test_empty_groups_and_tensors_are_stepped(name):
    ours, theirs = pair(name, [{"params": []}, {"params": make_params([(0,), (3, 0, 3, 3)])}], **RICH[name])
    follow(ours, theirs)
    assert all(len(ours.state[p]) > 0 for p in params_of(ours))


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_read_only(name):
    ours = getattr(optim, name)(make_params(), **RICH[name], maximize=True)
    set_gradients(params_of(ours), 0)
    before = [p.grad.clone() for p in params_of(ours)]
    ours.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params_of(ours), before, strict=True))


LOCALITY = (0.5, 2.0)
BACKENDS = [
    *((name, {"locality": LOCALITY}) for name in CLASSES),
    *((name, {"locality": None, "maximize": True}) for name in CLASSES),
    ("SGD", {"locality": LOCALITY, "norm": "l1", "momentum": 0.9, "nesterov": True}),
    ("Adam", {"locality": LOCALITY, "norm": "l1", "betas": (0.3, 0.5)}),
]


@pytest.mark.parametrize(("name", "options"), BACKENDS, ids=str)
def test_the_reference_gives_the_kernels_bits_in_float32(name, options):
    options = {**RICH[name], **options}
    params = make_params(SHAPES)
    reference = getattr(optim, name)(clones(params), **options, fused=False)
    forced = getattr(optim, name)(clones(params), **options)
    fused = getattr(optim, name)(clones(params), **options, fused=True)
    ours = getattr(optim, name)(params, **options)
    for opt in (ours, reference, fused):
        train(opt, 3)
    with loco_ext.backend("reference"):
        train(forced, 2)
    train(forced, 1, start=2)
    for other in (reference, forced, fused):
        assert_same(ours, other, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_each_backend_is_the_one_that_runs(name, monkeypatch):
    def never(*_):
        raise AssertionError("the reference ran")

    monkeypatch.setattr("loco_ext.reference.optim_step.optim_step", never)
    params = make_params([(3,)])
    set_gradients(params, 0)
    optimizer = getattr(optim, name)(params)
    optimizer.step()
    optimizer.param_groups[0]["fused"] = False
    with pytest.raises(AssertionError, match="the reference ran"):
        optimizer.step()
    optimizer.param_groups[0]["fused"] = None
    with loco_ext.backend("reference"), pytest.raises(AssertionError, match="the reference ran"):
        optimizer.step()


def test_a_backend_that_is_not_there_says_so():
    optimizer = optim.SGD(make_params([(3,)]))
    set_gradients(params_of(optimizer), 0)
    before = clones(params_of(optimizer))
    with loco_ext.backend("triton"), pytest.raises(RuntimeError, match=r"backend 'triton'.*cpu"):
        optimizer.step()
    assert torch.equal(params_of(optimizer)[0], before[0])
    with pytest.raises(ValueError, match="backend: expected one of"), loco_ext.backend("cuda"):
        pass
