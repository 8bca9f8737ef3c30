"""Tests of ring norms, compared with torch.linalg, and of their derivatives."""

import pytest
import torch

from loco_ext import ops, sparsity
from loco_ext.reference.dtypes import compute_dtype
from tests.covering import covering
from tests.ring_prox.cases import FLOATS, LAYOUTS, Rings
from tests.tolerances import assert_within_ulps

pytestmark = pytest.mark.usefixtures("backend")

ALL_RINGS = [
    Rings((1, 1), "half", "auto"),
    Rings((4,), "half", "auto"),
    Rings((5, 5), "half", "bottom_right"),
    Rings((9, 9), "full", "auto"),
    Rings((3, 2, 4), "half", "top_left"),
]


def norms_by_linalg(weight, rings):
    """Return the norm of each ring, in float64 and differentiable."""
    index = torch.tensor(rings.of_taps)
    parts = [weight.double().flatten(2)[:, :, index == r].flatten(1) for r in range(rings.count)]
    return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], 1)


@pytest.mark.parametrize(("rings", "dtype"), covering(ALL_RINGS, FLOATS), ids=str)
def test_norms_are_those_of_each_rings_weights(rings, dtype):
    for channels in (1, 5, 33):
        weight = torch.randn(7, channels, *rings.kernel_size, dtype=torch.float64).to(dtype)
        for laid_out in LAYOUTS.values():
            norms = sparsity.ring_norms(laid_out(weight), rings.kind, first=rings.first)
            assert norms.dtype == compute_dtype(dtype)
            assert_within_ulps(norms, norms_by_linalg(weight, rings))


def test_derivatives_are_those_of_finite_differences():
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sparsity.ring_norms, weight)
    assert torch.autograd.gradgradcheck(sparsity.ring_norms, weight)
    last = weight.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: sparsity.ring_norms(w[:, 1:], "full"), last)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_the_weights_over_their_norm(dtype):
    weight = torch.randn(3, 2, 3, 3).to(dtype).requires_grad_()
    in_float64 = weight.detach().double().requires_grad_()
    factors = torch.randn(3, 3)
    norms = sparsity.ring_norms(weight)
    (norms * factors.to(norms.dtype)).sum().backward()
    (norms_by_linalg(in_float64, Rings((3, 3), "half", "auto")) * factors.double()).sum().backward()
    assert weight.grad.dtype == dtype
    assert_within_ulps(weight.grad, in_float64.grad)


def test_the_gradient_of_a_ring_of_zeros_is_zero():
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    weight[0] = 0
    weight[1, :, 0] = weight[1, :, :, 0] = 0
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(sparsity.ring_norms(weight).sum(), weight, create_graph=True)
    assert torch.equal(gradient == 0, weight == 0)
    (second,) = torch.autograd.grad(gradient.square().sum(), weight)
    assert second.isfinite().all()


def test_a_layer_without_kernels_has_no_norms():
    weight = torch.zeros(0, 2, 3, 3, requires_grad=True)
    norms = sparsity.ring_norms(weight)
    assert norms.shape == (0, 3)
    norms.sum().backward()
    assert weight.grad.shape == weight.shape


def test_the_operator_takes_any_division_of_the_taps():
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    norms = ops.ring_norms(weight, [3, 1, 1, 3], 5)
    assert torch.count_nonzero(norms[:, [0, 2, 4]]) == 0
    assert_within_ulps(norms[:, 1], weight.flatten(2)[:, :, 1:3].flatten(1).norm(dim=1))
