"""The prox of folded kernels as the last act of the step, each with a threshold of its own that changes with the norm.

That the norm counts as it was ahead of the step, and that every path knows it, is tested with penalties of layers.
"""

import pytest
import torch
from optim_step_cases import make_case
from stepping import CLASSES, clones, set_gradients, train
from test_optim_layer_penalty import PENALTIES, by_hand, folded, make_norm
from test_optim_penalty import KINDS, LAYOUTS, SHAPES, make, make_params
from tolerances import assert_within_ulps, same_bits
from torch import nn

import loco_ext
from loco_ext import geometry, ops, optim, sparsity

# The CPU's kernels and the GPU's.
pytestmark = pytest.mark.usefixtures("native")

RINGS = sparsity.RingPenalty(20.0)
RING_OF_TAP = geometry.ring_index((3, 3)).flatten().tolist()


@pytest.fixture
def no_second_pass(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a prox that follows the step")

    monkeypatch.setattr("loco_ext.ops.shrink.ring_prox", refuse)


def by_torch(kind, penalty, steps):
    with loco_ext.backend("reference"):
        return by_hand(kind, penalty, torch.float64, steps)


@pytest.mark.parametrize("name", ["folded rings", "folded largest", "folded squares"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_second_pass")
def test_the_fused_step_is_that_of_torch_and_then_the_prox(kind, name):
    if "Adam" in kind and "squares" in name:
        pytest.skip("the reference takes seconds for two nested searches")
    params = make_params(torch.float64)
    optimizer = make(kind, params, PENALTIES[name]())
    train(optimizer, 3)
    assert optimizer._repeat is not None
    expected = by_torch(kind, PENALTIES[name](), 3)
    for p, q, start in zip(params, expected, make_params(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9 * start.detach().abs().max().item())
        assert torch.equal(p == 0, q == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["momentum", "Adam"])
def test_any_layout_of_narrow_types_is_rounded_once(kind, layout, dtype):
    params, expected = make_params(dtype, layout), make_params(dtype)
    train(make(kind, params, folded(RINGS)), 1)
    with loco_ext.backend("reference"):
        train(make(kind, expected, folded(RINGS)), 1)
    for p, q, start in zip(params, expected, make_params(dtype), strict=True):
        assert_within_ulps(p.detach(), q.detach(), scale=start.detach().abs().max().item())
        assert torch.equal(p == 0, q == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_1_change_no_bit(kind, dtype):
    norms = [nn.BatchNorm2d(shape[0], affine=False, eps=0.0) for shape in SHAPES]
    listed = [RINGS if len(shape) > 2 else None for shape in SHAPES]
    penalty = [
        None if entry is None else sparsity.FoldedPenalty(entry, n) for entry, n in zip(listed, norms, strict=True)
    ]
    params, expected = make_params(dtype), make_params(dtype)
    train(make(kind, params, penalty), 3)
    train(make(kind, expected, listed), 3)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(params, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_without_a_threshold_keep_every_bit_of_the_step(kind):
    penalty = folded(RINGS)
    for entry in filter(None, penalty):
        entry.batch_norm.weight.data[1], entry.batch_norm.running_var[2] = 0, torch.nan
    params, plain = make_params(), make_params()
    train(make(kind, params, penalty), 1)
    train(make(kind, plain, None), 1)
    for p, q, entry in zip(params, plain, penalty, strict=True):
        if entry is not None:
            assert same_bits(p.detach()[1:3], q.detach()[1:3])
            assert not torch.equal(p[0], q[0])


@pytest.mark.parametrize("native", ["cpu"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_find_the_factors_of_their_kernels(kind):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = [nn.Parameter(p.detach().repeat(64, *[1] * (p.dim() - 1))) for p in make_params()]
        norms = [make_norm(len(p)) if p.dim() > 2 else None for p in params]
        train(make(kind, params, [n and sparsity.FoldedPenalty(RINGS, n) for n in norms]), 2)
        results.append(params)
    for other in results[1:]:
        assert all(same_bits(p.detach(), q.detach()) for p, q in zip(results[0], other, strict=True))
    whole, penalty = results[0][0], sparsity.FoldedPenalty(RINGS, make_norm(len(results[0][0])))
    for k in range(0, len(whole), 37):
        alone = nn.Parameter(make_params()[0].detach().repeat(64, 1, 1, 1)[k : k + 1])
        strength = RINGS.strength * penalty.scales(whole)[k].item()
        optimizer = make(kind, [alone], [sparsity.RingPenalty(strength)])
        for step in range(2):
            set_gradients(results[0], step)
            alone.grad = results[0][0].grad[k : k + 1]
            optimizer.step()
        assert_within_ulps(alone.detach(), whole.detach()[k : k + 1], scale=1.0)


@pytest.mark.parametrize("name", CLASSES)
def test_steps_that_repeat_follow_the_norm(name):
    params, expected = make_params(torch.float64), make_params(torch.float64)
    penalty, others = folded(RINGS), folded(RINGS)
    optimizer = getattr(optim, name)(params, lr=0.02, penalty=penalty)
    other = getattr(optim, name)(expected, lr=0.02, penalty=others)
    for step in range(4):
        for entry, of_other in zip(penalty, others, strict=True):
            if entry is not None:
                entry.batch_norm.running_var.mul_(1.5)
                entry.batch_norm.weight.data = entry.batch_norm.weight.data.flip(0)
                of_other.batch_norm.load_state_dict(entry.batch_norm.state_dict())
        train(optimizer, 1, start=step)
        other._refresh()
        with loco_ext.backend("reference"):
            train(other, 1, start=step)
    assert optimizer._repeat is not None
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p == 0, q == 0)


def test_random_rounding_is_of_what_the_prox_leaves():
    results = []
    for backend in ("native", "reference"):
        params = make_params(torch.bfloat16)
        with loco_ext.backend(backend):
            train(make("momentum", params, folded(RINGS), stochastic_rounding=7), 1)
        results.append(params)
    for p, q, start in zip(*results, make_params(torch.bfloat16), strict=True):
        assert_within_ulps(p.detach(), q.detach(), scale=start.detach().abs().max().item())


def test_factors_move_with_their_parameter():
    params = make_params()
    optimizer = make("plain", params, folded(RINGS))
    before = optimizer._current_plans()
    assert optimizer._current_plans() is before
    torch.utils.swap_tensors(params[0], nn.Parameter(params[0].detach().to("meta")))
    ((param, factors), *_) = optimizer._current_plans()[0].factors
    assert param is params[0]
    assert factors.is_meta


# ---- operators


def factors(**changes):
    return ops.StepPenalty(RING_OF_TAP, torch.ones(3, dtype=torch.float64), **changes)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_the_operators_factors_are_the_kernels_own(rule):
    case = make_case(rule, [(6, 5, 3, 3)])
    scales = torch.tensor([0.0, 0.01, 0.1, 0.5, 2.0, 1e3], dtype=torch.float64)
    together = case.copy(penalties=[factors(factors=scales)]).step()
    for k in range(6):
        alone = ops.StepPenalty(RING_OF_TAP, torch.full((3,), scales[k].item(), dtype=torch.float64))
        each = case.copy(penalties=[alone]).step()
        assert same_bits(together.lists["params"][0][k], each.lists["params"][0][k])
    assert torch.count_nonzero(together.lists["params"][0][5]) == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(6), TypeError, r"penalties\[0\]\.factors: expected a float64 tensor on cpu, got torch\.float32"),
        (torch.ones(5).double(), ValueError, r"penalties\[0\]\.factors: .* shape \(6,\), got \(5,\)"),
        (torch.ones(12).double()[::2], ValueError, r"penalties\[0\]\.factors: .* with strides \(2,\)"),
    ],
)
def test_bad_factors_are_typed_errors(given, error, message):
    case = make_case("sgd", [(6, 5, 3, 3)])
    before = clones(case.lists["params"])
    with pytest.raises(error, match=message):
        case.copy(penalties=[factors(factors=given)]).step()
    assert same_bits(case.lists["params"][0], before[0].detach())


def test_factors_that_no_longer_fit_are_refused_by_the_library():
    params = make_params()
    optimizer = make("momentum", params, folded(RINGS))
    train(optimizer, 2)
    before = clones(params)
    (plan,) = optimizer._current_plans()
    plan.penalties[0].factors.resize_(5)
    plan.changing.clear()
    with pytest.raises(ValueError, match=r"penalties\[0\]\.factors: .* shape \(6,\), got \(5,\)"):
        train(optimizer, 1)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(params, before, strict=True))
