"""Tests of GPU steps that end with a prox: they match the reference, do not synchronize, and work in CUDA graphs."""

import contextlib
import copy

import pytest

import loco_ext
from loco_ext import optim, sparsity
from tests.gpu import no_syncs
from tests.optim import gpu
from tests.optim.gpu import BF16, F16, F32, F64, PENALISED, PENALTIES
from tests.optim.stepping import CLASSES
from tests.penalties.cases import make_norm, make_params

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", CLASSES)
def test_kernels_end_with_the_references_prox_and_wait_for_nothing(name, penalty, dtype):
    twins = gpu.make_twins(name, dtype, penalty)
    gpu.put_rates(*twins)
    for step, lr in enumerate([0.05, 0.05, 0.02]):
        gpu.fill_rates(twins, lr)
        gpu.step_both(*twins, step, waits=step == 0)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("inner", [sparsity.RingPenalty(0.5), sparsity.KernelPenalty(0.05, power=2)], ids=repr)
def test_replays_read_norms_anew(name, inner):
    params = [p for p in make_params() if p.dim() > 2]
    norms = [make_norm(len(p)) for p in params]
    on_device = [copy.deepcopy(norm).cuda() for norm in norms]

    def make(values, norms, **options):
        penalties = [sparsity.FoldedPenalty(inner, norm) for norm in norms]
        gammas = {"params": [norm.weight for norm in norms], "locality": None}
        return getattr(optim, name)([{"params": values, "penalty": penalties}, gammas], **PENALISED[name], **options)

    ours, reference = twins = make(gpu.on_gpu(params), on_device), make(params, norms, fused=False)

    def reference_step():
        with loco_ext.backend("native"):  # Triton has no kernels for its tensors
            reference.step()

    for step in range(2):
        gpu.give_gradients(*twins, step)
        with no_syncs() if step else contextlib.nullcontext():
            ours.step()
        reference_step()
        gpu.assert_near(*twins)
    gradients, graph = gpu.gradients_of(ours), gpu.capture(ours)
    for step in range(2, 5):
        for norm in (*norms, *on_device):
            norm.running_var.mul_(2.0)
        gpu.refill(gradients, reference, step)
        with no_syncs():
            graph.replay()
        reference_step()
        gpu.assert_near(*twins)
