"""Tests of penalties on whole layers: squared penalties, which couple a layer's filters, and functions as penalties."""

import pytest
import torch

import loco_ext
from loco_ext import ops, sparsity
from tests.covering import covering
from tests.optim.stepping import train
from tests.penalties.cases import KINDS, SHAPES, make, make_params
from tests.tolerances import same_bits

SQUARED = sparsity.KernelPenalty(0.3, power=2)
CONVOLUTIONS = [i for i, shape in enumerate(SHAPES) if len(shape) > 2]


PENALTIES = {
    "rings": sparsity.RingPenalty(20.0),
    "squared": SQUARED,
    "squared, linf": sparsity.KernelPenalty(0.1, norm="linf", power=2),
    "mixed": [sparsity.RingPenalty(20.0), SQUARED, None, None, *[sparsity.KernelPenalty(9.0)] * 2],
}


def entry_of(penalty, i):
    return penalty[i] if isinstance(penalty, list) else penalty if i in CONVOLUTIONS else None


def by_hand(kind, penalty, steps):
    """Step without a penalty, then apply its prox with the step size and metric that the documentation states."""
    params = make_params(torch.float64)
    optimizer = make(kind, params, None)
    for step in range(steps):
        train(optimizer, 1, start=step)
        (group,) = optimizer.param_groups
        for i, p in enumerate(params):
            if (entry := entry_of(penalty, i)) is None:
                continue
            if "Adam" in kind:
                state = optimizer.state[p]
                v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
                correction = (1 - group["betas"][1] ** state["step"].item()) ** 0.5
                shrunk = entry.prox(p, 1.0, (v.sqrt() / correction + group["eps"]) / group["lr"])
            else:
                undamped = (1 - group["dampening"]) / (1 - group["momentum"])
                shrunk = entry.prox(p, group["lr"] * undamped)
            p.data.copy_(shrunk)
    return params


@pytest.mark.parametrize(("kind", "name", "backend"), covering(KINDS, PENALTIES, ["native", "reference", "foreach"]))
def test_the_step_is_one_without_the_penalty_and_then_its_prox(kind, name, backend):
    penalty = PENALTIES[name]
    params = make_params(torch.float64)
    options = {"foreach": True} if backend == "foreach" else {}
    optimizer = make(kind, params, penalty, **options)
    with loco_ext.backend("reference" if backend == "reference" else "native"):
        train(optimizer, 2)
    for p, q, start in zip(params, by_hand(kind, penalty, 2), make_params(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9 * start.detach().abs().max().item())
        assert torch.equal(p == 0, q == 0)


@pytest.mark.usefixtures("native")
def test_what_follows_the_step_and_what_ends_it_may_mix():
    """The kernels for GPUs are tested, too."""
    rings = ops.StepPenalty([0] * 9, torch.full((1,), 0.5, dtype=torch.float64))
    halves = ops.LayerPenalty(lambda weight, step, metric: weight * step / 2)
    hyper = torch.tensor([[0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    starts = [torch.randn(4, 3, 3, 3, dtype=torch.float64) for _ in range(3)]
    results = []
    for backend in ("native", "reference"):
        weights = [start.clone() for start in starts]
        with loco_ext.backend(backend):
            grads = [torch.ones_like(start) for start in starts]
            ops.optim_step_sgd(weights, grads, [], hyper, penalties=[rings, halves, None])
        results.append(weights)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)
    assert torch.equal(results[0][1], (starts[1] - 0.5) / 4)
    assert not torch.equal(results[0][0], starts[0] - 0.5)


@pytest.mark.parametrize("kind", ["momentum", "Adam"])
def test_random_rounding_is_of_what_the_prox_leaves(kind):
    results = []
    for backend in ("native", "reference"):
        weight = torch.linspace(-2, 2, 600).view(20, 10, 3).bfloat16()
        states = [torch.full_like(weight, 0.01 * n) for n in range(1, 4)]
        penalty = ops.LayerPenalty(lambda w, step, metric: w * 0.999)
        options = {"penalties": [penalty], "seed": 7, "rounding_step": 3, "ordinals": [5]}
        with loco_ext.backend(backend):
            if kind == "momentum":
                hyper = torch.tensor([[0.5, 0.0, 0.9, 0.0]], dtype=torch.float64)
                ops.optim_step_sgd([weight], [torch.ones_like(weight)], states[:1], hyper, **options)
            else:
                hyper = torch.tensor([[0.1, 0.0, 0.9, 0.99, 1e-3]], dtype=torch.float64)
                lists = [[state] for state in states]
                steps = [torch.zeros(())]
                ops.optim_step_adam([weight], [weight / 2], *lists, steps, hyper, amsgrad=True, **options)
        results.append([weight, *states])
    assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.usefixtures("native")
def test_functions_get_adams_metric_over_the_learning_rate():
    told = []
    penalty = ops.LayerPenalty(lambda weight, step, metric: told.append((step, metric)) or weight)
    weight, grad = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    hyper = torch.tensor([[0.1, 0.0, 0.9, 0.99, 1e-3]], dtype=torch.float64)
    states = [[torch.zeros_like(weight)] for _ in range(2)]
    ops.optim_step_adam([weight], [grad], *states, [], [torch.zeros(())], hyper, penalties=[penalty])
    ((step, metric),) = told
    assert step == 1.0
    torch.testing.assert_close(metric, (grad.abs() + 1e-3) / 0.1)
