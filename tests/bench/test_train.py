"""The training benchmark and the CIFAR-10 experiment on a few samples: contents of their reports."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from bench import (
    bench_train,
    efcn_cifar10,
    efcn_paths_cifar10,
    frontier_cifar10,
    harness,
    locality_cifar10,
    tables,
    trained_cifar10,
)
from loco_ext.analysis import estimate_locality
from loco_ext.experiments import data

TINY = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1)


def test_training_report(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_train, "STEPS", {"small": 1})
    monkeypatch.setattr(harness, "Effort", lambda **arguments: TINY)
    compared: list[harness.Comparison] = []
    compare = harness.compare
    monkeypatch.setattr(harness, "compare", lambda *arguments: compared.append(compare(*arguments)) or compared[-1])
    path = tmp_path / "train-tiny.json"
    assert bench_train.main(["--quick", "--models", "small", "--threads", "1", "--out", str(path)]) == 0
    (record,) = json.loads(path.read_text())["results"]
    medians = {name: timing["median"] for name, timing in record["candidates"].items()}
    assert list(medians) == ["loader alone", "plain torch loop", "ours"]
    assert record["samples_per_second"] == {name: 128 / median for name, median in medians.items()}
    assert record["overhead"] == compared[0].ratio("ours", "plain torch loop") - 1
    assert "| small | 1 |" in tables.section("train", tmp_path)


def test_both_loops_take_the_same_batches_and_change_all_weights(monkeypatch):
    settings = bench_train.from_preset("quick", model="small", data="cifar10", locality=bench_train.LOCALITY)
    samples = bench_train.make_data(2)
    models = []
    original = bench_train.make_model
    monkeypatch.setattr(bench_train, "make_model", lambda *a: models.append(original(*a)) or models[-1])
    start = original(settings, samples)
    for make in (bench_train.plain_loop, bench_train.our_loop):
        make(samples, settings)()
    for model in models:
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True))
    # After one batch, the two differ only by the effect of the map on the decay.
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=5e-3)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Train three seeds for one epoch on a few random images; return the folder of the runs and the report."""
    folder = tmp_path_factory.mktemp("study")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, 3, 32, 32), generator=generator, dtype=torch.uint8)
    samples = data.Samples(images, torch.randint(10, (300,), generator=generator))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda name, folder: data.Dataset("cifar10", samples, samples, 10, True))
        options = ["--data", "none", "--runs", str(folder), "--seeds", "3", "--epochs", "1", "--stat", "rms"]
        assert locality_cifar10.main([*options, "--out", str(folder / "locality_cifar10-rms.json")]) == 0
    return folder, json.loads((folder / "locality_cifar10-rms.json").read_text())


def test_the_arms_take_the_factors_of_the_uniform_networks(study):
    folder, report = study
    uniform = [load_file(folder / f"uniform-{seed}" / "model.safetensors") for seed in range(3)]
    assert report["arms"]["uniform"]["locality"] is None
    for rule in ("local", "paper"):
        expected = estimate_locality(uniform, eta_rule=rule, stat="rms")
        assert report["arms"][rule]["locality"] == {name: list(factors) for name, factors in expected.items()}
        settings = json.loads((folder / f"{rule}-rms-2" / "settings.json").read_text())["settings"]
        assert settings["locality"] == report["arms"][rule]["locality"]
        assert settings["seed"] == 2


def test_the_summary_is_that_of_the_paired_runs(study):
    folder, report = study
    errors = {}
    for name, runs in (("uniform", "uniform"), ("local", "local-rms"), ("paper", "paper-rms")):
        lines = [(folder / f"{runs}-{seed}" / "metrics.jsonl").read_text().splitlines()[-1] for seed in range(3)]
        errors[name] = np.array([100 * (1 - json.loads(line)["test_accuracy"]) for line in lines])
        summary = report["arms"][name]["summary"]
        assert summary["error"] == pytest.approx(errors[name].mean())
        assert summary["standard_error"] == pytest.approx(stats.sem(errors[name]))
    for name in ("local", "paper"):
        summary = report["arms"][name]["summary"]
        difference = errors[name] - errors["uniform"]
        assert summary["difference"] == pytest.approx(difference.mean())
        expected = stats.ttest_1samp(difference, 0).pvalue if difference.any() else 1.0
        assert summary["paired_p"] == pytest.approx(expected)
    assert "| local |" in tables.section("locality_cifar10", folder)


@pytest.mark.slow
def test_the_frontiers_arms_are_comparable_and_its_tables_say_what_was_measured(tmp_path, monkeypatch):
    """One arm, then all arms run on a few random images, with two strengths; the second call reuses the first's run."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (100, 3, 32, 32), generator=generator, dtype=torch.uint8)
    samples = data.Samples(images, torch.randint(10, (100,), generator=generator))
    monkeypatch.setattr(data, "load", lambda name, folder: data.Dataset("cifar10", samples, samples, 10, True))
    for name, value in {
        "STRENGTHS": (0.1, 0.5),
        "TAUS": (0.1,),
        "WIDTHS": (0.25, 0.125),
        "DENSE_EPOCHS": 1,
        "REFIT_EPOCHS": 1,
        "SEARCHED_POINTS": 2,
        "BATCH_NORM_STRENGTHS": (0.1,),
    }.items():
        monkeypatch.setattr(frontier_cifar10, name, value)
    monkeypatch.setattr(frontier_cifar10, "MODELS", ("resnet8",))
    arms = frontier_cifar10.arms("resnet8")
    assert {name: setting.method for name, setting in arms.items() if "," not in name} == {
        **{"width": "width", "width with batch norm": "width"},
        **{f"{penalty} {method}": method for penalty in ("rings", "kernels") for method in ("prox", "subgradient")},
    }
    # The epochs are one dense, one for each of two strengths, and one of the refit.
    assert {sum((arms[name].dense_epochs, arms[name].refit_epochs)) for name in arms if "width" in name} == {1 + 2 + 1}
    options = ["--data", "none", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "frontier_cifar10-x.json")]
    assert frontier_cifar10.main([*options, "--only", "resnet8 rings prox"]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["resnet8-dense", "resnet8-rings-prox"]
    assert frontier_cifar10.main(options) == 0
    assert (tmp_path / "frontier_cifar10-x.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "frontier_cifar10-x.json").read_text())
    section = tables.section("frontier_cifar10", tmp_path)
    points = report["networks"]["resnet8"]["rings prox"]["paths"][0]["points"]
    best = 100 * (1 - max(point["refitted"]["accuracy"] for point in points))
    assert f"| rings prox, refitted | {best:.1f} |" in section
    assert "| down |" in section
    assert "Batch normalisation live, live with" in section


def test_trained_networks_are_timed_as_they_are_and_compacted(tmp_path, monkeypatch):
    samples = data.Samples(torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (60,)))
    monkeypatch.setattr(data, "load", lambda name, folder: data.Dataset("cifar10", samples, samples, 10, True))
    for name, value in {"STRENGTHS": {0.25: (0.1, 0.5)}, "DENSE_EPOCHS": 1, "MODELS": ("plain8",)}.items():
        monkeypatch.setattr(trained_cifar10, name, value)
    out = tmp_path / "trained_cifar10-x.json"
    assert trained_cifar10.main(["--data", "none", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    point = json.loads(out.read_text())["networks"]["plain8, width 0.25"]["paths"][0]["points"][0]
    section = tables.section("trained_cifar10", tmp_path)
    assert f"| {point['latency_before'] / point['latency_after']:.2f} |" in section


@pytest.mark.slow
def test_the_efcn_studies_share_one_cnn_and_their_tables_say_what_was_measured(tmp_path, monkeypatch):
    """All studies run on a few random images and a small network; then the report is made from the existing runs."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 3, 8, 8), generator=generator, dtype=torch.uint8)
    samples = data.Samples(images, torch.randint(10, (40,), generator=generator))
    monkeypatch.setattr(data, "load", lambda name, folder: data.Dataset("cifar10", samples, samples, 10, True))
    tiny = {
        "EPOCHS": 2,
        "BRANCH_EPOCHS": 1,
        "SWITCH_TIMES": (1,),
        "LANDSCAPE_SAMPLES": 20,
        "POINTS": 3,
        "STRING_STEPS": 1,
    }
    for name, value in tiny.items():
        monkeypatch.setattr(efcn_paths_cifar10, name, value)
    for name, value in {
        "EPOCHS": 2,
        "BRANCH_EPOCHS": 1,
        "SWITCH_TIMES": (0, 1, 2),
        "FEW_SWITCH_TIMES": (0, 1),
        "LANDSCAPE_SAMPLES": 20,
        "POWER_ITERATIONS": 2,
        "FEW_POWER_ITERATIONS": 1,
        "RADIUS": "1",
        "EFFORT": TINY,
    }.items():
        monkeypatch.setattr(efcn_cifar10, name, value)
    preset = efcn_cifar10.efcn_preset
    small = {"model": "plain8", "width": 0.1, "batch_size": 20}
    for module in (efcn_cifar10, efcn_paths_cifar10):
        monkeypatch.setattr(module, "efcn_preset", lambda name, **options: preset(name, **options | small))
    runs, out = tmp_path / "runs", tmp_path / "efcn_cifar10-x.json"
    options = ["--data", "none", "--runs", str(runs), "--out", str(out)]
    assert efcn_cifar10.main([*options, "--only", "lcn"]) == 0
    assert not out.exists()
    assert efcn_cifar10.main(options) == 0
    weights = [(runs / name / "cnn" / "model.safetensors").read_bytes() for name in efcn_cifar10.studies()]
    assert len(weights) == 3
    assert len(set(weights)) == 1
    for name in efcn_cifar10.FIGURES:
        assert (tmp_path / f"efcn_cifar10-x-{name}.png").stat().st_size > 10_000
    report = json.loads(out.read_text())
    branches = report["networks"]["branches"]
    assert [(branch["relax"], branch["switch_time"]) for branch in branches] == [
        *((relax, time) for time in (0, 1, 2) for relax in ("cnn", "lcn")),
        *((relax, time) for relax in ("1", "full") for time in (0, 1)),
    ]
    section = tables.section("efcn_cifar10", tmp_path)
    full = next(branch for branch in branches if branch["relax"] == "full")
    last = full["epochs"][-1]
    shares = " | ".join(f"{100 * last[name]:.1f}" for name in ("delta_locality", "delta_sharing", "local_accuracy"))
    assert f"| eFCN | 0 | {full['parameters']:,} | 1 |" in section
    assert shares in section
    assert f"| {full['before']['gradient_norm']:.3g} | {full['after']['gradient_norm']:.3g} |" in section
    assert "FCN from scratch" in section
    assert list(report["step_seconds"]) == ["cnn", "lcn", "2", "full"]
    assert f"| LCN | {1e3 * report['step_seconds']['lcn']:.3g} |" in section
    out = tmp_path / "efcn_paths-x.json"
    assert efcn_paths_cifar10.main(["--data", "none", "--runs", str(tmp_path / "paths"), "--out", str(out)]) == 0
    paths = json.loads(out.read_text())["networks"][1]["interpolations"]
    best = max(point["test_accuracy"] for point in paths["string"])
    assert f" {100 * best:.1f} |" in tables.section("efcn_paths", tmp_path)
