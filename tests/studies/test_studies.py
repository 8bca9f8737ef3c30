"""The studies on CIFAR-10, run on a few random images: their summaries and tables; the docs have the committed ones."""

import copy
import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from scipy import stats

from bench import generated, harness
from loco_ext.analysis import estimate_locality
from loco_ext.experiments import data, figures, region_pictures, regions
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.reproduce.pages import Page, Table
from loco_ext.experiments.train import make_optimizer, train_epoch
from loco_ext.sparsity.budget.distillation import TEMPERATURE, WEIGHT
from studies import (
    budget_cifar10,
    efcn_cifar10,
    fitting,
    frontier_cifar10,
    landscapes_cifar10,
    locality_cifar10,
    locality_sizes_cifar10,
    papers,
    regions_digits,
    summaries,
    tables,
    trained_cifar10,
)

HAS_PEER = find_spec("torch_pruning") is not None


def few_images(monkeypatch, module, count, size=8, **constants):
    """Replace CIFAR-10 by random images in a study, and its constants by others."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    samples = data.Samples(images, torch.randint(10, (count,), generator=generator))
    dataset = data.Dataset("cifar10", samples, samples, 10, True)
    monkeypatch.setattr(module, "load", lambda name, folder: dataset, raising=False)
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)


def without_figures_of_runs(monkeypatch, runs):
    """Let no run of a study draw its own figures, which other tests look at; the study's own are drawn."""
    save, own = figures.save, runs / "figures"
    monkeypatch.setattr(figures, "save", lambda drawn, out: save(drawn, out) if out == own else None)


def section(name, folder):
    return generated.section(name, tables.RENDERERS, folder)


def test_the_page_has_the_committed_results():
    assert tables.main(["--check"]) == 0


def test_pages_of_papers_are_copied_with_their_figures_and_shown(tmp_path):
    """A copy replaces the former one and its figures; the section's links are relative to the documentation's page."""
    made, kept, page = tmp_path / "cpu" / "pilcro", tmp_path / "studies" / "kept", tmp_path / "docs" / "papers.md"
    for name in ("a/first.png", "second.png"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(name.encode())
    (kept / "pilcro").mkdir(parents=True)
    (kept / "pilcro" / "old.png").write_bytes(b"")
    figures = {"One (of two)": made / "a" / "first.png", "Two": made / "second.png", "None": made / "missing.png"}
    Page("PILCRO", "Cut down.", [Table("Table 1", {"x": ".1f"}, [[0.25]], ["A note."])], figures).save(made)
    assert papers.collect(made.parent, kept) == ["pilcro"]
    copied = {str(path.relative_to(kept / "pilcro")) for path in kept.rglob("*") if path.is_file()}
    assert copied == {"reproduce.json", "reproduce.md", "a/first.png", "second.png"}
    shown = papers.sections(kept, page)
    assert shown["pilcro"] == (
        "\nCut down.\n\n### Table 1\n\n| x |\n| --- |\n| 0.2 |\n\nA note.\n\n"
        "![One (of two)](../studies/kept/pilcro/a/first.png)\n\n![Two](../studies/kept/pilcro/second.png)\n\n"
    )
    assert shown["loco_reg"] == "\nNot measured yet.\n\n"
    with pytest.raises(ValueError, match="folder: expected the folder of a preset"):
        papers.collect(tmp_path, kept)


def test_locality_compares_paired_runs_with_the_factors_of_the_uniform_networks(tmp_path, monkeypatch):
    """Each network's accuracy is replaced by another one: those of so small networks are the same in all arms."""
    few_images(monkeypatch, locality_cifar10, 40)
    random, train, accuracies = np.random.default_rng(0), locality_cifar10.run.run, {}

    def run(setting, dataset, folder, *given, **options):
        *before, last = train(setting, dataset, folder, *given, **options)
        accuracies[folder.name] = random.random()
        return [*before, replace(last, test_accuracy=accuracies[folder.name])]

    monkeypatch.setattr(locality_cifar10.run, "run", run)
    locality_cifar10.main(tmp_path, tmp_path, seeds=3, epochs=1, stat="rms", out=tmp_path / "locality_cifar10-rms.json")
    arms = json.loads((tmp_path / "locality_cifar10-rms.json").read_text())["arms"]
    uniform = [load_file(tmp_path / f"uniform-{seed}" / "model.safetensors") for seed in range(3)]
    errors = {}
    for arm, runs in (("uniform", "uniform"), ("local", "local-rms"), ("paper", "paper-rms")):
        errors[arm] = np.array([100 * (1 - accuracies[f"{runs}-{seed}"]) for seed in range(3)])
        summary = arms[arm]["summary"]
        assert summary["error"] == pytest.approx(errors[arm].mean())
        assert summary["standard_error"] == pytest.approx(stats.sem(errors[arm]))
        assert (summary["median"], summary["count"]) == (pytest.approx(np.median(errors[arm])), 3)
    for rule in ("local", "paper"):
        expected = estimate_locality(uniform, eta_rule=rule, stat="rms")
        settings = json.loads((tmp_path / f"{rule}-rms-2" / "settings.json").read_text())["settings"]
        assert settings["seed"] == 2
        assert settings["locality"] == {name: list(factors) for name, factors in expected.items()}
        assert arms[rule]["locality"].keys() == expected.keys()
        difference = errors[rule] - errors["uniform"]
        assert arms[rule]["summary"]["difference"] == pytest.approx(difference.mean())
        assert arms[rule]["summary"]["difference_standard_error"] == pytest.approx(stats.sem(difference))
        assert arms[rule]["summary"]["paired_p"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)
    assert "| local |" in section("locality_cifar10", tmp_path)


def test_errors_are_compared_in_pairs():
    errors, others = np.array([3.0, 5.0, 4.0]), np.array([1.0, 2.0, 4.5])
    found = summaries.compare(errors, others)
    assert found["difference"] == pytest.approx(1.5)
    assert found["difference_standard_error"] == pytest.approx(stats.sem(errors - others))
    assert found["paired_p"] == pytest.approx(stats.ttest_1samp(errors - others, 0).pvalue)


@pytest.mark.slow
def test_locality_by_size_tunes_uniform_decay_then_compares_by_seed_and_goes_on(tmp_path, monkeypatch):
    study = locality_sizes_cifar10
    few_images(monkeypatch, study, 60, 32, HELD_OUT=20, EPOCHS_OF_ALL=0.05, STRENGTHS={"sgd": (1e-4, 10.0)})
    out = tmp_path / "locality_sizes_cifar10-x.json"
    options = {"images": "30,60", "kernels": "5", "optimizers": "sgd", "out": out}
    study.main(tmp_path, **options, seeds=1, first=0)
    first = json.loads(out.read_text())["networks"]
    assert len(first) == 2 * (2 * 2 + 4)
    study.main(tmp_path, **options, seeds=1, first=1)
    report = json.loads(out.read_text())
    assert report["networks"][: len(first)] == first
    assert len(report["networks"]) == len(first) + 2 * 4
    for cell in report["cells"]:
        mine = [n for n in report["networks"] if n["images"] == cell["images"]]
        tuned = [n for n in mine if n["arm"] == "tuning"]
        errors = {s: np.mean([n["error"] for n in tuned if n["strength"] == s]) for s in (1e-4, 10.0)}
        assert errors[cell["strength"]] == min(errors.values())
        pair = [n["locality"] for n in tuned if n["strength"] == cell["strength"]]
        for layer, factors in cell["locality"].items():
            assert len(factors) == 6  # distance classes of 5x5
            assert factors == pytest.approx(np.mean([each[layer] for each in pair], 0))
        compared = {arm: [n for n in mine if n["arm"] == arm] for arm in cell["arms"]}
        assert {len(found) for found in compared.values()} == {2}
        assert {n["strength"] for found in compared.values() for n in found} == {cell["strength"]}
        uniform = [n["error"] for n in compared.pop("uniform")]
        for arm, found in compared.items():
            difference = np.subtract([n["error"] for n in found], uniform)
            s = cell["arms"][arm]
            assert s["difference"] == pytest.approx(difference.mean())
            assert s["difference_standard_error"] == pytest.approx(stats.sem(difference))
    study.main(tmp_path, **options | {"images": "30"}, seeds=2, first=0, tuned=True)
    networks = json.loads(out.read_text())["networks"]
    tuned = [n for n in networks if n["arm"] == "tuning, towards the centre"]
    errors = {s: np.mean([n["error"] for n in tuned if n["strength"] == s]) for s in (1e-4, 10.0)}
    best = min(errors, key=errors.__getitem__)
    centre = [n for n in networks if n["arm"] == "towards the centre" and n["images"] == 30 and n["strength"] == best]
    arm = json.loads(out.read_text())["cells"][0]["arms"]["towards the centre, tuned"]
    assert (arm["strength"], arm["error"]) == (best, pytest.approx(np.mean([n["error"] for n in centre])))
    assert "| 30 | 5x5 | sgd |" in section("locality_sizes_cifar10", tmp_path)


def test_networks_of_a_seed_begin_alike_and_their_decay_is_that_of_the_arm():
    study = locality_sizes_cifar10.Study(data.load("digits", None))
    cell = locality_sizes_cifar10.Cell(500, 5, "adamw")
    once, again = (study.network(5, 3).state_dict() for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert {tuple(w.shape[2:]) for w in once.values() if w.dim() == 4} == {(5, 5)}
    training = study.training(cell, 0.3, 3, (0.5, 2.0))
    assert (training.epochs, training.weight_decay, training.seed) == (160, 0.3, 3)
    kernels, *_ = make_optimizer(training, study.network(5, 3), study.dataset).param_groups
    assert (kernels["locality"], kernels["weight_decay"]) == ([(0.5, 2.0)] * 3, 0.3)


@pytest.mark.slow
def test_networks_of_each_way_have_their_share_of_the_macs_and_are_trained_once(tmp_path, monkeypatch):
    """Two ways have a second seed; each network's time is measured without choosing how to compute its layers."""
    effort = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1, builds=1)
    constants = {"WIDTHS": np.array([1.0, 0.7]), "TIMED": {1: "1 image"}, "EFFORT": effort, "PRUNING_STEPS": 10}
    few_images(monkeypatch, budget_cifar10, 40, 8, **constants)
    out = tmp_path / "budget_cifar10-x.json"
    options = {"model": "resnet8", "first": 0, "epochs": 2, "images": 40, "device": "cpu", "branches": "attention"}
    names = ("dense", "uniform width", "shrink_to", "Budget", "shrink_to, distilled")
    names += ("Torch-Pruning, local",) if HAS_PEER else ()
    ways = {name: replace(budget_cifar10.WAYS[name], shares=(1.0 if name == "dense" else 0.5,)) for name in names}
    monkeypatch.setattr(budget_cifar10, "WAYS", ways)
    budget_cifar10.main(tmp_path, tmp_path / "runs", out=out, seeds=1, time=False, ways="", **options)
    first = json.loads(out.read_text())["networks"]
    options["ways"] = "dense; uniform width"
    budget_cifar10.main(tmp_path, tmp_path / "runs", out=out, seeds=2, time=False, **options)
    report = json.loads(out.read_text())
    assert report["networks"][: len(first)] == first
    assert len(report["networks"]) == len(first) + 2 == len(names) + 2
    assert all(0.7 * record["share"] < record["macs"] <= record["share"] for record in report["networks"])
    assert {arm["way"] for arm in report["arms"]} == set(names)
    assert all(arm["latencies"] == {"1 image": None} for arm in report["arms"])
    trained = sorted((tmp_path / "runs").iterdir())
    monkeypatch.setattr(budget_cifar10.sparsity, "compact", partial(budget_cifar10.sparsity.compact, cost="macs"))
    budget_cifar10.main(tmp_path, tmp_path / "runs", out=out, seeds=2, time=True, **options)
    assert sorted((tmp_path / "runs").iterdir()) == trained
    timed = json.loads(out.read_text())
    assert [{k: v for k, v in n.items() if k != "latencies"} for n in timed["networks"]] == report["networks"]
    assert all(arm["latencies"]["1 image"] > 0 for arm in timed["arms"])
    assert "| 50% | Budget |" in section("budget_cifar10", tmp_path)


@pytest.mark.parametrize(("branches", "inner", "size"), [("groups", [16, 32, 64], 4), ("inverted", [64, 128, 256], 1)])
def test_branches_have_convolutions_in_groups(branches, inner, size, tmp_path, monkeypatch):
    few_images(monkeypatch, budget_cifar10, 40)
    dataset = budget_cifar10.load("cifar10", tmp_path)
    study = budget_cifar10.Study(dataset, tmp_path, "resnet8", 2, branches=branches)
    network = study.network(0)
    found = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d) and m.groups > 1]
    assert [(m.kernel_size, m.stride, m.in_channels, m.out_channels, m.in_channels // m.groups) for m in found] == [
        ((3, 3), (stride, stride), channels, channels, size) for stride, channels in zip((1, 2, 2), inner, strict=True)
    ]
    assert network(study.images).shape == (1, 10)


def test_a_network_that_was_shrunk_to_a_latency_is_kept_and_may_be_trained_elsewhere(tmp_path, monkeypatch):
    few_images(monkeypatch, budget_cifar10, 40, TIMED={1: "1 image"})
    study = budget_cifar10.Study(budget_cifar10.load("cifar10", tmp_path).first(40), tmp_path, "resnet8", 2)
    narrow = study.network(0, 0.5)
    monkeypatch.setattr(budget_cifar10, "_as_fast", lambda *arguments: copy.deepcopy(narrow))
    found = budget_cifar10.as_fast(study, 0, 0.5)
    assert (tmp_path / "dense-0-1.pt").exists()  # trained where the study runs, before the search on the CPU
    assert not torch.equal(next(found.parameters()), next(narrow.parameters()))
    monkeypatch.setattr(budget_cifar10, "_as_fast", None)
    again = budget_cifar10.as_fast(study, 0, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))


def test_a_budget_of_latency_is_that_of_fewer_channels_for_as_many_images_as_are_timed(tmp_path, monkeypatch):
    few_images(monkeypatch, budget_cifar10, 40, TIMED={1: "1 image", 3: "3 images"}, WIDTHS=np.array([1.0, 0.7]))
    study = budget_cifar10.Study(budget_cifar10.load("cifar10", tmp_path).first(40), tmp_path, "resnet8", 2)
    monkeypatch.setattr(budget_cifar10.Study, "latency_budget", lambda self, narrow, dense: 0.7)
    given = {}
    monkeypatch.setattr("loco_ext.experiments.train.Budget", lambda *arguments, **options: given.update(options))
    budget_cifar10.gradually_as_fast(study, 0, 0.5)
    assert given["latency"] == 0.7
    assert given["granularity"] == "filters"
    assert len(given["example_inputs"]) == 3
    with pytest.raises(ValueError, match="device: expected the CPU"):
        budget_cifar10.gradually_as_fast(replace(study, device=torch.device("meta")), 0, 0.5)


def test_unknown_ways_are_refused(tmp_path, monkeypatch):
    few_images(monkeypatch, budget_cifar10, 40)
    options = {"model": "resnet8", "first": 0, "epochs": 2, "images": 40, "seeds": 1, "time": False, "out": None}
    with pytest.raises(typer.BadParameter, match=r"ways: .*, got \['shrinking'\]"):
        budget_cifar10.main(tmp_path, tmp_path / "runs", ways="Budget; shrinking", device="cpu", **options)


def test_distilled_ways_are_compared_with_distilled_networks_of_fewer_channels_by_seed_and_device():
    ways = {"uniform width": 30.0, "shrink_to": 28.0, tables.PEER: 29.0}
    ways |= {"uniform width, distilled": 25.0, "shrink_to, distilled": 24.0}
    networks = [
        {"way": way, "share": 0.5, "seed": seed, "error": error + seed * shift, "macs": 0.5, "device": "CPU"}
        for shift, (way, error) in enumerate(ways.items())
        for seed in range(2)
    ]
    networks += [n | {"error": 50.0, "device": "GPU"} for n in networks if n["way"] == "shrink_to"]
    arms = {arm["way"]: arm for arm in budget_cifar10.summary(networks)}
    report = {"settings": {"model": "resnet8", "epochs": 2}, "training_samples": 9, "arms": list(arms.values())}
    (table,) = tables.budget_cifar10(report)
    assert {row[1]: row[3:5] for row in table.rows} == {
        "uniform width": [tables.MISSING, "+0.00 ± 1.00"],
        "shrink_to": ["-1.50 ± 0.50", "-1.50 ± 0.50"],
        tables.PEER: ["+0.00 ± 1.00", tables.MISSING],
        "uniform width, distilled": [tables.MISSING, "-3.50 ± 0.50"],
        "shrink_to, distilled": ["-0.50 ± 0.50", "-4.00 ± 1.00"],
    }


def test_readme_shows_the_halves_of_the_study_of_most_networks(tmp_path):
    arm = {"share": 0.5, "error": 30.0, "networks": 1, "macs": 0.499, "latencies": {"1 image": 0.8}}
    dense = arm | {"way": "dense", "share": 1.0, "macs": 1.0, "latencies": {"1 image": 1.0}}
    few = {"settings": {"model": "resnet8", "epochs": 2}, "training_samples": 90, "arms": [dense]}
    ours = [dense, arm | {"way": "shrink_to", "error": 33.33, "networks": 3}, arm | {"way": "shrink_to", "share": 0.25}]
    for name, report in (("a", few), ("b", few | {"training_samples": 10, "arms": ours}), ("c", few)):
        (tmp_path / f"budget_cifar10-{name}.json").write_text(json.dumps(report))
    title, *lines = tables.halves(tmp_path).strip().splitlines()
    assert "10 training images" in title
    assert lines[-2:] == ["| dense | 30.0% | 1 | 100% | 1.00 |", "| `shrink_to` | 33.3% | 3 | 50% | 0.80 |"]


def test_the_dense_network_is_trained_once_and_teaches_with_its_last_weights(tmp_path, monkeypatch):
    few_images(monkeypatch, budget_cifar10, 40)
    study = budget_cifar10.Study(budget_cifar10.load("cifar10", None), tmp_path, "resnet8", 2)
    optimizer = make_optimizer(study.training(0), dense := study.network(0), study.dataset)
    study.fit(dense, 0, optimizer=optimizer)
    found, again = study.fit(study.network(1), 0, distilled=True), study.network(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense-0-1.pt", "dense-0-2.pt"]
    teach = partial(train_epoch, teacher=Teacher(dense.eval(), WEIGHT, TEMPERATURE))
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "train_epoch", lambda *arguments, teacher, **options: teach(*arguments, **options))
        study.fit(again, 0)
    pairs = list(zip(found.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    monkeypatch.setattr(fitting, "train_epoch", None)
    for a, b in zip(study.dense(0, 2).state_dict().values(), dense.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_the_frontiers_arms_are_comparable_and_its_tables_say_what_was_measured(tmp_path, monkeypatch):
    """One arm, then all arms run on a few random images, with two strengths; the second call reuses the first's run."""
    tiny = {"STRENGTHS": (0.1, 0.5), "TAUS": (0.1,), "WIDTHS": (0.25, 0.125), "DENSE_EPOCHS": 1, "REFIT_EPOCHS": 1}
    tiny |= {"SEARCHED_POINTS": 2, "BATCH_NORM_STRENGTHS": (0.1,), "MODELS": ("resnet8",)}
    few_images(monkeypatch, frontier_cifar10, 100, **tiny)
    arms = frontier_cifar10.arms("resnet8")
    assert {name: setting.method for name, setting in arms.items() if "," not in name} == {
        **{"width": "width", "width with batch norm": "width"},
        **{f"{penalty} {method}": method for penalty in ("rings", "kernels") for method in ("prox", "subgradient")},
    }
    # The epochs are one dense, one for each of two strengths, and one of the refit.
    assert {sum((arms[name].dense_epochs, arms[name].refit_epochs)) for name in arms if "width" in name} == {1 + 2 + 1}
    runs, out = tmp_path / "runs", tmp_path / "frontier_cifar10-x.json"
    without_figures_of_runs(monkeypatch, runs)
    frontier_cifar10.main(tmp_path, runs, out, only="resnet8 rings prox")
    assert [path.name for path in runs.iterdir()] == ["resnet8-dense", "resnet8-rings-prox"]
    frontier_cifar10.main(tmp_path, runs, out)
    assert out.with_suffix(".png").stat().st_size > 10_000
    record = json.loads((runs / "resnet8-rings-prox" / "frontier.json").read_text())
    best = 100 * (1 - max(point["refitted"]["accuracy"] for point in record["paths"][0]["points"]))
    text = section("frontier_cifar10", tmp_path)
    assert f"| rings prox, refitted | {best:.1f} |" in text
    assert "| down |" in text
    assert "Batch normalisation live, live with" in text


@pytest.mark.slow
def test_trained_networks_are_timed_as_they_are_and_compacted(tmp_path, monkeypatch):
    few_images(monkeypatch, frontier_cifar10, 60)
    few_images(monkeypatch, trained_cifar10, 60, STRENGTHS={0.25: (0.1, 0.5)}, DENSE_EPOCHS=1, MODELS=("plain8",))
    out = tmp_path / "trained_cifar10-x.json"
    trained_cifar10.main(tmp_path, tmp_path / "runs", out)
    point = json.loads(out.read_text())["networks"]["plain8, width 0.25"]["paths"][0]["points"][0]
    assert f"| {point['latency_before'] / point['latency_after']:.2f} |" in section("trained_cifar10", tmp_path)


@pytest.mark.slow
def test_the_efcn_studies_share_one_cnn_and_their_tables_say_what_was_measured(tmp_path, monkeypatch):
    """All studies run on a few random images and a small network; then the report is made from the existing runs."""
    tiny = {"EPOCHS": 2, "BRANCH_EPOCHS": 1, "LANDSCAPE_SAMPLES": 20}
    tiny |= {"SWITCH_TIMES": (0, 1, 2), "FEW_SWITCH_TIMES": (0, 1), "POWER_ITERATIONS": 2, "FEW_POWER_ITERATIONS": 1}
    tiny |= {"PATHS_SWITCH_TIMES": (1,), "POINTS": 3, "STRING_STEPS": 1}
    effort = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1)
    few_images(monkeypatch, efcn_cifar10, 40, **tiny, RADIUS="1", EFFORT=effort)
    preset = efcn_cifar10.efcn_preset
    small = {"model": "plain8", "width": 0.1, "batch_size": 20}
    monkeypatch.setattr(efcn_cifar10, "efcn_preset", lambda name, **options: preset(name, **options | small))
    runs, out = tmp_path / "runs", tmp_path / "efcn_cifar10-x.json"
    without_figures_of_runs(monkeypatch, runs)
    efcn_cifar10.main(tmp_path, runs, out, only="lcn")
    assert not out.exists()
    efcn_cifar10.main(tmp_path, runs, out)
    weights = [(runs / name / "cnn" / "model.safetensors").read_bytes() for name in efcn_cifar10.studies()]
    assert len(weights) == 4
    assert len(set(weights)) == 1
    for name in efcn_cifar10.FIGURES:
        assert (tmp_path / f"efcn_cifar10-x-{name}.png").stat().st_size > 10_000
    report = json.loads(out.read_text())
    assert [(network["relax"], network["switch_time"]) for network in report["networks"]] == [
        ("cnn", None),
        *((relax, time) for time in (0, 1, 2) for relax in ("cnn", "lcn")),
        *((relax, time) for relax in ("1", "full") for time in (0, 1)),
        ("fcn", None),
    ]
    text = section("efcn_cifar10", tmp_path)
    full = next(network for network in report["networks"] if network["relax"] == "full")
    shares = [f"{100 * full['last'][name]:.1f}" for name in ("delta_locality", "delta_sharing")]
    norms = [f"{full[when]['gradient_norm']:.3g}" for when in ("before", "after")]
    step = f"{1e3 * report['step_seconds']['lcn']:.3g}"
    for cells in (["eFCN", "0", f"{full['parameters']:,}", "1"], shares, norms, ["LCN", step]):
        assert f"| {' | '.join(cells)} |" in text
    assert list(report["step_seconds"]) == ["cnn", "lcn", "2", "full"]
    paths = json.loads((runs / "paths" / "efcn.json").read_text())["branches"][1]["interpolations"]
    best = max(point["test_accuracy"] for point in paths["string"])
    assert f" {100 * best:.1f} |" in section("efcn_paths", tmp_path)


@pytest.mark.slow
def test_landscapes_are_summarised_by_arm(tmp_path, monkeypatch):
    tiny = {"EPOCHS": 1, "ARMS": ("plain", "curvature:1"), "TRAINING_IMAGES": 30, "TEST_IMAGES": 25}
    few = dict.fromkeys(landscapes_cifar10.MEASURED, 6)
    few_images(monkeypatch, landscapes_cifar10, 40, **tiny, MEASURED=few)
    runs, out = tmp_path / "runs", tmp_path / "landscapes_cifar10-x.json"
    landscapes_cifar10.main(tmp_path, runs, out, seeds=2)
    assert out.with_suffix(".png").stat().st_size > 10_000
    networks = json.loads((runs / "landscapes.json").read_text())["networks"]
    report = json.loads(out.read_text())
    assert (report["training_samples"], report["test_samples"]) == (30, 25)
    first, second = (100 * network["test"]["top1"] for network in networks if network["arm"] == "curvature:1")
    assert f"| curvature:1 | {(first + second) / 2:.1f} ± {abs(first - second) / 2:.1f} |" in section(
        "landscapes_cifar10", tmp_path
    )
    names = ("snow", "frost", "fog", "brightness")
    weather = [[network["robustness"]["accuracy"][name] for name in names] for network in networks[::2]]
    assert report["curves"]["plain"]["accuracy"]["weather"] == pytest.approx(np.mean(weather, (0, 1)), rel=1e-3)


def test_a_loss_that_is_not_finite_is_kept_as_null_and_shown_as_infinite():
    points = [{"test_accuracy": 0.5, "train_loss": loss} for loss in (1.0, None)]
    network = {"relax": "lcn", "switch_time": 3, "interpolations": dict.fromkeys(("linear", "string"), points)}
    assert summaries.paths(network)["methods"]["linear"]["highest_loss"] is None
    (table,) = tables.efcn_paths({"networks": [summaries.paths(network)]})
    assert table.rows == [["LCN", "3", "50.0", "50.0", "50.0", "50.0", "inf", "inf"]]


def test_regions_are_compared_in_paired_runs(tmp_path, monkeypatch):
    tiny = {"data": "digits", "epochs": 1, "units": 6, "layers": 1, "strengths": (0.5,), "hinges": (1.0,)}
    monkeypatch.setitem(regions.PRESETS, "quick", tiny | {"percents": ("max",), "seeds": 2})
    monkeypatch.setattr(region_pictures, "PIXELS", 10)
    monkeypatch.setattr(region_pictures, "TOY_STEPS", 2)
    out = tmp_path / "regions_digits-x.json"
    regions_digits.main(tmp_path / "runs", out)
    record = json.loads((tmp_path / "runs" / "regions.json").read_text())
    roll = next(arm for arm in record["arms"] if arm["strength"])
    text = section("regions_digits", tmp_path)
    assert f"| 0.5, 1, max | {100 * roll['accuracy']['mean']:.2f} ± " in text
    assert f"{roll['ratio']['2']['mean']:.2f} ± {roll['ratio']['2']['standard_error']:.2f} |" in text
    for name in ("regions", "toy"):
        assert (tmp_path / f"regions_digits-x-{name}.png").read_bytes().startswith(b"\x89PNG")
