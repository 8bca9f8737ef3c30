"""Tests of SGD, Adam and AdamW as drop-in replacements: their options, compared with torch.optim's for-loop."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

import loco_ext
from loco_ext import optim
from tests.optim.stepping import (
    CLASSES,
    LOCALITY,
    RICH,
    assert_same,
    clones,
    follow,
    make_params,
    pair,
    params_of,
    train,
)
from tests.tolerances import same_bits

# These options are missing from torch's database, which test_db.py steps through.
OPTIONS = [
    ("SGD", {"lr": 0.3, "dampening": 0.3}),
    ("SGD", {"lr": 0.3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.03, "betas": (0.3, 0.5), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.03, "betas": (0.0, 0.0), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.03, "betas": (0.3, 0.5), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_option_steps_as_torchs_loop(name, options):
    """A parameter that is unfrozen later starts its own states; gradients are only read."""
    ours, theirs = pair(name, [{"params": []}, {"params": make_params(seed=2)}], **options)
    for step, frozen in enumerate([(3, 5), (3,), (), (0, 6), ()]):
        follow(ours, theirs, seed=20 + step, frozen=frozen)
        for p, q in zip(params_of(ours), params_of(theirs), strict=True):
            assert p.grad is None if q.grad is None else torch.equal(p.grad, q.grad)


def test_arguments_and_their_defaults_are_torchs():
    for name in CLASSES:
        ours, theirs = (getattr(module, name)([nn.Parameter(torch.ones(2))]) for module in (optim, torch.optim))
        assert isinstance(ours, getattr(torch.optim, name))
        assert {key: ours.defaults[key] for key in theirs.defaults} == theirs.defaults
        assert set(ours.defaults) - set(theirs.defaults) >= {"locality", "norm", "state_dtype", "stochastic_rounding"}


POSITIONAL = [
    ("SGD", (0.1, 0.9, 0.0, 0.2, True)),
    ("SGD", (0.1, 0.9, 0.5, 0.2)),
    ("Adam", (0.1, (0.5, 0.7), 1e-3, 0.2, True)),
    ("AdamW", (0.1, (0.5, 0.7), 1e-3, 0.2, True)),
]


@pytest.mark.parametrize(("name", "arguments"), POSITIONAL)
def test_positional_arguments_mean_what_they_mean_in_torch(name, arguments):
    params = make_params()
    theirs = getattr(torch.optim, name)(clones(params), *arguments, foreach=False)
    follow(getattr(optim, name)(params, *arguments), theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_learning_rates_and_betas_may_be_tensors(name):
    betas = (0.875, 0.96875)  # both are exact in float32
    numbers, tensors = {"lr": 0.5}, {"lr": torch.tensor([0.5])}
    if name != "SGD":
        numbers["betas"], tensors["betas"] = betas, tuple(map(torch.tensor, betas))
    ours, theirs = pair(name, make_params(), theirs=numbers, **{**RICH[name], **tensors})
    schedulers = [lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch) for opt in (ours, theirs)]
    for step in range(4):
        follow(ours, theirs, seed=step)
        for each in schedulers:
            each.step()
    assert ours.param_groups[0]["lr"] is tensors["lr"]
    assert tensors["lr"].item() == 0.5**5


@pytest.mark.parametrize("name", CLASSES)
def test_autograd_sees_what_a_step_has_done(name):
    """Version counters go up, so that a backward whose forward came before the step is an error."""
    param = nn.Parameter(torch.ones(3))
    ours = getattr(optim, name)([param], lr=0.1)
    loss = param.square().sum()
    for _ in range(4):
        version = param._version
        param.grad = torch.ones(3)
        assert ours.step() is None
        assert param._version > version
    assert torch.is_grad_enabled()
    assert param.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


BACKENDS = [
    *((name, {"locality": LOCALITY}) for name in CLASSES),
    *((name, {"locality": None, "maximize": True}) for name in CLASSES),
    ("SGD", {"locality": LOCALITY, "norm": "l1", "momentum": 0.9, "nesterov": True}),
    ("Adam", {"locality": LOCALITY, "norm": "l1", "betas": (0.3, 0.5)}),
]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("name", "options"), BACKENDS, ids=str)
def test_the_reference_gives_the_kernels_bits_in_float32(name, options):
    params, options = make_params(), {**RICH[name], **options}
    ours, reference, forced, fused = (
        getattr(optim, name)(clones(params), **options, **own) for own in ({}, {"fused": False}, {}, {"fused": True})
    )
    for each in (ours, reference, fused):
        train(each, 4)
    with loco_ext.backend("reference"):
        train(forced, 3)
    train(forced, 1, start=3)
    for other in (reference, forced, fused):
        assert_same(ours, other, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_the_reference_steps_parameters_that_wrap_other_tensors(name):
    """Quantised weights, such as torchao's, are such parameters: they have no memory of their own."""
    (param,) = make_params([(3, 2, 3, 3)])
    wrapping = nn.Parameter(TwoTensor(param.detach().clone(), param.detach().clone()))
    options = {**RICH[name], "locality": LOCALITY, "fused": False}
    ours, plain = (getattr(optim, name)([each], **options) for each in (wrapping, param))
    for step in range(3):
        train(plain, 1, start=step)
        wrapping.grad = TwoTensor(param.grad.clone(), param.grad.clone())
        ours.step()
    assert torch.equal(wrapping.data.a, param)
    assert torch.equal(wrapping.data.b, param)


@pytest.mark.parametrize("steps", [1, 3], ids=["collected", "cached"])
@pytest.mark.parametrize("name", CLASSES)
def test_each_backend_is_the_one_that_runs(name, steps, monkeypatch):
    def never(*_):
        raise AssertionError("the reference ran")

    monkeypatch.setattr("loco_ext.reference.optim_step.optim_step", never)
    optimizer = getattr(optim, name)(make_params([(3,)]))
    train(optimizer, steps)
    optimizer.param_groups[0]["fused"] = False
    with pytest.raises(AssertionError, match="the reference ran"):
        optimizer.step()
    optimizer.param_groups[0]["fused"] = None
    train(optimizer, steps)
    with loco_ext.backend("reference"), pytest.raises(AssertionError, match="the reference ran"):
        optimizer.step()
    before = clones(params_of(optimizer))
    with loco_ext.backend("triton"), pytest.raises(RuntimeError, match=r"backend 'triton'.*cpu"):
        optimizer.step()
    assert torch.equal(params_of(optimizer)[0], before[0])


@pytest.mark.slow
def test_optimizers_import_no_compaction():
    """The first argument makes the package import nothing by itself, as for its command line."""
    code = "import sys; sys.argv[0] = 'loco-ext'; import loco_ext.optim; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "loco_ext.penalties" in modules
    assert not [name for name in modules if name.startswith("loco_ext.sparsity")]
