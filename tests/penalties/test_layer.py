"""Tests of penalties on whole layers: squared penalties, which couple a layer's filters, and functions as penalties."""

import cvxpy
import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import ops, optim, sparsity
from tests.covering import covering, slow
from tests.optim.stepping import train
from tests.penalties.cases import KINDS, SHAPES, make, make_params
from tests.penalties.minimum import CASES, CLOSE, KERNELS
from tests.ring_prox.solvers import clarabel
from tests.tolerances import BY_INTERIOR_POINTS, same_bits

SQUARED = sparsity.KernelPenalty(0.3, power=2)
CONVOLUTIONS = [i for i, shape in enumerate(SHAPES) if len(shape) > 2]


PENALTIES = {
    "squared": lambda: SQUARED,
    "squared, linf": lambda: sparsity.KernelPenalty(0.1, norm="linf", power=2),
    "mixed": lambda: [sparsity.RingPenalty(20.0), SQUARED, None, None, *[sparsity.KernelPenalty(9.0)] * 2],
}


def entry_of(penalty, i):
    return penalty[i] if isinstance(penalty, list) else penalty if i in CONVOLUTIONS else None


def by_hand(kind, penalty, dtype, steps):
    """Step without a penalty, then apply its prox with the step size and metric that the documentation states."""
    params = make_params(dtype)
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
    penalty = PENALTIES[name]()
    params = make_params(torch.float64)
    options = {"foreach": True} if backend == "foreach" else {}
    optimizer = make(kind, params, penalty, **options)
    with loco_ext.backend("reference" if backend == "reference" else "native"):
        train(optimizer, 2)
    for p, q, start in zip(params, by_hand(kind, penalty, torch.float64, 2), make_params(), strict=True):
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
@pytest.mark.usefixtures("native")
def test_penalties_of_all_kinds_may_mix(kind):
    """The kernels for GPUs are tested, too."""
    params, expected = make_params(torch.float64), make_params(torch.float64)
    train(make(kind, params, PENALTIES["mixed"]()), 2)
    with loco_ext.backend("reference"):
        train(make(kind, expected, PENALTIES["mixed"]()), 2)
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p == 0, q == 0)


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


# ---- the minimum


def convex_problem():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(120, 12, generator=generator, dtype=torch.float64)
    truth = torch.randn(KERNELS, 12, generator=generator, dtype=torch.float64)
    truth *= torch.tensor([1.0, 0.5, 0.3, 0.1, 0.05, 0.02], dtype=torch.float64)[:, None]
    return inputs, inputs @ truth.T + 0.1 * torch.randn(120, KERNELS, generator=generator, dtype=torch.float64)


def least(inputs, answers, strength):
    """The minimum of ``||inputs w - answers||^2 / 2n + strength * (sum_j ||w_j||)^2``, by CVXPY."""
    w = cvxpy.Variable((KERNELS, inputs.shape[1]))
    fit = cvxpy.sum_squares(inputs.numpy() @ w.T - answers.numpy()) / (2 * len(inputs))
    total = cvxpy.sum(cvxpy.norm(w, 2, axis=1))
    clarabel(cvxpy.Problem(cvxpy.Minimize(fit + strength * cvxpy.square(total))))
    return torch.from_numpy(w.value)


@pytest.mark.parametrize("case", ["dampening", slow("amsgrad")])
def test_every_optimizer_reaches_the_minimum_of_a_squared_penalty(case):
    name, options = CASES[case]
    inputs, answers = convex_problem()
    penalty = sparsity.KernelPenalty(0.2, power=2)
    expected = least(inputs, answers, 0.2)
    weight = nn.Parameter(torch.full((KERNELS, 3, 2, 2), 0.1, dtype=torch.float64))
    optimizer = getattr(optim, name)([weight], penalty=penalty, **options)
    steps = 500
    for step in range(steps):
        with torch.no_grad():
            errors = inputs @ weight.flatten(1).T - answers
            weight.grad = (errors.T @ inputs / len(inputs)).view_as(weight)
        optimizer.param_groups[0]["lr"] = options["lr"] * min(1.0, 100 ** (1 - 2 * step / steps))
        optimizer.step()
    found = weight.detach().flatten(1)
    assert (found - expected).abs().max() < CLOSE
    dead = expected.norm(dim=1) < BY_INTERIOR_POINTS**0.5
    assert 0 < dead.sum() < KERNELS
    assert torch.equal(found.norm(dim=1) == 0, dead)


# ---- operators


def test_the_operator_takes_any_function():
    weight, start = torch.ones(2, 1, 3, dtype=torch.float64), torch.ones(2, 1, 3, dtype=torch.float64)
    seen = []

    def prox(w, step, metric):
        seen.append((w.clone(), step, metric))
        return w * 2

    hyper = torch.tensor([[0.5, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for backend in ("native", "reference"):
        with loco_ext.backend(backend):
            ops.optim_step_sgd(
                [weight.copy_(start)],
                [start],
                [torch.zeros_like(start)],
                hyper,
                penalties=[ops.LayerPenalty(prox)],
            )
        assert torch.equal(weight, start)  # (1 - 0.5) * 2
    for w, step, metric in seen:
        assert torch.equal(w, start / 2)
        assert step == 2.0
        assert metric is None
    assert len(seen) == 2
