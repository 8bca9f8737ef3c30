"""Tests, without a GPU, of devices of parameters, learning rates and step counts, and of what a graph may capture."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loco_ext.optim import plan
from loco_ext.optim.options import device_lr, uses_kernels
from loco_ext.optim.plan import Batch, make_plan, select


def test_a_group_is_split_by_device():
    params = [nn.Parameter(torch.ones(4, 2, 3, 3, device=d)) for d in ("cpu", "meta", "meta", "cpu", "meta")]
    for i in (0, 1, 3, 4):
        params[i].grad = torch.ones_like(params[i])
    made = make_plan({"params": params, "locality": (0.5, 2.0), "penalty": None})
    assert select(made) == {"cpu": [0, 3], "meta": [1, 4]}


def test_a_learning_rate_is_read_where_the_parameters_are():
    meta, cpu = torch.device("meta"), torch.device("cpu")
    there = torch.tensor(0.1, device="meta")
    assert device_lr({"lr": there}, meta) is there
    for lr, device in ((0.1, meta), (torch.tensor(0.1), meta), (torch.tensor(0.1), cpu), (there, cpu)):
        assert device_lr({"lr": lr}, device) is None


def test_step_counts_live_on_the_gpu_only_for_our_kernels():
    there, here = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    ours = {"fused": None, "foreach": None, "differentiable": False}
    assert uses_kernels(ours, there)
    assert not uses_kernels(ours, here)
    for other in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        assert not uses_kernels({**ours, **other}, there)


@pytest.mark.parametrize(
    ("seed", "created", "reason"),
    [(None, [], None), (None, [1], "made a step before"), (7, [], "stochastic_rounding: expected None while a CUDA")],
)
def test_a_captured_step_makes_no_states_and_draws_no_numbers(monkeypatch, seed, created, reason):
    for capturing in (True, False):
        monkeypatch.setattr(plan, "is_capturing", lambda device, capturing=capturing: capturing)
        batch = SimpleNamespace(seed=seed, created=created, params=[torch.ones(())])
        with pytest.raises(RuntimeError, match=reason) if capturing and reason is not None else nullcontext():
            Batch.check_capture(batch)
