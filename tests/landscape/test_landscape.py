"""Tests of the landscape operator against formulas written with autograd, finite differences, and at its limits."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from loco_ext import ops
from loco_ext.ops.landscape import laplacian_stencil
from loco_ext.reference import landscape as reference
from tests.covering import slow

F64 = torch.float64


def by_autograd(g: Tensor, weights: Tensor, stencil: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss and the map, by the paper's formulas."""
    n = (weights.view(-1, 1, 1, 1) * g**2).sum(0).norm(dim=0)
    image = n.numel() ** 0.5 * n / n.norm()
    reach = len(stencil) // 2
    curvature = conv2d(pad(image[None, None], [reach] * 4, mode="reflect"), stencil[None, None])
    loss = curvature.var(correction=0) if target is None else (image - target).square().sum()
    return loss, image


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((3, 2, 5, 7), 3), ((1, 1, 4, 3), 5), ((4, 3, 1, 6), 1)])
def test_loss_and_gradient_are_those_of_the_formulas(shape, width, with_target):
    g, weights = torch.randn(shape, dtype=F64, requires_grad=True), torch.rand(shape[0], dtype=F64, requires_grad=True)
    stencil = laplacian_stencil(width) * torch.rand(width, width, dtype=F64)
    target = torch.rand(shape[2:], dtype=F64) if with_target else None
    expected, image = by_autograd(g, weights, stencil, target)
    found = ops.landscape(g, weights, stencil, target)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.map, image.detach())
    gradients = [torch.autograd.grad(loss, (g, weights)) for loss in (found.loss, expected)]
    torch.testing.assert_close(*gradients)
    torch.autograd.gradcheck(lambda g, w: ops.landscape(g, w, stencil, target).loss, (g, weights))


@pytest.mark.parametrize(
    ("dtype", "with_target"),
    [(torch.float32, True), *map(slow, [(torch.bfloat16, False), (torch.float64, False), (torch.float16, True)])],
    ids=str,
)
def test_the_operators_pass_opcheck(dtype, with_target):
    g = torch.randn(3, 2, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    weights, stencil = torch.rand(3, dtype=F64, requires_grad=True), laplacian_stencil(3)
    target = torch.rand(4, 5) if with_target else None
    torch.library.opcheck(torch.ops.loco_ext.landscape.default, (g, weights, stencil, target))
    rest = weights.detach(), torch.rand(2, 4, 5, dtype=F64), torch.tensor(2.0)
    torch.library.opcheck(torch.ops.loco_ext.landscape_backward.default, (g.detach(), *rest))


def test_it_compiles_into_one_graph():
    def loss(g: Tensor) -> Tensor:
        return ops.landscape(g * 2).loss

    g = torch.randn(2, 3, 6, 6, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(g), loss(g))
    torch.testing.assert_close(torch.autograd.grad(compiled(g), g), torch.autograd.grad(loss(g), g))


def test_torchs_default_device_does_not_count():
    g = torch.randn(2, 3, 6, 6)
    expected = ops.landscape(g)
    with torch.device("meta"):
        assert torch.equal(ops.landscape(g).loss, expected.loss)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_landscape_does_not_depend_on_the_size_of_gradients(scale):
    g = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(ops.landscape(g * scale), ops.landscape(g))


def test_gradients_of_zeros_make_maps_of_zeros_and_nan_comes_through():
    zeros = torch.zeros(2, 3, 6, 6, requires_grad=True)
    found = ops.landscape(zeros)
    assert not found.map.any()
    assert not found.loss
    assert not torch.autograd.grad(found.loss, zeros)[0].any()
    assert ops.landscape(torch.full((1, 1, 3, 3), torch.nan)).loss.isnan()


def test_kernels_get_no_lazy_negations(monkeypatch):
    g = torch.complex(torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6)).conj().imag
    expected, lazy = ops.landscape(g.resolve_neg()), []
    compute = reference.landscape
    monkeypatch.setattr(reference, "landscape", lambda g, *others: lazy.append(g.is_neg()) or compute(g, *others))
    assert g.is_neg()
    torch.testing.assert_close(ops.landscape(g), expected)
    assert lazy == [False]


G = torch.zeros(2, 3, 6, 6)
WRONG = {
    "g: expected a tensor": lambda: ops.landscape([1.0]),
    "g: expected float32": lambda: ops.landscape(G.int()),
    "g: expected shape": lambda: ops.landscape(G[0]),
    "weights: expected shape": lambda: ops.landscape(G, torch.ones(3)),
    "weights: expected float32": lambda: ops.landscape(G, torch.ones(2, dtype=torch.int64)),
    "stencil: expected a square of odd width": lambda: ops.landscape(G, stencil=torch.ones(2, 2)),
    "stencil: expected at most 11 taps": lambda: ops.landscape(G, stencil=torch.ones(13, 13)),
    "target: expected the images' size": lambda: ops.landscape(G, target=torch.ones(6, 5)),
    "target: expected a floating-point": lambda: ops.landscape(G, target=torch.ones(6, 6).int()),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()
