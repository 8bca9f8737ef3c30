"""Measurements in several threads at the same time restore what they switch in the process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

from loco_ext import regularizers
from loco_ext.regularizers.ieee import ieee_arithmetic

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
    finally:
        products.fp32_precision = before
