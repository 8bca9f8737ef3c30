"""``loco-ext frontier`` and training with a penalty: options, written files, and resuming."""

import json
import math
from dataclasses import asdict, replace

import matplotlib.image
import pytest
import torch
from torch import nn

from loco_ext import sparsity
from loco_ext.checkpoints import load_checkpoint, save_checkpoint
from loco_ext.cli import main
from loco_ext.experiments import frontier
from loco_ext.experiments.models import MODELS, digest
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import make_model, make_optimizer, penalty_term
from tests.covering import slow
from tests.experiments.runs import digits, quick

BASE = ["--model", "plain8", "--dataset", "digits", "--samples", "100", "--seed", "3", "--batch-size", "50"]
OF_POINTS = ["--width", "0.25", "--epochs", "1"]
FIRST = ["--dense-epochs", "3", "--dense-lr", "0.05"]
TINY = [*BASE, *OF_POINTS, *FIRST]


def convolutions(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_the_base_architectures_have_the_macs_of_table_2():
    """The channels are compared with the table's by the reproduction."""
    for name, blocks in (("plain20", 3), ("resnet8", 1)):
        by_hand, channels = 0, 3
        for width in [16] * (2 * blocks + 1) + [32] * 2 * blocks + [64] * 2 * blocks:
            by_hand += (32 * 16 // width) ** 2 * width * channels * 9
            channels = width
        shortcuts = 16 * 16 * 16 * 32 + 8 * 8 * 32 * 64 if name.startswith("resnet") else 0
        _, report = sparsity.compact(MODELS[name].make(3, 10, 32), torch.zeros(1, 3, 32, 32), cost="macs")
        assert report.macs_before == by_hand + shortcuts + 64 * 10


def test_widths_multiply_all_channels():
    model = make_model(quick(model="resnet8", width=0.3), digits())
    widths = [conv.out_channels for conv in convolutions(model) if conv.kernel_size == (3, 3)]
    assert widths == [5] * 3 + [10] * 2 + [19] * 2
    assert [conv.out_channels for conv in convolutions(MODELS["plain8"].make(1, 10, 8, width=0.01))] == [1] * 7


def test_the_optimizer_has_the_settings_penalty_and_the_loss_the_subgradients():
    options = {"penalty": "rings", "strength": 0.3, "weighting": "scaled", "kind": "full"}
    model, samples = make_model(quick(), digits()), digits()
    layers = convolutions(model)
    expected = sparsity.RingPenalty(0.3, "full", "scaled")
    assert make_optimizer(quick(**options, folded=False), model, samples).param_groups[0]["penalty"] == [expected] * 3
    assert make_optimizer(quick(**options, solver="subgradient"), model, samples).param_groups[0]["penalty"] is None
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    folded = [sparsity.FoldedPenalty(expected, norm) for norm in norms]
    assert make_optimizer(quick(**options), model, samples).param_groups[0]["penalty"] == folded
    complexity, image = options | {"penalty": "complexity"}, torch.zeros(1, 1, 8, 8)
    by_layer = sparsity.complexity_penalties(model, (image,), 0.3, kind="full", weighting="scaled").values()
    entries = make_optimizer(quick(**complexity), model, samples).param_groups[0]["penalty"]
    assert [(entry.layer, entry.rings) for entry in entries] == [(each.layer, each.rings) for each in by_layer]
    for chosen, penalties in ((options, folded), (complexity, by_layer)):
        term = penalty_term(quick(**chosen, solver="subgradient"), model, samples)
        values = [penalty.value(layer.weight) for penalty, layer in zip(penalties, layers, strict=True)]
        assert term().item() == pytest.approx(sum(values).item())
    chosen = quick(penalty="kernels", strength=0.2, weighting="normalized", group_norm="linf", power=2)
    assert chosen.make_penalty() == sparsity.KernelPenalty(0.2, "normalized", "linf", 2)
    rings = replace(chosen, penalty="rings").make_penalty()
    assert rings == sparsity.RingPenalty(0.2, "half", "normalized", "linf", 2)
    for penalty, which in ((None, "without a penalty"), ("complexity", "with the penalty complexity")):
        with pytest.raises(SettingsError, match=f"group_norm, power: expected l2, 1 {which}, got l2, 2"):
            quick(penalty=penalty, power=2)
    model.forward = lambda x: nn.Sequential.forward(model, x) if x.sum() > 0 else x
    with pytest.raises(SettingsError, match=r"^folded: expected False for this model; .*torch.fx"):
        make_optimizer(quick(**options), model, samples)


class OtherOrder(nn.Module):
    """A norm behind a ReLU, one ahead of a convolution, and one right behind its convolution, made in another order."""

    def __init__(self):
        super().__init__()
        self.norm1, self.first, self.norm2 = nn.BatchNorm2d(4), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second, self.norm3, self.third = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.norm1(self.first(x).relu())
        return self.norm3(self.third(self.second(self.norm2(x).relu())))


@pytest.mark.parametrize(("make", "left"), [(OtherOrder, 2), (lambda: make_model(quick(model="resnet8"), digits()), 0)])
def test_norms_that_read_a_convolution_alone_are_folded_and_scale_its_filters(make, left):
    model, x = make(), torch.randn(20, 1, 8, 8)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    for _ in range(5):
        model(x)
    expected, norms = model.eval()(x), frontier.filter_norms(model)
    frontier.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    folded = frontier.filter_norms(model)
    assert folded["weight_norm"] == pytest.approx(norms["effective_norm"])
    assert norms["weight_norm"] != pytest.approx(norms["effective_norm"])
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == left
    model.forward = lambda x: x if x.sum() > 0 else x + 1  # which torch.fx cannot trace
    norms = frontier.filter_norms(model)
    assert norms["weight_norm"] == folded["weight_norm"]
    assert math.isnan(norms["effective_norm"])


POINT = {"strength", "tau", "metrics", "refitted", "macs", "latency_before", "latency_after", "kernels"}
PATH = {"width", "penalty", "path", "macs", "latency", "metrics", "trials", "points"}


SUBGRADIENT = ["--method", "subgradient", "--penalty", "kernels", "--strengths", "0.1,0.01", "--taus", "0,0.2"]


@pytest.mark.parametrize(
    ("options", "points"),
    [
        (["--points", "2", "--span", "0.5"], [(None, 0.0)] * 2),
        slow((SUBGRADIENT, [(0.1, 0.0), (0.1, 0.2), (0.01, 0.0), (0.01, 0.2)])),
        slow((["--method", "width", "--widths", "0.25,0.5", "--lr", "0.01", "--latency"], [(0.0, 0.0)] * 2)),
        slow((["--strengths", "0.01,1000", "--batch-norm", "live", "--path", "up"], [(0.01, 0.0), (1000.0, 0.0)])),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_frontier_leaves_its_record_and_figures(tmp_path, capsys, request, options, points):
    out, width_only = tmp_path / "frontier", "width" in options
    line = ["frontier", *([*BASE, *FIRST] if width_only else TINY), "--out", str(out), *options]
    assert main([*line, "--json"]) == 0
    record = json.loads((out / "frontier.json").read_text(), parse_constant=pytest.fail)
    assert json.loads(capsys.readouterr().out) == record
    assert record["settings"] == json.loads((out / "settings.json").read_text())["settings"]
    assert (record["training_samples"], record["test_samples"]) == (100, 997)
    assert [path["width"] for path in record["paths"]] == ([0.25, 0.5] if width_only else [0.25])
    found = [point for path in record["paths"] for point in path["points"]]
    assert all(path.keys() == PATH for path in record["paths"])
    for point, (strength, tau) in zip(found, points, strict=True):
        assert point.keys() == POINT
        assert (point["strength"] if strength is not None else None, point["tau"]) == (strength, tau)
        assert {point[name] is not None for name in ("latency_before", "latency_after")} == {"--latency" in options}
        assert 0 <= point["metrics"]["accuracy"] <= 1
        for counts, width in zip(point["kernels"].values(), [4, 4, 4, 8, 8, 16, 16], strict=True):
            assert width_only or sum(counts) == width
    if "--points" in options:  # the first strength, which leaves nothing, is found by trial
        counts = [sum(sum(sizes[1:]) for sizes in point["kernels"].values()) for point in found]
        assert counts[0] == 0 < counts[1]
        assert found[0]["macs"] < record["paths"][0]["macs"] / 20
    assert {path.name for path in out.glob("*.png")} == {
        "errors.png",
        *(["sizes.png", "widths.png"] * (not width_only)),
    }
    for path in out.glob("*.png"):
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 300
        assert picture.std() > 0.05
    request.getfixturevalue("undrawn")
    # A finished run is not overwritten or trained again, and its table is the same.
    assert main(line) == 2
    assert "holds an experiment already" in capsys.readouterr().err
    assert main([*line, "--resume"]) == 0
    table = capsys.readouterr().out
    assert all(f"{point['macs']:,}" in table for point in found)
    assert json.loads((out / "frontier.json").read_text()) == record


@pytest.mark.usefixtures("undrawn")
def test_weights_of_a_point_that_are_not_finite_are_named(tmp_path, capsys):
    short = ["--dense-epochs", "0", "--refit-epochs", "0"]
    line = ["frontier", *BASE, *OF_POINTS, *short, "--strengths", "0.1", "--out", str(tmp_path)]
    assert main(line) == 0
    point = tmp_path / "path-0.25" / "point-00.pt"
    save_checkpoint(point, {name: value * math.nan for name, value in load_checkpoint(point).items()})
    assert main([*line, "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"loco-ext: {point} does not hold this model's weights: NaN or infinity in ")


def test_a_frontier_whose_training_diverges_is_an_error(tmp_path, capsys):
    options = ["frontier", *BASE, *OF_POINTS, "--strengths", "0.1", "--dense-epochs"]
    for name, rates in (("dense", ["1", "--dense-lr", "1e30"]), ("point", ["0", "--lr", "1e30"])):
        assert main([*options, *rates, "--out", str(tmp_path / name)]) == 1
        assert "the run has diverged, the loss of epoch 1 is not finite" in capsys.readouterr().err
        assert not list(tmp_path.rglob("point-00.pt"))


@pytest.mark.usefixtures("undrawn")
def test_points_start_from_the_initial_weights_without_a_dense_training(tmp_path):
    """The draft trains from scratch under its penalty."""
    options = ["--penalty", "kernels", "--method", "subgradient", "--batch-norm", "live", "--dense-epochs", "0"]
    options += ["--refit-epochs", "0", "--strengths", "0.1", "--taus", "0.001", "--power", "2"]
    assert main(["frontier", *BASE, *OF_POINTS, *options, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("dense-*"))
    (folder,) = (tmp_path / "runs").iterdir()
    settings = json.loads((folder / "settings.json").read_text())["settings"]
    initial = make_model(quick(model="plain8", width=0.25, seed=3), digits())
    assert folder.name.startswith(digest(initial))
    assert (settings["power"], settings["strength"], settings["solver"]) == (2, 0.1, "subgradient")


def test_settings_say_what_is_trained():
    training = quick(penalty="rings", epochs=3, learning_rate=0.02)
    whole = frontier.FrontierSettings(training, method="subgradient", strengths=(0.3,), dense_epochs=7)
    of_dense = {"epochs": 7, "learning_rate": 0.1, "penalty": None, "strength": 0.0}
    assert asdict(whole.dense(1.0)) == asdict(training) | of_dense
    of_point = {"strength": 0.3, "solver": "subgradient", "folded": True}
    assert asdict(whole.point(1.0, 0.3)) == asdict(training) | of_point
    assert not frontier.FrontierSettings(training, batch_norm="live").point(1.0, 0.3).penalises_folded
