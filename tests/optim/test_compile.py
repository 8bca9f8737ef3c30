"""torch.compile of training steps gives the results of eager training, and does not recompile when lr changes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler

from loco_ext import optim
from tests.covering import covering
from tests.optim.stepping import CLASSES, RICH, assert_same, make_params, nearly, params_of, set_gradients, train
from tests.tolerances import same_bits

pytestmark = pytest.mark.usefixtures("native", "fresh_dynamo")

LIBRARIES = ["cpu", "cuda_on_cpu"]  # parameters of the fixture native
LOCALITY = (0.5, 2.0)
STEPS = 8
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


def run(step, scheduler, steps, counter=None):
    """Make steps; with a counter, fail if anything is compiled after the warm-up."""
    for count in range(steps):
        if counter is not None and count == WARM_UP:
            frames = counter.frame_count
            assert frames > 0
        with torch._dynamo.config.patch(error_on_recompile=counter is not None and count >= WARM_UP):
            loss = step()
        scheduler.step()
    if counter is not None:
        assert counter.frame_count == frames
    return loss


def assert_trained_alike(compiled, eager, equal=same_bits):
    assert compiled.param_groups[0]["lr"] == eager.param_groups[0]["lr"]
    assert_same(compiled, eager, equal)


OPTIONS = {
    "float lr": dict,
    "tensor lr": lambda: {"lr": torch.tensor(0.02)},
    "foreach": lambda: {"foreach": True},
    "reference": lambda: {"fused": False},
}


@pytest.mark.parametrize(
    ("native", "name", "options"), covering(LIBRARIES, CLASSES, OPTIONS, strength=1), indirect=["native"]
)
def test_a_compiled_training_step_is_compiled_once_and_trains_as_eager(name, options):
    eager, eager_scheduler, eager_step = make_training(name, **OPTIONS[options]())
    expected = run(eager_step, eager_scheduler, STEPS)
    optimizer, scheduler, step = make_training(name, **OPTIONS[options]())
    counter = CompileCounterWithBackend("eager")
    loss = run(torch.compile(step, backend=counter), scheduler, STEPS, counter)
    assert same_bits(loss.detach(), expected.detach())
    assert_trained_alike(optimizer, eager)


@pytest.mark.parametrize(("native", "name"), covering(LIBRARIES, CLASSES, strength=1), indirect=["native"])
def test_a_compiled_training_step_works_with_aot_autograd(name):
    eager, eager_scheduler, eager_step = make_training(name)
    run(eager_step, eager_scheduler, STEPS)
    optimizer, scheduler, step = make_training(name)
    counter = CompileCounterWithBackend("aot_eager")
    run(torch.compile(step, backend=counter), scheduler, STEPS, counter)
    assert_trained_alike(optimizer, eager)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_training_step_compiled_by_inductor_trains_as_eager(name):
    """Inductor's convolutions round differently, so results are compared in float64 and not bit for bit."""
    torch.set_default_dtype(torch.float64)
    eager, eager_scheduler, eager_step = make_training(name)
    run(eager_step, eager_scheduler, 10)
    optimizer, scheduler, step = make_training(name)
    counter = CompileCounterWithBackend("inductor")
    run(torch.compile(step, backend=counter), scheduler, 10, counter)
    assert_trained_alike(optimizer, eager, nearly)


@pytest.mark.parametrize(
    ("native", "name", "backend"), covering(LIBRARIES, CLASSES, ["eager", "aot_eager"]), indirect=["native"]
)
def test_a_compiled_step_is_compiled_once_and_steps_as_eager(name, backend):
    eager, compiled = (getattr(optim, name)(make_params(), **RICH[name], locality=LOCALITY) for _ in range(2))
    schedulers = [lr_scheduler.ExponentialLR(opt, 0.97) for opt in (eager, compiled)]
    step = torch.compile(compiled.step, backend=backend)
    for count in range(STEPS):
        train(eager, 1, start=count)
        set_gradients(params_of(compiled), count)
        with torch._dynamo.config.patch(error_on_recompile=count >= WARM_UP):
            step()
        for scheduler in schedulers:
            scheduler.step()
    assert_trained_alike(compiled, eager)


@pytest.mark.parametrize("name", CLASSES)
def test_compiled_steps_notice_what_changes_between_them(name):
    """A frozen parameter, a new group and another locality must not meet a stale graph."""
    results = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        optimizer = getattr(optim, name)(make_params(), **RICH[name])
        step = wrap(optimizer.step)
        set_gradients(params_of(optimizer), 0, frozen=(3, 5))
        step()
        set_gradients(params_of(optimizer), 1)
        step()
        optimizer.param_groups[0]["locality"] = LOCALITY
        step()
        optimizer.add_param_group({"params": make_params([(3, 3)], seed=1), "lr": 0.7})
        set_gradients(params_of(optimizer), 2)
        step()
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
