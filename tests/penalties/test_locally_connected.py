"""Ring and kernel penalties on the blocks of locally connected layers: prox, value, threshold, and in optimizers."""

import copy
import math
import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from loco_ext import geometry, ops, optim, sparsity
from loco_ext.geometry.attached_pattern import attach_pattern
from loco_ext.nn import LocallyConnected1d, LocallyConnected2d
from tests.nn.cases import random_layer

PENALTIES = {
    "half rings": lambda a: sparsity.RingPenalty(a),
    "rings": lambda a: sparsity.RingPenalty(a, kind="full"),
    "normalized": lambda a: sparsity.RingPenalty(4 * a, weighting="normalized"),
    "scaled": lambda a: sparsity.RingPenalty(a / 8, kind="full", weighting="scaled"),
    "largest": lambda a: sparsity.RingPenalty(a, norm="linf"),
    "squared": lambda a: sparsity.RingPenalty(a, power=2),
    "kernels": lambda a: sparsity.KernelPenalty(3 * a),
    "squared kernels": lambda a: sparsity.KernelPenalty(a / 8, power=2),
}


def by_tap(weight, groups):
    """Return a convolution's weight in the layout of blocks, ``[n_taps, groups, C_in / groups, C_out / groups]``."""
    return weight.flatten(2).unflatten(0, (groups, -1)).permute(3, 0, 2, 1)


@pytest.mark.parametrize("with_metric", [False, True], ids=["euclidean", "metric"])
@pytest.mark.parametrize("name", PENALTIES)
def test_units_without_a_border_shrink_as_their_convolution(name, with_metric):
    """The kernel is as large as the image, so it has one position and growth can add nothing."""
    torch.manual_seed(3)
    zeros = 0
    for strength in (0.02, 0.3, 3.0):
        conv = nn.Conv2d(4, 6, (5, 3), groups=2, dtype=torch.float64)
        with torch.no_grad():
            conv.weight[0] /= 50
            conv.weight[1, :, 0] /= 5000
            conv.weight[1, :, :, 0] /= 5000
        layer = LocallyConnected2d.from_conv(conv, (5, 3))
        penalty = PENALTIES[name](strength)
        metric = torch.rand_like(conv.weight) + 0.5 if with_metric else None
        blocks = by_tap(metric, 2) if with_metric else None
        shrunk = penalty.prox(conv.weight, 1.0, metric)
        torch.testing.assert_close(penalty.prox(layer.weight, 1.0, blocks), by_tap(shrunk, 2))
        assert torch.equal(penalty.prox(layer.weight, 1.0, blocks) == 0, by_tap(shrunk, 2) == 0)
        torch.testing.assert_close(penalty.value(layer.weight), penalty.value(conv.weight))
        values = [torch.autograd.grad(penalty.value(p), p)[0] for p in (conv.weight, layer.weight)]
        torch.testing.assert_close(values[1], by_tap(values[0], 2))
        tau = conv.weight.abs().max().item() * 3
        torch.testing.assert_close(penalty.threshold(layer.weight, tau), by_tap(penalty.threshold(conv.weight, tau), 2))
        zeros += (shrunk == 0).sum()
    assert zeros > 0


def test_shrunk_blocks_are_rounded_once():
    torch.manual_seed(0)
    layer, penalty = LocallyConnected2d.from_conv(nn.Conv2d(4, 4, 5), (6, 6)).bfloat16(), sparsity.RingPenalty(1.0)
    found = penalty.prox(layer.weight, 0.05)
    assert torch.equal(found, penalty.prox(layer.float().weight, 0.05).bfloat16())


@pytest.mark.parametrize("number", [math.inf, math.nan, 1e30], ids=str)
def test_what_is_no_number_or_too_large_to_square_stays_in_its_unit(number):
    conv = nn.Conv1d(3, 4, 5)
    conv.weight.data[1, 2, 3] = number
    layer = LocallyConnected1d.from_conv(conv, 5)
    for penalty in (sparsity.RingPenalty(0.3, kind="full"), sparsity.KernelPenalty(0.1)):
        expected = by_tap(penalty.prox(conv.weight, 1.0), 1)
        torch.testing.assert_close(penalty.prox(layer.weight, 1.0), expected, equal_nan=True)


@pytest.mark.parametrize("name", PENALTIES)
def test_weights_too_small_to_square_vanish(name):
    layer, penalty = LocallyConnected2d(2, 3, 3, padding=1, input_size=(4, 5)).grow(1), PENALTIES[name](0.05)
    outside, start = ~layer.pattern.local_mask(), layer.weight.detach().clone()
    for number in (1e-20, 1e-22, 1e-40):
        layer.weight.data.copy_(start)[outside] = number
        assert torch.equal(penalty.prox(layer.weight, 0.0), layer.weight)
        if "kernels" not in name:
            assert penalty.prox(layer.weight, 1.0)[outside].count_nonzero() == 0
        layer.weight.data.fill_(number)
        if "squared" not in name:
            assert penalty.prox(layer.weight, 1.0).count_nonzero() == 0


@pytest.mark.parametrize("name", ["scaled", "largest", "squared", "squared kernels"])
def test_a_layer_that_has_lost_all_blocks_trains_on(name):
    layer, penalty = LocallyConnected2d(2, 3, 3, padding=1, input_size=(4, 5)), PENALTIES[name](100.0)
    optimizer = optim.SGD(layer.parameters(), 0.1, 0.9, weight_decay=0.1, locality=(0.5, 2.0), penalty=penalty)
    keep = torch.zeros(layer.pattern.nnz, dtype=torch.bool)
    for _ in range(3):
        optimizer.zero_grad()
        (layer(torch.ones(1, 2, 4, 5)).sum() + penalty.value(layer.weight)).backward()
        before = layer.bias.detach().clone()
        optimizer.step()
        assert not torch.equal(layer.bias, before)
        if len(layer.weight):
            layer.prune(keep, optimizer=optimizer)
    assert penalty.value(layer.weight) == 0
    assert penalty.prox(layer.weight, 1.0).shape == penalty.threshold(layer.weight, 1.0).shape == layer.weight.shape
    layer.grow(1, optimizer)
    layer(torch.ones(1, 2, 4, 5)).sum().backward()
    optimizer.step()
    assert layer.pattern.nnz > 0


def test_too_many_rings_are_refused_before_anything_changes():
    layer = LocallyConnected1d(1, 2, 3, padding=1, input_size=70).grow(70)
    optimizer = optim.SGD(layer.parameters(), 0.1, penalty=sparsity.KernelPenalty(1e-3))
    optimizer.param_groups[0]["penalty"] = sparsity.RingPenalty(1e-3)
    layer(torch.ones(1, 1, 70)).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="rings: expected 1 to 64 of them, got 139"):
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert math.isfinite(sparsity.KernelPenalty(0.1).value(layer.weight).item())


@pytest.mark.parametrize("name", ["scaled", "largest", "squared kernels"])
def test_default_devices_change_nothing(name):
    torch.manual_seed(4)
    layer, penalty = LocallyConnected2d(2, 3, 3, padding=1, input_size=(4, 5)).grow(1), PENALTIES[name](0.05)
    expected = [penalty.prox(layer.weight, 1.0), penalty.threshold(layer.weight, 0.3), penalty.value(layer.weight)]
    with torch.device("meta"):
        found = [penalty.prox(layer.weight, 1.0), penalty.threshold(layer.weight, 0.3), penalty.value(layer.weight)]
    assert all(map(torch.equal, found, expected))


def boxes(layer):
    """Return how many pixels each block is beyond the kernel's box along its farthest axis, for odd kernels.

    The number is negative inside of the box, -100 where no axis has an offset.
    """
    offsets = geometry.block_offsets(layer.pattern).abs() // 2
    halves = torch.tensor([d * (k - 1) // 2 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)])
    return torch.where(offsets == 0, -100, offsets - halves).amax(1)


@pytest.mark.parametrize("seed", range(2))
def test_grown_layers_shrink_from_the_outside_in_unit_by_unit(seed):
    """Groups of rings are shrunk one by one in each unit; rings are boxes around the kernel, then its own rings."""
    generator = random.Random(seed)
    tested = zeros = 0
    while tested < 6:
        layer, case = random_layer(generator)
        if any(k % 2 == 0 for k in case.kernel_size) or case.padding_mode == "circular":
            continue
        layer.grow(generator.randint(0, 2)).reset_parameters(like="linear")
        if layer.pattern.nnz == 0:
            continue
        tested += 1
        outside_in = -boxes(layer)
        _, rings = outside_in.unique(return_inverse=True)  # the pattern's rings; rings that a unit lacks count twice
        count = int(rings.max()) + 1
        step = 0.3 * layer.weight.detach().abs().max().item()
        result = sparsity.RingPenalty(1.0, kind="full").prox(layer.weight, step)
        metric = torch.rand_like(layer.weight) + 0.5
        in_metric = sparsity.RingPenalty(1.0, kind="full").prox(layer.weight, step, metric)
        rows, thresholds = layer.crow_indices.tolist(), torch.full((count,), step, dtype=torch.float64)
        for first, last in pairwise(rows):
            for group in range(layer.groups):
                for channel in range(layer.weight.shape[3]):
                    unit = layer.weight.detach()[first:last, group, :, channel]
                    expected = unit.clone()
                    for ring in range(count):
                        inside = rings[first:last] <= ring
                        norm = expected[inside].norm()
                        expected[inside] *= 0.0 if norm <= step else 1 - step / norm
                    torch.testing.assert_close(result[first:last, group, :, channel], expected)
                    if len(unit):
                        alone = ops.ring_prox(
                            *(unit.t().unsqueeze(0), rings[first:last].tolist(), thresholds),
                            metric=metric[first:last, group, :, channel].t().unsqueeze(0),
                        )
                        torch.testing.assert_close(in_metric[first:last, group, :, channel], alone[0].t())
        zeros += (result == 0).sum()
    assert zeros > 0


def make_model(dtype=torch.float64):
    torch.manual_seed(2)
    layer = LocallyConnected2d(2, 3, 3, padding=1, input_size=(5, 4), dtype=dtype).grow(1)
    layer.reset_parameters(like="linear")
    return nn.Sequential(layer, nn.Conv2d(3, 2, 3, dtype=dtype))


def copy_of(layer):
    """Return a copy of the layer's blocks that is marked as blocks of its pattern."""
    values = layer.weight.detach().clone()
    attach_pattern(values, layer.pattern)
    return values


@pytest.mark.parametrize(
    ("momentum", "path"), [(0.0, {}), (0.9, {}), (0.9, {"fused": False}), (0.9, {"foreach": True})], ids=str
)
def test_steps_of_sgd_end_with_the_prox(momentum, path):
    model, penalty = make_model(), sparsity.RingPenalty(0.2, kind="full")
    groups = optim.parameter_groups(model, 0.0, penalty=penalty)
    assert groups[0]["penalty"] == [penalty, penalty]
    optimizer = optim.SGD(groups, lr=0.1, momentum=momentum, **path)
    for step in range(4):
        if step == 2:
            model[0].prune(radius=0, optimizer=optimizer)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        values, grad = copy_of(model[0]), model[0].weight.grad
        values -= 0.1 * (momentum * optimizer.state[model[0].weight].get("momentum_buffer", 0 * grad) + grad)
        expected = penalty.prox(values, 0.1 / (1 - momentum))
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), expected)


def test_steps_of_adam_end_with_the_prox_in_their_metric():
    model, penalty = make_model(), sparsity.RingPenalty(100.0)
    optimizer = optim.Adam(optim.parameter_groups(model, 0.0, penalty=penalty), lr=0.01)
    plain = copy.deepcopy(model)
    other = torch.optim.Adam(plain.parameters(), lr=0.01)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    squares = other.state[plain[0].weight]["exp_avg_sq"] / (1 - 0.999)
    expected = penalty.prox(copy_of(plain[0]), 1.0, (squares.sqrt() + 1e-8) / 0.01)
    torch.testing.assert_close(model[0].weight.detach(), expected)
    assert (expected == 0).any()


def test_a_grown_layer_shrinks_back_to_its_convolution():
    """The target needs only the kernel's pixels; the other blocks start as noise."""
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 2, 3, padding=1, dtype=torch.float64)
    layer = LocallyConnected1d.from_conv(conv, 8).grow(2)
    local = layer.pattern.local_mask()
    with torch.no_grad():
        layer.weight[~local] = torch.randn_like(layer.weight[~local]) / 20
    groups = optim.parameter_groups(layer, 0.0, penalty=sparsity.RingPenalty(0.004, kind="full"))
    optimizer = optim.SGD(groups, lr=0.05, momentum=0.9)
    for _ in range(250):
        x = torch.randn(32, 2, 8, dtype=torch.float64)
        optimizer.zero_grad()
        (layer(x) - conv(x).detach()).square().mean().backward()
        optimizer.step()
    assert not layer.weight[~local].any()
    layer.prune(threshold=0.0, optimizer=optimizer)
    assert len(layer.weight) == local.sum()
    assert layer.deviation().delta_locality == 0
    x = torch.randn(64, 2, 8, dtype=torch.float64)
    assert (layer(x) - conv(x)).std() < conv(x).std() / 4


def test_blocks_are_no_convolutions_weight():
    layer = LocallyConnected1d(3, 5, 3, padding=1, input_size=7)
    folded = sparsity.FoldedPenalty(sparsity.RingPenalty(0.1), nn.BatchNorm1d(7))
    for use in (sparsity.ring_norms, sparsity.kernel_sizes, folded.for_step):
        with pytest.raises(TypeError, match="got the blocks of a locally connected layer"):
            use(layer.weight)
    even = LocallyConnected1d(3, 5, 4, input_size=7)
    with pytest.raises(ValueError, match="expected odd sizes for full rings"):
        sparsity.RingPenalty(0.1, kind="full").prox(even.weight, 1.0)


def test_rings_of_dilated_kernels_are_those_of_their_taps():
    pattern = geometry.BlockPattern.from_conv((9, 9), (3, 5), dilation=2)
    for kind in ("half", "full"):
        rings = geometry.block_rings(pattern, kind).view(pattern.n_out, 15)
        assert (rings == rings[0]).all()
    assert geometry.block_rings(pattern, "full")[:15].view(3, 5).tolist() == [[0] * 5, [0, 1, 2, 1, 0], [0] * 5]
    pattern = geometry.BlockPattern.from_conv(9, 4)
    for first in ("auto", "top_left", "bottom_right"):
        expected = geometry.ring_index(4, first=first).tolist()
        assert geometry.block_rings(pattern, first=first).view(-1, 4).tolist() == [expected] * pattern.n_out
