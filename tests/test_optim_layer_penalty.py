"""Penalties of whole layers: squared ones that couple their kernels, and those of folded kernels."""

import copy
import io
import pickle

import cvxpy
import numpy as np
import pytest
import torch
from ring_prox_solvers import clarabel
from stepping import CLASSES, clones, set_gradients, train
from test_optim_penalty import KINDS, LAYOUTS, SHAPES, make, make_params
from test_optim_penalty_minimum import CASES, CLOSE, KERNELS
from tolerances import BY_INTERIOR_POINTS, assert_within_ulps, same_bits
from torch import nn

import loco_ext
from loco_ext import ops, optim, sparsity

SQUARED = sparsity.KernelPenalty(0.3, power=2)
CONVOLUTIONS = [i for i, shape in enumerate(SHAPES) if len(shape) > 2]


def make_norm(channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels, eps=0.1)
    norm.weight.data = torch.randn(channels, generator=generator)
    norm.running_var = torch.rand(channels, generator=generator) + 0.05
    return norm


def folded(penalty):
    """For the parameters of make_params, each with a norm of its own."""
    return [sparsity.FoldedPenalty(penalty, make_norm(shape[0])) if len(shape) > 2 else None for shape in SHAPES]


PENALTIES = {
    "squared": lambda: SQUARED,
    "squared, linf": lambda: sparsity.KernelPenalty(0.1, norm="linf", power=2),
    "folded rings": lambda: folded(sparsity.RingPenalty(20.0)),
    "folded largest": lambda: folded(sparsity.RingPenalty(8.0, norm="linf")),
    "folded squares": lambda: folded(sparsity.RingPenalty(3.0, power=2)),
    "folded squared kernels": lambda: folded(SQUARED),
    "mixed": lambda: [sparsity.RingPenalty(20.0), SQUARED, None, None, *folded(sparsity.KernelPenalty(9.0))[4:]],
}
NAMES = list(PENALTIES)


def entry_of(penalty, i):
    return penalty[i] if isinstance(penalty, list) else penalty if i in CONVOLUTIONS else None


def by_hand(kind, penalty, dtype, steps=1):
    """Steps without a penalty, then its prox with what the documentation says of step size and metric."""
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


@pytest.mark.parametrize("backend", ["native", "reference", "foreach"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_one_without_the_penalty_and_then_its_prox(kind, name, backend):
    if backend == "reference" and "Adam" in kind and "square" in name:
        pytest.skip("the reference takes seconds for two nested searches")
    penalty = PENALTIES[name]()
    params = make_params(torch.float64)
    options = {"foreach": True} if backend == "foreach" else {}
    optimizer = make(kind, params, penalty, **options)
    with loco_ext.backend("reference" if backend == "reference" else "native"):
        train(optimizer, 2)
    for p, q, start in zip(params, by_hand(kind, penalty, torch.float64, 2), make_params(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9 * start.detach().abs().max().item())
        assert torch.equal(p == 0, q == 0)
    if (kind, name) == ("plain", "folded rings"):
        assert sum((p == 0).sum() for p in params) > 0


@pytest.mark.parametrize("name", ["squared", "folded rings", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
def test_narrow_types_are_rounded_once_at_the_end(kind, dtype, name):
    ours, theirs = make_params(dtype), make_params(dtype)
    for params, backend in ((ours, "native"), (theirs, "reference")):
        with loco_ext.backend(backend):
            train(make(kind, params, PENALTIES[name]()), 1)
    for p, q, start in zip(ours, theirs, make_params(dtype), strict=True):
        assert_within_ulps(p.detach(), q.detach(), scale=start.detach().abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same(layout):
    results = []
    for chosen in ("contiguous", layout):
        params = make_params(torch.float64, chosen)
        train(make("momentum", params, PENALTIES["mixed"]()), 3)
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.usefixtures("native")
def test_what_follows_the_step_and_what_ends_it_may_mix():
    """On a GPU's kernels, too."""
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
    """On a GPU's kernels, too."""
    params, expected = make_params(torch.float64), make_params(torch.float64)
    train(make(kind, params, PENALTIES["mixed"]()), 2)
    with loco_ext.backend("reference"):
        train(make(kind, expected, PENALTIES["mixed"]()), 2)
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p == 0, q == 0)


def test_what_the_prox_sees_is_the_norm_at_that_step():
    (entry, *_) = penalty = folded(sparsity.RingPenalty(20.0))
    params = make_params(torch.float64)
    optimizer = make("plain", params, penalty)
    train(optimizer, 2)
    before = clones(params)
    entry.batch_norm.weight.data = torch.tensor([0.0, 0.0, 0.0, 1e3, 1e3, 1e3])
    train(optimizer, 1, start=2)
    assert torch.count_nonzero(params[0][3:]) == 0
    set_gradients(before, 2)
    make("plain", before[:1], None).step()
    torch.testing.assert_close(params[0][:3], before[0][:3])


@pytest.mark.parametrize("path", ["native", "reference", "foreach", "groups apart"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_norm_in_the_same_optimizer_counts_as_it_was_before_the_step(name, path):
    conv, norm = nn.Conv2d(2, 6, 3, bias=False).double(), make_norm(6).double()
    penalty = sparsity.FoldedPenalty(sparsity.RingPenalty(0.05), norm)
    groups = [
        {"params": list(norm.parameters()), "maximize": path == "groups apart"},
        {"params": [conv.weight], "penalty": [penalty]},
    ]
    scales = penalty.scales(conv.weight)
    hand = clones([conv.weight])
    options = {"lr": 0.5, **({"foreach": True} if path == "foreach" else {})}
    optimizer, other = getattr(optim, name)(groups, **options), getattr(optim, name)(hand, **options)
    for p in norm.parameters():
        p.grad = torch.full_like(p, 100.0)
    conv.weight.grad = torch.full_like(conv.weight, 0.01)
    hand[0].grad = conv.weight.grad.clone()
    with loco_ext.backend("reference" if path == "reference" else "native"):
        optimizer.step()
        other.step()
    assert (penalty.scales(conv.weight) - scales).abs().min() > 0.1
    before, metric = hand[0].detach(), None
    if name != "SGD":
        metric = (other.state[hand[0]]["exp_avg_sq"].sqrt() / (1 - 0.999) ** 0.5 + 1e-8) / 0.5
    thresholds = (0.05 * (0.5 if name == "SGD" else 1.0) * scales)[:, None].expand(-1, 3)
    expected = sparsity.ring_prox(before, thresholds, metric=metric)
    torch.testing.assert_close(conv.weight.detach(), expected)
    assert not torch.equal(expected, before)


@pytest.mark.parametrize("name", CLASSES)
def test_found_inf_and_a_learning_rate_of_0_leave_everything_alone(name):
    for penalty in (SQUARED, folded(sparsity.RingPenalty(1.0))):
        params = make_params()
        before = clones(params)
        optimizer = getattr(optim, name)(params, lr=0.1, penalty=penalty)
        set_gradients(params, 0)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.tensor(2.0)
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
        optimizer.param_groups[0]["lr"] = 0.0
        if name != "AdamW":
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_several_batches_are_checked_before_the_first_is_stepped():
    params = make_params(torch.float64)
    groups = [{"params": params[:2]}, {"params": params[4:5], "maximize": True}]
    optimizer = optim.Adam(groups, lr=0.02, penalty=SQUARED)
    train(optimizer, 1)
    alone = make_params(torch.float64)
    set_gradients(alone[:2], 0)
    optim.Adam(alone[:2], lr=0.02, penalty=SQUARED).step()
    assert same_bits(params[0].detach(), alone[0].detach())


def test_random_rounding_is_refused_where_the_prox_follows_the_step():
    weight = torch.ones(2, 1, 3, dtype=torch.bfloat16)
    hyper = torch.tensor([[0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    penalty = ops.LayerPenalty(lambda w, step, metric: w / 2)
    with pytest.raises(NotImplementedError, match="stochastic_rounding: expected None for bfloat16"):
        ops.optim_step_sgd([weight], [torch.ones_like(weight)], [], hyper, penalties=[penalty], seed=7)
    assert torch.equal(weight, torch.ones_like(weight))


# ---- the minimum


def convex_problem():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(120, 12, generator=generator, dtype=torch.float64)
    truth = torch.randn(KERNELS, 12, generator=generator, dtype=torch.float64)
    truth *= torch.tensor([1.0, 0.5, 0.3, 0.1, 0.05, 0.02], dtype=torch.float64)[:, None]
    return inputs, inputs @ truth.T + 0.1 * torch.randn(120, KERNELS, generator=generator, dtype=torch.float64)


def least(inputs, answers, strength, factors):
    """The minimum of ``||inputs w - answers||^2 / 2n + strength * (sum_j f_j ||w_j||)^2``, by CVXPY."""
    w = cvxpy.Variable((KERNELS, inputs.shape[1]))
    fit = cvxpy.sum_squares(inputs.numpy() @ w.T - answers.numpy()) / (2 * len(inputs))
    total = cvxpy.norm(w, 2, axis=1) @ np.asarray(factors)
    clarabel(cvxpy.Problem(cvxpy.Minimize(fit + strength * cvxpy.square(total))))
    return torch.from_numpy(w.value)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_reaches_the_minimum_of_a_squared_penalty(case, fold):
    name, options = CASES[case]
    inputs, answers = convex_problem()
    penalty, factors = sparsity.KernelPenalty(0.2, power=2), [1.0] * KERNELS
    if fold:
        norm = nn.BatchNorm2d(KERNELS, eps=0.0).double()
        norm.running_var = torch.tensor([1.0, 4.0, 0.25, 1.0, 1.0, 9.0], dtype=torch.float64)
        penalty, factors = sparsity.FoldedPenalty(penalty, norm), (1 / norm.running_var.sqrt()).tolist()
    expected = least(inputs, answers, 0.2, factors)
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


# ---- checkpoints and operators


def test_checkpoints_keep_the_norms_of_the_optimizer_they_are_loaded_into():
    params = make_params()
    penalty = PENALTIES["mixed"]()
    optimizer = make("Adam", params, penalty)
    train(optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    others = clones(params)
    # Settings come from the checkpoint, norms stay.
    others_own = sparsity.FoldedPenalty(sparsity.RingPenalty(1.0), penalty[4].batch_norm)
    fresh = [sparsity.RingPenalty(5.0), *penalty[1:4], others_own, penalty[5]]
    other = make("Adam", others, fresh)
    other.load_state_dict(state)
    assert other.param_groups[0]["penalty"] == penalty
    assert other.param_groups[0]["penalty"][4].batch_norm is penalty[4].batch_norm
    train(optimizer, 1, start=1)
    train(other, 1, start=1)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(params, others, strict=True))
    for place in (None, [*penalty[:4], *penalty[:2]]):
        with pytest.raises(ValueError, match="penalty: expected an optimizer with a FoldedPenalty where"):
            make("Adam", clones(params)[:6] if place is None else make_params(), None).load_state_dict(state)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0]["penalty"][:4] == penalty[:4]
        torch.testing.assert_close(
            copied.param_groups[0]["penalty"][4].batch_norm.running_var, make_norm(5).running_var
        )


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
