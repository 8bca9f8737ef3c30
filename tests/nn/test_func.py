"""Locally connected layers under torch.func, forward AD and torch.jit.trace, against a dense matrix in float64."""

import warnings

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import loco_ext
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d, LocallyConnected3d
from loco_ext.ops import backends
from tests.block_sparse.cases import dense_matmul
from tests.covering import covering

BACKENDS = ("reference", *(("native",) if backends.library else ()))


LAYERS = {
    "1d": lambda: LocallyConnected1d(2, 3, 3, padding=1, input_size=5, dtype=torch.float64),
    "grown": lambda: LocallyConnected2d(2, 3, 3, stride=2, input_size=(3, 4), dtype=torch.float64).grow(1),
    "groups": lambda: LocallyConnected2d(4, 2, 2, dilation=2, groups=2, input_size=(3, 4), dtype=torch.float64),
    "depthwise": lambda: LocallyConnected2d(3, 3, 3, padding=1, groups=3, input_size=3, dtype=torch.float64),
    "no bias": lambda: LocallyConnected3d(1, 2, 2, bias=False, input_size=(2, 3, 2), dtype=torch.float64),
}


class Both:
    """Layer and equivalent dense matrix, as functions of the parameters and the input."""

    def __init__(self, name: str) -> None:
        self.layer = LAYERS[name]()
        pattern = self.layer.pattern
        self.live = torch.zeros(pattern.n_out, pattern.n_in, dtype=torch.bool)
        self.live[pattern.row_indices, pattern.col_indices] = True
        self.parameters = {name: torch.randn_like(p) for name, p in self.layer.named_parameters()}
        self.x = torch.randn(2, self.layer.in_channels, *self.layer.input_size, dtype=torch.float64)

    def ours(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return func.functional_call(self.layer, parameters, (x,))

    def dense(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        batch = x if x.dim() == self.layer.axes + 2 else x.unsqueeze(0)
        y = dense_matmul(batch.flatten(2).mT, parameters["weight"], parameters.get("bias"), self.live)
        y = y.mT.unflatten(2, self.layer.output_size)
        return y.view(*x.shape[: x.dim() - self.layer.axes - 1], *y.shape[1:])


def loss(f):
    return lambda parameters, x: f(parameters, x).sin().sum()


def stacked(parameters):
    return {name: torch.stack([p, 2 * p, p.cos()], 1) for name, p in parameters.items()}


TRANSFORMS = {
    "grad": lambda f, p, x, t: func.grad(loss(f), (0, 1))(p, x),
    "vjp": lambda f, p, x, t: func.vjp(f, p, x)[1](f(p, x)),
    "jvp": lambda f, p, x, t: func.jvp(f, (p, x), (t, x.cos())),
    "jvp of x": lambda f, p, x, t: func.jvp(lambda x: f(p, x), (x,), (x.cos(),)),
    "jvp of some": lambda f, p, x, t: func.jvp(lambda v: f({**p, "weight": v}, x), (p["weight"],), (t["weight"],)),
    "vmap": lambda f, p, x, t: func.vmap(f, (None, 0))(p, x),
    "vmap of batches": lambda f, p, x, t: func.vmap(f, (None, 1), 2)(p, torch.stack([x, x.cos(), x.sin()], 1)),
    "vmap of nothing": lambda f, p, x, t: func.vmap(f, (None, 0))(p, torch.stack([x[:0], x[:0]])),
    "vmap of no samples": lambda f, p, x, t: func.vmap(f, (None, 0))(p, x[:0]),
    "ensemble": lambda f, p, x, t: func.vmap(f, (1, None))(stacked(p), x),
    "ensemble, own inputs": lambda f, p, x, t: func.vmap(f, (1, 0))(stacked(p), torch.stack([x, 2 * x, x.cos()])),
    "ensemble of gradients": lambda f, p, x, t: func.vmap(func.grad(loss(f), (0, 1)), (1, None))(stacked(p), x),
    "gradients per sample": lambda f, p, x, t: func.vmap(func.grad(loss(f)), (None, 0))(p, x),
    "gradients per member and sample": lambda f, p, x, t: func.vmap(
        func.vmap(func.grad(loss(f)), (None, 0)), (1, None)
    )(stacked(p), x),
    "jacrev": lambda f, p, x, t: func.jacrev(f, (0, 1))(p, x[:1]),
    "jacfwd": lambda f, p, x, t: func.jacfwd(f, (0, 1))(p, x[:1]),
    "hessian": lambda f, p, x, t: func.hessian(loss(f), 1)(p, x[:1]),
    "jvp of grad": lambda f, p, x, t: func.jvp(func.grad(loss(f), (0, 1)), (p, x), (t, x.cos())),
    "grad of jvp": lambda f, p, x, t: func.grad(lambda p: func.jvp(lambda p: f(p, x), (p,), (t,))[1].sin().sum())(p),
}


@pytest.mark.parametrize(("transform", "name", "backend"), covering(TRANSFORMS, LAYERS, BACKENDS))
def test_transforms_are_those_of_a_dense_matrix(transform, name, backend):
    both = Both(name)
    tangents = {name: torch.randn_like(p) for name, p in both.parameters.items()}
    with loco_ext.backend(backend):
        found, expected = (TRANSFORMS[transform](f, both.parameters, both.x, tangents) for f in (both.ours, both.dense))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_forward_backward_and_batched(name):
    both = Both(name)
    operands = [t.clone().requires_grad_() for t in (both.x, *both.parameters.values())]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return both.ours(dict(zip(both.parameters, parameters, strict=True)), x)

    options = {"fast_mode": True, "check_batched_grad": True}
    assert gradcheck(function, operands, check_forward_ad=True, check_batched_forward_grad=True, **options)
    assert gradgradcheck(function, operands, check_fwd_over_rev=True, **options)


def test_dual_tensors_carry_tangents_through_frozen_layers():
    both = Both("grown")
    both.layer.requires_grad_(False)
    parameters = dict(both.layer.named_parameters())
    with forward_ad.dual_level():
        y = both.layer(forward_ad.make_dual(both.x, both.x.cos()))
        tangent = forward_ad.unpack_dual(y).tangent
        assert forward_ad.unpack_dual(both.layer(both.x)).tangent is None
    _, expected = func.jvp(lambda x: both.dense(parameters, x), (both.x,), (both.x.cos(),))
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_transforms_keep_half_precision_and_autocast(dtype):
    layer = LocallyConnected2d(2, 3, 3, padding=1, input_size=4)
    x, parameters = torch.randn(3, 2, 4, 4), dict(layer.named_parameters())
    half = {name: p.detach().to(dtype) for name, p in parameters.items()}
    with torch.autocast("cpu", dtype):
        y = func.vmap(layer)(x)
        gradients = func.grad(lambda p: func.functional_call(layer, p, (x,)).float().sum())(parameters)
    assert torch.equal(y, func.functional_call(layer, half, (x.to(dtype),)))
    assert y.dtype == dtype
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    with pytest.raises(TypeError, match=f"input: expected torch.float32 as the weight of the layer, got {dtype}"):
        func.vmap(layer)(x.to(dtype))


@pytest.mark.parametrize("trained", [True, False])
def test_traced_models_are_saved_and_train(tmp_path, trained):
    model = nn.Sequential(LocallyConnected2d(2, 3, 3, padding=1, input_size=(4, 5)), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(60, 2)).requires_grad_(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("error", "values: ")  # torch reads all attributes, the former name is not one to read
        torch.jit.trace(model, torch.randn(2, 2, 4, 5)).save(tmp_path / "model.pt")
        loaded = torch.jit.load(tmp_path / "model.pt")
    for batch in (1, 7, 0):
        x = torch.randn(batch, 2, 4, 5)
        torch.testing.assert_close(loaded(x), model(x))
    if trained:
        x = torch.randn(3, 2, 4, 5)
        for y in (loaded(x), model(x)):
            y.square().sum().backward()
        gradients = [[p.grad for p in module.parameters()] for module in (loaded, model)]
        torch.testing.assert_close(*gradients)


def test_a_state_dict_takes_the_place_of_the_parameters_for_a_call():
    both = Both("grown")
    given = both.layer.state_dict() | both.parameters
    torch.testing.assert_close(both.ours(given, both.x), both.dense(both.parameters, both.x))
    before = both.layer(both.x)
    for name in ("crow_indices", "col_indices"):
        with pytest.raises(ValueError, match=f"{name}: expected the layer's"):
            both.ours(given | {name: given[name] + 1}, both.x)
    assert torch.equal(both.layer(both.x), before)
