"""``loco-ext train``: its options and output; a user's error prints one line and leaves no files behind."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from loco_ext.cli import main
from loco_ext.experiments import models
from loco_ext.experiments.models import small_cnn
from loco_ext.experiments.settings import Settings

GOOD = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--epochs", "1", "--lr", "0.05"]


LOCALITIES = ("", "[]", "{}", '{"locality": 3}', '{"locality": {"0": "12"}}', '{"locality": {"0": [1, "a"]}}')
LOCALITIES += ('{"locality": {"0": [1, 1%s]}}' % ("0" * 400), "[" * 100_000, "\udcff")


@pytest.mark.parametrize("content", LOCALITIES, ids=lambda content: content[:30])
def test_a_file_that_analyze_has_not_written_is_named(tmp_path, capsys, content):
    path = tmp_path / "locality.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert main([*GOOD, "--out", str(tmp_path / "run"), "--locality", str(path)]) == 2
    assert "locality.json: expected JSON with an entry 'locality'" in capsys.readouterr().err


def test_factors_that_are_none_are_said_once_to_be_of_the_locality(tmp_path, capsys):
    assert main([*GOOD, "--locality", "nan", "--out", str(tmp_path / "run")]) == 2
    said = "loco-ext: --locality: expected finite factors of at least 0, got (nan,)\n"
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("drawn")
def test_options_reach_the_settings(tmp_path, capsys):
    path = tmp_path / "analysis.json"
    path.write_text(json.dumps({"locality": {"3": [0.5, 2.0]}}))
    options = f"--locality {path} --no-augment --batch-size 400 --milestones 1,2 --schedule steps --factor 0.3 "
    options += "--momentum 0.8 --weight-decay 0.02 --seed 4 --penalty rings --strength 0.001 --weighting scaled "
    options += "--kind full --folded --solver subgradient --amp --pilcro target --alpha 10 --optimizer sgd --norm l1"
    assert main([*GOOD, "--out", str(tmp_path / "run"), *options.split()]) == 0
    assert f"are in {tmp_path / 'run'}" in capsys.readouterr().out
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "run" / "settings.json").read_text())["settings"]
    expected = {"model": "small", "data": "digits", "epochs": 1, "learning_rate": 0.05, "locality": {"3": [0.5, 2.0]}}
    expected |= {"augment": False, "batch_size": 400, "milestones": [1, 2], "schedule": "steps", "factor": 0.3}
    expected |= {"momentum": 0.8, "weight_decay": 0.02, "seed": 4, "penalty": "rings", "strength": 0.001, "amp": True}
    expected |= {"weighting": "scaled", "kind": "full", "folded": True, "solver": "subgradient", "optimizer": "sgd"}
    expected |= {"pilcro": "target", "alpha": 10.0, "norm": "l1", "round_to": 1}
    assert found == asdict(Settings("small")) | expected


@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "a", "RANK": "0"}], ids=str
)
def test_an_environment_that_torchrun_does_not_make_is_named(tmp_path, capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*GOOD, "--out", str(tmp_path / "run")]) == 2
    assert "processes: expected the environment that torchrun makes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_starts_from_given_weights(tmp_path, capsys):
    model = small_cnn()
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pt")
    line = [*GOOD, "--lr", "0", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*line, "--weights", str(tmp_path / "weights.pt")]) == 0
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())
    assert tuple(capsys.readouterr()) == ("", "")
    # The second run continues from the same weights only.
    assert main([*line, "--resume"]) == 2
    assert "--weights: expected " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight.to(torch.int8), "expected floating-point numbers in '3.weight', got torch.int8"),
        (lambda weight: weight.cfloat(), "expected floating-point numbers in '3.weight', got torch.complex64"),
        (lambda weight: weight / 0, "expected finite numbers in '3.weight', got NaN or infinity"),
        (lambda weight: weight.double() + 1e300, "expected finite numbers in '3.weight', got NaN or infinity"),
    ],
    ids=["integer", "complex", "NaN", "too large"],
)
def test_weights_that_would_change_when_they_are_copied_are_refused(tmp_path, capsys, change, said):
    weights = small_cnn().state_dict()
    torch.save(weights | {"3.weight": change(weights["3.weight"])}, tmp_path / "weights.pt")
    assert main([*GOOD, "--out", str(tmp_path / "run"), "--weights", str(tmp_path / "weights.pt")]) == 2
    assert capsys.readouterr().err == f"loco-ext: --weights: {tmp_path / 'weights.pt'}: {said}\n"
    assert not (tmp_path / "run").exists()


def test_a_teacher_is_the_network_of_a_run_or_the_same_network(tmp_path, capsys):
    """A wider network teaches a narrower one, from its run; a file's weights are taken for the network's own kind."""
    line = ["train", "--model", "plain8", "--dataset", "digits", "--preset", "quick", "--epochs", "1", "--quiet"]
    assert main([*line, "--width", "0.2", "--out", str(tmp_path / "wide")]) == 0
    line += ["--width", "0.1"]
    for name, teacher in (("a", []), ("b", ["--teacher", "wide"]), ("c", ["--teacher", "a/model.safetensors"])):
        teacher = [*teacher[:1], *(str(tmp_path / path) for path in teacher[1:])]
        soft = ["--distillation", "0.5", "--temperature", "2"] if name == "c" else []
        assert main([*line, *teacher, *soft, "--out", str(tmp_path / name)]) == 0
    settings = [json.loads((tmp_path / name / "settings.json").read_text())["settings"] for name in "abc"]
    assert [each["distillation"] for each in settings] == [None, 0.9, 0.5]
    assert [each["temperature"] for each in settings] == [4.0, 4.0, 2.0]
    networks = [models.MODELS["plain8"].make(1, 10, 8, width=width) for width in (0.2, 0.1)]
    for network, name in zip(networks, ("wide", "a"), strict=True):
        network.load_state_dict(load_file(tmp_path / name / "model.safetensors"))
    assert [each["teacher"] for each in settings] == [None, *map(models.digest, networks)]
    weights = [load_file(tmp_path / name / "model.safetensors")["0.weight"] for name in "abc"]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    # The second run goes on with the same teacher only.
    for teacher in ([], ["--teacher", str(tmp_path / "a")]):
        assert main([*line, *teacher, "--out", str(tmp_path / "b"), "--resume"]) == 2
        assert "--teacher: expected " in capsys.readouterr().err.replace("--distillation, ", "")


def test_the_network_of_a_users_function_teaches_another_of_it(tmp_path, monkeypatch, capsys):
    """The JSON does not contain what the function prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "from torch import nn\ndef make():\n    print('made')\n"
    code += "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "teachers_of_this_test.py").write_text(code)
    line = ["train", "--model", "teachers_of_this_test:make", *GOOD[3:], "--quiet"]
    assert main([*line, "--out", "first"]) == 0
    capsys.readouterr()
    assert main([*line, "--teacher", "first", "--out", "second", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["epoch"] == 1
    assert printed.err == "made\nmade\n"


def test_a_run_that_goes_on_for_more_epochs_keeps_its_milestones(tmp_path):
    line = [*GOOD, "--preset", "paper", "--batch-size", "400", "--out", str(tmp_path)]
    assert main([*line, "--epochs", "2"]) == 0
    assert main([*line, "--epochs", "3", "--resume"]) == 0
    rates = [json.loads(text)["learning_rate"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([0.05, 0.0158, 0.0158])
    assert json.loads((tmp_path / "settings.json").read_text())["settings"]["milestones"] == [1]


def test_a_run_that_diverges_leaves_its_last_good_epoch(tmp_path, capsys):
    line = [*GOOD, "--schedule", "steps", "--epochs", "3", "--milestones", "1", "--factor", "1e30"]
    assert main([*line, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"loco-ext: {tmp_path}: the run has diverged, the loss of epoch 2 is not finite")
    assert "the checkpoint of epoch 1 is left" in said
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert [epoch["epoch"] for epoch in state["history"]] == [1]
    assert all(value.isfinite().all() for value in state["model"].values())
    assert not (tmp_path / "model.safetensors").exists()


def test_json_is_the_last_epoch_also_of_a_finished_run(tmp_path, capsys):
    for options in ([], ["--resume"]):
        assert main([*GOOD, "--epochs", "2", "--out", str(tmp_path / "run"), "--json", *options]) == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(capsys.readouterr().out) == json.loads(lines[-1])


def test_only_a_new_run_is_refused_for_an_option_without_effect(tmp_path, capsys):
    line = [*GOOD, "--optimizer", "adam", "--out", str(tmp_path / "run")]
    assert main([*line, "--momentum", "0.5", "--resume"]) == 2
    assert "--momentum: expected it only with --optimizer sgd, got 0.5" in capsys.readouterr().err
    assert main(line) == 0
    # Earlier versions have begun runs with such options; whether they are this run's is compared as for all others.
    assert main([*line, "--momentum", "0.9", "--resume"]) == 0
    assert main([*line, "--momentum", "0.5", "--resume"]) == 2
    assert "--momentum: expected 0.9, as the run" in capsys.readouterr().err
