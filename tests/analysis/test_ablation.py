"""Integrated Gradients against Captum's and a closed form; ablation of pixels against a loop over them."""

import math

import pytest
import torch
from torch import nn

from loco_ext.analysis import ablation_curve, integrated_gradients
from tests.tolerances import ULPS

F64 = torch.float64
CLOSE = {"rtol": 100 * ULPS[F64] * torch.finfo(F64).eps, "atol": 1e-14}


def network(kind="tanh"):
    torch.manual_seed(3)
    bend = nn.Tanh() if kind == "tanh" else nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4))
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), bend, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)).to(F64)


def images(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, 4, 7, generator=generator, dtype=F64)
    return x, torch.randint(3, (count,), generator=generator)


@pytest.mark.parametrize("kind", ["tanh", "batch norm"])
def test_captum_finds_the_same_contributions(kind):
    captum = pytest.importorskip("captum.attr")
    model, (x, targets), baseline = network(kind), images(), images(1, seed=1)[0]
    ours = integrated_gradients(model, x, targets, baseline, steps=9)
    reference = captum.IntegratedGradients(model.eval())
    theirs = reference.attribute(x, baseline, target=targets, n_steps=9, method="riemann_middle")
    torch.testing.assert_close(ours.float(), theirs.float())  # its steps have the precision of float32


def test_contributions_add_up_to_the_logits_difference_and_baselines_take_turns():
    model, (x, targets), baselines = network(), images(), images(3, seed=1)[0]
    ours = integrated_gradients(model, x, targets, baselines[:1], steps=1000)
    rows = torch.arange(len(x))
    difference = model(x)[rows, targets] - model(baselines[:1])[0, targets]
    assert (ours.sum((1, 2, 3)) - difference).abs().max() < 1e-3 * difference.abs().max()
    mixed = integrated_gradients(model, x, targets, baselines, steps=6)
    expected = torch.zeros_like(x)
    for k in range(6):
        b = baselines[k % 3]
        point = (b + (k + 0.5) / 6 * (x - b)).requires_grad_()
        expected += torch.autograd.grad(model(point)[rows, targets].sum(), point)[0] * (x - b) / 6
    torch.testing.assert_close(mixed, expected, **CLOSE)


def test_the_most_relevant_pixels_are_replaced_by_their_channels_mean():
    model, (x, targets) = network("batch norm"), images()
    model[1][2].eval()  # one flag differs from its parent's
    modes = [module.training for module in model.modules()]
    statistics = model[1][0].running_mean.clone()
    relevance = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    counts = (0, 1, 5, 28)
    found = ablation_curve(model, x, targets, relevance, counts)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1][0].running_mean, statistics)
    model.eval()
    for i, (image, target) in enumerate(zip(x, targets, strict=True)):
        score = relevance[i].sum(0)
        places = sorted((-score[r, c].item(), r, c) for r in range(4) for c in range(7))
        for j, count in enumerate(counts):
            ablated = image.clone()
            for _, r, c in places[:count]:
                ablated[:, r, c] = image.mean((1, 2))
            probability = [model(some[None]).softmax(1)[0, target] for some in (ablated, image)]
            torch.testing.assert_close(found[j, i], probability[0] / probability[1], **CLOSE)
    assert torch.equal(found[0], torch.ones(5, dtype=F64))


def test_probabilities_that_underflow_have_ratios():
    """The logit of the target is 300 below the other one, and 2 more once its pixel is replaced."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]]))
        model[1].bias.copy_(torch.tensor([-300.0, 2.0]))
    x, targets = torch.tensor([1.0, 0, 0, -1]).view(1, 1, 2, 2), torch.tensor([0])
    found = ablation_curve(model, x, targets, x, (0, 1))
    torch.testing.assert_close(found, torch.tensor([[1.0], [math.exp(-2)]]))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"model": 3}, TypeError),
        ({"x": torch.zeros(2, 2, 4, 7, dtype=torch.int64)}, TypeError),
        ({"x": torch.zeros(2, 4)}, ValueError),
        ({"targets": torch.zeros(2)}, TypeError),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError),
        ({"targets": torch.tensor([0, 3])}, ValueError),
        ({"model": nn.Flatten(0)}, ValueError),
        ({"baselines": torch.zeros(1, 2, 4, 6, dtype=F64)}, ValueError),
        ({"steps": 0}, ValueError),
        ({"steps": 1, "baselines": torch.zeros(2, 2, 4, 7, dtype=F64)}, ValueError),
        ({"relevance": torch.zeros(2, 4, 7)}, ValueError),
        ({"counts": (29,)}, ValueError),
        ({"counts": (1.5,)}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_named(bad, error):
    x, targets = images(2)
    common = {"model": network(), "x": x, "targets": targets}
    ablates = {"relevance", "counts"} & bad.keys()
    function, others = (
        (ablation_curve, {"relevance": x, "counts": (1,)}) if ablates else (integrated_gradients, {"baselines": x[:1]})
    )
    with pytest.raises(error, match=f"^{next(iter(bad))}: expected .*got"):
        function(**common | others | bad)


def test_no_counts_give_no_rows():
    x, targets = images(2)
    assert ablation_curve(network(), x, targets, x, ()).shape == (0, 2)
    assert math.prod(integrated_gradients(network(), x, targets, x, steps=2).shape) == x.numel()
