"""Tests, without a GPU, of devices of parameters, learning rates and step counts, and of what a graph may capture."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loco_ext.optim.options import device_lr, uses_kernels
from loco_ext.optim.plan import Batch, make_plan, select


def test_a_group_is_split_by_device():
    params = [nn.Parameter(torch.ones(4, 2, 3, 3, device=d)) for d in ("cpu", "meta", "meta", "cpu", "meta")]
    for i in (0, 1, 3, 4):
        params[i].grad = torch.ones_like(params[i])
    group = {"params": params, "locality": (0.5, 2.0), "penalty": None}
    here, there = select(make_plan(group))
    assert (here.device, there.device) == ("cpu", "meta")
    assert (list(here.offsets), list(there.offsets)) == ([0, 3], [1, 4])
    for selection in (here, there):
        assert all(p is params[i] for p, i in zip(selection.params, selection.offsets, strict=True))
        assert all(g is params[i].grad for g, i in zip(selection.grads, selection.offsets, strict=True))
        assert selection.map_index == [0, 0]


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


@pytest.mark.parametrize("created", [[], [1]], ids=["no_states_made", "states_made"])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(("is_cuda", "capturing"), [(True, True), (True, False), (False, True)])
def test_a_captured_step_makes_no_states_and_draws_no_numbers(monkeypatch, is_cuda, capturing, seed, created):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    batch = SimpleNamespace(seed=seed, created=created, params=[SimpleNamespace(is_cuda=is_cuda)])
    expected = nullcontext()
    if is_cuda and capturing and (created or seed is not None):
        reason = (
            "made a step before" if created else "stochastic_rounding: expected None while a CUDA graph is captured"
        )
        expected = pytest.raises(RuntimeError, match=reason)
    with expected:
        Batch.check_capture(batch)
