"""Our optimizers on a GPU beside the reference on the CPU, and CUDA graphs of their steps."""

from contextlib import nullcontext

import torch
from torch import nn

from loco_ext import optim, sparsity
from tests.gpu import no_syncs
from tests.optim.stepping import LOCALITY, RICH, make_params, params_of, set_gradients
from tests.penalties import cases as penalised
from tests.tolerances import ULPS, ULPS_OF_ROOTS, assert_within_ulps, same_bits

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SCALE = 1024.0  # a power of two: scaling and unscaling are exact
PENALTIES = {
    **penalised.PENALTIES,
    "joint": sparsity.KernelPenalty(0.3, power=2),
    "joint, largest": sparsity.KernelPenalty(0.1, norm="linf", power=2),
}
# Options of steps that end with a prox.
PENALISED = {
    "SGD": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "locality": LOCALITY},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1, "locality": LOCALITY},
}


def on_gpu(params):
    return [nn.Parameter(p.detach().cuda()) for p in params]


def make_twins(name, dtype=F32, penalty=None, **options):
    """Return our optimizer on the GPU and the reference on the CPU, with equal parameters.

    penalty: one of the names in PENALTIES, or None.
    """
    make = getattr(optim, name)
    if penalty is None:
        params, options = make_params(dtype=dtype), {**RICH[name], "locality": LOCALITY, **options}
    else:
        params = penalised.make_params(dtype)
        options = {**PENALISED[name], "penalty": PENALTIES[penalty], **options}
    return make(on_gpu(params), **options), make(params, **{**options, "fused": False})


def give_gradients(ours, reference, seed, frozen=()):
    """Give both optimizers the same new gradients, in new memory."""
    set_gradients(params_of(reference), seed, frozen)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.grad = None if q.grad is None else q.grad.to(p.device)


def assert_same(ours, reference):
    """Assert that both agree to the bit; after a prox, that their weights do but for sums and roots.

    Ours then takes over the reference's weights.
    """
    if any(group["penalty"] is not None for group in ours.param_groups):
        assert_near(ours, reference)
        return
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert same_bits(p.detach().cpu(), q.detach())
        mine, other = ours.state.get(p, {}), reference.state.get(q, {})
        if not other:  # only the GPU knew that a first step was skipped
            assert not any(value.any() for value in mine.values())
            continue
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert same_bits(value.cpu(), other[key]), key


def assert_near(ours, reference):
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        there = p.detach().cpu()
        ulps = max(ULPS[q.dtype], ULPS_OF_ROOTS[q.dtype])
        assert_within_ulps(there, q.detach(), ulps, scale=q.detach().abs().max().clamp(min=1).item())
        assert torch.equal(there == 0, q == 0)
        with torch.no_grad():
            p.copy_(q)


def step_both(ours, reference, seed, frozen=(), waits=False):
    give_gradients(ours, reference, seed, frozen)
    with nullcontext() if waits else no_syncs():
        ours.step()
    reference.step()
    assert_same(ours, reference)


def set_in_groups(optimizers, **values):
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.update(values)


def put_rates(ours, reference, lr=0.05):
    """Let both read their learning rates from tensors, ours from one on the GPU."""
    ours.param_groups[0]["lr"] = torch.tensor(lr, device="cuda")
    reference.param_groups[0]["lr"] = torch.tensor(lr)


def fill_rates(twins, lr):
    for optimizer in twins:
        optimizer.param_groups[0]["lr"].fill_(lr)


def capture(*optimizers):
    """Return a graph of one step of each optimizer; nothing is stepped before it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for optimizer in optimizers:
            optimizer.step()
    return graph


def gradients_of(optimizer):
    return [p.grad for p in params_of(optimizer)]


def refill(gradients, reference, seed):
    """Write new gradients into the given memory, and set the same on the reference's parameters."""
    set_gradients(params_of(reference), seed)
    for grad, q in zip(gradients, params_of(reference), strict=True):
        grad.copy_(q.grad)
