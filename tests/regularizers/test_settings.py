"""Neither the caller's settings nor compilation or other threads change a loss or a measurement."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

from loco_ext import regularizers
from loco_ext.regularizers.ieee import ieee_arithmetic
from tests.regularizers import networks, piecewise

torch.manual_seed(0)
CLASSIFIER, X = networks.make("batch norm and pooling"), networks.images(3)
PIXELS = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.ReLU()).double()
VECTORS, V = nn.Sequential(*piecewise.mlp(10, 4, 3)), torch.randn(3, 10)
STACK = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
TARGET = torch.rand(8, 8, dtype=torch.float64)


class OfBuffers(nn.Module):
    """A module whose weight is the product of two buffers, and whose code counts its calls and draws numbers."""

    def __init__(self):
        super().__init__()
        for name, value in (("one", torch.randn(10, 10)), ("other", torch.randn(10, 10)), ("calls", torch.zeros(()))):
            self.register_buffer(name, value)

    def forward(self, x):
        self.calls += 1
        torch.rand(3)
        return torch.relu(x @ (self.one @ self.other))


OF_BUFFERS = OfBuffers()
MEASURES = {
    "PILCRO": lambda x, v: regularizers.PILCRO()(CLASSIFIER, x),
    "PILCRO, zero": lambda x, v: regularizers.PILCRO(alpha=0)(CLASSIFIER, x),
    "PILCRO, target": lambda x, v: regularizers.PILCRO("target", target=TARGET, expectation="exact")(CLASSIFIER, x),
    "importance_landscape": lambda x, v: regularizers.importance_landscape(CLASSIFIER, x),
    "data_smoothness": lambda x, v: regularizers.data_smoothness(x),
    "total_variation": lambda x, v: regularizers.total_variation(x[0, 0]),
    "path_counts": lambda x, v: regularizers.path_counts(STACK, (2, 9, 9)),
    "region_radius": lambda x, v: regularizers.region_radius(VECTORS, v),
    "region_radius, 1": lambda x, v: regularizers.region_radius(PIXELS, x, 1),
    "region_radius, buffers": lambda x, v: regularizers.region_radius(OF_BUFFERS, v),
    "count_regions": lambda x, v: regularizers.count_regions(PIXELS, x),
    "ROLL": lambda x, v: regularizers.ROLL(1.0, 0.5)(VECTORS, v),
    "ROLL, pixels": lambda x, v: regularizers.ROLL(1.0, 0.5, 50, memory_limit=100_000)(PIXELS, x),
    "ROLL, random": lambda x, v: regularizers.ROLL(1.0, 0.5, probes=1, generator=torch.Generator())(VECTORS, v),
    "MarginLoss": lambda x, v: regularizers.MarginLoss(1.0)(PIXELS, x),
}


def gradients(loss):
    """Return the gradients of a loss in the parameters of all models; nothing for a measurement."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return []
    models = CLASSIFIER, PIXELS, VECTORS
    parameters = [p for model in models for p in model.parameters()]
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", MEASURES)
def test_what_the_caller_has_set_changes_nothing(name):
    """Inputs that are made in inference mode count outside of it as well."""
    measure, exact = MEASURES[name], {"rtol": 0, "atol": 0}
    expected = measure(X, V)
    slopes, state = gradients(expected), torch.get_rng_state()
    for setting in (
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        torch.inference_mode(),
    ):
        with setting:
            inputs = X.clone(), V.clone()
            inside = measure(*inputs)
        torch.testing.assert_close(inside, expected, **exact)
        outside = measure(*inputs)
        torch.testing.assert_close(outside, expected, **exact)
        torch.testing.assert_close(gradients(outside), slopes, **exact)
        if isinstance(setting, torch.no_grad | torch.inference_mode) and "PILCRO" not in name:
            assert gradients(inside) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert OF_BUFFERS.calls == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_measures_and_compiled_parts_are_measured():
    names = ("importance_landscape", "path_counts", "region_radius", "count_regions")

    def measure():
        return [MEASURES[name](X, V) for name in names]

    expected = measure()
    torch.testing.assert_close(torch.compile(measure, backend="eager")(), expected)
    with contextlib.ExitStack() as stack:
        for model in (CLASSIFIER, STACK, VECTORS, PIXELS):
            stack.callback(model.__setitem__, 0, model[0])
            model[0] = torch.compile(model[0], backend="eager")
        torch.testing.assert_close(measure(), expected)


PAUSE = 0.2  # seconds that a measurement waits for the other one
LIMIT = 60.0  # seconds after which a test fails


class Paused(nn.Module):
    """Linear layer that tells that it runs, and waits for something else."""

    def __init__(self, runs: threading.Event, waits_for: threading.Event) -> None:
        super().__init__()
        self.runs, self.waits_for, self.layer = runs, waits_for, nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.set()
        self.waits_for.wait(PAUSE)
        return self.layer(x.flatten(1))


def test_what_one_thread_switches_another_does_not_leave_behind() -> None:
    """The first measurement would end inside of the second."""
    first, second, ended = threading.Event(), threading.Event(), threading.Event()
    x = torch.rand(2, 3, 2, 2)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(regularizers.importance_landscape, Paused(first, second), x)
        one.add_done_callback(lambda _: ended.set())
        assert first.wait(LIMIT)
        other = pool.submit(regularizers.importance_landscape, Paused(second, ended), x)
        assert one.result().isfinite().all()
        assert other.result().isfinite().all()
    assert eval_frame._stance.stance == "default"


def test_arithmetic_is_ieee_as_long_as_a_thread_wants_it() -> None:
    products = torch.backends.mkldnn.matmul
    before, entered, left = products.fp32_precision, threading.Event(), threading.Event()

    def until_the_other_left() -> str:
        with ieee_arithmetic(torch.device("cpu")):
            entered.set()
            assert left.wait(LIMIT)
            return products.fp32_precision

    try:
        products.fp32_precision = "bf16"
        with ThreadPoolExecutor(1) as pool:
            with ieee_arithmetic(torch.device("cpu")):
                longer = pool.submit(until_the_other_left)
                assert entered.wait(LIMIT)
            left.set()
            assert longer.result() == "ieee"
        assert products.fp32_precision == "bf16"
        products.fp32_precision, torch.backends.fp32_precision = "none", "tf32"
        with ieee_arithmetic(torch.device("cpu")):
            assert products.fp32_precision == "ieee"
        torch.backends.fp32_precision = "ieee"
        assert products.fp32_precision == "ieee"  # it has none of its own, as before
    finally:
        products.fp32_precision, torch.backends.fp32_precision = before, "none"
    assert torch.backends.cudnn.allow_tf32  # torch raises an error here if convolutions have lost their default
