"""torch.compile of training steps gives the results of eager training, and does not recompile when lr changes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import (
    CLASSES,
    LOCALITY,
    RICH,
    assert_same,
    make_params,
    nearly,
    params_of,
    set_gradients,
    train,
)
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 6
WARM_UP = 3  # the first step makes states, the second meets them


def make_training(name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 5), nn.Flatten(), nn.Linear(32, 2))
    optimizer = getattr(optim, name)(model.parameters(), **{**RICH[name], "locality": LOCALITY, **options})
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.1 * epoch))
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])

    def train_step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, scheduler, train_step


def run(step, scheduler, counter=None):
    """Make steps; with a counter, fail if anything is compiled after the warm-up."""
    for count in range(STEPS):
        if counter is not None and count == WARM_UP:
            frames = counter.frame_count
            assert frames > 0
        with torch._dynamo.config.patch(error_on_recompile=counter is not None and count >= WARM_UP):
            loss = step()
        scheduler.step()
    if counter is not None:
        assert counter.frame_count == frames
    return loss


OPTIONS = {
    "float lr": dict,
    "tensor lr": lambda: {"lr": torch.tensor(0.02)},
    "foreach": lambda: {"foreach": True},
    "reference": lambda: {"fused": False},
}


@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [
        *covering(CLASSES, OPTIONS, ["eager", "aot_eager"], strength=1),
        pytest.param("AdamW", "float lr", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_training_step_is_compiled_once_and_trains_as_eager(name, options, backend):
    """Inductor's convolutions round differently, so its results are compared in float64 and not bit for bit."""
    equal = nearly if backend == "inductor" else same_bits
    torch.set_default_dtype(torch.float64 if backend == "inductor" else torch.float32)
    eager, eager_scheduler, eager_step = make_training(name, **OPTIONS[options]())
    expected = run(eager_step, eager_scheduler)
    optimizer, scheduler, step = make_training(name, **OPTIONS[options]())
    counter = CompileCounterWithBackend(backend)
    loss = run(torch.compile(step, backend=counter), scheduler, counter)
    assert equal(loss.detach(), expected.detach())
    assert optimizer.param_groups[0]["lr"] == eager.param_groups[0]["lr"]
    assert_same(optimizer, eager, equal)


@pytest.mark.parametrize(("name", "backend"), covering(CLASSES, ["eager", "aot_eager"], strength=1))
def test_compiled_steps_are_eager_ones_and_notice_what_changes_between_them(name, backend):
    """A frozen parameter, a new group, a schedule and another locality must not meet a stale graph."""
    results = []
    for compiled in (False, True):
        optimizer = getattr(optim, name)(make_params(), **RICH[name])
        step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
        set_gradients(params_of(optimizer), 0, frozen=(3, 5))
        step()
        train(optimizer, 1, start=1, step=step)
        optimizer.param_groups[0]["locality"] = LOCALITY
        train(optimizer, 1, start=2, step=step)
        optimizer.add_param_group({"params": make_params([(3, 3)], seed=1), "lr": 0.7})
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.97)
        for count in range(3, 6):
            with torch._dynamo.config.patch(error_on_recompile=count > 3):
                train(optimizer, 1, start=count, step=step)
            scheduler.step()
        results.append(optimizer)
    assert_same(*results, same_bits)


def test_a_compiled_step_takes_a_closure_and_returns_its_loss():
    params = make_params([(3,)])
    optimizer = optim.SGD(params, lr=0.25)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    before = params[0].detach().clone()
    loss = torch.compile(optimizer.step, backend="eager")(closure)
    assert torch.equal(loss.detach(), before.square().sum())
    assert torch.equal(params[0], before / 2)
