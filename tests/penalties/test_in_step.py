"""Tests of a group's penalty: the fused step, the reference and torch's path agree; checkpoints, groups, errors."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import loco_ext
from loco_ext import ops, optim, sparsity
from tests.covering import covering
from tests.optim.stepping import CLASSES, LAYOUTS, clones, set_gradients, through_a_file, train
from tests.penalties.cases import DTYPES, KINDS, PENALTIES, SHAPES, assert_near, make, make_params, stepped
from tests.tolerances import same_bits

# Runs every test with the CPU's kernels and with the GPU's, except for those of groups and checkpoints.
pytestmark = pytest.mark.usefixtures("native")
cpu_only = pytest.mark.parametrize("native", ["cpu"], indirect=True)


# Kernels of 1 to 4 vectors and more, with a rest or without: the CPU sums their rings while it updates their weights.
VECTORS = [(3, 16, 1, 1), (2, 80, 1), (2, 16, 3, 3), (2, 64, 3, 3), (2, 17, 3, 3), (2, 32, 5, 5), (2, 16, 7, 7)]
ALL_SHAPES = [*SHAPES, *VECTORS]


JOINT = {
    "joint": sparsity.KernelPenalty(0.1, power=2),
    "joint, largest": sparsity.KernelPenalty(0.05, norm="linf", power=2),
}
MIXED = [PENALTIES["rings"], JOINT["joint"], PENALTIES["largest"], None, PENALTIES["kernels"], JOINT["joint, largest"]]
ALL = {**PENALTIES, **JOINT, "mixed": MIXED}


@pytest.mark.parametrize(("kind", "penalty", "dtype"), covering(KINDS, ALL, DTYPES), ids=str)
def test_the_fused_step_is_that_of_the_reference(kind, penalty, dtype):
    # The reference's searches for squares are slow; a list names the penalties of SHAPES alone.
    shapes = ALL_SHAPES if penalty in ("rings", "full rings", "largest", "kernels") else SHAPES
    ours, theirs, before = (make_params(dtype, shapes=shapes) for _ in range(3))
    stepped(ours, kind, ALL[penalty])
    assert_near(ours, stepped(theirs, kind, ALL[penalty], "reference"), before)
    if KINDS[kind][0] == "SGD" and penalty in ("rings", "full rings", "kernels", "mixed"):
        assert sum((p == 0).sum() for p in ours) > 0


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"),
    covering(["momentum", "AdamW"], [torch.float32, torch.bfloat16], [*LAYOUTS][1:]),
    ids=str,
)
def test_any_layout_gives_the_same(kind, dtype, layout):
    for penalty in (PENALTIES["rings"], PENALTIES["largest"], JOINT["joint"]):
        params, before = (make_params(dtype, layout, ALL_SHAPES) for _ in range(2))
        expected = stepped(make_params(dtype, shapes=ALL_SHAPES), kind, penalty, steps=2)
        assert_near(stepped(params, kind, penalty, steps=2), expected, before)


@pytest.mark.parametrize("size", [1e-30, 1e22])
@pytest.mark.parametrize("kind", ["momentum", "Adam"])
def test_squares_beyond_float32_are_summed(kind, size):
    # Adam's steps and thresholds scale with its learning rate.
    options = {"lr": 0.02 * size} if kind == "Adam" else {"gradients": size}
    penalty = sparsity.RingPenalty(15.0 * options.get("gradients", 1.0))
    ours, theirs, before = ([nn.Parameter(p.detach() * size) for p in make_params(shapes=ALL_SHAPES)] for _ in range(3))
    stepped(ours, kind, penalty, steps=2, **options)
    assert_near(ours, stepped(theirs, kind, penalty, "reference", steps=2, **options), before)
    assert all(p.isfinite().all() for p in ours)
    assert any(p.any() for p in ours)


@pytest.mark.parametrize(("kind", "value"), [("momentum", torch.inf), ("Adam", torch.nan)])
def test_a_gradient_that_is_no_number_spoils_its_kernel_alone(kind, value):
    results = []
    for backend in ("native", "reference"):
        params = make_params(shapes=VECTORS)
        optimizer = make(kind, params, PENALTIES["rings"])
        with loco_ext.backend(backend):
            for last in (1.0, value):
                for p in params:
                    p.grad = torch.ones_like(p)
                    p.grad.view(-1)[-1] = last
                optimizer.step()
        results.append([p.detach() for p in params])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours[:-1].isfinite().all()
        assert not ours[-1].isfinite().all()


@cpu_only
@pytest.mark.parametrize(
    ("kind", "penalty"),
    [("momentum", "rings"), ("AdamW", "rings"), ("momentum", "joint, largest"), ("Adam", "joint")],
)
def test_the_number_of_threads_changes_no_bit(kind, penalty):
    shapes = [(shape[0] * 24, *shape[1:]) for shape in ALL_SHAPES]
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(stepped(make_params(shapes=shapes), kind, ALL[penalty], steps=2))
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(*results, strict=True))


def test_random_rounding_is_of_what_the_prox_leaves():
    params = {backend: make_params(torch.bfloat16) for backend in ("native", "reference")}
    for backend, values in params.items():
        stepped(values, "momentum", PENALTIES["rings"], backend, stochastic_rounding=7)
    assert_near(*params.values(), make_params(torch.bfloat16))
    nearest = stepped(make_params(torch.bfloat16), "momentum", PENALTIES["rings"])
    assert any(not torch.equal(p, q) for p, q in zip(params["native"], nearest, strict=True))


def test_small_shrinkage_of_half_precision_is_rounded_once():
    """A prox that follows the rounding of the step to bfloat16 would lose a small shrinkage, or that of the step."""
    params = make_params(torch.bfloat16, shapes=[(2, 4, 3, 3)])
    exact = [nn.Parameter(p.detach().float()) for p in params]
    set_gradients(params, 0)
    exact[0].grad = params[0].grad.float()
    for values in (params, exact):
        make("plain", values, PENALTIES["rings"]).step()
    assert torch.equal(params[0].detach(), exact[0].detach().bfloat16())


@pytest.mark.parametrize(
    ("name", "penalty"), covering(CLASSES, [PENALTIES["rings"], sparsity.KernelPenalty(0.3, power=2)], strength=1)
)
def test_found_inf_and_a_learning_rate_of_0_leave_everything_alone(name, penalty):
    params = make_params()
    before = clones(params)
    optimizer = getattr(optim, name)(params, lr=0.1, penalty=penalty)
    set_gradients(params, 0)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.tensor(2.0)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize(("name", "penalty"), covering(CLASSES, [*PENALTIES, *JOINT], strength=2))
def test_a_learning_rate_that_a_schedule_has_rounded_below_0_shrinks_nothing(name, penalty):
    for path in ({}, {"fused": False}, {"foreach": True}):
        params = make_params()
        with torch.no_grad():
            for p in params:
                p[:1] = 0.0  # as a penalty leaves filters
        before = clones(params)
        optimizer = getattr(optim, name)(params, lr=0.1, penalty=ALL[penalty], **path)
        optimizer.param_groups[0]["lr"] = -2e-19
        set_gradients(params, 0)
        optimizer.step()
        for p, q in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), q.detach())


def test_torchs_own_path_shrinks_subclasses_of_parameter():
    class Named(nn.Parameter):
        pass

    kernels = [kind(torch.ones(2, 2, 3, 3)) for kind in (Named, nn.Parameter)]
    for kernel in kernels:
        kernel.grad = torch.zeros_like(kernel)
        optim.SGD([kernel], lr=0.1, penalty=PENALTIES["rings"], foreach=True).step()
    assert torch.equal(*kernels)
    assert not torch.equal(kernels[0], torch.ones(2, 2, 3, 3))


def test_a_list_names_each_parameters_own_penalty_and_what_has_no_gradient_is_not_shrunk():
    params, plain, before = make_params(), make_params(), make_params()
    optimizers = [
        make("plain", params, [PENALTIES["rings"], None, PENALTIES["kernels"], None, PENALTIES["rings"], None]),
        make("plain", plain, None),
    ]
    for values, optimizer in zip((params, plain), optimizers, strict=True):
        set_gradients(values, 0, frozen=(4,))
        optimizer.step()
    changed = [not torch.equal(p, q) for p, q in zip(plain, params, strict=True)]
    assert changed == [True, False, True, False, False, False]
    assert torch.equal(params[4], before[4])


@cpu_only
@pytest.mark.parametrize("penalty", [PENALTIES["rings"], [PENALTIES["kernels"], PENALTIES["squared"], *[None] * 4]])
def test_checkpoints_hold_penalties_and_need_no_code_to_load(penalty):
    params = make_params()
    optimizer = make("Adam", params, penalty)
    train(optimizer, 1)
    others = clones(params)
    other = make("Adam", others, None)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.param_groups[0]["penalty"] == penalty
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0]["penalty"] == penalty
    train(optimizer, 1, start=1)
    train(other, 1, start=1)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(params, others, strict=True))


@dataclass(frozen=True)
class Shrinkage(sparsity.Penalty):
    strength: float
    power: int = 1

    def value(self, weight):
        return self.strength * weight.double().abs().pow(self.power).sum()

    def for_step(self, weight):
        return ops.LayerPenalty(lambda w, step, metric: nn.functional.softshrink(w, step * self.strength))


@dataclass(frozen=True)
class ShrinkagePenalty(Shrinkage):
    pass


@cpu_only
@pytest.mark.parametrize("kind", [Shrinkage, ShrinkagePenalty])
def test_a_penalty_of_the_users_class_is_loaded_where_there_is_one(kind):
    params = make_params()
    optimizer = make("plain", params, kind(0.5))
    other = make("plain", clones(params), kind(0.25, power=2))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.param_groups[0]["penalty"] == kind(0.5)


@cpu_only
def test_a_checkpoint_of_torch_leaves_the_penalty_alone():
    params = make_params()
    optimizer = make("plain", params, PENALTIES["rings"])
    optimizer.load_state_dict(torch.optim.SGD(params, lr=0.5).state_dict())
    assert optimizer.param_groups[0]["penalty"] == PENALTIES["rings"]


CONV, VECTOR, EVEN = (4, 2, 3, 3), (4,), (4, 2, 2, 2)
BAD = {
    "no penalty": ([CONV], {"penalty": 1e-4}, TypeError, r"penalty: expected None, a RingPenalty .* got 0.0001"),
    "no penalty in a list": ([CONV], {"penalty": ["x"]}, TypeError, r"penalty\[0\]: expected None, a RingPenalty"),
    "short list": ([CONV, CONV], {"penalty": [None]}, ValueError, "penalty: expected a list of 2 entries"),
    "nothing to shrink": ([VECTOR], {}, ValueError, r"penalty: expected a group with convolution weights .*\(4,\)"),
    "named vector": ([VECTOR], {"penalty": [PENALTIES["rings"]]}, ValueError, "penalty of parameter 0: weight: exp"),
    "even kernel": ([EVEN], {"penalty": PENALTIES["full rings"]}, ValueError, "parameter 0: kernel_size: expected odd"),
}


@cpu_only
@pytest.mark.parametrize(("shapes", "options", "error", "message"), BAD.values(), ids=BAD)
def test_a_bad_penalty_is_a_typed_error(shapes, options, error, message):
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    with pytest.raises(error, match=message):
        optim.SGD(params, lr=0.1, **{"penalty": PENALTIES["rings"], **options})


def test_a_group_without_penalty_may_come_before_one_with():
    weights = []
    for order in (1, -1):
        plain, shrinks = (nn.Parameter(torch.full((2, 3, 3, 3), 0.1)) for _ in range(2))
        penalised = {"params": [shrinks], "penalty": sparsity.RingPenalty(0.5), "locality": (0.5, 2.0)}
        optimizer = optim.SGD([{"params": [plain]}, penalised][::order], lr=0.1, weight_decay=0.1)
        plain.grad, shrinks.grad = torch.ones_like(plain), torch.ones_like(shrinks)
        optimizer.step()
        weights.append((plain, shrinks))
    assert all(map(torch.equal, *weights))
    assert not torch.equal(*weights[0])
