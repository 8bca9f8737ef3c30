"""Penalties on the square of a layer's sum, which join its filters: their prox, and steps that end with it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import loco_ext
from loco_ext import geometry, ops, optim, sparsity
from loco_ext.ops.joint import group_norms_by, shared_factor
from tests.covering import covering
from tests.optim.stepping import train
from tests.optim_step.cases import make_case
from tests.penalties.cases import make, make_params
from tests.tolerances import assert_within_ulps, same_bits

SHAPES = [(6, 16, 3, 3), (5, 3, 5, 5), (7,), (4, 3, 3, 3, 3)]
PENALTIES = {
    "l2": sparsity.KernelPenalty(0.1, power=2),
    "linf": sparsity.KernelPenalty(0.05, norm="linf", power=2),
}
RINGS = geometry.ring_index((3, 3)).flatten().tolist()


def start(dtype=torch.float32):
    """Return parameters some of whose kernels are small enough to vanish."""
    params = make_params(torch.float64, shapes=SHAPES)
    sizes = [torch.linspace(0.02, 1.5, len(p)).view(-1, *[1] * (p.dim() - 1)) for p in params]
    return [nn.Parameter((p.detach() * s).to(dtype)) for p, s in zip(params, sizes, strict=True)]


# ---- the prox


@pytest.mark.parametrize("with_metric", [False, True])
@pytest.mark.parametrize("linf", [False, True])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rings_share_the_factor_that_their_own_sum_asks_for(backend, linf, with_metric):
    """The prox has the thresholds ``t + f q``, where f is twice the sum of the result's norms weighted by q."""
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1.0, 2.0]).view(4, 1, 1, 1)
    metric = torch.rand_like(weight) + 0.5 if with_metric else None
    t = torch.tensor([0.1, 0.0, 0.2], dtype=torch.float64)
    q = torch.rand(4, 3, dtype=torch.float64) * 0.3
    with loco_ext.backend(backend):
        x = ops.ring_prox(weight, RINGS, t.expand(4, 3), q, metric, linf=linf, joint=True)
    groups = [[k for k, ring in enumerate(RINGS) if ring <= n] for n in range(3)]
    order = torch.inf if linf else 2
    norms = torch.stack([x.flatten(2)[:, :, g].flatten(1).norm(order, dim=1) for g in groups], 1)
    factor = 2 * (q * norms).sum()
    expected = ops.ring_prox(weight, RINGS, t + factor * q, None, metric, linf=linf)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-13)
    assert factor > 0.1
    alone = ops.ring_prox(weight, RINGS, t.expand(4, 3), q, metric, linf=linf)
    assert not torch.allclose(x, alone)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("linf", [False, True])
def test_weights_without_taps_and_rings_without_taps(backend, linf):
    weight, zero = torch.tensor([[3.0, 4.0], [0.6, 0.8]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    with loco_ext.backend(backend):
        flat = ops.ring_prox(weight, [0], zero, zero + 0.5, linf=linf, joint=True)
        tapped = ops.ring_prox(weight[:, :, None], [0], zero, zero + 0.5, linf=linf, joint=True)
        t, q = torch.zeros(2, dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64)
        more = ops.ring_prox(weight[:, :, None], [0], t, q, linf=linf, joint=True)
    torch.testing.assert_close(flat, tapped[:, :, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(more, tapped, rtol=1e-12, atol=1e-12)
    assert (flat < weight).any()


@pytest.mark.parametrize(("linf", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=str)
def test_narrow_weights_are_rounded_once(linf, dtype):
    weight, metric = start(dtype)[0].detach(), torch.rand(SHAPES[0]) + 0.5
    zero = torch.zeros(1, dtype=torch.float64)
    narrow, wide = (
        ops.ring_prox(w, [0] * 9, zero, zero + 0.2, metric, linf=linf, joint=True) for w in (weight, weight.float())
    )
    assert_within_ulps(narrow, wide.to(dtype), ulps=1)
    assert narrow.ne(weight).any()


class Unseen(TorchDispatchMode):
    """Dispatch mode that refuses operators that would synchronise with a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        refused = any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"))
        indices = args[1] if name.startswith("aten::index.Tensor") else ()
        assert not refused, name
        assert not any(index is not None and index.dtype == torch.bool for index in indices), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("linf", [False, True])
def test_the_factor_is_found_without_a_look_at_numbers_of_the_device(linf, count):
    weight = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    rings = RINGS if count == 3 else [0] * 9
    q = torch.full((5, count), 0.2, dtype=torch.float64)

    def prox(factor):
        with _disable_current_modes():
            return ops.ring_prox(weight, rings, factor * q, linf=linf)

    def ring_norms(*arguments):
        with _disable_current_modes():
            return ops.ring_norms(*arguments)

    norms_of = partial(group_norms_by, ring_norms, rings=rings, count=count, linf=linf)
    with Unseen():
        factor = shared_factor(prox, norms_of, weight, q, plain=not linf, waits=False)
    expected = ops.ring_prox(weight, rings, 0 * q, q, linf=linf, joint=True)
    torch.testing.assert_close(prox(factor), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("linf", [False, True])
def test_without_squares_filters_are_not_joint(backend, linf):
    weight, t = torch.randn(3, 2, 3, 3), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    with loco_ext.backend(backend):
        alone = ops.ring_prox(weight, RINGS, t, linf=linf)
        for squared in (None, torch.zeros_like(t)):
            assert same_bits(ops.ring_prox(weight, RINGS, t, squared, linf=linf, joint=True), alone)


# ---- the step


@pytest.mark.parametrize(("rule", "linf"), [("sgd", True), ("adam", False)])
@pytest.mark.usefixtures("native")
def test_rings_with_thresholds_of_their_own_are_joint_too(linf, rule):
    weight = torch.randn(4, 5, 3, 3, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1.0, 2.0]).view(4, 1, 1, 1)
    t, q = torch.tensor([0.3, 0.0, 0.6], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.1], dtype=torch.float64)
    hyper = (0.1, 0.0, 0.0, 0.0) if rule == "sgd" else (0.1, 0.0, 0.9, 0.99, 1e-3)
    options = {"penalties": [ops.StepPenalty(RINGS, t, q, linf, joint=True)], "hyper": hyper, "step": 0}
    case = make_case(rule, [weight.shape], dtypes=[torch.float64] * 3, states=0, **options)
    case.lists["params"] = [weight]
    ours, theirs = (case.copy().step(backend).params[0] for backend in ("native", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize(("norm", "strength"), [("l2", 1e9), ("linf", 1e3), ("linf", 1e9)])
@pytest.mark.usefixtures("native")
def test_a_layer_never_vanishes_however_strong_the_penalty(norm, strength):
    """The factor ``f`` is then many powers of 2 below what the weights ask for."""
    weights = start(torch.float64)[0].detach()
    penalty = sparsity.KernelPenalty(strength, norm=norm, power=2)
    param = nn.Parameter(weights.clone())
    param.grad = torch.zeros_like(param)
    optim.SGD([param], lr=1.0, penalty=penalty).step()
    assert param.detach().any()
    torch.testing.assert_close(param.detach(), penalty.prox(weights, 1.0), rtol=1e-5, atol=0)
    param = nn.Parameter(weights.clone())
    param.grad = torch.full_like(param, 1e-8)
    optim.Adam([param], lr=1e-3, penalty=penalty).step()
    assert param.detach().any()


def test_the_norms_left_are_those_of_the_formula_up_to_any_strength():
    """The strongest filter keeps ``1 / (1 + 2 strength)`` of its norm, others far below it nothing."""
    weight = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64).view(3, 1, 1, 1).expand(3, 1, 3, 3)
    for strength in (10.0**exponent for exponent in range(2, 40)):
        left = sparsity.KernelPenalty(strength, power=2).prox(weight, 1.0).flatten(1).norm(dim=1)
        expected = torch.tensor([6 / (1 + 2 * strength), 0, 0], dtype=torch.float64)
        torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "name", "value"), covering(["plain", "Adam"], PENALTIES, [torch.nan, torch.inf], strength=1)
)
@pytest.mark.usefixtures("native")
def test_a_kernel_without_a_norm_has_no_part_in_the_sum(kind, name, value):
    results = []
    for spoilt in (False, True):
        param = nn.Parameter(start()[0].detach())
        param.grad = torch.ones_like(param)
        param.data[2] = 0.0
        param.grad[2] = 0.0
        if spoilt:
            param.data[2, 0, 1, 1] = value
        make(kind, [param], PENALTIES[name]).step()
        results.append(param.detach())
    whole, spoilt = results
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(spoilt[others], whole[others])
    assert not spoilt[2, 0, 1, 1].isfinite()
    assert spoilt[2].isnan().any() == (value != value)


@pytest.mark.parametrize("size", [1e-200, 1e200, 0.0])
@pytest.mark.usefixtures("native")
def test_squares_neither_vanish_nor_overflow(size):
    before, penalty = start(torch.float64)[0].detach() * size, sparsity.KernelPenalty(0.05, power=2)
    for backend in ("native", "reference"):
        param = nn.Parameter(before.clone())
        param.grad = torch.zeros_like(param)
        with loco_ext.backend(backend):
            optim.SGD([param], lr=1.0, penalty=penalty).step()
        expected = penalty.prox(before / (size or 1.0), 1.0) * size
        torch.testing.assert_close(param.detach(), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("linf", [False, True])
@pytest.mark.usefixtures("native")
def test_a_parameter_may_be_stepped_where_gradients_are_recorded(linf):
    zeros = torch.zeros(3, dtype=torch.float64)
    penalty = ops.StepPenalty(RINGS, zeros, zeros + 0.2, linf, joint=True)
    stepped = nn.Parameter(torch.randn(4, 5, 3, 3))
    expected, hyper = stepped.detach().clone(), torch.tensor([[0.1, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for w in (stepped, expected):
        ops.optim_step_sgd([w], [torch.ones_like(w)], [], hyper, penalties=[penalty])
    assert same_bits(stepped.detach(), expected)


@pytest.mark.parametrize(
    ("name", "penalty"), [("SGD", PENALTIES["l2"]), ("Adam", PENALTIES["linf"]), ("Adam", sparsity.KernelPenalty(0.1))]
)
def test_fake_parameters_can_be_stepped(name, penalty):
    with FakeTensorMode():
        param = nn.Parameter(torch.randn(4, 5, 3, 3))
        optimizer = getattr(optim, name)([param], lr=0.1, penalty=penalty)
        train(optimizer, 2)
    assert param.shape == (4, 5, 3, 3)
