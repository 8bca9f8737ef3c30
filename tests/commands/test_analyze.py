"""``loco-ext analyze``: it measures the kernels of any checkpoint, and train reads the file that it writes."""

import itertools
import json
import math
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from loco_ext import option_parsers
from loco_ext.analysis import estimate_locality, locality_statistics
from loco_ext.analysis.tables import PARTS
from loco_ext.analysis.tap_figure import tap_figure
from loco_ext.cli import main
from loco_ext.experiments.data import load
from loco_ext.experiments.models import load_weights
from loco_ext.experiments.settings import from_preset
from loco_ext.experiments.train import make_optimizer
from loco_ext.foreign_checkpoints import CheckpointError, read_checkpoint


def make_model(seed=0):
    """Return a model with kernels of several sizes, whose weights grow towards the centre: a locality to be found."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 3), nn.Flatten()
    )
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            size = layer.weight.shape[-1]
            offsets = torch.arange(size) - size // 2
            layer.weight += 0.5 / (1 + offsets.view(-1, 1) ** 2 + offsets.view(1, -1) ** 2)
    return model


def write(path, model, kind):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "wrapped":
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "torch", "wrapped"])
def test_every_kind_of_file_gives_the_models_weights(tmp_path, kind):
    path, expected = (
        tmp_path / ("model.safetensors" if kind == "safetensors" else "model.pt"),
        make_model().state_dict(),
    )
    found = read_checkpoint(write(path, make_model(), kind))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{path.name}: cannot be read as "):
        read_checkpoint(path)


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_the_models_numbers(tmp_path, capsys):
    model = make_model()
    path = write(tmp_path / "model.pt", model, "wrapped")
    assert main(["analyze", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert (tmp_path / "out" / "taps.png").read_bytes().startswith(b"\x89PNG")
    statistics = locality_statistics(model)
    cells = {(cell.kernel_size, cell.part, cell.distances): cell for cell in statistics.cells}
    found = printed["statistics"][str(path)]["cells"]
    assert len(found) == len(cells)
    for cell in found:
        expected = cells[tuple(cell["kernel_size"]), cell["part"], tuple(cell["distances"])]
        assert (cell["mean"], cell["p_greater"]) == pytest.approx((expected.mean, expected.p_greater))
    assert printed["locality"] == {name: list(factors) for name, factors in estimate_locality(model).items()}
    assert list(printed["locality"]) == ["0", "2", "4"]
    for name in ("0", "2", "4"):
        expected_taps = model[int(name)].weight.detach().double().abs().mean((0, 1))
        np.testing.assert_allclose(printed["mean_abs_weight"][name], expected_taps, rtol=1e-6)


def test_factors_are_estimated_over_all_checkpoints(tmp_path, capsys):
    models = [make_model(seed) for seed in range(3)]
    paths = [str(write(tmp_path / f"{i}.pt", model, "torch")) for i, model in enumerate(models)]
    options = ["--stat", "rms", "--eta-rule", "paper", "--c", "0.7", "--weighting", "matrices", "--json"]
    assert main(["analyze", *paths, "--out", str(tmp_path), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = estimate_locality(models, c=0.7, eta_rule="paper", stat="rms")
    assert printed["locality"] == {name: pytest.approx(factors) for name, factors in expected.items()}
    assert list(printed["statistics"]) == paths
    assert printed["options"] == {"weighting": "matrices", "eta_rule": "paper", "stat": "rms", "c": 0.7}
    statistics = locality_statistics(models[1], weighting="matrices")
    assert printed["statistics"][paths[1]]["cells"][0]["mean"] == pytest.approx(statistics.cells[0].mean)


def test_people_get_table_4_by_kernel_size_and_the_factors(tmp_path, capsys):
    path = write(tmp_path / "vgg.pt", make_model(), "torch")
    assert main(["analyze", str(path), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    cells = {(c.kernel_size, c.distances[0], c.part): c for c in locality_statistics(make_model()).cells}
    lines = [[cell.strip(" *") for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    texts = {3: ["0 - 1", "1 - 1.41"], 5: ["0 - 1", "1 - 1.41", "1.41 - 2", "2 - 2.24", "2.24 - 2.83"]}
    nearer = (0.0, 1.0, math.sqrt(2), 2.0, math.sqrt(5))
    assert [line for line in lines if line[:1] == ["vgg"]] == [
        [
            *("vgg", f"{size}x{size}", text),
            *(f"{cell.mean:.3f}" if cell else "" for cell in (cells.get(((size, size), near, part)) for part in PARTS)),
        ]
        for size in (3, 5)
        for text, near in zip(texts[size], nearer, strict=False)
    ]
    strong = cells[(3, 3), 0.0, "all"]
    assert strong.p_greater < 0.001
    for text in (
        "lower 1/2",
        f"{strong.mean:.3f}***",
        "Suggested factors",
        f"{estimate_locality(make_model())['2'][0]:.3f}",
    ):
        assert text in printed


def test_folders_are_named_by_their_whole_names(tmp_path, capsys, monkeypatch):
    (tmp_path / "lr0.1").mkdir()
    write(tmp_path / "lr0.1" / "model.safetensors", make_model(), "safetensors")
    for place, name in ((tmp_path, "lr0.1"), (tmp_path / "lr0.1", ".")):
        monkeypatch.chdir(place)
        assert main(["analyze", name, "--out", "analysis"]) == 0
        assert f"│ {name} " in capsys.readouterr().out


def test_layers_left_uniform_are_said(tmp_path, capsys):
    torch.manual_seed(0)
    path = write(tmp_path / "model.pt", nn.Sequential(nn.Conv2d(8, 8, 3)), "torch")
    assert main(["analyze", str(path), "--out", str(tmp_path)]) == 0
    assert "leaves '0' uniform" in capsys.readouterr().out.replace("\n", " ")
    assert json.loads((tmp_path / "analysis.json").read_text())["locality"] == {"0": [1.0, 1.0]}


def test_train_takes_what_analyze_has_written(tmp_path, capsys):
    train = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--epochs", "1"]
    assert main([*train, "--out", str(tmp_path / "first")]) == 0
    folder, analysis = tmp_path / "first", tmp_path / "analysis.json"
    found = []
    for weights in (folder, folder / "model.safetensors"):
        assert main(["analyze", str(weights), "--stat", "rms", "--out", str(tmp_path)]) == 0
        found.append(json.loads(analysis.read_text())["locality"])
    assert found[0] == found[1]
    assert main([*train, "--out", str(tmp_path / "second"), "--locality", str(analysis)]) == 0
    settings = json.loads((tmp_path / "second" / "settings.json").read_text())["settings"]
    assert settings["locality"] == found[0]
    assert len(settings["locality"]) == 3
    # The run's own checkpoint has optimizer states beside the weights; the kernels are those of the weights.
    state = read_checkpoint(tmp_path / "second" / "checkpoint.pt")
    assert {name for name in state if state[name].dim() == 4} == {f"{layer}.weight" for layer in settings["locality"]}


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from the file was run')",)


DENSE = "expected dense tensors with data, '0.weight' is not"
BAD = {
    "missing": (None, "model.pt: cannot be read"),
    "empty": (b"", "model.pt: cannot be read"),
    "json": (b'{"a": 1}', "it is of another kind, or has other objects than tensors in it"),
    "code": ({"0.weight": Malicious()}, "model.pt: cannot be read"),
    "list": ([torch.ones(3)], "expected a state dict, found a list"),
    "no tensors": ({"a": 3}, "found no tensors"),
    "sparse": ({"0.weight": torch.ones(3, 3, 3, 3).to_sparse()}, DENSE),
    "meta": ({"0.weight": torch.ones(3, 3, 3, 3, device="meta")}, DENSE),
    "expanded": ({"0.weight": torch.ones(3, 1, 1, 1).expand(3, 10**6, 3, 3)}, "expected weights that fill the file"),
    "no kernels": ({"0.weight": torch.ones(3, 3, 1, 1)}, "model.pt: "),
    "nan": ({"0.weight": torch.full((3, 3, 3, 3), float("nan"))}, "model.pt: "),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_analyzed_is_one_line_and_exit_code_2(tmp_path, capsys, content, said):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert main(["analyze", str(path), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert "weights_only" not in captured.err  # torch's advice to run code from the file
    assert not (tmp_path / "out").exists()


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", "/dev/zero"):
        assert main(["analyze", str(path), "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.endswith("expected a regular file, found a folder, a pipe or a device\n")


def test_no_more_than_300_layers_are_drawn():
    weights = {str(i): torch.rand(((3, 5), (1, 3), (3, 3, 3))[i % 3]) for i in range(301)}
    figure = tap_figure(weights)
    assert figure.get_suptitle() == "Mean |weight| by tap, of the first 300 of 301 layers"
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == list(weights)[:300]
    for image, taps in zip(axes.images, weights.values(), strict=False):
        np.testing.assert_array_equal(image.get_array(), taps if taps.dim() == 2 else torch.cat(list(taps), 1))
        left, right, bottom, top = image.get_extent()
        assert 0 <= left < right <= 6 * 2.1
        assert 0 <= top < bottom <= 50 * 2.3 + 0.1


@pytest.mark.usefixtures("drawn")
def test_names_are_shown_as_they_are_for_kernels_of_any_dimension(tmp_path, capsys):
    names = {name: name for name in ("x[/y]z", "a$\\frac$b", "[bold]", "a\\", ":smile:", "\u65e5")}
    names |= {"a\nb": "a\\nb", "\x1b[31m": "\\x1b[31m", "\udcff": "\\udcff", "x" * 9999: "x" * 20}
    kernels = itertools.cycle([(7,), (3, 3), (3, 3, 3), (1, 5)])
    state = {f"{name}.weight": torch.randn(8, 8, *kernel) for name, kernel in zip(names, kernels, strict=False)}
    torch.save(state, tmp_path / "m.pt")
    assert main(["analyze", str(tmp_path / "m.pt"), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in names.values():
        assert any(line.startswith(f"│ {name}") for line in printed.splitlines()), name
    assert len(printed) < 9999
    assert (tmp_path / "taps.png").stat().st_size > 5000
    assert json.loads((tmp_path / "analysis.json").read_text())["locality"].keys() == names.keys()


def test_wrappers_of_any_order_and_empty_entries_are_looked_through(tmp_path):
    weight = torch.ones(2, 2, 3, 3)
    torch.save({"model": {}, "state_dict": {"_orig_mod.module.0.weight": weight}}, tmp_path / "m.pt")
    assert list(read_checkpoint(tmp_path / "m.pt")) == ["0.weight"]
    network = make_model()
    network.register_buffer("n_averaged", torch.zeros(1))  # is not AveragedModel's entry of this name
    torch.save(torch.optim.swa_utils.AveragedModel(network).state_dict(), tmp_path / "average.pt")
    assert read_checkpoint(tmp_path / "average.pt").keys() == network.state_dict().keys()


def test_a_network_whose_own_module_has_a_wrappers_name_is_trained_on_from_its_weights_and_its_locality(tmp_path):
    first, second = (nn.Sequential(OrderedDict(module=make_model(seed))) for seed in (0, 1))
    load_weights(second, write(tmp_path / "m.pt", first, "torch"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert main(["analyze", str(tmp_path / "m.pt"), "--out", str(tmp_path), "--quiet", "--stat", "abs"]) == 0
    factors, samples = option_parsers.locality(str(tmp_path / "analysis.json")), load("digits", None)
    for named in (factors, {f"module.{name}": of_layer for name, of_layer in factors.items()}):
        optimizer = make_optimizer(from_preset("quick", model="small", data="digits", locality=named), second, samples)
        assert factors["4"] in optimizer.param_groups[0]["locality"]


def test_weights_of_a_module_that_has_the_network_as_an_attribute_are_loaded(tmp_path):
    """A network whose own names all begin alike keeps them."""
    for network in (make_model, lambda seed: nn.Sequential(OrderedDict(net=make_model(seed)))):
        first, second, third = map(network, range(3))
        lightning = {f"net.{name}": value for name, value in first.state_dict().items()}
        torch.save({"state_dict": lightning, "epoch": 3}, tmp_path / "m.ckpt")
        load_weights(second, tmp_path / "m.ckpt")
        load_weights(third, write(tmp_path / "m.pt", first, "torch"))
        for loaded in (second, third):
            assert all(torch.equal(a, b) for a, b in zip(first.parameters(), loaded.parameters(), strict=True))


def test_checkpoints_of_different_networks_are_refused(tmp_path, capsys):
    one = write(tmp_path / "one.pt", make_model(), "torch")
    other = write(tmp_path / "other.pt", nn.Sequential(nn.Conv2d(3, 8, 3)), "torch")
    assert main(["analyze", str(one), str(other), "--out", str(tmp_path / "out")]) == 2
    assert "expected the same layers in all" in capsys.readouterr().err
