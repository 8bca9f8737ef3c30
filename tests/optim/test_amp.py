"""Tests of GradScaler on the CPU: a step unscales, skips on inf and NaN, and otherwise equals one without a scaler."""

import pytest
import torch
from torch import nn

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import CLASSES, RICH, assert_same, clones, make_params, params_of, set_gradients, train
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("native")

LOCALITY = (0.5, 2.0)
SCALE = 1024.0  # a power of two: scaling and unscaling are exact
PATHS = {"fused": {"fused": True}, "default": {}, "foreach": {"foreach": True}}


def make_scaler(**options):
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6, **options)
    scaler.scale(torch.ones(()))  # the scaler creates its tensors at the first call
    return scaler


def make(name, path="fused", dtype=torch.float32, **options):
    """Return an optimizer of two groups that differ in more than one operator call can handle."""
    second = {"params": make_params(dtype=dtype, seed=1), "maximize": True, "lr": 0.3}
    groups = [{"params": make_params(dtype=dtype)}, second]
    return getattr(optim, name)(groups, **{**RICH[name], "locality": LOCALITY, **PATHS[path], **options})


def scaled_gradients(optimizer, step, scaler, spoil=None):
    set_gradients(params_of(optimizer), step)
    for p in params_of(optimizer):
        p.grad.mul_(scaler.get_scale())
    if spoil is not None:
        params_of(optimizer)[-1].grad[1, 0, 0, 2] = spoil


def snapshot(optimizer):
    params = params_of(optimizer)
    return [p.detach().clone() for p in params], [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]


def assert_unchanged(optimizer, before):
    for p, old, state in zip(params_of(optimizer), *before, strict=True):
        assert same_bits(p.detach(), old)
        assert optimizer.state[p].keys() == state.keys()
        assert all(same_bits(optimizer.state[p][key], value) for key, value in state.items())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("path", "dtype"),
    [*((path, torch.float32) for path in PATHS), ("fused", torch.float16), ("fused", torch.bfloat16)],
    ids=str,
)
def test_scaled_training_is_unscaled_training(name, path, dtype):
    scaled, plain = make(name, path, dtype), make(name, path, dtype)
    scaler = make_scaler()
    for step in range(3):
        scaled_gradients(scaled, step, scaler)
        scaler.step(scaled)
        scaler.update()
    train(plain, 3)
    assert scaler.get_scale() == SCALE
    assert_same(scaled, plain, same_bits)
    if path != "foreach":
        for p, q in zip(params_of(scaled), params_of(plain), strict=True):
            assert same_bits(p.grad, q.grad)  # unscaled in place, as torch's fused optimizers do


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_into_inf_or_nan_changes_nothing(name, path, value):
    scaled, plain = make(name, path), make(name, path)
    scaler = make_scaler()
    scaled_gradients(scaled, 0, scaler)
    scaler.step(scaled)
    scaler.update()
    before = snapshot(scaled)
    scaled_gradients(scaled, 9, scaler, spoil=value)
    assert scaler.step(scaled) is None
    scaler.update()
    assert_unchanged(scaled, before)
    assert scaler.get_scale() == SCALE / 2
    scaled_gradients(scaled, 1, scaler)
    scaler.step(scaled)
    train(plain, 2)
    assert_same(scaled, plain, same_bits)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("path", PATHS)
def test_after_a_skipped_first_step_the_second_is_a_first(name, path):
    """Dampening, the start of momentum and Adam's bias correction all differ at a first step."""
    options = {"dampening": 0.5} if name == "SGD" else {}
    scaled, plain = make(name, path, **options), make(name, path, **options)
    scaler = make_scaler()
    scaled_gradients(scaled, 9, scaler, spoil=float("inf"))
    scaler.step(scaled)
    scaler.update()
    assert not any(scaled.state[p] for p in params_of(scaled))
    scaled_gradients(scaled, 0, scaler)
    scaler.step(scaled)
    scaler.update()
    train(plain, 1)
    assert_same(scaled, plain, same_bits)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("path", PATHS)
def test_manual_unscaling_and_clipping_come_before_the_step(name, path):
    scaled, plain = make(name, path), make(name, path)
    scaler = make_scaler()
    for step in range(2):
        scaled_gradients(scaled, step, scaler)
        scaler.unscale_(scaled)
        set_gradients(params_of(plain), step)
        for opt in (scaled, plain):
            nn.utils.clip_grad_norm_(params_of(opt), 1.0)
        scaler.step(scaled)
        scaler.update()
        plain.step()
    assert_same(scaled, plain, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_manual_unscaling_of_inf_skips_the_step(name):
    scaled = make(name)
    scaler = make_scaler()
    before = snapshot(scaled)
    scaled_gradients(scaled, 0, scaler, spoil=float("inf"))
    scaler.unscale_(scaled)
    scaler.step(scaled)
    assert_unchanged(scaled, before)


@pytest.mark.parametrize(
    ("name", "fused", "found", "shape"), covering(CLASSES, [True, False], [1.0, 2.0, 8.0, 0.5], [(), (1,)]), ids=str
)
def test_any_found_inf_but_zero_skips(name, fused, found, shape):
    """GradScaler sums found_inf over devices, so it may be any number."""
    optimizer = make(name, fused=fused)
    train(optimizer, 1)
    before = snapshot(optimizer)
    set_gradients(params_of(optimizer), 1)
    optimizer.grad_scale = torch.full(shape, SCALE)
    optimizer.found_inf = torch.full(shape, found)
    optimizer.step()
    assert_unchanged(optimizer, before)
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert not torch.equal(params_of(optimizer)[0], before[0][0])


@pytest.mark.parametrize("name", CLASSES)
def test_a_grad_scale_divides_and_is_not_rounded_to_a_power_of_two(name):
    scaled, plain = make(name, dtype=torch.float64), make(name, dtype=torch.float64)
    for opt in (scaled, plain):
        set_gradients(params_of(opt), 0)
    for p in params_of(plain):
        p.grad /= 3.0
    scaled.grad_scale, scaled.found_inf = torch.tensor(3.0), torch.tensor(0.0)
    scaled.step()
    plain.step()
    assert_same(scaled, plain, same_bits)


@pytest.mark.parametrize("stochastic", [None, 7])
def test_a_skipped_step_draws_no_random_numbers(stochastic):
    """Resuming after a skipped step must not depend on whether it was skipped by the scaler or not made at all."""
    scaled = make("SGD", dtype=torch.bfloat16, stochastic_rounding=stochastic)
    plain = make("SGD", dtype=torch.bfloat16, stochastic_rounding=stochastic)
    scaler = make_scaler()
    for step, spoil in ((0, None), (9, float("inf")), (1, None)):
        scaled_gradients(scaled, step, scaler, spoil)
        scaler.step(scaled)
        scaler.update()
    train(plain, 2)
    assert_same(scaled, plain, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_an_autocast_loop_trains_and_leaves_nothing_behind(name):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = getattr(optim, name)(model.parameters(), **{**RICH[name], "lr": 0.01}, locality=LOCALITY)
    scaler = make_scaler()
    x, y = torch.randn(16, 1, 8, 8), torch.randint(2, (16,))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("group", [{"foreach": True}, {"fused": None}], ids=str)
def test_a_group_that_cannot_unscale_added_later_lets_the_scaler_unscale(group):
    scaled, plain = (optim.SGD(make_params(), **RICH["SGD"], fused=True) for _ in range(2))
    later = make_params(seed=3)
    for opt in (scaled, plain):
        opt.add_param_group({"params": clones(later), **group})
    assert not scaled._step_supports_amp_scaling
    scaler = make_scaler()
    scaled_gradients(scaled, 0, scaler)
    scaler.step(scaled)
    train(plain, 1)
    assert_same(scaled, plain, same_bits)
