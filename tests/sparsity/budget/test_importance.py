"""Importance of filters and rings: by differences of the loss, and where norms cancel the length of filters."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loco_ext.sparsity.budget.importance import Taylor, by_norm, by_taylor
from loco_ext.sparsity.budget.structure import structure_of
from tests.compaction.cases import Network
from tests.sparsity.budget.networks import IMAGE, IMAGES_OF_8, NETWORKS, batches, between, conv, network

X = torch.zeros(2, *IMAGE)


@pytest.mark.parametrize("name", NETWORKS)
def test_taylor_is_the_change_of_the_loss(name: str) -> None:
    """The importance is compared with central differences of the loss when a part is scaled by 1 +- h, in float64."""
    model, h = network(name).double(), 1e-5
    several = [(x.double(), target) for x, target in batches()]
    structure = structure_of(model, [X.double()], "half", "rings")
    lost = {name: each.square() for name, each in by_taylor(structure, model, several, F.cross_entropy).items()}

    @torch.no_grad()
    def losses(parts: list[tuple[Tensor, Any]], factor: float) -> Tensor:
        saved = [whole[place].clone() for whole, place in parts]
        for whole, place in parts:
            whole[place] *= factor
        found = [F.cross_entropy(model(x), target) for x, target in several]
        for (whole, place), values in zip(parts, saved, strict=True):
            whole[place] = values
        return torch.stack(found)

    for layer in structure.layers:
        transposed = isinstance(layer.module, nn.ConvTranspose2d)
        weight, rings = layer.module.weight, torch.from_numpy(layer.rings)
        weight = weight.detach().transpose(0, 1) if transposed else weight
        scale, shift = (layer.norms[0].weight, layer.norms[0].bias) if layer.norms else (weight, layer.module.bias)
        for j, choice in itertools.product((0, len(weight) - 1), range(1, len(layer.taps))):
            outside: Any = (j, slice(None), (rings < choice).view(weight.shape[2:])) if weight.dim() > 2 else j
            parts = [(weight, outside)]
            together = len(weight) // layer.module.groups if getattr(layer.module, "groups", 1) > 1 else 1
            if choice == len(layer.taps) - 1:
                group = slice(j - j % together, j - j % together + together)
                parts = [(p, group) for p in (scale, shift) if p is not None]
            expected = ((losses(parts, 1 + h) - losses(parts, 1 - h)) / (2 * h * together)).square().sum()
            found = lost[layer.name][j, choice]
            assert found >= expected * (1 - 1e-4) - 1e-12
            if found > expected * (1 + 1e-4) + 1e-12:  # a smaller part changes more by itself
                assert found == lost[layer.name][j, choice - 1]


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_products_of_weights_and_gradients_may_be_too_small_for_float16(name: str) -> None:
    model, found = network(name).half(), {}
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(p.shape, generator=generator).mul(1e-6).half() for p in model.parameters()]
    for dtype in (torch.float16, torch.float64):
        taylor = Taylor(structure_of(model.to(dtype), [X.to(dtype)], "half", "rings"))
        given = {p: g.to(dtype) for p, g in zip(model.parameters(), gradients, strict=True)}
        taylor.add(given.get)
        found[dtype] = taylor.lost()
    for layer, expected in found[torch.float64].items():
        torch.testing.assert_close(found[torch.float16][layer], expected, rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.InstanceNorm2d, nn.BatchNorm2d])
def test_norms_that_cancel_the_length_of_filters_do_not_hide_their_importance(kind: Any, frozen: bool) -> None:
    """It is compared with that of a norm whose weights are ones, which has the same outputs."""
    totals = []
    for affine in (False, True):
        torch.manual_seed(0)
        norm = kind(32, affine=affine or frozen).requires_grad_(affine)
        model = nn.Sequential(between(norm), nn.Flatten(), nn.LazyLinear(4)).train()
        F.cross_entropy(model(IMAGES_OF_8), torch.arange(2)).backward()
        taylor = Taylor(structure_of(model, [IMAGES_OF_8], "half", "filters"))
        taylor.add(lambda parameter: parameter.grad)
        totals.append(taylor.lost()["0.0"][:, -1].sum())
    assert 0.1 < totals[0] / totals[1] < 10


@pytest.mark.parametrize("norms", [1, 2])
def test_importance_of_a_layer_with_several_calls_is_that_of_what_its_norms_return(norms: int) -> None:
    """The norms cancel the length of its filters, whether the calls share one or each has its own."""

    def function(net: Any, x: Tensor) -> Tensor:
        y = F.relu(net.first(x))
        heads = [net.norms[k % norms](net.head(each)) for k, each in enumerate((y, F.avg_pool2d(y, 2)))]
        return sum(net.last(F.relu(each)).mean((2, 3)) for each in heads)

    layers = {"first": conv(3, 8), "head": conv(8, 6), "last": conv(6, 4)}
    model = Network(function, **layers, norms=nn.ModuleList(nn.BatchNorm2d(6) for _ in range(norms))).double().train()
    for norm in model.norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    x, factors = IMAGES_OF_8.double(), torch.ones(6, 1, 1, dtype=torch.double, requires_grad=True)
    structure = structure_of(model, [x], "half", "rings")
    for norm in model.norms:
        norm.register_forward_hook(lambda module, given, y: y * factors)
    F.cross_entropy(model(x), torch.arange(2)).backward()
    taylor = Taylor(structure)
    taylor.add(lambda parameter: parameter.grad)
    torch.testing.assert_close(taylor.lost()["head"][:, -1], factors.grad.abs().flatten())
    with torch.no_grad():
        for norm in model.norms:
            norm.weight[0] = 0.0
    lost = by_norm(structure)["head"][:, -1]
    assert lost[0] == 0
    torch.testing.assert_close(lost.sum(), torch.tensor(1.0, dtype=torch.double))


@pytest.mark.parametrize("alone", [True, False])
def test_importance_of_a_layer_behind_concatenations_is_that_of_what_all_norms_return(alone: bool) -> None:
    """As in a DenseNet, whose norms cancel the length of its filters; not if anything else reads them."""

    def function(net: Any, x: Tensor) -> Tensor:
        y = net.first(x)
        z = net.inner(F.relu(net.norms[0](torch.cat((x, y), 1))))
        z = F.relu(net.norms[1](torch.cat((F.max_pool2d(torch.cat((y,), 1), 3, 1, 1), z), 1)))
        return net.last(z if alone else torch.cat((z[:, :8] + y, z[:, 8:]), 1)).mean((2, 3))

    layers = {"first": conv(3, 8), "inner": conv(11, 6), "last": conv(14, 4)}
    norms = nn.ModuleList([nn.BatchNorm2d(11), nn.BatchNorm2d(14)])
    model = Network(function, **layers, norms=norms).double().train()
    x, factors = IMAGES_OF_8.double(), torch.ones(8, 1, 1, dtype=torch.double, requires_grad=True)
    structure = structure_of(model, [x], "half", "filters")
    for norm, others in zip(norms, ((3, 0), (0, 6)), strict=True):
        nn.init.normal_(norm.bias)
        scale = F.pad(factors, (0, 0, 0, 0, *others), value=1.0)
        norm.register_forward_hook(lambda module, given, y, scale=scale: y * scale)
    F.cross_entropy(model(x), torch.arange(2)).backward()
    taylor = Taylor(structure)
    taylor.add(lambda parameter: parameter.grad)
    own = sum((p * p.grad).reshape(8, -1).sum(1) for p in model.first.parameters())
    torch.testing.assert_close(taylor.lost()["first"][:, -1], (factors.grad.flatten() if alone else own).abs())


def test_layers_that_share_a_norm_have_none_of_their_own() -> None:
    """Removing a filter of one layer must not remove the shift of the other."""
    function = lambda net, x: net.last(net.norm(net.inner(F.relu(net.norm(net.first(x))))))  # noqa: E731
    model = Network(function, first=conv(3, 8), inner=conv(8, 8), last=conv(8, 4), norm=nn.BatchNorm2d(8))
    assert not any(layer.norms for layer in structure_of(model, [IMAGES_OF_8], "half", "rings").layers)


def test_norm_is_the_share_of_the_folded_filters() -> None:
    model = network("plain")
    structure = structure_of(model, [X], "full", "rings")
    folded = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])  # type: ignore[index]
    energy = folded.weight.detach().double().square()
    lost = by_norm(structure)["0"]
    torch.testing.assert_close(lost[:, -1], energy.sum((1, 2, 3)) / energy.sum(), rtol=1e-5, atol=0)
    inner = energy[:, :, 1:-1, 1:-1].sum((1, 2, 3))
    torch.testing.assert_close(lost[:, -1] - lost[:, 1], inner / energy.sum(), rtol=1e-4, atol=1e-9)


def chain(net: Any, x: Tensor) -> Tensor:
    return net.last(F.relu(net.norms[1](net.inner(F.relu(net.norms[0](net.first(x))))))).mean((2, 3))


def read_elsewhere(net: Any, x: Tensor) -> Tensor:
    y = F.relu(net.norms[0](net.first(x)))
    return net.last(y + F.relu(net.norms[1](net.inner(y)))).mean((2, 3))


@pytest.mark.parametrize("groups", [2, 8])
def test_a_group_is_worth_the_change_of_the_loss_without_it_once(groups: int) -> None:
    """The filters before it, which go with it, lose nothing beside, unless other layers read them as well."""
    layers = {"first": conv(3, 8), "inner": nn.Conv2d(8, 8, 3, padding=1, groups=groups), "last": conv(8, 4)}
    norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
    model, x = Network(chain, **layers, norms=norms).double(), IMAGES_OF_8.double()
    structure = structure_of(model, [x], "half", "rings")
    factors = torch.ones(groups, dtype=torch.double, requires_grad=True)
    nn.init.normal_(norms[1].bias)
    hook = norms[1].register_forward_hook(
        lambda module, given, y: y * factors.repeat_interleave(8 // groups)[:, None, None]
    )
    F.cross_entropy(model(x), torch.arange(2)).backward()
    hook.remove()
    taylor = Taylor(structure)
    taylor.add(lambda parameter: parameter.grad)
    lost = taylor.lost()
    torch.testing.assert_close(lost["inner"][:, -1].view(groups, -1).sum(1), factors.grad.abs())
    for function, name in ((chain, "inner"), (read_elsewhere, "")):
        model.function = function
        structure = structure_of(model, [x], "half", "rings")
        assert [layer.follower for layer in structure.layers] == [name, "", ""]
        twice, once = (
            structure.problem("macs", lost, dict.fromkeys(lost, 1), followers_alone=alone).layers
            for alone in (False, True)
        )
        assert (once[0].lost[:, -1] == 0).all() == bool(name)
        assert (twice[0].lost[:, -1] > 0).all()
        assert np.array_equal(once[0].lost[:, :-1], twice[0].lost[:, :-1])
        assert all(np.array_equal(a.lost, b.lost) for a, b in zip(once[1:], twice[1:], strict=True))
