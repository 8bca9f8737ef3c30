"""Tests of GPU steps that end with a prox: they match the reference, do not synchronize, and work in CUDA graphs."""

import contextlib
import copy

import pytest
import torch

import loco_ext
from loco_ext import optim, sparsity
from tests.optim.cuda_graphs import capture, gradients_of, refill
from tests.optim.gpu import give_gradients, no_syncs, on_gpu
from tests.optim.stepping import CLASSES, params_of
from tests.penalties.cases import PENALTIES, make_norm, make_params
from tests.tolerances import ULPS, ULPS_OF_ROOTS, assert_within_ulps

RINGS = sparsity.RingPenalty(0.5)
ALL = {
    **PENALTIES,
    "joint": sparsity.KernelPenalty(0.3, power=2),
    "joint, largest": sparsity.KernelPenalty(0.1, norm="linf", power=2),
}
RICH = {
    "SGD": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "locality": (0.5, 2.0)},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1, "locality": (0.5, 2.0)},
}


def make_twins(name, penalty, dtype=torch.float32, **options):
    """Return our optimizer on the GPU and the reference on the CPU, with equal parameters."""
    params = make_params(dtype)
    options = {**RICH[name], "penalty": ALL[penalty], **options}
    make = getattr(optim, name)
    return make(on_gpu(params), **options), make(params, **options, fused=False)


def assert_near(ours, reference):
    """Assert that weights agree but for sums and roots, with the same zeros; then copy the reference's into ours."""
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        there = p.detach().cpu()
        ulps = max(ULPS[q.dtype], ULPS_OF_ROOTS[q.dtype])
        assert_within_ulps(there, q.detach(), ulps, scale=q.detach().abs().max().clamp(min=1).item())
        assert torch.equal(there == 0, q == 0)
        with torch.no_grad():
            p.copy_(q)


def set_rates(optimizers, lr):
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"].fill_(lr)


def put_rates(ours, reference):
    ours.param_groups[0]["lr"] = torch.tensor(0.05, device="cuda")
    reference.param_groups[0]["lr"] = torch.tensor(0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("penalty", ALL)
@pytest.mark.parametrize("name", CLASSES)
def test_kernels_end_with_the_references_prox_and_wait_for_nothing(backend, name, penalty, dtype):
    ours, reference = twins = make_twins(name, penalty, dtype)
    put_rates(*twins)
    give_gradients(*twins, 0)
    ours.step()
    reference.step()
    assert_near(*twins)
    for step, lr in enumerate([0.05, 0.02], start=1):
        set_rates(twins, lr)
        give_gradients(*twins, step)
        with no_syncs():
            ours.step()
        reference.step()
        assert_near(*twins)


@pytest.mark.parametrize("penalty", ["rings", "joint", "joint, largest"])
@pytest.mark.parametrize("name", CLASSES)
def test_replays_follow_what_lives_on_the_gpu(backend, name, penalty):
    ours, reference = twins = make_twins(name, penalty)
    put_rates(*twins)
    give_gradients(*twins, 0)
    ours.step()
    reference.step()
    assert_near(*twins)
    give_gradients(*twins, 1)
    gradients = gradients_of(ours)
    ours.grad_scale, ours.found_inf = torch.tensor(1.0, device="cuda"), torch.tensor(0.0, device="cuda")
    graph = capture(ours)
    for step, (lr, found) in enumerate([(0.05, 0.0), (0.02, 0.0), (0.02, 1.0), (0.1, 0.0)], start=1):
        refill(gradients, reference, step)
        set_rates(twins, lr)
        ours.found_inf.fill_(found)
        with no_syncs():
            graph.replay()
        if not found:
            reference.step()
        assert_near(*twins)


@pytest.mark.parametrize("name", CLASSES)
def test_a_graph_is_not_disturbed_by_steps_between(backend, name):
    ours, reference = twins = make_twins(name, "rings")
    give_gradients(*twins, 0)
    ours.step()
    reference.step()
    assert_near(*twins)
    give_gradients(*twins, 1)
    gradients, lr = gradients_of(ours), RICH[name]["lr"]
    graph = capture(ours)
    for step in range(1, 4):
        refill(gradients, reference, step)
        graph.replay()
        reference.step()
        assert_near(*twins)
        for optimizer in twins:
            optimizer.param_groups[0].update(lr=lr / (1 + step), penalty=PENALTIES["kernels"])
        give_gradients(*twins, 100 + step)
        ours.step()
        reference.step()
        assert_near(*twins)
        for optimizer in twins:
            optimizer.param_groups[0].update(lr=lr, penalty=PENALTIES["rings"])


@pytest.mark.parametrize("name", CLASSES)
def test_replays_read_norms_anew(backend, name):
    params = [p for p in make_params() if p.dim() > 2]
    norms = [make_norm(len(p)) for p in params]
    on_device = [copy.deepcopy(norm).cuda() for norm in norms]
    ours, reference = twins = [
        getattr(optim, name)(
            [
                {"params": values, "penalty": [sparsity.FoldedPenalty(RINGS, norm) for norm in of_norms]},
                {"params": [norm.weight for norm in of_norms], "locality": None},
            ],
            **{**RICH[name], "penalty": None, **options},
        )
        for values, options, of_norms in ((on_gpu(params), {}, on_device), (params, {"fused": False}, norms))
    ]
    for step in range(2):
        give_gradients(*twins, step)
        with no_syncs() if step else contextlib.nullcontext():
            ours.step()
        with loco_ext.backend("native"):  # Triton has no kernels for its tensors
            reference.step()
        assert_near(*twins)
    gradients, graph = gradients_of(ours), capture(ours)
    for step in range(2, 5):
        for norm in (*norms, *on_device):
            norm.running_var.mul_(2.0)
        refill(gradients, reference, step)
        with no_syncs():
            graph.replay()
        with loco_ext.backend("native"):  # Triton has no kernels for its tensors
            reference.step()
        assert_near(*twins)
