"""``loco-ext reproduce``: job lists, resuming, and tables beside the papers' values."""

import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file
from scipy import stats

from loco_ext import commands
from loco_ext.cli import main
from loco_ext.commands import reproduce
from loco_ext.experiments.models import MODELS
from loco_ext.experiments.reproduce import efcn, linear_regions, loco_reg, loco_reg_figures, pilcro, sparsity
from loco_ext.experiments.reproduce.jobs import PRESETS, JobPlan, ordered
from loco_ext.experiments.reproduce.published import entries, published
from loco_ext.version import commit
from tests.processes import kill_when, run_command, start_command

PAPERS = {"loco-reg": loco_reg, "sparsity": sparsity, "efcn": efcn, "pilcro": pilcro, "linear-regions": linear_regions}
DOCS = Path(__file__).parents[2] / "docs" / "reproduce.md"


def plan(preset, out, **options):
    return JobPlan(preset, out, Path("DIR") if preset != "smoke" else None, **options)


@functools.cache
def command_of(name):
    return typer.main.get_command(commands._application(name)).commands[name]


def options_of(job):
    """Return the values of the options of a job's command, as the command itself parses them."""
    name, *words = job.words
    # A file that an option reads is written by an earlier job.
    words = ["0.5,2" if words[i - 1] == "--locality" else word for i, word in enumerate(words)]
    return command_of(name).make_context(name, words).params


def test_published_values_have_a_source_and_are_unique():
    assert all(set(e) == {"paper", "where", "row", "column", "value", "unit"} and e["where"] for e in entries())
    places = Counter((e["paper"], e["where"], e["row"], e["column"]) for e in entries())
    assert set(places.values()) == {1}
    assert {e["paper"] for e in entries()} == set(PAPERS)
    assert published("loco-reg", "Table 5", "FASHION-MNIST, MobileNet", "LOCO-REG") == 5.73
    assert published("loco-reg", "Table 4", "ImageNet, Xception", "upper, neighbours - corners") == -0.329
    assert published("pilcro", "Table 1", "RC+, target:10", "top1") == 0.7833
    assert published("pilcro", "Table 3", "RC-, plain", "noise, level 1") == 0.59
    assert published("pilcro", "Table 3", "RC-, plain", "noise, level 6") is None
    # Section 7.2: test errors improve "from 0.1% up to 0.8% absolutely".
    pairs = [
        [published("loco-reg", "Table 5", f"{data}, {network}", column) for column in ("uniform", "LOCO-REG")]
        for data in ("CIFAR-10", "CIFAR-100", "FASHION-MNIST")
        for network in ("VGG13", "ResNet18", "MobileNet")
    ]
    assert {round(uniform - local, 1) for uniform, local in pairs} <= {0.1, 0.4, 0.5, 0.8}


def test_the_preset_paper_has_the_authors_protocols(tmp_path):
    jobs = {name: module.jobs(plan("paper", tmp_path)) for name, module in PAPERS.items()}
    settings = [(job.name.split("/")[1], job.words[0], options_of(job)) for job in jobs["loco-reg"][::83]]
    assert all(s["preset"] == "paper" for _, command, s in settings if command == "train")
    names = Counter(job.name.split("/")[1] for job in jobs["loco-reg"] if job.words[0] == "train")
    # 20 seeds of uniform decay, and of two rules with four values of c
    assert names.pop("cifar100-vgg13-5x5") == 20
    assert names.pop("cifar10-small") == 1  # of figures 1 and 2
    assert set(names.values()) == {20 * 9}
    assert len(names) == 9
    assert sum(job.words[0] == "analyze" for job in jobs["loco-reg"]) == 9 * 8 + 1
    efcns = [options_of(job) for job in jobs["efcn"]]
    assert [o["switch_times"][0] for o in efcns[:18]] == published("efcn", "Figure 2", "eFCN", "switch times")
    assert [o["preset"] for o in efcns] == ["paper"] * 18 + ["alexnet"] * 18
    assert [o["fcn_epochs"] for o in efcns] == [100, *[0] * 17] * 2
    assert {o["landscape_samples"] for o in efcns} == {50_000}
    pilcros = [options_of(job) for job in jobs["pilcro"]]
    assert Counter(o["crop"] for o in pilcros) == {False: 7, None: 7}
    assert {o["arms"] for o in pilcros} == {
        ("plain",),
        *((f"{k}:{a}",) for k in ("target", "curvature") for a in (1, 10, 100)),
    }
    regions = [options_of(job) for job in jobs["linear-regions"]]
    assert {(o["strengths"], o["percents"]) for o in regions} >= {((2.0,), ("100",)), ((0.25,), ("max",))}
    assert [o["toy"] for o in regions] == [None, *[False] * 24]
    frontiers = [options_of(job) for job in jobs["sparsity"] if job.words[0] == "frontier"]
    assert {o["model"] for o in frontiers} == {"resnet20-a", "plain20", "resnet20-5x5", "plain20-5x5"}
    assert {(o["dense_epochs"], o["method"]) for o in frontiers} == {(0, "subgradient")}
    assert {o["power"] for o in frontiers} == {None, 2}
    assert {o["group_norm"] for o in frontiers} == {None, "linf"}
    assert {o["weighting"] for o in frontiers} == {None, "normalized", "scaled"}


@pytest.mark.parametrize("preset", PRESETS)
def test_jobs_have_folders_of_their_own_and_seeds_are_paired(tmp_path, preset):
    jobs = [job for module in PAPERS.values() for job in module.jobs(plan(preset, tmp_path))]
    assert len({job.folder for job in jobs}) == len(jobs)
    assert {job.words[job.words.index("--out") + 1] for job in jobs} == {str(job.folder) for job in jobs}
    trained = [job for job in PAPERS["loco-reg"].jobs(plan(preset, tmp_path)) if job.words[0] == "train"]
    for job in trained:
        seed = job.words[job.words.index("--seed") + 1]
        assert job.name.endswith(f"-{seed}")
        assert ("--locality" in job.words) == ("uniform" not in job.name) == (job.stage == 3)
    # Inputs are written by earlier stages.
    results = {str(job.result): job.stage for job in jobs} | {str(job.folder): job.stage for job in jobs}
    for job in jobs:
        read = {results[word] for word in job.words if word in results and word != str(job.folder)}
        assert all(stage < job.stage for stage in read)
    if preset == "cpu":
        assert len(trained) == 30
        for job in jobs:
            options_of(job)
        assert sum(job.minutes for job in jobs) <= 120


def test_networks_of_the_papers():
    """VGG13 has kernels of 5x5 where maps are larger; option A has no weights in its shortcuts."""
    sizes = [p.shape[-1] for p in MODELS["vgg13-5x5"].make().parameters() if p.dim() == 4]
    assert sizes == [5] * 6 + [3] * 4
    projected, padded = (
        sum(p.numel() for p in MODELS[name].make().parameters()) for name in ("resnet20", "resnet20-a")
    )
    assert padded == 269_722  # He et al. 2015: 0.27M
    assert projected - padded == 16 * 32 + 32 * 64 + 2 * (32 + 64)


def test_base_architectures_are_those_of_table_2():
    table = sparsity._architectures()
    rows = {row[0]: row for row in table.rows}
    assert rows["plain18-7x7"] == ["plain18-7x7", 17, "ImageNet, D = 18", 17, "yes"]
    different = [name for name, row in rows.items() if row[4] != "yes"]
    assert different == ["resnet20-5x5", "plain20-5x5"]  # of which the draft prints one layer less
    stem = MODELS["resnet8-7x7"].make(3, 1000, 224)[:4]
    assert stem(torch.zeros(1, 3, 224, 224)).shape == (1, 64, 56, 56)


def vgg16():
    """Return random weights by torchvision's names, a sixteenth as wide."""
    state, channels = {}, 3
    widths = (64, 64, 128, 128, *[256] * 3, *[512] * 6)
    for place, width in zip((0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28), widths, strict=True):
        state |= {f"features.{place}.weight": torch.randn(width // 16, channels, 3, 3)}
        state |= {f"features.{place}.bias": torch.randn(width // 16)}
        channels = width // 16
    return state | {f"classifier.{place}.weight": torch.randn(5, 7) for place in (0, 3, 6)}


def resnet50():
    """Return random weights by torchvision's names, a sixteenth as wide."""
    state, channels = {"conv1.weight": torch.randn(4, 3, 7, 7), "bn1.num_batches_tracked": torch.tensor(9)}, 4
    for stage, (blocks, width) in enumerate(((3, 4), (4, 8), (6, 16), (3, 32)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            state[f"{name}.conv1.weight"] = torch.randn(width, channels, 1, 1)
            state[f"{name}.conv2.weight"] = torch.randn(width, width, 3, 3)
            state[f"{name}.bn2.running_mean"] = torch.randn(width)
            state[f"{name}.conv3.weight"] = torch.randn(4 * width, width, 1, 1)
            if block == 0:
                state[f"{name}.downsample.0.weight"] = torch.randn(4 * width, channels, 1, 1)
            channels = 4 * width
    return state | {"fc.weight": torch.randn(10, channels)}


def table_4(state):
    """Return the differences of Table 4 in its order, those of weights of 3x3."""
    of_halves = []
    layers = [w.double().numpy().reshape(-1, 9) for w in state.values() if w.dim() == 4 and w.shape[-1] == 3]
    half = (len(layers) + 1) // 2
    for part in (layers[:half], layers[half:]):
        rings = [(w[:, 4], w[:, 1::2].mean(1), w[:, [0, 2, 6, 8]].mean(1)) for w in part]
        pairs = [[near - far for near, far in itertools.pairwise(ring)] for ring in rings]
        of_halves.append([np.concatenate([p[i] / p[i].std() for p in pairs]).mean() for i in (0, 1)])
    return [np.mean(of_halves, 0).tolist(), *of_halves]


def test_table_4_has_the_networks_of_the_users_files(tmp_path, capsys):
    """Files as torchvision has published them: in torch's old format, with a hash in the name, or renamed."""
    files, out = tmp_path / "files", tmp_path / "out"
    files.mkdir()
    states = {"VGG16": vgg16(), "ResNet50": resnet50()}
    torch.save(states["VGG16"], files / "vgg16-397923af.pth", _use_new_zipfile_serialization=False)
    save_file(states["ResNet50"], files / "ResNet50.safetensors")
    (files / "vgg16_bn-6c64b313.pth").write_text("another network")
    options = ["reproduce", "loco-reg", "--out", str(out), "--checkpoints", str(files), "--quiet"]
    assert main([*options, "--list", "--json"]) == 0
    jobs = [job for job in json.loads(capsys.readouterr().out) if "imagenet" in job["folder"]]
    assert [Path(job["folder"]).name for job in jobs] == ["ResNet50", "VGG16"]
    for job in jobs:
        assert main([*options, "--job", str(job["job"])]) == 0
    table = loco_reg._statistics(JobPlan("smoke", out, checkpoints=files))
    for name, state in states.items():
        rows = [row for row in table.rows if row[0] == name]
        assert [row[2] for row in rows] == ["all", "lower", "upper"]
        assert [[row[3], row[5]] for row in rows] == [pytest.approx(pair) for pair in table_4(state)]
        assert rows[0][4] == published("loco-reg", "Table 4", f"ImageNet, {name}", "all, centre - neighbours")
    assert "VGG16" not in table.notes[-1]


def fake(folder, accuracy):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "metrics.jsonl").write_text(
        json.dumps({"test_accuracy": 0.1}) + "\n" + json.dumps({"test_accuracy": accuracy})
    )


def test_errors_are_compared_by_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(loco_reg_figures, "save", lambda *arguments: {})
    uniform, local = [0.70, 0.72, 0.69, 0.75], [0.71, 0.735, 0.69, 0.758]
    place = tmp_path / "smoke" / "loco-reg" / "digits-small"
    monkeypatch.setitem(loco_reg.SCALES, "smoke", loco_reg.SCALES["smoke"]._replace(seeds=5))
    for name, accuracies in (("uniform", [*uniform, 0.2]), ("local-1.5", local)):  # one seed is not done
        for seed, accuracy in enumerate(accuracies):
            fake(place / f"{name}-{seed}", accuracy)
    page = loco_reg.page(JobPlan("smoke", tmp_path))
    table = next(table for table in page.tables if table.title.startswith("Table 5"))
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    differences = [100 * (b - a) for a, b in zip(local, uniform, strict=True)]
    t = statistics.mean(differences) / (statistics.stdev(differences) / 2)
    row = rows["local-1.5"]
    assert row["seeds"] == 4
    assert row["difference"] == pytest.approx(statistics.mean(differences))
    assert row["p"] == pytest.approx(stats.t.cdf(t, 3))
    assert row["p"] < 0.5
    assert (row["paper: uniform"], row["paper: LOCO-REG"]) == (6.26, 6.13)
    assert (rows["paper-1.5"]["seeds"], rows["paper-1.5"]["error"]) == (0, None)
    page.save(tmp_path)
    assert "| small, digits | local-1.5 | 4 | 27.68 |" in (tmp_path / "reproduce.md").read_text()


def test_jobs_run_once_and_tables_follow(tmp_path, capsys):
    """A job that is not done is listed, run and then skipped; the table has what it measured."""
    arguments = ["reproduce", "linear-regions", "--out", str(tmp_path)]
    assert main([*arguments, "--list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("loco-ext regions --preset quick")
    assert main([*arguments, "--json"]) == 0
    (page,) = json.loads(capsys.readouterr().out).values()
    folder = tmp_path / "smoke" / "linear-regions"
    below = {caption: str(Path(path).relative_to(folder)) for caption, path in page["figures"].items()}
    assert json.loads((folder / "reproduce.json").read_text()) == page | {"figures": below}
    record = json.loads((folder / "seed-0" / "regions.json").read_text())
    ours = {(a["strength"], a["hinge"]): a["median_radius"]["2"]["mean"] for a in record["arms"]}
    assert page["commits"] == [record["commit"]] == [commit()]
    assert commit() in (folder / "reproduce.md").read_text()
    (table,) = page["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert {(row["strength"], row["hinge"]): row["radius, p = 2"] for row in rows} == ours
    assert [row["paper: radius, p = 2"] for row in rows] == [6e-4, 92e-4, 297e-4]
    assert main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == ""
    before = (folder / "seed-0" / "regions.json").stat().st_mtime_ns
    assert main([*arguments, "--job", "1"]) == 0
    assert main(arguments) == 0
    assert (folder / "seed-0" / "regions.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("module", [pilcro, sparsity])
def test_jobs_that_are_done_on_other_data_are_not_done(tmp_path, module):
    """The command train has its data set in settings.json, an experiment in its training's, compact in report.json."""
    plans = [JobPlan("cpu", tmp_path, folder) for folder in (None, Path("DIR"))]
    for job in module.jobs(plans[0]):
        job.folder.mkdir(parents=True)
        job.result.write_text('{"data": "digits"}')
        settings = {"data": "digits"} if job.words[0] == "train" else {"training": {"data": "digits"}}
        if job.words[0] != "compact":
            (job.folder / "settings.json").write_text(json.dumps({"settings": settings}))
    on_digits, on_cifar = map(module.jobs, plans)
    assert all(job.done for job in on_digits)
    assert not any(job.done for job in on_cifar)
    assert "IMAGES of CIFAR-10" in re.sub(r"\d,000 images", "IMAGES", module.page(plans[1]).scale)
    for path in tmp_path.rglob("*.json"):
        path.unlink()
    assert "800 handwritten digits" in module.page(plans[0]).scale


def content(folder):
    """Return the content of a reproduction's pages, and the weights of all networks, by path below the folder."""
    pages = {p.relative_to(folder): json.loads(p.read_text()) for p in folder.rglob("reproduce.json")}
    return pages | {p.relative_to(folder): p.read_bytes() for p in folder.rglob("model.safetensors")}


def times(paths):
    return {path: path.stat().st_mtime_ns for path in paths}


def test_a_killed_reproduction_goes_on(tmp_path):
    """The network that was finished before the kill is kept, and the tables are those of an uninterrupted run."""
    torch.set_num_threads(1)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    command = ["reproduce", "linear-regions", "--quiet", "--out"]
    kill_when(lambda: list(cut.rglob("vanilla-0.json")), *command, cut)
    assert not list(cut.rglob("regions.json"))
    kept = times(cut.rglob("vanilla-0.json"))
    assert main([*command, str(cut)]) == main([*command, str(whole)]) == 0
    assert times(kept) == kept
    assert content(cut) == content(whole)


def test_a_failed_job_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    ran = []

    def fail_first(words):
        ran.append(words)
        return 1 if len(ran) == 1 else 0

    jobs = ordered(loco_reg.jobs(JobPlan("smoke", tmp_path)))
    monkeypatch.setattr(reproduce.commands, "run", fail_first)
    with pytest.raises(reproduce.FailedJobsError, match=f"without them: {jobs[0].name}$"):
        reproduce._ended(reproduce._run(jobs), [])
    assert len(ran) == len(jobs)
    assert "job 8 of 8, loco-reg/digits-small/paper-1.5-1; about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["loco-reg", "--preset", "paper"], "--data: expected the folder of the data sets with the preset paper"),
        (["efcn", "--preset", "cpu"], "--data: expected the folder of CIFAR-10 with the preset cpu of efcn or all"),
        (["all", "--preset", "cpu"], "--data: expected the folder of CIFAR-10 with the preset cpu of efcn or all"),
        (["sparsity", "--stage", "3"], "--stage: expected at most 2, got 3"),
        (["loco-reg", "--job", "9"], "--job: expected a number from 1 to 8, got 9"),
        (["loco-reg", "--job", "1", "--stage", "3"], "--job: expected a number of stage 3, got 1"),
        (["loco"], "expected one of loco-reg, sparsity, efcn, pilcro, linear-regions, all"),
        (["loco-reg", "--checkpoints", "nowhere"], "--checkpoints: expected a folder, got 'nowhere'"),
    ],
)
def test_errors_name_the_option(tmp_path, capsys, options, said):
    assert main(["reproduce", *options, "--out", str(tmp_path / "runs")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_example_with_xargs_runs(tmp_path):
    """All lines of the page's example run in two processes; the command that follows has nothing left to train."""
    (example,) = re.findall(r"^```sh\n(for stage.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "loco-ext").write_text(f'#!/bin/sh\nexec {sys.executable} -m loco_ext.cli "$@"\n')
    (tmp_path / "loco-ext").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    here = os.environ | {"PATH": path, "PYTHONPATH": str(DOCS.parents[1]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(["bash", "-ec", example], cwd=tmp_path, env=here, capture_output=True, text=True, check=True)
    assert "job 1 of" not in found.stderr
    page = json.loads((tmp_path / "runs/reproduce/smoke/loco-reg/reproduce.json").read_text())
    table = next(table for table in page["tables"] if table["title"].startswith("Table 5"))
    assert [row[2] for row in table["rows"]] == [2, 2, 2]
    assert all(math.isfinite(row[3]) for row in table["rows"])
    assert len(page["figures"]) == 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of all papers at the preset smoke."""
    folder = tmp_path_factory.mktemp("whole")
    process = start_command(["reproduce", "all", "--out", folder], folder / "said.txt")
    process.join()
    said = (folder / "said.txt").read_text()
    assert process.exitcode == 0, said
    assert "Warning" not in said
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_the_preset_smoke_reproduces_a_paper(whole, capsys, paper):
    assert main(["reproduce", paper, "--out", str(whole), "--json"]) == 0
    printed = capsys.readouterr()
    assert "job 1 of" not in printed.err  # all have been run with those of the other papers
    (page,) = json.loads(printed.out).values()
    unreproduced = [table for table in page["tables"] if not table["rows"]]
    assert all("Not reproduced" in table["notes"][0] for table in unreproduced)
    assert page["figures"]
    text = (whole / "smoke" / paper / "reproduce.md").read_text()
    assert text.count("![") == len(page["figures"])


@pytest.mark.slow
def test_the_preset_smoke_trains_by_locality(whole):
    """No layer's factors fall back to (1, 1), and each rule makes other weights out of the same first ones."""
    page = json.loads((whole / "smoke" / "loco-reg" / "reproduce.json").read_text())
    factors = next(table for table in page["tables"] if table["title"].startswith("Table 6"))
    assert len(factors["rows"]) == 3
    assert all(1.0 not in row[2:] for row in factors["rows"])
    for seed in (0, 1):
        places = [
            whole / "smoke/loco-reg/digits-small" / f"{name}-{seed}" for name in ("uniform", "local-1.5", "paper-1.5")
        ]
        assert len({(place / "model.safetensors").read_bytes() for place in places}) == 3


KILLS = (  # a file that a job writes on its way, and the job's result
    ("loco-reg/digits-small/uniform-1/checkpoint.pt", "model.safetensors"),
    ("sparsity/resnet8-a/rings-plain/alpha-0.01/path-0.25/point-00.pt", "../frontier.json"),
    ("efcn/plain8/switch-000/branches/000-full/before.json", "../../efcn.json"),
    ("pilcro/RC-/target-10-0/target-10-0/landscape.json", "../landscapes.json"),
    ("linear-regions/seed-0/runs/vanilla-0.json", "../regions.json"),
    ("loco-reg/digits-small/paper-1.5-0/settings.json", "model.safetensors"),
)


@pytest.mark.slow
def test_all_papers_go_on_after_kills(whole, tmp_path):
    """Files written before a kill are kept, whether their job was done or not, and all results are as without kills."""
    command, kept = ["reproduce", "all", "--out", tmp_path], {}
    for name, result in KILLS:
        reached = tmp_path / "smoke" / name
        kill_when(reached.exists, *command)
        assert not (reached.parent / result).exists()
        assert times(kept) == kept
        jobs = [job for module in PAPERS.values() for job in module.jobs(plan("smoke", tmp_path))]
        kept = times([*(job.result for job in jobs if job.done), *([] if "settings" in name else [reached])])
    run_command(*command)
    assert times(kept) == kept
    assert content(tmp_path) == content(whole)
