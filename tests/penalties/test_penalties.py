"""Tests of penalties on rings and kernels: values by formula, gradients by differences, the prox by its definition."""

import itertools

import pytest
import torch

from loco_ext import optim, sparsity
from loco_ext.sparsity import KernelPenalty, RingPenalty
from tests.covering import covering, label
from tests.ring_prox.cases import BACKENDS, FLOATS, WEIGHTINGS, Rings, group_norms, group_weights
from tests.tolerances import assert_within_ulps, same_bits

NORMS = ("l2", "linf")
KINDS = (("half", "top_left"), ("half", "bottom_right"), ("full", "auto"))
OPTIONS = [
    {"weighting": weighting, "norm": norm, "power": power}
    for weighting, norm, power in itertools.product(WEIGHTINGS, NORMS, (1, 2))
]


def value_of_rings(weight, rings, strength, weighting, norm, power):
    """Return the value of a ring penalty by eqs. 21-22, 25, 29 and 33, with torch.linalg."""
    w = group_weights(rings, weight.shape[1], weighting)
    return strength * ((w * group_norms(weight, rings, norm)).sum(1) ** power).sum()


def value_of_kernels(weight, strength, weighting, norm, power):
    """Return the value of a kernel penalty by eqs. 12-13 and 32."""
    w = weight[0].numel() ** WEIGHTINGS[weighting]
    order = torch.inf if norm == "linf" else 2
    return strength * (w * torch.linalg.vector_norm(weight.double().flatten(1), order, dim=1)).sum() ** power


def both_penalties(strength, options):
    return RingPenalty(strength, **options), KernelPenalty(strength, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("options", "dtype", "backend"), covering(OPTIONS, FLOATS, BACKENDS, strength=1), ids=label, indirect=["backend"]
)
def test_values_are_those_of_the_formulas(options, dtype):
    for kernel_size, channels in (((5, 5), 3), ((3, 3), 1), ((1, 1), 8), ((7,), 2), ((3, 1, 5), 2)):
        weight = torch.randn(6, channels, *kernel_size).to(dtype)
        for kind, first in KINDS:
            value = RingPenalty(0.3, kind, first=first, **options).value(weight)
            expected = value_of_rings(weight, Rings(kernel_size, kind, first), 0.3, **options)
            assert value.dtype == torch.float64
            assert value.shape == ()
            torch.testing.assert_close(value, expected, rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0)
        value = KernelPenalty(0.3, **options).value(weight)
        expected = value_of_kernels(weight, 0.3, **options)
        torch.testing.assert_close(value, expected, rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("options", "backend"), covering(OPTIONS, BACKENDS, strength=1), ids=label, indirect=["backend"]
)
def test_gradients_are_those_of_finite_differences_and_0_where_a_norm_is_0(options):
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    with_zeros = torch.randn(3, 2, 3, 3)
    with_zeros[0] = with_zeros[1, :, 0] = with_zeros[1, :, :, 0] = 0
    with_zeros.requires_grad_()
    for penalty in both_penalties(0.3, options):
        assert torch.autograd.gradcheck(penalty.value, weight)
        (gradient,) = torch.autograd.grad(penalty.value(with_zeros), with_zeros)
        assert torch.count_nonzero(gradient[0]) == 0
        assert gradient.isfinite().all()
        assert torch.count_nonzero(gradient[2]) > 0


def test_weights_count_all_weights_of_a_group():
    weight = torch.zeros(2, 5, 3, 3)
    sizes = [5 * 5.0, 8 * 5.0, 9 * 5.0]
    for weighting, power in WEIGHTINGS.items():
        expected = torch.tensor(sizes, dtype=torch.float64) ** power
        assert_within_ulps(RingPenalty(1.0, weighting=weighting).group_weights(weight), expected)
        assert_within_ulps(KernelPenalty(1.0, weighting).group_weights(weight), expected[2:])


def objective(penalty, weight, x, step, metric):
    d = 1.0 if metric is None else metric.double()
    return ((d * (x.double() - weight.double()).square()).sum() / 2 + step * penalty.value(x)).item()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("options", "with_metric", "backend"),
    covering(OPTIONS, [False, True], BACKENDS),
    ids=label,
    indirect=["backend"],
)
def test_the_prox_is_lower_than_all_around_it(options, with_metric):
    """A convex function that decreases in no direction from a point has its minimum there."""
    weight = torch.randn(4, 2, 3, 3, dtype=torch.float64) * torch.logspace(-1, 0.5, 4).view(4, 1, 1, 1)
    metric = torch.rand_like(weight) + 0.5 if with_metric else None
    strengths = {"plain": 0.3, "normalized": 1.5, "scaled": 0.05}
    for penalty in both_penalties(strengths[options["weighting"]], options):
        x = penalty.prox(weight, 0.4, metric)
        least = objective(penalty, weight, x, 0.4, metric)
        assert least < objective(penalty, weight, weight, 0.4, metric)
        assert least < objective(penalty, weight, torch.zeros_like(weight), 0.4, metric)
        for size in (1e-1, 1e-3, 1e-5):
            for direction in torch.randn(8, *weight.shape, dtype=torch.float64):
                for part in (direction, direction * (x != 0), direction * x, direction[:, :1, :1, :1] * x):
                    moved = objective(penalty, weight, x + size * part, 0.4, metric)
                    assert moved >= least - 1e-13 * abs(least)


@pytest.mark.parametrize(("options", "with_metric"), covering(OPTIONS, [False, True]), ids=label)
def test_weights_on_the_meta_device_have_a_prox_and_steps(options, with_metric):
    weight = torch.nn.Parameter(torch.empty(4, 2, 3, 3, device="meta").to(memory_format=torch.channels_last))
    weight.grad = torch.empty_like(weight)
    for penalty in both_penalties(0.1, options):
        x = penalty.prox(weight, 0.4, torch.empty_like(weight) if with_metric else None)
        assert (x.device, x.dtype, x.shape, x.stride()) == (weight.device, weight.dtype, weight.shape, weight.stride())
        optimizer = (optim.Adam if with_metric else optim.SGD)([weight], lr=0.1, penalty=penalty)
        for _ in range(2):
            optimizer.step()
    assert sparsity.kernel_sizes(weight).shape == (4,)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("options", "dtype", "backend"), covering(OPTIONS, FLOATS, BACKENDS, strength=1), ids=label, indirect=["backend"]
)
def test_strength_0_and_step_0_change_no_bit_and_weights_that_are_not_finite_stay(options, dtype):
    weight = torch.randn(4, 2, 3).to(dtype)
    weight[0] = -0.0
    weight[1, 0] = torch.finfo(dtype).smallest_normal / 4
    for metric in (None, torch.rand_like(weight) + 0.5):
        for strength, step in ((0.0, 1.0), (1.0, 0.0), (0, 0)):
            for penalty in both_penalties(strength, options):
                assert same_bits(penalty.prox(weight, step, metric), weight)
        for number, penalty in itertools.product((torch.nan, torch.inf), both_penalties(0.1, options)):
            spoilt = torch.randn(4, 2, 3).to(dtype)
            spoilt[2, 1, 1] = number
            x = penalty.prox(spoilt, 0.5, metric)
            assert same_bits(x[2, 1, 1], spoilt[2, 1, 1])
            assert x[[0, 1, 3]].isfinite().all()


def test_a_layer_without_kernels_is_left():
    weight = torch.zeros(0, 2, 3, 3)
    for options in OPTIONS:
        for metric in (None, torch.ones_like(weight)):
            for penalty in both_penalties(0.1, options):
                assert penalty.value(weight).item() == 0
                assert penalty.prox(weight, 0.5, metric).shape == weight.shape


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("norm", "dtype", "backend"), covering(NORMS, FLOATS, BACKENDS, strength=1), ids=label, indirect=["backend"]
)
def test_thresholds_take_every_group_that_is_not_above_them(norm, dtype):
    """Eqs. 15 and 23 are checked for one kernel and one group at a time."""
    order = torch.inf if norm == "linf" else 2
    for kernel_size, (kind, first) in itertools.product(((5, 5), (1, 3), (1, 1), (3, 1, 5)), KINDS):
        weight = (torch.randn(7, 3, *kernel_size) * torch.logspace(-2, 0, 7).view(7, *[1] * (1 + len(kernel_size)))).to(
            dtype
        )
        index = torch.tensor(Rings(kernel_size, kind, first).of_taps).view(kernel_size)
        penalties = (
            (RingPenalty(0.7, kind, "scaled", norm, first=first), range(index.max() + 1)),
            (KernelPenalty(0.7, "normalized", norm), (index.max(),)),
        )
        for (penalty, groups), tau in itertools.product(penalties, (0.0, 0.05, 0.5, 100.0)):
            expected = weight.clone()
            for kernel, whole in zip(expected, weight, strict=True):
                for n in groups:
                    if torch.linalg.vector_norm(whole[:, index <= n].double(), order) <= tau:
                        kernel[:, index <= n] = 0
            before = weight.clone()
            assert same_bits(penalty.threshold(weight, tau), expected)
            assert same_bits(weight, before)


def test_thresholds_may_be_met_exactly_and_leave_what_is_no_number():
    weight = torch.tensor([[[3.0, 5.0, 4.0]], [[3.0, torch.nan, 4.0]], [[torch.nan, 1.0, 1.0]], [[0.0, 1e-30, -0.0]]])
    penalty = RingPenalty(1.0, "full")
    found = penalty.threshold(weight, 5)
    assert found[:2].isnan().nonzero().tolist() == [[1, 0, 1]]
    assert found[:2, 0, [0, 2]].count_nonzero() == 0
    assert found[0, 0, 1] == 5
    assert same_bits(found[2], weight[2])
    assert found[3].count_nonzero() == 0
    assert penalty.threshold(weight, 4.999)[:2, 0, [0, 2]].count_nonzero() == 4
    assert penalty.threshold(torch.zeros(0, 2, 3, 3), 1.0).shape == (0, 2, 3, 3)
    parameter = torch.nn.Parameter(torch.ones(1, 1, 3))
    assert not penalty.threshold(parameter, 1.0).requires_grad


@pytest.mark.parametrize(
    ("tau", "error"), [(-1.0, ValueError), (torch.inf, ValueError), (torch.nan, ValueError), ("1", TypeError)]
)
def test_a_bad_tau_is_a_typed_error(tau, error):
    for penalty in (RingPenalty(1.0), KernelPenalty(1.0)):
        with pytest.raises(error, match=r"tau: expected a .*number.* got"):
            penalty.threshold(torch.ones(1, 1, 3, 3), tau)
    with pytest.raises(ValueError, match="weight: expected a convolution's weight"):
        RingPenalty(1.0).threshold(torch.ones(3), 1.0)


def test_inference_mode_and_parameters_get_the_same():
    weight, penalty = torch.randn(3, 2, 3, 3), RingPenalty(0.3, weighting="scaled")
    with torch.inference_mode():
        first = penalty.prox(weight, 0.7)
    for again in (penalty.prox(weight, 0.7), penalty.prox(torch.nn.Parameter(weight), 0.7)):
        assert torch.equal(again, first)
