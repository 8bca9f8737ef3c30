"""Tests of the optimizer step's arithmetic: kernels give the reference's bits, both agree with NumPy and autograd."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loco_ext import geometry, ops, optim, sparsity
from loco_ext.ops import prox_after_step
from tests.covering import covering
from tests.optim_step.cases import (
    FLOATS,
    HYPER,
    RULES,
    SHAPES,
    assert_native_is_reference,
    assert_same,
    make_case,
    with_interpreter,
    with_kernels,
    with_reference,
)
from tests.optim_step.maps import ANY_MAP, LOCO_2D
from tests.tolerances import assert_within_ulps

pytestmark = pytest.mark.usefixtures("kernels")

MAPS = {"maps": [LOCO_2D], "map_index": [0, -1, -1, 0, -1, 0]}

MOMENTUM = {"none": {"states": 0}, "first": {"first": [1] * len(SHAPES)}, "next": {}}
DECAYS = {
    "uniform": {},
    "maps": MAPS,
    "uniform_l1": {"l1": True},
    "maps_l1": {**MAPS, "l1": True},
    "no_decay": {**MAPS, "hyper": {"weight_decay": 0.0}},
}
ADAM_DECAYS = {**DECAYS, "decoupled": {"decoupled": True}, "decoupled_maps": {**MAPS, "decoupled": True}}


def hyper_with(rule, **columns):
    return tuple((dict(zip(RULES[rule].columns, HYPER[rule], strict=True)) | columns).values())


@with_interpreter
@pytest.mark.parametrize(
    ("momentum", "nesterov", "maximize", "decay", "dtype"),
    covering(MOMENTUM, [False, True], [False, True], DECAYS, FLOATS),
    ids=str,
)
def test_sgd_gives_the_references_bits(momentum, nesterov, maximize, decay, dtype):
    options = {**MOMENTUM[momentum], **DECAYS[decay]}
    hyper = hyper_with("sgd", **options.pop("hyper", {}), dampening=0.0 if nesterov else 0.1)
    case = make_case("sgd", SHAPES, dtypes=[dtype] * 3, hyper=hyper, nesterov=nesterov, maximize=maximize, **options)
    assert_native_is_reference(case)


@with_interpreter
@pytest.mark.parametrize(
    ("step", "beta1", "amsgrad", "maximize", "decay", "dtype"),
    covering([0, 3, 10**6], [0.9, 0.4, 0.0], [False, True], [False, True], ADAM_DECAYS, FLOATS),
    ids=str,
)
def test_adam_gives_the_references_bits(step, beta1, amsgrad, maximize, decay, dtype):
    options = {"amsgrad": amsgrad, "maximize": maximize, **ADAM_DECAYS[decay]}
    hyper = hyper_with("adam", **options.pop("hyper", {}), beta1=beta1)
    case = make_case("adam", SHAPES, dtypes=[dtype] * 3, hyper=hyper, states=2 + amsgrad, step=step, **options)
    assert_native_is_reference(case)


@with_interpreter
def test_each_group_and_parameter_has_its_own_hyperparameters_map_first_and_step():
    case = make_case("sgd", SHAPES[:3] * 2, group_index=[0, 1, 2, 2, 1, 0], first=[0, 1, 0, 1, 0, 1])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.0], [0.3, 0.0, 0.5, 0.5], [0.01, 0.5, 0.0, 0.2]], dtype=torch.float64)
    case.options |= {"maps": [LOCO_2D, LOCO_2D.square()], "map_index": [1, -1, -1, 0, -1, -1]}
    assert_native_is_reference(case)
    case = make_case("adam", SHAPES[:3] * 2, group_index=[0, 1, 1, 0, 1, 0])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.99, 1e-8], [0.3, 0.0, 0.5, 0.9, 1e-3]], dtype=torch.float64)
    case.lists["steps"] = [torch.tensor([7.0 * i], dtype=(torch.float32, torch.float64)[i % 2]) for i in range(6)]
    assert_native_is_reference(case)


@with_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_a_learning_rate_may_be_a_tensor_of_its_own(rule, dtype):
    """Some groups take their learning rate from a tensor; 2^-4 is exact in every dtype."""
    groups = {"group_index": [0, 1, 2, 2, 1, 0], "maps": [LOCO_2D], "map_index": [0] * 2 + [-1] * 4}
    decoupled = {"decoupled": True} if rule == "adamw" else {}
    case = make_case(rule[:4], [(5, 3, 3, 3), (2, 3, 3, 3), (19,)] * 2, **groups, **decoupled)
    case.hyper = case.hyper.repeat(3, 1)
    case.hyper[:, 0] = torch.tensor([0.3, 0.0625, 0.25])
    expected = case.copy().step("native")
    case.hyper[1:, 0] = torch.nan
    case.options |= {"lrs": [torch.tensor([0.25], dtype=dtype), torch.tensor(0.0625, dtype=dtype)]}
    case.options |= {"lr_index": [-1, 1, 0]}
    assert_native_is_reference(case)
    assert_same(case.step("native"), expected)


@with_interpreter
@pytest.mark.parametrize(
    ("which", "rule", "memory_format"),
    covering(ANY_MAP, ["sgd", "adam", "adamw"], [torch.contiguous_format, torch.channels_last]),
    ids=str,
)
def test_any_map_gives_the_references_bits(which, rule, memory_format):
    shape, decay_map = ANY_MAP[which]
    if memory_format == torch.channels_last and len(shape) != 4:
        pytest.skip("channels_last is for four dimensions")
    for dtype in (torch.float32, torch.float64):
        options = {"decoupled": True} if rule == "adamw" else {}
        case = make_case(rule[:4], [(5,), shape], dtypes=[dtype] * 3, maps=[decay_map], map_index=[-1, 0], **options)
        case.params[1] = case.params[1].contiguous(memory_format=memory_format)
        assert_native_is_reference(case)


def test_one_map_serves_kernels_of_several_channel_counts_layouts_and_groups():
    shapes = [(4, 3, 3, 3), (4, 8, 3, 3), (4, 3, 3, 3), (40, 30, 3, 3), (4, 300, 3, 3)]
    case = make_case("sgd", shapes * 2, maps=[LOCO_2D], map_index=[0] * 10, group_index=[0] * 5 + [1] * 5)
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.0], [0.1, 0.5, 0.9, 0.0]], dtype=torch.float64)
    for i in (1, 2, 4, 5, 8):
        case.params[i] = case.params[i].contiguous(memory_format=torch.channels_last)
    assert_native_is_reference(case)


def numpy_sgd(w, g, b, row, decay_map, first, nesterov, maximize, l1):
    """Step by the textbook formulas of SGD, in float64."""
    lr, decay, momentum, dampening = row
    d = (-g if maximize else g) + decay * decay_map * (np.sign(w) if l1 else w)
    if b is not None:
        b = d if first else momentum * b + (1 - dampening) * d
        d = d + momentum * b if nesterov else b
    return w - lr * d, b


def numpy_adam(w, g, states, step, row, decay_map, amsgrad, maximize, decoupled, l1):
    """Step by Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), in float64."""
    lr, decay, beta1, beta2, eps = row
    m, v, *largest = states
    g = -g if maximize else g
    if decoupled:
        w = w - lr * decay * decay_map * w
    else:
        g = g + decay * decay_map * (np.sign(w) if l1 else w)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    largest = [np.maximum(largest[0], v)] if amsgrad else []
    m_hat = m / (1 - beta1**step)
    v_hat = (largest[0] if amsgrad else v) / (1 - beta2**step)
    return w - lr * m_hat / (np.sqrt(v_hat) + eps), [m, v, *largest]


FLAGS = [[False, True]] * 3


@with_reference
@pytest.mark.parametrize(
    ("momentum", "nesterov", "maximize", "l1", "dtype"), covering(MOMENTUM, *FLAGS, [torch.float32, torch.float64])
)
def test_sgd_is_the_formula(momentum, nesterov, maximize, l1, dtype):
    options = {"maps": [LOCO_2D], "map_index": [0, 0], "nesterov": nesterov, "maximize": maximize, "l1": l1}
    first, states = momentum == "first", 0 if momentum == "none" else 1
    options |= {"states": states, "first": [first] * 2 * states}
    case = make_case("sgd", [(4, 3, 3, 3)] * 2, dtypes=[dtype] * 3, **options)
    before = case.copy()
    case.step()
    for i in range(2):
        w, g, *b = (before.lists[name][i].double().numpy() for name in before.lists if before.lists[name])
        buffer = b[0] if b else None
        w, buffer = numpy_sgd(w, g, buffer, HYPER["sgd"], LOCO_2D.numpy(), first, nesterov, maximize, l1)
        assert_within_ulps(case.params[i], torch.from_numpy(w), scale=1.0)
        if b:
            assert_within_ulps(case.lists["momentum_buffers"][i], torch.from_numpy(buffer), scale=1.0)


@with_reference
@pytest.mark.parametrize(
    ("amsgrad", "maximize", "decay", "beta1", "dtype"),
    covering(*FLAGS[:2], ["l2", "l1", "decoupled"], [0.9, 0.4, 0.0], [torch.float32, torch.float64]),
)
def test_adam_is_the_formula(amsgrad, maximize, decay, beta1, dtype):
    hyper = hyper_with("adam", beta1=beta1)
    decoupled, l1 = decay == "decoupled", decay == "l1"
    options = {"amsgrad": amsgrad, "maximize": maximize, "decoupled": decoupled, "l1": l1}
    case = make_case("adam", [(4, 3, 3, 3)], dtypes=[dtype] * 3, hyper=hyper, states=2 + amsgrad, **options)
    case.options |= {"maps": [LOCO_2D], "map_index": [0]}
    before = case.copy()
    case.step()
    names = ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"][: 2 + amsgrad]
    w, g, *states = (before.lists[name][0].double().numpy() for name in ["params", "grads", *names])
    w, states = numpy_adam(w, g, states, 4, hyper, LOCO_2D.numpy(), amsgrad, maximize, decoupled, l1)
    assert case.lists["steps"][0].item() == 4
    assert_within_ulps(case.params[0], torch.from_numpy(w), scale=1.0)
    for name, state in zip(names, states, strict=True):
        assert_within_ulps(case.lists[name][0], torch.from_numpy(state), scale=1.0)


@with_reference
@pytest.mark.parametrize("l1", [False, True])
def test_step_follows_the_gradient_of_the_papers_loss(l1):
    """The loss of section 6 is L + lambda * sum of g/Z * w^2 (or |w|); torch's weight_decay is 2*lambda for squares."""
    lam, lr, gamma, eta = 0.07, 0.1, 0.6, 1.8
    g = torch.tensor([[eta, 1, eta], [1, gamma, 1], [eta, 1, eta]], dtype=torch.float64)
    z = (gamma + 4 * (1 + eta)) / 9
    maps, row = [geometry.decay_map((3, 3), (gamma, eta))], (lr, lam if l1 else 2 * lam, 0, 0)
    case = make_case(
        "sgd", [(4, 2, 3, 3)], dtypes=[torch.float64] * 3, hyper=row, states=0, maps=maps, map_index=[0], l1=l1
    )
    w = case.params[0].clone().requires_grad_()
    task = torch.nn.functional.conv2d(torch.randn(5, 2, 6, 6, dtype=torch.float64), w).tanh().sum()
    penalty = lam * (g / z * (w.abs() if l1 else w.square())).sum()
    (loss_gradient,) = torch.autograd.grad(task + penalty, w, retain_graph=True)
    case.lists["grads"] = list(torch.autograd.grad(task, w))
    case.step()
    assert_within_ulps(case.params[0], w.detach() - lr * loss_gradient, scale=loss_gradient.abs().max().item())


@with_reference
def test_no_decay_ignores_weights_that_are_not_finite_in_the_gradient():
    w = torch.tensor([math.inf, math.nan, 1.0])
    buffer = torch.zeros(3)
    ops.optim_step_sgd([w], [torch.ones(3)], [buffer], torch.tensor([[0.1, 0.0, 0.9, 0.0]], dtype=torch.float64))
    assert buffer.tolist() == [1, 1, 1]


@with_interpreter
def test_nothing_to_step_is_no_error_and_empty_tensors_are_counted():
    ops.optim_step_sgd([], [], [], torch.zeros(0, 4, dtype=torch.float64))
    ops.optim_step_adam([], [], [], [], [], [], torch.zeros(0, 5, dtype=torch.float64))
    case = make_case("adam", [(0, 3), (0,)])
    assert [t.item() for t in case.step().lists["steps"]] == [4, 4]


@with_kernels("cpu")
@pytest.mark.parametrize(
    ("rule", "betas", "dtype"),
    [
        (optim.SGD, None, torch.bfloat16),
        (optim.Adam, (0.9, 0.999), torch.bfloat16),  # one beta for all
        (optim.Adam, (0.8, 0.99), torch.float32),
    ],
)
def test_proxes_computed_together_are_those_computed_one_by_one(monkeypatch, rule, betas, dtype):
    # As on a GPU. Kernels apply no penalty on largest weights, so that their prox follows the step.
    def stepped() -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(n, 2, 3, 3, dtype=dtype).requires_grad_() for n in (4, 1, 3)]
        kinds = sparsity.RingPenalty(2.0, norm="linf"), sparsity.KernelPenalty(1.0, norm="linf"), None
        second = {"betas": betas} if betas else {}
        groups = [
            {"params": params[:1], "penalty": list(kinds[:1])},
            {"params": params[1:], "penalty": list(kinds[1:]), **second},
        ]
        optimizer = rule(groups, lr=0.1)
        for step in range(3):
            for i, param in enumerate(params):  # the second parameter has fewer steps than the first
                param.grad = torch.randn_like(param) if step > 0 or i != 1 else None
            optimizer.step()
        return params

    one_by_one = stepped()
    monkeypatch.setattr(prox_after_step, "_batches", lambda _args, chosen: [list(chosen)])
    together = stepped()
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))
    sizes = together[0].detach().abs().flatten()
    assert len(sizes.unique()) < len(sizes) - 4  # largest weights have been clipped to the same size


@with_kernels("cpu")
@pytest.mark.parametrize(("device", "batches"), [("cpu", [[1], [2], [3], [5], [6]]), ("cuda", [[1, 2], [3], [5, 6]])])
def test_on_a_gpu_parameters_are_shrunk_in_batches_of_bounded_size(monkeypatch, device, batches):
    monkeypatch.setattr(prox_after_step, "MOST_IN_A_BATCH", 10)
    sizes = [99, 4, 6, 12, 99, 3, 5]
    params = [SimpleNamespace(device=torch.device(device), numel=lambda size=size: size) for size in sizes]
    assert list(prox_after_step._batches(SimpleNamespace(params=params), [1, 2, 3, 5, 6])) == batches
