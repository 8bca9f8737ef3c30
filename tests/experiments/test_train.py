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
from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.models import MODELS, Model
from loco_ext.experiments.precision import Precision
from loco_ext.experiments.settings import SettingsError, check_same, from_preset
from loco_ext.experiments.train import make_model, make_optimizer, train
from tests.covering import covering
from tests.experiments.runs import CPU, digits, killed_after, quick
from tests.processes import die, kill_when, run_command, start_command, wait_for_all

CONVOLUTIONS = {"small": 3, "vgg13": 10, "mobilenet": 19, "resnet18": 20}
CONVOLUTIONS |= {"resnet20": 21, "plain20": 19, "resnet50": 53, "resnet8": 9, "plain8": 7, "vanilla": 3, "alexnet": 5}
CONVOLUTIONS |= {"resnet20-a": 19, "resnet8-a": 7, "resnet20-5x5": 19, "plain20-5x5": 19, "vgg13-5x5": 10}
CONVOLUTIONS |= {"resnet8-7x7": 7, "plain8-7x7": 7, "resnet18-7x7": 17, "plain18-7x7": 17}
# LOCO-REG, Table 3, lists the channels of VGG13's convolutions and (stride, channels) of MobileNet's depthwise ones.
VGG13 = [64, 64, 128, 128, 256, 256, 512, 512, 512, 512]
MOBILENET = [(2, 64), (1, 64), (2, 128), (1, 128), (1, 256), (2, 256), (1, 256), (1, 512), (2, 512)]


def few_digits(train=200):
    """Return few digits, with crops and flips, so that a run covers all of the loader's work."""
    whole = digits(train)
    return replace(whole, test=data.Samples(*(part[:100] for part in whole.test)), augmented=True)


def figures(history):
    """Return all figures of a history but the times."""
    return [{k: v for k, v in asdict(epoch).items() if k not in ("seconds", "samples_per_second")} for epoch in history]


def test_the_papers_schedule():
    setting = from_preset("paper", model="vgg13", data="cifar10")
    expected = {0: 0.1, 69: 0.1, 70: 0.0316, 139: 0.0316, 140: 0.0099856, 190: 0.1 * 0.316**3, 249: 0.1 * 0.316**5}
    for epoch, rate in expected.items():
        assert setting.learning_rate_of(epoch) == pytest.approx(rate)
    assert (setting.epochs, setting.batch_size, setting.momentum, setting.weight_decay) == (250, 128, 0.9, 2 * 0.0005)


def test_milestones_move_along_with_the_epochs_unless_given():
    assert from_preset("paper", model="small", data="digits", epochs=50).milestones == (14, 28, 38, 46, 49)
    assert from_preset("paper", model="small", data="digits", epochs=50, milestones=(7,)).milestones == (7,)
    assert from_preset("paper", model="small", data="digits", epochs=5).milestones == (1, 3, 4)
    assert from_preset("paper", model="small", data="digits", schedule="cosine").milestones == ()


def test_the_cosine_falls_from_the_learning_rate_towards_zero():
    rates = [quick(epochs=4).learning_rate_of(epoch) for epoch in range(4)]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


@pytest.mark.parametrize(
    "bad",
    [
        {"optimizer": "lion"},
        {"schedule": "linear"},
        {"norm": "l3"},
        {"epochs": 0},
        {"weight_decay": math.inf},
        {"penalty": "rings", "weighting": "heavy"},
        {"penalty": "rings", "kind": "quarter"},
        {"penalty": "rings", "solver": "magic"},
        {"distillation": 1.5},
        {"distillation": 0.5, "temperature": 0.0},
        {"distillation": 0.5, "temperature": math.nan},
        {"temperature": 2.0},
    ],
    ids=str,
)
def test_impossible_settings_are_named(bad):
    with pytest.raises(SettingsError, match=list(bad)[-1]):
        quick(**bad)


@pytest.mark.parametrize(("name", "of_data"), covering(MODELS, [(3, 10), (1, 100)], strength=1))
def test_models_map_images_to_logits(name, of_data):
    channels, classes = of_data
    model = MODELS[name].make(channels, classes, 32)
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, classes)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == CONVOLUTIONS[name]
    least = MODELS[name].least_size
    assert MODELS[name].make(channels, classes, least).eval()(torch.zeros(2, channels, least, least)).isfinite().all()


def test_vgg13_and_mobilenet_are_the_papers():
    vgg, mobilenet = MODELS["vgg13"].make(3, 10, 32), MODELS["mobilenet"].make(3, 10, 32)
    convolutions = [module for module in vgg.modules() if isinstance(module, nn.Conv2d)]
    assert [convolution.out_channels for convolution in convolutions] == VGG13
    depthwise = [module for module in mobilenet.modules() if isinstance(module, nn.Conv2d) and module.groups > 1]
    assert [(convolution.stride[0], convolution.out_channels) for convolution in depthwise] == MOBILENET
    assert all(convolution.groups == convolution.in_channels for convolution in depthwise)


@pytest.mark.parametrize(
    ("locality", "expected"),
    [
        (None, [None] * 3),
        ((0.5, 2.0), [(0.5, 2.0)] * 3),
        ({"3": (0.5, 1.0, 2.0)}, [None, (0.5, 1.0, 2.0), None]),
    ],
    ids=str,
)
def test_the_optimizer_has_the_settings_locality_and_rule(locality, expected):
    model = make_model(quick(), few_digits())
    for name, kind in (("sgd", optim.SGD), ("adam", optim.Adam), ("adamw", optim.AdamW)):
        optimizer = make_optimizer(quick(optimizer=name, locality=locality, weight_decay=0.3), model)
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["locality"] == expected
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]


@pytest.mark.parametrize("locality", [(1.0, 2.0, 3.0, 4.0), {"5": (1.0, 2.0)}, {"0": (-1.0, 2.0)}], ids=str)
def test_a_locality_that_does_not_fit_the_model_is_named(locality):
    with pytest.raises(SettingsError, match="locality"):
        make_optimizer(quick(locality=locality), make_model(quick(), few_digits()))


def test_training_is_the_plain_loop_over_the_loaders_batches():
    """Weights and figures match those of a plain loop with torch.optim's SGD."""
    setting, samples = quick(epochs=2), few_digits()
    history = []
    model = make_model(setting, samples)
    train(model, make_optimizer(setting, model), samples, setting, CPU, label="", after_epoch=history.append)

    expected = make_model(setting, samples)
    decayed = [p for p in expected.parameters() if p.dim() > 1]
    others = [p for p in expected.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": setting.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=setting.learning_rate, momentum=setting.momentum, foreach=False)
    normalization = Normalization(samples.train)
    loader = Loader(samples.train, normalization, CPU.device, batch_size=100, seed=setting.seed, augmented=True)
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate_of(epoch)
        losses, correct = [], []
        expected.train()
        for images, labels, _ in loader.epoch(epoch):
            optimizer.zero_grad()
            logits = expected(images)
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            losses += nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
            correct += (logits.argmax(1) == labels).tolist()
        expected.eval()
        with torch.no_grad():
            logits = expected(normalization(samples.test.images))
        found = history[epoch]
        assert found.train_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert found.train_accuracy == pytest.approx(sum(correct) / len(correct), abs=0.011)
        assert found.test_loss == pytest.approx(
            nn.functional.cross_entropy(logits, samples.test.labels).item(), rel=1e-3
        )
        assert found.test_accuracy == pytest.approx(
            (logits.argmax(1) == samples.test.labels).float().mean().item(), abs=0.011
        )
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("amp", [False, True])
def test_a_teacher_in_eval_mode_is_learned_and_left_alone(amp):
    """Weights match a plain loop on Hinton's loss, the figures are cross-entropies, and the teacher keeps its state."""
    setting, samples = quick(epochs=1, distillation=0.7, temperature=2.0, amp=amp), few_digits()
    teacher = make_model(quick(seed=1), samples)
    model, before = make_model(setting, samples), copy.deepcopy(teacher.state_dict())
    history, seen = [], set()
    teacher[0].register_forward_hook(lambda module, inputs, result: seen.add((module.training, result.dtype)))
    options = {"label": "", "after_epoch": history.append, "teacher": Teacher(teacher.eval(), 0.7, 2.0)}
    train(model, make_optimizer(setting, model), samples, setting, CPU, **options)
    assert seen == {(False, torch.bfloat16 if amp else torch.float32)}
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())

    expected = make_model(setting, samples)
    optimizer = make_optimizer(setting, expected)
    loader = Loader(samples.train, Normalization(samples.train), CPU.device, batch_size=100, seed=0, augmented=True)
    losses = []
    for images, labels, _ in loader.epoch(0):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            ours, theirs = expected(images), teacher(images).detach()
        losses.append(nn.functional.cross_entropy(ours.float(), labels))
        q, p = ((each.float() / 2).softmax(1) for each in (ours, theirs))
        (0.3 * losses[-1] + 0.7 * 4 * (p * (p / q).log()).sum(1).mean()).backward()
        optimizer.step()
    assert history[0].train_loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_run_with_a_teacher_resumes_to_the_same_bits_and_not_without_it(tmp_path):
    samples = few_digits()
    teacher = make_model(quick(seed=1), samples)
    setting = quick(epochs=2, distillation=0.5, teacher="its digest")
    whole = run.run(setting, samples, tmp_path / "whole", CPU, teacher=teacher)
    with killed_after(1):
        run.run(setting, samples, tmp_path / "cut", CPU, teacher=teacher)
    with pytest.raises(SettingsError, match=r"^distillation, teacher: expected 0.5, its digest"):
        run.run(quick(epochs=2), samples, tmp_path / "cut", CPU, resume=True)
    assert figures(run.run(setting, samples, tmp_path / "cut", CPU, resume=True, teacher=teacher)) == figures(whole)
    state, weights = (
        load_checkpoint(tmp_path / "cut" / "checkpoint.pt"),
        load_file(tmp_path / "whole/model.safetensors"),
    )
    assert all(torch.equal(value, state["model"][name]) for name, value in weights.items())
    assert state.keys() == load_checkpoint(tmp_path / "whole" / "checkpoint.pt").keys()
    assert "teacher" not in state


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
    setting = quick(epochs=2, locality={"0": (0.5, 2.0)})
    history = run.run(setting, few_digits(), tmp_path / "new" / "run", CPU)
    out = tmp_path / "new" / "run"
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "checkpoint.pt",
        "metrics.jsonl",
        "model.safetensors",
        "settings.json",
    ]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [asdict(epoch) for epoch in history]
    assert [line["epoch"] for line in lines] == [1, 2]
    recorded = json.loads((out / "settings.json").read_text())["settings"]
    assert recorded["locality"] == {"0": [0.5, 2.0]}
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == state["model"].keys()
    assert all(torch.equal(value, state["model"][name]) for name, value in weights.items())


def test_the_same_settings_give_the_same_bits_and_another_seed_does_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run.run(quick(epochs=1, seed=seed), few_digits(), tmp_path / name, CPU)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["0.weight"], c["0.weight"])


RINGS = {"penalty": "rings", "strength": 0.01}


@pytest.mark.parametrize(
    ("optimizer", "penalty"),
    [
        ("sgd", RINGS),
        ("sgd", RINGS | {"solver": "subgradient"}),
        ("adam", {"penalty": "complexity", "strength": 1e-6}),
        ("adamw", {}),
        ("sgd", {"pilcro": "target", "alpha": 10.0}),
        ("sgd", {"macs": 0.5, "granularity": "filters"}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, optimizer, penalty):
    setting = quick(epochs=3, optimizer=optimizer, locality=(0.5, 2.0), **penalty)
    whole = run.run(setting, few_digits(), tmp_path / "whole", CPU)
    with killed_after(1):
        run.run(setting, few_digits(), tmp_path / "cut", CPU)
    resumed = run.run(setting, few_digits(), tmp_path / "cut", CPU, resume=True)
    assert figures(resumed) == figures(whole)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    again = run.run(setting, few_digits(), tmp_path / "cut", CPU, resume=True)
    assert figures(again) == figures(whole)


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


def test_a_run_that_recorded_what_its_penalty_was_on_is_resumed_with_that_alone(tmp_path):
    rings = {"penalty": "rings", "strength": 0.1}
    for options, folded in (({}, False), (rings, True)):
        setting = quick(**options)
        check_same(setting, asdict(setting) | {"folded": folded}, 0, tmp_path)
    for folded in (None, True):
        with pytest.raises(SettingsError, match=r"^folded: expected False, as the run in"):
            check_same(quick(**rings, folded=folded), asdict(quick(**rings)) | {"folded": False}, 0, tmp_path)
    check_same(quick(**rings, folded=False), asdict(quick(**rings)) | {"folded": False}, 0, tmp_path)


def test_a_run_whose_record_lacks_the_rounding_is_resumed(tmp_path):
    setting = quick(macs=0.5)
    recorded = asdict(setting)
    assert recorded["round_to"] == 1
    for before in (recorded, recorded | {"round_to": None}, {k: v for k, v in recorded.items() if k != "round_to"}):
        check_same(setting, before, 0, tmp_path)
    with pytest.raises(SettingsError, match=r"^round_to: expected 4, as the run in"):
        check_same(setting, recorded | {"round_to": 4}, 0, tmp_path)
    assert quick(latency=0.5).round_to is None


TRAIN = ["train", "--model", "small", "--dataset", "digits", "--preset", "quick", "--lr", "0.05"]


@pytest.mark.slow
def test_a_process_killed_at_any_moment_resumes_to_the_same_numbers(tmp_path):
    command = [*TRAIN, "--epochs", "8", "--batch-size", "32", "--out"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    path = cut / "metrics.jsonl"
    for epochs in (2, 5):  # killed soon after these epochs' metrics are written
        kill_when(
            lambda epochs=epochs: path.exists() and len(path.read_text().splitlines()) >= epochs,
            *(*command, cut, "--resume"),
        )
    run_command(*command, cut, "--resume")
    run_command(*command, whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    metrics = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("seconds", "samples_per_second")}
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        for out in (cut, whole)
    ]
    assert metrics[0] == metrics[1]
    assert [line["epoch"] for line in metrics[0]] == list(range(1, 9))
    # Nothing but a temporary file of the killed process may be left over.
    names = {path.name for path in cut.iterdir() if not path.name.startswith(".")}
    assert names == {"settings.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors", "curves.png"}


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


def test_steps_under_autocast_compute_in_bfloat16_and_leave_float32():
    seen = set()
    model = make_model(quick(), few_digits())
    model[0].register_forward_hook(lambda module, inputs, result: seen.add((module.training, result.dtype)))
    history = []
    setting = quick(epochs=1, amp=True)
    train(model, make_optimizer(setting, model), few_digits(), setting, CPU, label="", after_epoch=history.append)
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert math.isfinite(history[0].train_loss)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (b"", "changed since it was written"),
        (b"no checkpoint", "changed since it was written"),
        (lambda content: content[:-100], "changed since it was written"),
        (lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:], "changed since it was written"),
        ({"settings": 3}, "TypeError"),
        ({"model": {}}, "RuntimeError"),
        ({"model": {"0.weight": torch.tensor([1.0, torch.nan])}}, "NaN or infinity in '0.weight': the training has"),
        ({"optimizer": {}}, "KeyError"),
        ({"history": []}, "its epochs are not 1, 2, ..."),
        ({"history": [{}]}, "TypeError"),
    ],
    ids=["empty", "text", "cut", "flipped", "settings", "model", "NaN", "optimizer", "no epochs", "epoch"],
)
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path, unfinished, change, said):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, unfinished | (change if isinstance(change, dict) else {}))
    if not isinstance(change, dict):
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))
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

    def save_and_die(*arguments):
        save(*arguments)
        if len(arguments[-1]) == 1:
            die()

    run._save = save_and_die


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


def metrics_of(out):
    """Return the lines of a run's metrics without the times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    left_out = ("seconds", "samples_per_second", "measures")
    return [{k: v for k, v in line.items() if k not in left_out} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("taught", [False, True])
def test_several_processes_train_as_one_does(tmp_path, taught):
    """Three processes split batches of 50 (800 samples) into 17, 17, 16; gradients are those of the whole batch."""
    torch.save(plain(1).state_dict(), tmp_path / "teacher.pt")
    options = ["--teacher", str(tmp_path / "teacher.pt")] if taught else []
    folders = [tmp_path / str(count) for count in (1, 3)]
    for count, out in zip((1, 3), folders, strict=True):
        code, said = launch(count, out, *options, change=plain_network)
        assert code == 0, said
    for expected, found in zip(*map(metrics_of, folders), strict=True):
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
