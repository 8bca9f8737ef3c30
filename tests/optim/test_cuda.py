"""Tests of the optimizers and their kernels on a GPU: the CPU reference's bits, without synchronizing.

``make device-check`` also runs the tests of single kernels, named ``test_kernels_...``, under compute-sanitizer: they
capture no graphs.
"""

import copy
import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from loco_ext import ops, optim
from tests.gpu import needs_gpu, no_syncs
from tests.optim import gpu
from tests.optim.gpu import BF16, F16, F32, F64, SCALE
from tests.optim.stepping import CLASSES, LOCALITY, RICH, clones, make_params, params_of, train
from tests.optim_step.cases import Case, Gpu, assert_same, make_case
from tests.optim_step.layouts import KINDS, LAYOUTS, gaps, shifted
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import same_bits

# ---- single kernels


def assert_is_reference(case: Case, backend: str, expected: Case | None = None) -> None:
    """Assert that the GPU gives the reference's bits (nearly, in float64) and leaves memory around views unchanged."""
    expected = case.copy().step("reference") if expected is None else expected
    stepped = case.copy()
    Gpu("cuda", backend).step_in_place(stepped)
    assert_same(stepped, expected, nearly_in_float64=True)
    for name, tensors in case.lists.items():
        for i, (a, before) in enumerate(zip(stepped.lists[name], tensors, strict=True)):
            assert a.stride() == before.stride()
            assert same_bits(gaps(a), gaps(before)), f"{name}[{i}]: memory outside the view was written"


# Sizes around those of a block's part, 8192 and 2048, and of the vectors at its ends.
KERNEL_SHAPES = [(), (1,), (7,), (0, 4), (2048,), (8191,), (8192 + 3,), (2 * 8192 + 9,), (6, 5, 3, 3), (99, 11, 3, 3)]
KERNEL_MAPS = {"maps": [LOCO_2D], "map_index": [-1] * 8 + [0, 0]}
DTYPES = {
    "f32": (F32, F32, F32),
    "f64": (F64, F64, F64),
    "bf16": (BF16, BF16, BF16),
    "f16": (F16, F16, F16),
    "bf16_f32": (BF16, BF16, F32),
    "f16_f32": (F16, F16, F32),
    "mixed": (BF16, F16, F32),
    "mixed_f64": (F64, F32, BF16),
}
# Number of elements by which parameters, gradients and the three states are shifted: together, or each differently.
SHIFTS = {"aligned": (0,) * 5, "together": (1,) * 5, "apart": (1, 0, 2, 3, 5)}


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_kernels_of_every_dtype_give_the_references_bits_at_any_alignment(backend, rule, dtypes, shift):
    options = {"decoupled": True, "amsgrad": True, "states": 3} if rule == "adam" else {}
    case = make_case(rule, KERNEL_SHAPES, dtypes=DTYPES[dtypes], **KERNEL_MAPS, **options)
    for name, by in zip([n for n in case.lists if n != "steps"], SHIFTS[shift], strict=False):
        case.lists[name] = [shifted(t, by) for t in case.lists[name]]
    assert_is_reference(case, backend)


@pytest.mark.parametrize("param", LAYOUTS)
def test_kernels_take_any_mix_of_layouts(backend, param):
    layouts, kinds = list(LAYOUTS.values()), itertools.cycle(KINDS.values())
    for shift, grad in enumerate(layouts):
        case = make_case("sgd", [(6, 5, 3, 3)], maps=[LOCO_2D], map_index=[0], **next(kinds))
        state = layouts[(3 * shift + 1) % len(layouts)]
        laid_out = case.laid_out(params=LAYOUTS[param], grads=grad, momentum_buffers=state)
        assert_is_reference(laid_out, backend, case.copy().step("reference"))


FOUND = [("sgd", 1.0), ("sgd", math.nan), ("adam", math.inf), ("adam", math.nan)]
SEEDS = [("sgd", 0), ("sgd", 2**63 - 1), ("adam", -1)]
ROUNDED = {"dtypes": (BF16,) * 3, "rounding_step": 5, "ordinals": [2**31 + 5, *range(9)]}
OPTIONS = {
    "plain_sgd": ("sgd", {"states": 0}),
    "first_nesterov": ("sgd", {"first": [1] * 5 + [0] * 5, "nesterov": True}),
    "l1_maximize": ("sgd", {"l1": True, "maximize": True}),
    "coupled": ("adam", {}),
    "coupled_l1": ("adam", {"l1": True, "maximize": True}),
    "scaled": ("adam", {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}),
    "scaled_in_f64": ("sgd", {"grad_scale": torch.tensor([3.0], dtype=F64), "found_inf": torch.zeros(1, dtype=F64)}),
    "learning_rate": ("adam", {"lrs": [torch.tensor(0.03)], "lr_index": [0], "decoupled": True}),
    "learning_rate_in_f64": ("sgd", {"lrs": [torch.tensor(0.03, dtype=F64)], "lr_index": [0]}),
    **{f"{rule}_found_{found}": (rule, {"found_inf": torch.tensor(found)}) for rule, found in FOUND},
    **{f"{rule}_rounded_{seed}": (rule, {"seed": seed, **ROUNDED}) for rule, seed in SEEDS},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_follow_every_option(backend, options):
    rule, given = OPTIONS[options]
    case = make_case(rule, KERNEL_SHAPES, **KERNEL_MAPS, **given)
    case.params[8] = LAYOUTS["channels_last"](case.params[8])
    assert_is_reference(case, backend)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_elements_beyond_2_to_the_31_are_stepped(backend, dtype):
    bulk, tail = 2**31, 100
    if torch.cuda.mem_get_info()[0] < 3 * bulk * dtype.itemsize:
        pytest.skip("needs more memory")
    w = torch.full((bulk + tail,), 1.5, dtype=dtype, device="cuda")
    g = torch.zeros_like(w)
    hyper = torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=F64)
    places = [*range(0, bulk, bulk // 64), *range(bulk - 9, bulk + tail)]
    g[places] = torch.randn(len(places), generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    expected = (w[places].float() - 0.25 * g[places].float()).to(dtype)
    ops.optim_step_sgd([w], [g], [], hyper)
    assert same_bits(w[places].cpu(), expected.cpu())
    assert (w != 1.5).sum().item() == (expected != 1.5).sum().item()
    # Rows that are 2^31 elements apart, and a view that begins beyond them.
    far, far_grad = (t.as_strided((2, 3), (bulk, 1)) for t in (w, g))
    beyond, beyond_grad = (t.as_strided((7, 3), (9, 3), bulk + 11) for t in (w, g))
    expected = [(p.double() - 0.25 * q.double()).to(dtype) for p, q in ((far, far_grad), (beyond, beyond_grad))]
    ops.optim_step_sgd([far, beyond], [far_grad, beyond_grad], [], hyper)
    assert same_bits(far.cpu(), expected[0].cpu())
    assert same_bits(beyond.cpu(), expected[1].cpu())


# ---- optimizers


@pytest.mark.parametrize("name", CLASSES)
def test_training_gives_the_references_bits(backend, name):
    """A schedule changes the learning rates; parameters are unfrozen, and a group is added."""
    ours, reference = twins = gpu.make_twins(name)
    schedulers = [lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8) for optimizer in twins]
    for step in range(6):
        if step == 3:
            later = make_params([(40, 30), (4, 2, 3, 3)], seed=5)
            for optimizer, params in ((ours, gpu.on_gpu(later)), (reference, later)):
                optimizer.add_param_group({"params": params, "lr": 0.02, "locality": None})
        gpu.step_both(*twins, step, frozen=(1, 5) if step < 2 else (), waits=step == 0)
        for scheduler in schedulers if step < 3 else ():
            scheduler.step()


@pytest.mark.parametrize("spoilt", [(), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("manually", [False, True], ids=["fused", "unscaled_before"])
@pytest.mark.parametrize("name", CLASSES)
def test_grad_scaler_scales_and_skips_without_waiting(backend, name, manually, spoilt):
    ours, reference = gpu.make_twins(name, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE, growth_interval=10**6)
    scaler.scale(torch.ones((), device="cuda"))  # the scaler creates its tensors at the first call
    stepped = False
    for step in range(5):
        gpu.give_gradients(ours, reference, step)
        for p in params_of(ours):
            p.grad.mul_(scaler.get_scale())
        if step in spoilt:
            params_of(ours)[-1].grad[1, 0, 0, 2] = math.inf
        # SGD synchronizes to learn whether it must create its momentum buffers.
        with no_syncs() if stepped else nullcontext():
            if manually:
                scaler.unscale_(ours)
            scaler.step(ours)
            scaler.update()
        if step not in spoilt:
            reference.step()
            stepped = True
        gpu.assert_same(ours, reference)
    assert scaler.get_scale() == SCALE / 2 ** len(spoilt)


@pytest.mark.parametrize("name", CLASSES)
def test_steps_may_be_made_on_other_streams(backend, name):
    ours, reference = gpu.make_twins(name)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    for step in range(7):
        gpu.give_gradients(ours, reference, step)
        stream, home = streams[step % 3], torch.cuda.current_stream()
        stream.wait_stream(home)
        with torch.cuda.stream(stream), no_syncs() if step else nullcontext():
            ours.step()
        home.wait_stream(stream)
        reference.step()
        gpu.assert_same(ours, reference)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_checkpoints_with_step_counts_on_the_cpu_are_continued(backend, name):
    ours, reference = gpu.make_twins(name)
    theirs = getattr(torch.optim, name)(clones(params_of(reference)), **RICH[name], foreach=False)
    train(theirs, 2)
    checkpoint = theirs.state_dict()
    assert all(state["step"].is_cpu for state in checkpoint["state"].values())
    for optimizer in (ours, reference):
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
        with torch.no_grad():
            for p, q in zip(params_of(optimizer), params_of(theirs), strict=True):
                p.copy_(q)
    gpu.give_gradients(ours, reference, 2)
    with pytest.raises(RuntimeError, match="expected the optimizer to have made a step before"):
        gpu.capture(ours)
    for step in range(2, 5):
        gpu.step_both(ours, reference, step, waits=step == 2)
    assert all(ours.state[p]["step"].is_cuda for p in params_of(ours))


@needs_gpu
@pytest.mark.parametrize("name", CLASSES)
def test_a_group_may_have_parameters_of_several_devices(name):
    params = make_params()
    placed = [nn.Parameter(p.detach().to("cuda" if i % 2 else "cpu", copy=True)) for i, p in enumerate(params)]
    options = {**RICH[name], "locality": LOCALITY}
    make = getattr(optim, name)
    ours, reference = make(placed, **options), make(params, **options, fused=False)
    for step in range(4):
        gpu.step_both(ours, reference, step, frozen=(0, 1) if step == 2 else (), waits=step == 0)
