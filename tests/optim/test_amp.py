"""Tests of GradScaler on the CPU: a step unscales, skips on inf and NaN, and otherwise equals one without a scaler."""

import math

import pytest
import torch
from torch import nn

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import CLASSES, LOCALITY, RICH, assert_same, make_params, params_of, set_gradients, train
from tests.tolerances import same_bits

SCALE = 1024.0  # a power of two: scaling and unscaling are exact
PATHS = {"fused": {"fused": True}, "default": {}, "foreach": {"foreach": True}}


def make_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    scaler.scale(torch.ones(()))  # the scaler creates its tensors at the first call
    return scaler


def make(name, path, dtype, seed):
    """Return an optimizer of two groups that differ in more than one operator call can handle."""
    second = {"params": make_params(dtype=dtype, seed=1), "maximize": True, "lr": 0.3}
    groups = [{"params": make_params(dtype=dtype)}, second]
    dampening = {"dampening": 0.5} if name == "SGD" else {}
    options = {**RICH[name], **PATHS[path], **dampening, "locality": LOCALITY, "stochastic_rounding": seed}
    return getattr(optim, name)(groups, **options)


def set_scaled_gradients(optimizer, step, scaler):
    set_gradients(params_of(optimizer), step)
    for p in params_of(optimizer):
        p.grad.mul_(scaler.get_scale())


@pytest.mark.parametrize(
    ("name", "path", "dtype", "seed", "unscale", "spoilt"),
    [
        *covering(CLASSES, PATHS, [torch.float32], [None], [False, True], [(), (0,), (1,), (1, 2)]),
        *covering(CLASSES, ["fused"], [torch.float16, torch.bfloat16], [None], [False], [(1,)]),
        *covering(CLASSES, ["fused"], [torch.bfloat16], [7], [False], [(1,)]),
    ],
    ids=str,
)
def test_scaled_training_is_training_without_the_skipped_steps(name, path, dtype, seed, unscale, spoilt):
    """After a skipped first step the second is a first; a skipped step draws no random numbers.

    Dampening, the start of momentum and Adam's bias correction all differ at a first step. Gradients that were unscaled
    before the step are clipped.
    """
    scaled, plain = (make(name, path, dtype, seed) for _ in range(2))
    scaler = make_scaler()
    for step in range(4):
        set_scaled_gradients(scaled, step, scaler)
        set_gradients(params_of(plain), step)
        if step in spoilt:
            params_of(scaled)[-1].grad[1, 0, 0, 2] = math.nan if step % 2 else math.inf
        if unscale:
            scaler.unscale_(scaled)
            for optimizer in (scaled, plain):
                nn.utils.clip_grad_norm_(params_of(optimizer), 1.0)
        scaler.step(scaled)
        scaler.update()
        if step not in spoilt:
            plain.step()
            for p, q in zip(params_of(scaled), params_of(plain), strict=True):
                assert path == "foreach" or same_bits(
                    p.grad, q.grad
                )  # unscaled in place, as torch's fused optimizers do
        assert_same(scaled, plain, same_bits)
    assert scaler.get_scale() == SCALE / 2 ** len(spoilt)


CHANGES = {
    "a later group of torch's": lambda o: o.add_param_group({"params": make_params(seed=3), "foreach": True}),
    "a later group": lambda o: o.add_param_group({"params": make_params(seed=3), "fused": None}),
    "foreach": lambda o: o.param_groups[0].update(foreach=True),
    "differentiable": lambda o: o.param_groups[0].update(differentiable=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_scaler_unscales_for_groups_that_cannot_since_a_change(change):
    scaled, plain = (optim.SGD(make_params(), **RICH["SGD"], fused=True) for _ in range(2))
    for optimizer in (scaled, plain):
        CHANGES[change](optimizer)
    scaler = make_scaler()
    set_scaled_gradients(scaled, 0, scaler)
    scaler.step(scaled)
    train(plain, 1)
    assert_same(scaled, plain, same_bits)
