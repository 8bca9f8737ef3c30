"""Tests of training runs: their settings, resuming to the same numbers, and several processes training as one."""

import copy
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from loco_ext import optim, sparsity
from loco_ext.checkpoints import load_checkpoint, save_checkpoint
from loco_ext.experiments import data, run
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.models import MODELS, Model
from loco_ext.experiments.precision import Precision
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import SettingsError, check_resumable, from_preset
from loco_ext.experiments.train import make_model, make_optimizer, measure_accuracies, train
from tests.covering import covering, slow
from tests.experiments.runs import CPU, digits, killed_after, quick, written_out
from tests.processes import die, start_command, wait_for_all

CONVOLUTIONS = {"small": 3, "vgg13": 10, "mobilenet": 19, "resnet18": 20}
CONVOLUTIONS |= {"resnet20": 21, "plain20": 19, "resnet50": 53, "resnet8": 9, "plain8": 7, "vanilla": 3, "alexnet": 5}
CONVOLUTIONS |= {"resnet20-a": 19, "resnet8-a": 7, "resnet20-5x5": 19, "plain20-5x5": 19, "vgg13-5x5": 10}
CONVOLUTIONS |= {"resnet8-7x7": 7, "plain8-7x7": 7, "resnet18-7x7": 17, "plain18-7x7": 17}
# LOCO-REG, Table 3, lists stride and channels of MobileNet's depthwise convolutions.
MOBILENET = [(2, 64), (1, 64), (2, 128), (1, 128), (1, 256), (2, 256), (1, 256), (1, 512), (2, 512)]


def few_digits(train=200):
    """Return few digits, with crops and flips, so that a run covers all of the loader's work."""
    whole = digits(train)
    return replace(whole, test=data.Samples(*(part[:100] for part in whole.test)), augmented=True)


TIMES = ("seconds", "samples_per_second")


def figures(history):
    """Return all figures of a history but the times."""
    return [{k: v for k, v in asdict(epoch).items() if k not in TIMES} for epoch in history]


def metrics_of(out):
    """Return the lines of a run's metrics without the times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def test_learning_rates_and_milestones():
    setting = from_preset("paper", model="vgg13", data="cifar10")
    expected = {0: 0.1, 69: 0.1, 70: 0.0316, 139: 0.0316, 140: 0.0099856, 190: 0.1 * 0.316**3, 249: 0.1 * 0.316**5}
    for epoch, rate in expected.items():
        assert setting.learning_rate_of(epoch) == pytest.approx(rate)
    assert (setting.epochs, setting.batch_size, setting.momentum, setting.weight_decay) == (250, 128, 0.9, 2 * 0.0005)
    for options, milestones in (
        ({"epochs": 50}, (14, 28, 38, 46, 49)),
        ({"epochs": 50, "milestones": (7,)}, (7,)),
        ({"epochs": 5}, (1, 3, 4)),
        ({"schedule": "cosine"}, ()),
    ):
        assert from_preset("paper", model="small", data="digits", **options).milestones == milestones
    rates = [quick(epochs=4).learning_rate_of(epoch) for epoch in range(4)]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


@pytest.mark.parametrize(("name", "of_data"), covering(MODELS, [(3, 10), (1, 100)], strength=1))
def test_models_map_images_to_logits(name, of_data):
    channels, classes = of_data
    model = MODELS[name].make(channels, classes, 32)
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, classes)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == CONVOLUTIONS[name]
    least = MODELS[name].least_size
    assert MODELS[name].make(channels, classes, least).eval()(torch.zeros(2, channels, least, least)).isfinite().all()


def test_mobilenets_depthwise_convolutions_are_the_papers():
    convolutions = [module for module in MODELS["mobilenet"].make().modules() if isinstance(module, nn.Conv2d)]
    depthwise = [convolution for convolution in convolutions if convolution.groups > 1]
    assert [(convolution.stride[0], convolution.out_channels) for convolution in depthwise] == MOBILENET
    assert all(convolution.groups == convolution.in_channels for convolution in depthwise)


def test_the_optimizer_has_the_settings_locality_and_rule():
    model = make_model(quick(), samples := few_digits())
    for name, kind, locality, expected in (
        ("sgd", optim.SGD, None, [None] * 3),
        ("adam", optim.Adam, (0.5, 2.0), [(0.5, 2.0)] * 3),
        ("adamw", optim.AdamW, {"3": (0.5, 1.0, 2.0)}, [None, (0.5, 1.0, 2.0), None]),
    ):
        optimizer = make_optimizer(quick(optimizer=name, locality=locality, weight_decay=0.3), model, samples)
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["locality"] == expected
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]


PENALTY = {"penalty": "rings", "strength": 0.02, "folded": False}
TAUGHT, TAUGHT_BY = {"distillation": 0.7, "temperature": 2.0}, {"weight": 0.7, "temperature": 2.0}


@pytest.mark.parametrize(
    "options",
    [{}, PENALTY, PENALTY | {"solver": "subgradient"}, TAUGHT, TAUGHT | {"amp": True}],
    ids=["plain", "prox", "subgradient", "taught", "taught in bfloat16"],
)
def test_training_is_the_loop_written_out(options):
    """A teacher stays as it is; figures are cross-entropies also with one or a penalty, those of tests in float32."""
    setting, seen = quick(epochs=2, **options), set()
    samples = few_digits(100 if setting.amp else 200)  # CPUs are slow in bfloat16
    teacher = make_model(quick(seed=1), samples).eval()
    model, before = make_model(setting, samples), copy.deepcopy(teacher.state_dict())
    assert not torch.equal(model[0].weight, teacher[0].weight)  # whose seed is another one
    given = {"teacher": Teacher(teacher, **TAUGHT_BY)} if "distillation" in options else {}
    hooks = [
        each[0].register_forward_hook(lambda module, _, result, who=who: seen.add((who, module.training, result.dtype)))
        for who, each in {"model": model, "teacher": teacher}.items()
    ]
    history = train(model, make_optimizer(setting, model, samples), samples, setting, CPU, label="", **given)
    for hook in hooks:
        hook.remove()
    computed = torch.bfloat16 if setting.amp else torch.float32
    of_model = {("model", True, computed), ("model", False, torch.float32)}
    assert seen == of_model | ({("teacher", False, computed)} if given else set())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    expected = make_model(setting, samples)
    figures = written_out(setting, samples, expected, teacher)
    for found, (train_loss, train_accuracy, test_loss, test_accuracy) in zip(history, figures, strict=True):
        assert (found.train_loss, found.test_loss) == pytest.approx((train_loss, test_loss), rel=1e-3)
        assert (found.train_accuracy, found.test_accuracy) == pytest.approx((train_accuracy, test_accuracy), abs=0.011)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_teacher_and_its_weight_come_together(tmp_path):
    samples = few_digits()
    for setting, teacher, said in (
        (quick(distillation=0.5), None, "expected a teacher with it, got none"),
        (quick(), make_model(quick(), samples), "expected a number with a teacher, got none"),
    ):
        with pytest.raises(SettingsError, match=f"^distillation: {said}"):
            run.run(setting, samples, tmp_path / "run", CPU, teacher=teacher)
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_settings_metrics_checkpoint_and_weights(tmp_path):
    out = tmp_path / "new" / "run"
    history = run.run(quick(epochs=2, locality={"0": (0.5, 2.0)}), few_digits(), out, CPU)
    files = [".lock", "checkpoint.pt", "metrics.jsonl", "model.safetensors", "settings.json"]
    assert sorted(path.name for path in out.iterdir()) == files
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [asdict(epoch) for epoch in history]
    assert [line["epoch"] for line in lines] == [1, 2]
    recorded = json.loads((out / "settings.json").read_text())["settings"]
    assert recorded["locality"] == {"0": [0.5, 2.0]}
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == state["model"].keys()
    assert all(torch.equal(value, state["model"][name]) for name, value in weights.items())


RINGS = {"penalty": "rings", "strength": 0.01}


@pytest.mark.parametrize(
    "options",
    [
        RINGS,
        slow(RINGS | {"solver": "subgradient"}),
        slow({"optimizer": "adam", "penalty": "complexity", "strength": 1e-6}),
        {"optimizer": "adamw"},
        {"pilcro": "target", "alpha": 10.0},
        {"macs": 0.5, "granularity": "filters"},
        {"distillation": 0.5, "teacher": "its digest"},
        {"learning_rate": 0.0, "shuffle": False},
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_bits_and_measurements(tmp_path, options):
    """The last runs have dropout: nothing is learned and the samples keep their order, so only dropout can differ."""
    samples, setting = few_digits(), quick(epochs=3, **{"locality": (0.5, 2.0)} | options)
    teacher = make_model(quick(seed=1), samples) if "teacher" in options else None
    parts = {"teacher": teacher, "measure": lambda epoch: {"twice": 2.0 * epoch, "nothing": None}}
    dropout = "shuffle" in options
    if dropout:
        samples, setting = replace(samples, augmented=False), replace(setting, locality=None)

    def go(name, **more):
        torch.rand(5)  # random numbers that the process has drawn before must not matter
        before = torch.get_rng_state()
        if dropout:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                more["model"] = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))
        history = run.run(setting, samples, tmp_path / name, CPU, **parts, **more)
        assert torch.equal(torch.get_rng_state(), before)
        return figures(history)

    whole = go("whole")
    with killed_after(1):
        go("cut")
    assert go("cut", resume=True) == go("cut", resume=True) == whole
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "teacher" not in torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert [line["measures"] for line in metrics_of(tmp_path / "cut")] == [epoch["measures"] for epoch in whole]
    assert len({epoch["train_loss"] for epoch in whole}) == 3
    assert len({epoch["test_loss"] for epoch in whole}) == (1 if dropout else 3)


def test_a_budget_is_met_when_half_of_the_training_is_over(tmp_path):
    for granularity, method in (("rings", "pruning"), ("filters", "penalty")):
        setting = quick(epochs=2, macs=0.4, granularity=granularity, method=method)
        run.run(setting, few_digits(), tmp_path / granularity, CPU)
        model = make_model(setting, few_digits())
        model.load_state_dict(load_file(tmp_path / granularity / "model.safetensors"))
        _, report = sparsity.compact(model, torch.zeros(2, 1, 8, 8), cost="macs")
        assert 0.3 * report.macs_before < report.macs_after <= 0.4 * report.macs_before
        sizes = {size for layer in report.layers for size in layer.sizes} - {"0", "1"}
        assert (sizes == {"3x3"}) == (granularity == "filters")


def test_a_latency_that_is_missed_at_the_end_is_an_error_of_the_settings(tmp_path, monkeypatch):
    said = "latency: expected at least 0.6, the least reached, got 0.5"

    def miss(budget):
        raise ValueError(said)

    monkeypatch.setattr(sparsity.Budget, "_sizes_now", miss)
    with pytest.raises(SettingsError, match=said):
        run.run(quick(macs=0.5), few_digits(), tmp_path, CPU)


@pytest.mark.parametrize("wrap", [lambda model: model, slow(nn.DataParallel)], ids=["alone", "wrapped"])
def test_a_budget_leaves_frozen_layers_whole(tmp_path, wrap):
    setting = quick(macs=0.6)
    model = make_model(setting, few_digits())
    first = model[0].weight.requires_grad_(False)
    before = first.clone()
    run.run(setting, few_digits(), tmp_path, CPU, model=wrap(model))
    assert torch.equal(first, before)
    _, report = sparsity.compact(model, torch.zeros(2, 1, 8, 8), cost="macs")
    assert report.macs_after <= 0.6 * report.macs_before


def test_a_network_without_parameters_to_train_is_named(tmp_path):
    model = make_model(quick(), few_digits()).requires_grad_(False)
    with pytest.raises(SettingsError, match=r"^model: expected one with parameters to train, got small"):
        run.run(quick(), few_digits(), tmp_path, CPU, model=model)
    assert not any(tmp_path.iterdir())


def test_runs_of_earlier_versions_are_resumed_with_what_they_had(tmp_path):
    """They may have recorded whether the penalty is folded where that was not chosen, and lack the rounding."""
    rings, budget = quick(penalty="rings", strength=0.1), asdict(quick(macs=0.5))
    assert budget["round_to"] == 1
    without = {name: value for name, value in budget.items() if name != "round_to"}
    for setting, recorded in (
        (quick(), asdict(quick()) | {"folded": False}),
        (rings, asdict(rings) | {"folded": True}),
        (replace(rings, folded=False), asdict(rings) | {"folded": False}),
        *((quick(macs=0.5), before) for before in (budget, budget | {"round_to": None}, without)),
    ):
        check_resumable(setting, recorded, 0, tmp_path)
    for setting, recorded, said in (
        (rings, asdict(rings) | {"folded": False}, "folded: expected False"),
        (replace(rings, folded=True), asdict(rings) | {"folded": False}, "folded: expected False"),
        (quick(macs=0.5), budget | {"round_to": 4}, "round_to: expected 4"),
    ):
        with pytest.raises(SettingsError, match=f"^{said}, as the run in"):
            check_resumable(setting, recorded, 0, tmp_path)


TRAIN = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--lr", "0.05"]


def test_a_run_may_go_on_for_more_epochs(tmp_path):
    def steps(epochs, *milestones):
        return quick(epochs=epochs, schedule="steps", milestones=milestones, factor=0.5)

    whole = run.run(steps(3, 1, 2), few_digits(), tmp_path / "whole", CPU)
    run.run(steps(2, 1), few_digits(), tmp_path / "longer", CPU)
    for refused, said in ((steps(1), "^epochs: expected at least 2"), (steps(3, 2), "^milestones: expected ")):
        with pytest.raises(SettingsError, match=said):
            run.run(refused, few_digits(), tmp_path / "longer", CPU, resume=True)
    longer = run.run(steps(3, 1, 2), few_digits(), tmp_path / "longer", CPU, resume=True)
    assert figures(longer) == figures(whole)
    assert json.loads((tmp_path / "longer" / "settings.json").read_text())["settings"]["epochs"] == 3


def test_no_epoch_is_left_out_after_a_kill(tmp_path):
    seen, setting = [], quick(epochs=3)
    with killed_after(2):
        run.run(setting, few_digits(), tmp_path, CPU, after_epoch=seen.append)
    history = run.run(setting, few_digits(), tmp_path, CPU, resume=True, after_epoch=seen.append)
    assert seen == history


def test_a_run_that_goes_on_has_no_weights_of_fewer_epochs(tmp_path):
    weights = tmp_path / "model.safetensors"
    run.run(quick(epochs=1), few_digits(), tmp_path, CPU)
    with killed_after(2):
        run.run(quick(epochs=3), few_digits(), tmp_path, CPU, resume=True)
    assert not weights.exists()
    run.run(quick(epochs=3), few_digits(), tmp_path, CPU, resume=True)
    saved, trained = load_file(weights), load_checkpoint(tmp_path / "checkpoint.pt")["model"]
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


class Elsewhere(Processes):
    """Processes of a device whose sums cannot be read."""

    def sum(self, values):
        return torch.zeros(2)


def test_accuracies_are_measured_on_the_processes_device():
    model = make_model(quick(), few_digits()).to("meta")
    assert measure_accuracies(few_digits(), Elsewhere(torch.device("meta")), model) == [0.0]


def test_float16_leaves_out_steps_whose_gradients_overflow():
    precision = Precision(False, torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    weight = nn.Parameter(torch.ones(1))
    precision.step((8 * weight).sum(), torch.optim.SGD([weight], lr=0.1))
    assert weight.item() == 1
    assert precision.scaler.state_dict()["scale"] == 2.0**126


def test_a_run_is_neither_overwritten_nor_mixed_up(tmp_path):
    run.run(quick(epochs=1), few_digits(), tmp_path, CPU)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SettingsError, match="holds a run already"):
        run.run(quick(epochs=1), few_digits(), tmp_path, CPU)
    with pytest.raises(SettingsError, match=r"^seed: expected 0"):
        run.run(quick(epochs=2, seed=7), few_digits(), tmp_path, CPU, resume=True)
    with pytest.raises(SettingsError, match="expected the dataset of its run"):
        run.run(quick(epochs=1), few_digits(train=100), tmp_path, CPU, resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """Return the checkpoint of a two-epoch run as if after its first epoch."""
    out = tmp_path_factory.mktemp("unfinished")
    run.run(quick(epochs=2), few_digits(), out, CPU)
    state = load_checkpoint(out / "checkpoint.pt")
    return state | {"history": state["history"][:1]}


DAMAGES = {
    "text": (b"no checkpoint", "changed since it was written"),
    "settings": ({"settings": 3}, "TypeError"),
    "model": ({"model": {}}, "RuntimeError"),
    "NaN": ({"model": {"0.weight": torch.tensor([torch.nan])}}, "NaN or infinity in '0.weight': the training has"),
    "optimizer": ({"optimizer": {}}, "KeyError"),
    "no epochs": ({"history": []}, "its epochs are not 1, 2, ..."),
    "epoch": ({"history": [{}]}, "TypeError"),
}


@pytest.mark.parametrize(("change", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path, unfinished, change, said):
    path = tmp_path / "checkpoint.pt"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        save_checkpoint(path, unfinished | change)
    before = path.read_bytes()
    with pytest.raises(SettingsError, match=r"checkpoint\.pt: not a checkpoint of such a run \(" + re.escape(said)):
        run.run(quick(epochs=2), few_digits(), tmp_path, CPU, resume=True)
    assert path.read_bytes() == before


def test_a_finished_run_that_has_diverged_is_not_trained_again(tmp_path, unfinished):
    weights = unfinished["model"] | {"0.weight": unfinished["model"]["0.weight"] * math.nan}
    finished = unfinished | {"model": weights, "settings": asdict(quick(epochs=1))}
    save_checkpoint(tmp_path / "checkpoint.pt", finished)
    assert len(run.run(quick(epochs=1), few_digits(), tmp_path, CPU, resume=True)) == 1


def plain(channels, *_):
    layers = [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 10)]
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), *layers)


def plain_network():
    """Leave batch normalisation out of the small network: only without it do several processes train exactly as one."""
    MODELS["small"] = Model(plain, 8)


def dies_after_an_epoch():
    save = run._save
    run._save = lambda *arguments: (save(*arguments), die())


def options_of(out):
    return [*TRAIN, "--epochs", "2", "--batch-size", "50", "--out", str(out), "--json"]


def launch(processes, out, *options, change=None):
    """Train in processes as torchrun starts them; return the exit code of the first that fails, and what they print."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    said = out.with_suffix(".log")
    said.unlink(missing_ok=True)
    ranks = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    code = wait_for_all([start_command([*options_of(out), *options], said, rank, change) for rank in ranks])
    return code, said.read_text()


@pytest.mark.slow
def test_several_processes_train_as_one_does(tmp_path):
    """Three processes split batches of 50 (800 samples) into 17, 17, 16; gradients are those of the whole batch."""
    torch.save(plain(1).state_dict(), tmp_path / "teacher.pt")
    folders = [tmp_path / str(count) for count in (1, 3)]
    for count, out in zip((1, 3), folders, strict=True):
        code, said = launch(count, out, "--teacher", str(tmp_path / "teacher.pt"), change=plain_network)
        assert code == 0, said
    for expected, found in zip(*map(metrics_of, folders), strict=True):
        assert found.pop("measures") == expected.pop("measures")
        assert found == pytest.approx(expected, rel=1e-4)
    a, b = (load_file(out / "model.safetensors") for out in folders)
    for name, expected in a.items():
        torch.testing.assert_close(b[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_several_processes_resume_to_the_same_bits(tmp_path):
    """Three processes are used because their sums, unlike those of two, depend on the order."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    code, said = launch(3, whole)
    assert code == 0, said
    assert said.count('"epoch": 2') == said.count('"epoch":') == 1  # only one process prints
    code, said = launch(3, cut, change=dies_after_an_epoch)
    assert code == -signal.SIGKILL, said
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "loco_ext.cli", *options_of(cut), "--resume"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "expected the processes of its run" in done.stderr
    code, said = launch(3, cut, "--resume")
    assert code == 0, said
    assert metrics_of(cut) == metrics_of(whole)
    weights = [(out / "model.safetensors").read_bytes() for out in (whole, cut)]
    assert weights[0] == weights[1]
