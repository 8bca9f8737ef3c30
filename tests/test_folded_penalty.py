"""Penalties of kernels as they are once the batch norm after them is folded into them."""

import pytest
import torch
from test_optim_layer_penalty import SQUARED, folded, make_norm
from tolerances import same_bits
from torch import nn

from loco_ext import optim, sparsity


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("make_penalty", [sparsity.RingPenalty, sparsity.KernelPenalty])
def test_folded_penalties_are_those_of_the_folded_kernels(make_penalty, norm, power):
    """In x = weight * s the same problem has the metric d / s^2, kernel by kernel."""
    weight = torch.randn(6, 2, 3, 3, dtype=torch.float64) * torch.logspace(-1, 1, 6).view(-1, 1, 1, 1)
    batch_norm = make_norm(6).double()
    s = (batch_norm.weight.detach() / (batch_norm.running_var + batch_norm.eps).sqrt()).view(-1, 1, 1, 1)
    inner = make_penalty(0.2, norm=norm, power=power)
    penalty = sparsity.FoldedPenalty(inner, batch_norm)
    torch.testing.assert_close(penalty.value(weight), inner.value(weight * s))
    for metric in (None, torch.rand_like(weight) + 0.5):
        d = torch.ones_like(weight) if metric is None else metric
        expected = inner.prox(weight * s, 0.7, d / s**2) / s
        torch.testing.assert_close(penalty.prox(weight, 0.7, metric), expected)
    found = penalty.threshold(weight, 0.9)
    assert 0 < (found == 0).sum() < found.numel()
    assert torch.equal(found == 0, inner.threshold(weight * s, 0.9) == 0)
    # A kernel whose scale is 0 has no threshold, whose variance is no number neither; without a scale it is 1.
    batch_norm.weight.data[1], batch_norm.running_var[2] = 0, torch.nan
    shrunk = penalty.prox(weight, 0.7)
    assert same_bits(shrunk[1:3], weight[1:3])
    plain = nn.BatchNorm2d(6, affine=False, eps=0.0).double()
    torch.testing.assert_close(sparsity.FoldedPenalty(inner, plain).prox(weight, 0.7), inner.prox(weight, 0.7))


def test_the_norm_gets_no_gradient_from_the_penalty():
    conv, norm = nn.Conv2d(2, 4, 3), make_norm(4)
    sparsity.FoldedPenalty(sparsity.RingPenalty(1.0), norm).value(conv.weight).backward()
    assert conv.weight.grad.abs().sum() > 0
    assert norm.weight.grad is None


def test_scale_invariance_buys_nothing():
    """What halves the convolution's kernels, and so the norm's deviations, leaves the penalty as it is."""
    conv, norm = nn.Conv2d(2, 4, 3, bias=False).double(), nn.BatchNorm2d(4, eps=1e-14, momentum=1.0).double()
    images = torch.randn(16, 2, 9, 9, dtype=torch.float64)
    penalty = sparsity.FoldedPenalty(sparsity.RingPenalty(1.0), norm)
    values = []
    for _ in range(2):
        norm(conv(images))
        values.append(penalty.value(conv.weight).item())
        conv.weight.data /= 2
    assert values[1] == pytest.approx(values[0])


@pytest.mark.parametrize(
    ("make_bad", "error", "message"),
    [
        (lambda: sparsity.FoldedPenalty(1.0, nn.BatchNorm2d(3)), TypeError, "penalty: expected a RingPenalty or"),
        (lambda: sparsity.FoldedPenalty(SQUARED, nn.LayerNorm(3)), TypeError, "batch_norm: .*got LayerNorm"),
        (
            lambda: sparsity.FoldedPenalty(SQUARED, nn.BatchNorm2d(3, track_running_stats=False)),
            ValueError,
            "batch_norm: expected one with track_running_stats=True",
        ),
        (
            lambda: optim.SGD([nn.Parameter(torch.ones(2, 1, 3, 3))], penalty=folded(SQUARED)[:1]),
            ValueError,
            "penalty of parameter 0: weight: expected 6 kernels as batch_norm, got 2",
        ),
    ],
)
def test_what_cannot_be_folded_is_a_typed_error(make_bad, error, message):
    with pytest.raises(error, match=message):
        make_bad()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.other_norm = nn.BatchNorm2d(4)
        self.third = nn.Conv2d(4, 4, 1)
        self.plain_norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.up = nn.ConvTranspose2d(4, 4, 3)
        self.last_norm = nn.BatchNorm2d(4)
        self.unused = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        y = self.second(x)  # also goes past its norm
        z = self.plain_norm(self.third(self.other_norm(y) + y))
        return self.last_norm(self.up(z))


def test_convolutions_are_folded_where_only_a_norm_takes_their_output():
    model, penalty = Block(), sparsity.RingPenalty(1e-3)
    found = sparsity.folded_penalties(model, penalty)
    assert found == {"first": sparsity.FoldedPenalty(penalty, model.norm), "second": penalty, "third": penalty}
    groups = optim.parameter_groups(model, 0.1, penalty=found)
    assert groups[0]["penalty"] == [found["first"], penalty, penalty, None, None]
    optim.SGD(groups, lr=0.1)
    model.second.weight = model.first.weight
    assert sparsity.folded_penalties(model, penalty)["first"] is penalty


def test_a_model_that_cannot_be_traced_is_an_error():
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"model: expected one that torch\.fx can trace, got TraceError"):
        sparsity.folded_penalties(Decides(), SQUARED)
