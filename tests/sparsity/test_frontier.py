"""``sparsity.frontier``: its strengths, its paths, the counts in its points, and resuming."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import optim, sparsity
from loco_ext.checkpoints import load_checkpoint, save_checkpoint
from loco_ext.sparsity import KernelPenalty, RingPenalty
from tests.covering import covering

PENALTIES = [
    RingPenalty(1.0),
    RingPenalty(1.0, "full", "normalized"),
    RingPenalty(1.0, "half", "scaled", "linf"),
    RingPenalty(1.0, first="bottom_right"),
    KernelPenalty(1.0),
    KernelPenalty(1.0, "scaled", "linf"),
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("penalty", "shape"),
    covering(PENALTIES, [(4, 3, 3, 3), (1, 2, 5, 3), (3, 1, 1, 1), (2, 2, 7)], strength=1),
    ids=str,
)
def test_the_dual_norm_is_the_largest_ratio_of_product_and_penalty(penalty, shape):
    """No x has a larger ratio ``<gradient, x> / penalty(x)``, and the prox finds an x that comes close to it."""
    gradient = torch.randn(shape, dtype=torch.float64)
    found = sparsity.dual_norm(penalty, gradient)

    def ratio(x):
        return ((gradient * x).sum() / penalty.value(x)).item()

    tried = [torch.randn_like(gradient) for _ in range(20)]
    tried += [penalty.prox(gradient, step * found) for step in (0.3, 0.6, 0.9, 0.99)]
    assert max(map(ratio, tried)) <= found * (1 + 1e-9)
    assert ratio(penalty.prox(gradient, (1 - 1e-6) * found)) == pytest.approx(found, rel=1e-3)
    assert not penalty.prox(gradient, found * (1 + 1e-9)).any()


def test_the_dual_norm_of_nothing_is_zero_and_of_squares_an_error():
    assert sparsity.dual_norm(RingPenalty(1.0), torch.zeros(2, 2, 3, 3)) == 0
    assert sparsity.dual_norm(RingPenalty(1.0), torch.zeros(0, 2, 3, 3)) == 0
    with pytest.raises(ValueError, match=r"penalty: expected power=1.*power=2"):
        sparsity.dual_norm(RingPenalty(1.0, power=2), torch.ones(2, 2, 3, 3))
    with pytest.raises(ValueError, match="gradient: expected finite"):
        sparsity.dual_norm(RingPenalty(1.0), torch.full((2, 2, 3, 3), math.nan))


class Regression:
    """Least squares with one convolution, which is convex, so all warm starts lead to the same minimum."""

    def __init__(self, steps=60):
        self.steps = steps
        self.model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False))
        self.x = torch.randn(40, 2, 5, 5)
        target = torch.randn(3, 2, 3, 3) * torch.tensor([1.0, 0.3, 0.05])[:, None, None, None]
        self.y = nn.functional.conv2d(self.x, target, padding=1)

    def loss(self, model):
        return (model(self.x) - self.y).square().mean()

    def fit(self, model, penalty):
        optimizer = optim.SGD(optim.parameter_groups(model, 0.0, penalty=penalty), lr=0.3, momentum=0.5)
        for _ in range(self.steps):
            optimizer.zero_grad()
            self.loss(model).backward()
            optimizer.step()

    def evaluate(self, model):
        return {"loss": self.loss(model).item()}

    def frontier(self, penalty, **options):
        return sparsity.frontier(self.model, self.fit, self.evaluate, penalty, example_inputs=self.x, **options)


def live(point):
    return sum(sum(counts[1:]) for counts in point.kernels.values())


@pytest.mark.parametrize("penalty", [RingPenalty(1.0), KernelPenalty(1.0, "normalized")], ids=repr)
def test_the_largest_strength_leaves_nothing_and_a_little_less_something(penalty):
    task = Regression()
    (alpha_max,) = sparsity.max_strength(task.model, task.loss, penalty).values()
    # At zero, the gradient is only that of the squares, which is computed here.
    weight = torch.zeros(3, 2, 3, 3, requires_grad=True)
    (nn.functional.conv2d(task.x, weight, padding=1) - task.y).square().mean().backward()
    assert alpha_max == pytest.approx(sparsity.dual_norm(penalty, weight.grad), rel=1e-6)
    path = task.frontier(penalty, strengths=[0.9 * alpha_max, 1.1 * alpha_max])
    assert [live(point) for point in path.points] == [0, 1]
    assert path.points[0].macs == 0
    assert path.points[0].metrics["loss"] == pytest.approx(task.y.square().mean().item())


def test_the_largest_strength_is_found_of_frozen_layers_where_gradients_are_off_and_is_0_of_unused_ones():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 1, 1)), torch.randn(2, 1, 6, 6)

    def found():
        return sparsity.max_strength(model, lambda model: model[:2](x).square().sum(), RingPenalty(1.0))

    expected = found()
    assert (expected["0"] > 0, expected["1"] > 0, expected["2"]) == (True, True, 0.0)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert found() == expected
    model.requires_grad_(False)
    model.insert(0, nn.Conv2d(1, 1, 1))
    model[0].requires_grad_(False)
    frozen = sparsity.max_strength(model, lambda model: model[1:3](x).square().sum(), RingPenalty(1.0))
    assert frozen == {"0": 0.0, "1": expected["0"], "2": expected["1"], "3": 0.0}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_strengths_run_from_the_largest_down_on_a_logarithmic_scale():
    task = Regression()
    path = task.frontier(RingPenalty(1.0), loss=task.loss, points=5, span=1e-2)
    (alpha_max,) = sparsity.max_strength(task.model, task.loss, RingPenalty(1.0)).values()
    assert path.trials[0][0] == alpha_max
    (larger, smaller) = sorted((strength for strength, _ in path.trials[-2:]), reverse=True)
    assert larger == 2 * smaller
    assert dict(path.trials)[larger]
    assert not dict(path.trials)[smaller]
    # The gradient is exact and the problem convex, so the search ends where it begins.
    assert alpha_max / 2 <= larger <= 2 * alpha_max
    strengths = [point.strength for point in path.points]
    assert strengths[0] == larger
    assert [a / b for a, b in itertools.pairwise(strengths)] == pytest.approx([10**0.5] * 4)
    assert live(path.points[0]) == 0
    losses = [point.metrics["loss"] for point in path.points]
    assert losses == sorted(losses, reverse=True)


def test_the_search_doubles_where_the_gradient_asks_for_too_little():
    task = Regression(steps=30)
    wanted = sparsity.max_strength(task.model, task.loss, RingPenalty(1.0))["0"]
    path = task.frontier(RingPenalty(1.0), loss=lambda model: task.loss(model) / 20, points=1)
    tried = [strength / wanted for strength, _ in path.trials]
    assert tried == pytest.approx([0.05 * 2**i for i in range(len(tried))])
    assert [empty for _, empty in path.trials] == [False] * (len(tried) - 1) + [True]


def test_all_warm_starts_of_a_convex_problem_lead_to_one_path():
    task = Regression()
    alpha_max = sparsity.max_strength(task.model, task.loss, RingPenalty(1.0))["0"]
    strengths = [alpha_max * factor for factor in (1.1, 0.5, 0.1)]
    paths = {path: task.frontier(RingPenalty(1.0), strengths=strengths, path=path) for path in ("dense", "up", "down")}
    points = {name: sorted(path.points, key=lambda point: point.strength) for name, path in paths.items()}
    for name in ("up", "down"):
        for expected, found in zip(points["dense"], points[name], strict=True):
            assert found.kernels == expected.kernels
            assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-3)
    assert [live(point) for point in points["down"]] != [0] * 3
    assert [point.strength for point in paths["down"].points] == sorted(strengths, reverse=True)
    assert [point.strength for point in paths["up"].points] == sorted(strengths)


def test_two_convolutions_that_are_zero_stay_so_on_the_way_down():
    """Neither has a gradient while the other is zero, as the documentation warns."""
    x = torch.randn(16, 1, 4, 4)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.Conv2d(3, 1, 3, padding=1, bias=False))

    def fit(model, penalty):
        optimizer = optim.SGD(optim.parameter_groups(model, 0.0, penalty=penalty), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()

    options = {"example_inputs": x, "strengths": [10.0, 1e-4]}
    for direction, alive in (("down", False), ("dense", True), ("up", True)):
        points = sparsity.frontier(model, fit, lambda model: {}, RingPenalty(1.0), **options, path=direction).points
        (of_large, of_small) = sorted(points, key=lambda point: -point.strength)
        assert live(of_large) == 0
        assert (live(of_small) > 0) == alive


def two_layers(inner, outer):
    """Return a fit that leaves kernels of these sizes, by half rings, in two convolutions without a bias."""

    def fit(model, penalty):
        with torch.no_grad():
            for conv, sizes in ((model[0], inner), (model[2], outer)):
                conv.weight.fill_(1.0)
                for kernel, size in zip(conv.weight, sizes, strict=True):
                    # Size 3 shrinks by the top-left half ring first, then by the bottom-right one, then by the centre.
                    kernel[:, : int(size < 3)] = kernel[:, :, : int(size < 3)] = 0
                    kernel[:, 3 - int(size < 2) :] = kernel[:, :, 3 - int(size < 2) :] = 0
                    kernel.mul_(size > 0)

    return fit


@pytest.mark.parametrize(
    ("inner", "outer"),
    [((3, 3, 3, 3), (2, 0)), ((3, 2, 1, 0), (3, 3)), ((3, 2, 1, 0), (0, 1)), ((0, 0, 1, 0), (2, 0))],
    ids=str,
)
def test_macs_are_those_of_equation_10(inner, outer):
    """The count by hand is the product of output pixels, live input channels and summed squares of sizes."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2, padding=1, bias=False)
    )
    options = {"example_inputs": torch.rand(1, 2, 6, 8) + 0.1, "strengths": [1.0]}
    path = sparsity.frontier(model, two_layers(inner, outer), lambda model: {}, RingPenalty(1.0), **options)
    alive = sum(size > 0 for size in inner)
    expected = 6 * 8 * 2 * sum(size**2 for size in inner) + 3 * 4 * alive * sum(size**2 for size in outer)
    assert path.macs == 6 * 8 * 2 * 4 * 9 + 3 * 4 * 4 * 2 * 9
    (point,) = path.points
    assert point.macs == expected
    assert point.kernels == {
        name: [sizes.count(size) for size in range(4)] for name, sizes in (("0", inner), ("2", outer))
    }


def test_taus_threshold_a_copy_of_what_was_trained():
    """Groups of at most tau are zero in a point; the next training starts from the weights as they were."""
    starts = []

    def fit(model, penalty):
        starts.append(model[0].weight.detach().clone())
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].weight[0, 0, 1, 1] = 1.0
            model[0].weight[0, 0, 0, 0] = 0.01 * penalty.strength
            model[0].weight[1, 0, 1, 1] = 0.02

    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    options = {"example_inputs": torch.rand(1, 1, 4, 4), "path": "up", "taus": [0.0, 0.015, 0.05]}
    evaluate = lambda model: {"sum": model[0].weight.sum().item()}  # noqa: E731
    path = sparsity.frontier(model, fit, evaluate, RingPenalty(1.0), **options, strengths=[1.0, 2.0])
    assert [(p.strength, p.tau) for p in path.points] == list(itertools.product((1.0, 2.0), (0.0, 0.015, 0.05)))
    sums = [p.metrics["sum"] for p in path.points]
    assert sums == pytest.approx([1.03, 1.02, 1.0, 1.04, 1.04, 1.0])
    assert starts[1][0, 0, 0, 0] == pytest.approx(0.01)
    assert [p.kernels["0"] for p in path.points[:3]] == [[0, 1, 0, 1], [0, 2, 0, 0], [1, 1, 0, 0]]


def test_taus_of_a_folded_penalty_are_norms_times_the_scale_of_the_norm_behind():
    def fit(model, penalty):
        with torch.no_grad():
            model[1].weight.copy_(torch.tensor([1e-6, 0.5, 1e-6, 1.0]))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    options = {"example_inputs": torch.randn(4, 1, 6, 6), "strengths": [1.0], "taus": [1e-4]}
    raw, folded = (
        sparsity.frontier(model, fit, lambda _: {}, RingPenalty(1.0), **options, folded=folded).points[0].kernels["0"]
        for folded in (False, True)
    )
    assert (raw, folded) == ([0, 0, 0, 4], [2, 0, 0, 2])


def test_a_refit_trains_the_compacted_network_and_the_path_goes_on_without_it():
    """A refit keeps the MACs, and its weights come closer to the minimum than the penalty allows."""
    task = Regression()
    seen, left = [], []

    def refit(model, to_come):
        left.append(to_come)
        seen.append([module.weight.shape for module in model.modules() if isinstance(module, nn.Conv2d)])
        task.fit(model, RingPenalty(0.0))

    options = {"strengths": [0.02, 0.05], "path": "up"}
    plain, refitted = (task.frontier(RingPenalty(1.0), **options, refit=chosen) for chosen in (None, refit))
    assert left == [1, 0]
    for before, after in zip(plain.points, refitted.points, strict=True):
        assert before.refitted is None
        assert after == replace(before, refitted=after.refitted)
        assert after.refitted["loss"] < 0.9 * before.metrics["loss"]
    # The shapes are what is left of the kernels: no weight that had become zero is trained.
    sizes = {size for counts in (refitted.points[1].kernels["0"],) for size, count in enumerate(counts) if count}
    assert {shape[-1] for shape in seen[1]} == sizes - {0}
    task.frontier(RingPenalty(1.0), **options | {"path": "dense"}, refit=refit)
    assert left == [1, 0, 0, 0]


@pytest.mark.parametrize(("path", "calls"), covering(["dense", "up", "down"], [0, 3, 5], strength=1), ids=str)
def test_a_path_that_was_killed_goes_on_to_the_same_records(tmp_path, path, calls):
    task = Regression(steps=10)
    options = {"loss": task.loss, "points": np.int64(4), "path": path, "taus": [0.0, 0.01]}
    whole = task.frontier(RingPenalty(1.0), **options, folder=tmp_path / "whole")
    left, fit = iter(range(calls)), task.fit

    def dying(model, penalty):
        fit(model, penalty)
        if next(left, None) is None:
            raise KeyboardInterrupt

    task.fit = dying
    with pytest.raises(KeyboardInterrupt):
        task.frontier(RingPenalty(1.0), **options, folder=tmp_path / "cut")
    (tmp_path / "cut" / ".point-00.json.1.part").write_text("half")
    task.fit = fit
    assert task.frontier(RingPenalty(1.0), **options, folder=tmp_path / "cut") == whole
    names = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("cut", "whole")]
    assert names[0] == names[1]
    assert task.frontier(RingPenalty(1.0), **options) == whole
    # Finished points are neither trained nor measured again.
    task.fit = task.evaluate = None
    assert task.frontier(RingPenalty(1.0), **options, folder=str(tmp_path / "cut")) == whole
    lists = {"penalty": list(whole.penalty), "trials": list(map(list, whole.trials))}
    assert json.loads(json.dumps(whole.to_dict())) == whole.to_dict() | lists


def test_a_folder_of_another_path_or_damaged_is_named(tmp_path):
    task = Regression()
    task.frontier(RingPenalty(1.0), strengths=[0.1, 0.2], folder=tmp_path)
    with pytest.raises(ValueError, match=r"folder: .* differs in penalty, taus"):
        task.frontier(KernelPenalty(1.0), strengths=[0.1, 0.2], taus=[0.1], folder=tmp_path)
    with pytest.raises(ValueError, match=r"differs in strengths"):
        task.frontier(RingPenalty(1.0), strengths=[0.1, 0.3], folder=tmp_path)
    for name, said in (("point-00-0.json", "is not a record"), ("point-01.pt", "does not hold this model's weights")):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-20])
        with pytest.raises(ValueError, match=said):
            task.frontier(RingPenalty(1.0), strengths=[0.1, 0.2], folder=tmp_path)
        (tmp_path / name).write_bytes(content)
    point = json.loads((tmp_path / "point-00-0.json").read_text())
    for content, said in (
        ([], "point-00-0.json is not a record of a path: content: expected dict, got "),
        ({}, "expected an entry 'strength', got {}"),
        (point | {"macs": "1"}, "content['macs']: expected int, got '1'"),
    ):
        (tmp_path / "point-00-0.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=re.escape(said)):
            task.frontier(RingPenalty(1.0), strengths=[0.1, 0.2], folder=tmp_path)
    (tmp_path / "point-00-0.json").write_text(json.dumps(point | {"of another version": 0}))
    path = tmp_path / "point-01.pt"
    save_checkpoint(path, {name: value * torch.inf for name, value in load_checkpoint(path).items()})
    with pytest.raises(ValueError, match=r"point-01.pt does not hold .*: NaN or infinity in '0.weight'"):
        task.frontier(RingPenalty(1.0), strengths=[0.1, 0.2], folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, TypeError, "loss: expected a function"),
        ({"strengths": []}, ValueError, "strengths: expected at least one number"),
        ({"strengths": 0.1}, TypeError, "strengths: expected a sequence of numbers, got 0.1"),
        ({"strengths": [1.0, math.nan]}, ValueError, r"strengths\[1\]: expected a finite number"),
        ({"strengths": [1.0], "taus": [-1.0]}, ValueError, r"taus\[0\]: expected a finite number"),
        ({"strengths": [1.0], "path": "sideways"}, ValueError, "path: expected one of 'dense', 'up', 'down'"),
        ({"loss": True, "points": 0}, ValueError, "points: expected at least 1, got 0"),
        ({"strengths": [1.0], "points": None}, TypeError, "points: expected an int, got None"),
        ({"loss": True, "span": 0.0}, ValueError, "span: expected more than 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, error, said, tmp_path):
    task = Regression()
    with pytest.raises(error, match=said):
        task.frontier(RingPenalty(1.0), **options, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_penalty_or_loss_for_which_no_strength_can_be_found_is_named():
    task = Regression(steps=1)
    with pytest.raises(ValueError, match="expected power=1"):
        task.frontier(replace(RingPenalty(1.0), power=2), loss=task.loss)
    with pytest.raises(ValueError, match="loss: expected one that depends on the convolutions"):
        task.frontier(RingPenalty(1.0), loss=lambda model: 0 * task.loss(model))
    task.fit = lambda model, penalty: None
    with pytest.raises(ValueError, match="fit: expected that some strength leaves nothing"):
        task.frontier(RingPenalty(1.0), loss=task.loss)
    with pytest.raises(TypeError, match=r"penalty: expected a RingPenalty or a KernelPenalty, got 0\.1"):
        task.frontier(0.1, strengths=[1.0])
    task.evaluate = lambda model: 0.5
    with pytest.raises(TypeError, match="evaluate: expected a function that returns a dict, got float"):
        task.frontier(RingPenalty(1.0), strengths=[1.0])
    with pytest.raises(ValueError, match="model: expected at least one convolution"):
        sparsity.max_strength(nn.Sequential(nn.Linear(2, 2)), task.loss, RingPenalty(1.0))
