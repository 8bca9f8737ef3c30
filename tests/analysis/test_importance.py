"""Importance of pixels against loops over images and steps, Captum, and Lemma 1 where its assumptions hold."""

import itertools
import math

import pytest
import torch
from torch import nn

from loco_ext.analysis import ablation_curve, gradient_importance, integrated_gradients, permutation_importance
from tests.analysis.classifiers import CLOSE, F64, UNITS, images, network
from tests.tolerances import STANDARD_ERRORS


def test_captum_finds_the_same_contributions():
    captum = pytest.importorskip("captum.attr")
    model, (x, targets), baseline = network(nn.ReLU()), images(), images(1, seed=1)[0]
    ours = integrated_gradients(model, x, targets, baseline, steps=9)
    reference = captum.IntegratedGradients(model.eval())
    theirs = reference.attribute(x, baseline, target=targets, n_steps=9, method="riemann_middle")
    torch.testing.assert_close(ours.float(), theirs.float())  # its steps have the precision of float32


def test_integrated_gradients_take_baselines_in_turn():
    model, (x, targets), baselines = network(), images(), images(3, seed=1)[0]
    found = integrated_gradients(model, x, targets, baselines, steps=6)
    model.eval()
    expected = torch.zeros_like(x)
    for k in range(6):
        b = baselines[k % 3]
        point = (b + (k + 0.5) / 6 * (x - b)).requires_grad_()
        chosen = model(point)[torch.arange(len(x)), targets].sum()
        expected += torch.autograd.grad(chosen, point)[0] * (x - b) / 6
    torch.testing.assert_close(found, expected, **CLOSE)


def test_steps_of_integrated_gradients_add_up_in_half_precision():
    (x, targets), model = images(), nn.Sequential(nn.Flatten(), nn.Linear(images()[0][0].numel(), 3))
    expected = integrated_gradients(model.double(), x, targets, torch.zeros_like(x[:1]))  # the model is linear
    found = integrated_gradients(model.bfloat16(), x.bfloat16(), targets, torch.zeros_like(x[:1]).bfloat16(), 600)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < torch.finfo(torch.bfloat16).eps * expected.norm()


def test_steps_of_integrated_gradients_may_be_beyond_the_range_of_float16():
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(2, 1, bias=False)), torch.full((1, 1, 1, 2), 300.0).half()
    with torch.no_grad():
        model[1].weight.fill_(400.0)
    baselines = torch.stack([torch.zeros_like(x[0]), 2 * x[0]])  # whose steps cancel
    assert not integrated_gradients(model.half(), x, torch.tensor([0]), baselines, 2).any()


def test_sums_of_relevance_may_be_beyond_the_range_of_float16():
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    relevance = torch.tensor([[[[4e4, 5e4]], [[4e4, 5e4]]]])
    found = [ablation_curve(model, x, torch.tensor([0]), each, (1,)) for each in (relevance.half(), relevance)]
    assert torch.equal(*found)


def test_the_most_relevant_pixels_are_replaced_by_their_channels_mean():
    model, (x, targets) = network(), images()
    relevance = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    counts = (0, 1, 5, 28)
    found = ablation_curve(model, x, targets, relevance, counts)
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
    assert torch.equal(found[0], torch.ones(len(x), dtype=F64))
    assert ablation_curve(model, x, targets, x, ()).shape == (0, len(x))


def test_probabilities_that_underflow_have_ratios():
    """The logit of the target is 300 below the other one, and 2 more once its pixel is replaced."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]]))
        model[1].bias.copy_(torch.tensor([-300.0, 2.0]))
    x, targets = torch.tensor([1.0, 0, 0, -1]).view(1, 1, 2, 2), torch.tensor([0])
    found = ablation_curve(model, x, targets, x, (0, 1))
    torch.testing.assert_close(found, torch.tensor([[1.0], [math.exp(-2)]]))


def resampled(model, x, targets, unit):
    """Return eq. 10 with the mean over all images in the place of draws."""
    channel, row, column = unit
    total = 0.0
    for i, target in enumerate(targets):
        changed = x[i].repeat(len(x), 1, 1, 1)
        changed[:, channel, row, column] = x[:, channel, row, column]
        total += (model(changed)[:, target].mean() - model(x[i][None])[0, target]).square().item()
    return total / len(x)


def test_resampling_has_the_exact_importance_as_its_mean():
    model, (x, targets) = network().eval(), images()
    model[0].weight.data *= 3  # far from linear
    seeds = 50
    runs = [permutation_importance(model, x, targets, UNITS, draws=2, seed=seed) for seed in range(seeds)]
    found = torch.stack(runs)
    expected = torch.tensor([resampled(model, x, targets, unit) for unit in UNITS.tolist()], dtype=F64)
    error = (found.mean(0) - expected).abs() / (found.std(0) / seeds**0.5)
    assert (error < STANDARD_ERRORS).all()
    assert torch.equal(runs[5], permutation_importance(model, x, targets, UNITS, draws=2, seed=5))
    more = permutation_importance(model, x, targets, UNITS, draws=1000)
    assert ((more - expected).abs() < 0.1 * expected).all()


def test_the_lemma_is_exact_for_a_linear_network():
    """There the exact importance is ``(h'_i)^2 V[x_i]``, if ``h`` is one logit."""
    model, (x, _) = network(nn.Identity()), images()
    targets = torch.ones(len(x), dtype=torch.int64)
    found = gradient_importance(model, x, targets)
    model.eval()
    expected = [resampled(model, x, targets, unit) for unit in itertools.product(range(2), range(4), range(7))]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=F64), **CLOSE)


X, TARGETS = images(2)
FUNCTIONS = {
    permutation_importance: {"units": UNITS},
    integrated_gradients: {"baselines": X[:1]},
    ablation_curve: {"relevance": X, "counts": (1,)},
}
OF_ALL, OF_PERMUTATION, OF_GRADIENTS, OF_ABLATION = None, *FUNCTIONS
BAD = [
    (OF_ALL, {"model": 3}, TypeError),
    (OF_ALL, {"x": torch.zeros(2, 2, 4, 7, dtype=torch.int64)}, TypeError),
    (OF_ALL, {"x": torch.zeros(2, 56)}, ValueError),
    (OF_ALL, {"targets": torch.zeros(2)}, TypeError),
    (OF_ALL, {"targets": torch.zeros(3, dtype=torch.int64)}, ValueError),
    (OF_ALL, {"targets": torch.tensor([0, 3])}, ValueError),
    (OF_ALL, {"model": nn.Flatten(0)}, ValueError),
    (OF_GRADIENTS, {"baselines": torch.zeros(1, 2, 4, 6, dtype=F64)}, ValueError),
    (OF_GRADIENTS, {"steps": 0}, ValueError),
    (OF_GRADIENTS, {"steps": 1, "baselines": torch.zeros(2, 2, 4, 7, dtype=F64)}, ValueError),
    (OF_ABLATION, {"relevance": torch.zeros(2, 4, 7)}, ValueError),
    (OF_ABLATION, {"counts": (29,)}, ValueError),
    (OF_ABLATION, {"counts": (1.5,)}, ValueError),
    (OF_PERMUTATION, {"units": torch.zeros(1, 3)}, TypeError),
    (OF_PERMUTATION, {"units": torch.tensor([[0, 0]])}, ValueError),
    (OF_PERMUTATION, {"units": torch.tensor([[0, 0, 7]])}, ValueError),
    (OF_PERMUTATION, {"units": torch.tensor([[0, -1, 0]])}, ValueError),
    (OF_PERMUTATION, {"draws": 1}, ValueError),
    (OF_PERMUTATION, {"seed": -1}, ValueError),
]


@pytest.mark.parametrize(("function", "bad", "error"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(function, bad, error):
    for each in FUNCTIONS if function is OF_ALL else [function]:
        arguments = {"model": network(), "x": X, "targets": TARGETS} | FUNCTIONS[each] | bad
        with pytest.raises(error, match=f"^{next(iter(bad))}: expected .*got"):
            each(**arguments)
