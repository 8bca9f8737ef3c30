"""Tests of penalties on whole layers: squared penalties, which couple a layer's filters, and functions as penalties."""

import pytest
import torch

import loco_ext
from loco_ext import ops, sparsity
from tests.covering import covering
from tests.optim.stepping import train
from tests.optim_step.cases import assert_native_is_reference, make_case
from tests.penalties.cases import KINDS, SHAPES, make, make_params

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
    options = {"hyper": (0.5, 0.0, 0.0, 0.0), "penalties": [rings, halves, None]}
    case = make_case("sgd", [(4, 3, 3, 3)] * 3, dtypes=[torch.float64] * 3, states=0, **options)
    ours, theirs = (case.copy().step(backend).params for backend in ("native", "reference"))
    torch.testing.assert_close(ours, theirs)
    stepped = [p - g / 2 for p, g in zip(case.params, case.lists["grads"], strict=True)]
    assert torch.equal(ours[1], stepped[1] / 4)
    assert not torch.equal(ours[0], stepped[0])


@pytest.mark.parametrize(("rule", "own"), [("sgd", {}), ("adam", {"states": 3, "amsgrad": True})], ids=str)
def test_random_rounding_is_of_what_the_prox_leaves(rule, own):
    penalty = ops.LayerPenalty(lambda w, step, metric: w * 0.999)
    options = {"penalties": [penalty], "seed": 7, "rounding_step": 3, "ordinals": [5], **own}
    assert_native_is_reference(make_case(rule, [(20, 10, 3)], dtypes=[torch.bfloat16] * 3, **options))


@pytest.mark.usefixtures("native")
def test_functions_get_adams_metric_over_the_learning_rate():
    told = []
    penalty = ops.LayerPenalty(lambda weight, step, metric: told.append((step, metric)) or weight)
    options = {"hyper": (0.1, 0.0, 0.9, 0.99, 1e-3), "penalties": [penalty]}
    case = make_case("adam", [(4, 3, 3)], dtypes=[torch.float64] * 3, step=0, **options)
    case.lists["exp_avg_sqs"][0].zero_()
    case.step()
    ((step, metric),) = told
    assert step == 1.0
    torch.testing.assert_close(metric, (case.lists["grads"][0].abs() + 1e-3) / 0.1)
