"""``loco-ext reproduce``: job lists, resuming, and tables beside the papers' values."""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from multiprocessing.connection import Listener
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
from loco_ext.experiments.reproduce.jobs import JobPlan
from loco_ext.experiments.reproduce.published import published, tables
from loco_ext.version import commit
from tests.drawing import without_drawing
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
    assert all(set(t) == {"paper", "where", "columns", "rows"} and t["where"] for t in tables())
    rows = [(t["paper"], t["where"], t["columns"], row) for t in tables() for row, *_ in t["rows"]]
    assert set(Counter((*place, row, column) for *place, columns, row in rows for column in columns).values()) == {1}
    assert {t["paper"] for t in tables()} == set(PAPERS)
    for value, *place in (
        (-0.329, "loco-reg", "Table 4", "ImageNet, Xception", "upper, neighbours - corners"),
        (0.59, "pilcro", "Table 3", "RC-, plain", "noise, level 1"),
        (None, "pilcro", "Table 3", "RC-, plain", "noise, level 6"),
    ):
        assert published(*place) == value
    # Section 7.2: test errors improve "from 0.1% up to 0.8% absolutely".
    pairs = [
        [published("loco-reg", "Table 5", f"{data}, {network}", column) for column in ("uniform", "LOCO-REG")]
        for data in ("CIFAR-10", "CIFAR-100", "FASHION-MNIST")
        for network in ("VGG13", "ResNet18", "MobileNet")
    ]
    assert {round(uniform - local, 1) for uniform, local in pairs} <= {0.1, 0.4, 0.5, 0.8}


def test_the_preset_paper_has_the_authors_protocols(tmp_path):
    jobs = {name: module.jobs(plan("paper", tmp_path)) for name, module in PAPERS.items()}
    assert {options_of(job)["preset"] for job in jobs["loco-reg"][::83] if job.words[0] == "train"} == {"paper"}
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
    arms = {"plain", *(f"{kind}:{alpha}" for kind in ("target", "curvature") for alpha in (1, 10, 100))}
    assert {arm for o in pilcros for arm in o["arms"]} == arms
    regions = [options_of(job) for job in jobs["linear-regions"]]
    assert {(o["strengths"], o["percents"]) for o in regions} >= {((2.0,), ("100",)), ((0.25,), ("max",))}
    assert [o["toy"] for o in regions] == [None, *[False] * 24]
    frontiers = [options_of(job) for job in jobs["sparsity"] if job.words[0] == "frontier"]
    assert {o["model"] for o in frontiers} == {"resnet20-a", "plain20", "resnet20-5x5", "plain20-5x5"}
    assert {(o["dense_epochs"], o["method"]) for o in frontiers} == {(0, "subgradient")}
    variants = {(o["power"], o["group_norm"], o["weighting"]) for o in frontiers}
    assert variants == {(None,) * 3, (2, None, None), (None, "linf", None)} | {
        (None, None, weighting) for weighting in ("normalized", "scaled")
    }


@pytest.mark.parametrize("preset", loco_reg.SCALES)
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


def test_networks_are_those_of_the_papers():
    """VGG13 has kernels of 5x5 where maps are larger; option A has no weights in its shortcuts."""
    assert all(row[-1] == "yes" for row in loco_reg._networks().rows)
    rows = {row[0]: row for row in sparsity._architectures().rows}
    assert rows["plain18-7x7"] == ["plain18-7x7", 17, "ImageNet, D = 18", 17, "yes"]
    different = [name for name, row in rows.items() if row[4] != "yes"]
    assert different == ["resnet20-5x5", "plain20-5x5"]  # of which the draft prints one layer less
    stem = MODELS["resnet8-7x7"].make(3, 1000, 224)[:4]
    assert stem(torch.zeros(1, 3, 224, 224)).shape == (1, 64, 56, 56)
    sizes = [p.shape[-1] for p in MODELS["vgg13-5x5"].make().parameters() if p.dim() == 4]
    assert sizes == [5] * 6 + [3] * 4
    names = ("resnet20", "resnet20-a")
    projected, padded = (sum(p.numel() for p in MODELS[name].make().parameters()) for name in names)
    assert padded == 269_722  # He et al. 2015: 0.27M
    assert projected - padded == 16 * 32 + 32 * 64 + 2 * (32 + 64)


VGG16 = {f"features.{place}.weight": (8 if place < 9 else 16, 8, 3, 3) for place in (0, 2, 5, 7, 10, 12, 14)}
RESNET50 = {"conv1.weight": (4, 3, 7, 7), "layer1.0.conv1.weight": (4, 4, 1, 1), "layer1.0.conv2.weight": (4, 4, 3, 3)}
RESNET50 |= {"bn1.running_mean": (4,), "layer2.0.conv2.weight": (9, 4, 3, 3), "fc.weight": (10, 9)}


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
    shapes = {"VGG16": VGG16, "ResNet50": RESNET50}
    states = {name: {key: torch.randn(shape) for key, shape in each.items()} for name, each in shapes.items()}
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


def test_networks_that_have_diverged_have_empty_cells():
    """They have null in the place of what is not finite."""
    epochs = [{"test_accuracy": 0.5, "delta_locality": None}]
    branch = {"switch_time": 0, "epochs": epochs, "start": {"test_accuracy": 0.25}, "interpolations": {}}
    branch |= {when: {"gradient_norm": None, "top_eigenvalue": None} for when in ("before", "after")}
    record = {"cnn": branch, "fcn": branch, "settings": {"landscape_samples": 1}}
    claims = {tuple(row[:3]): row[3] for row in efcn._claims("vanilla", record, [branch]).rows}
    assert claims[efcn.LEFT, "eFCN from epoch 0", "test accuracy"] == 50
    assert [claims[efcn.FAR, *what] for what in (("eFCN", "delta, at most"), ("FCN", "delta"))] == [None, None]
    assert efcn._switch_times("vanilla", record, [branch]).rows == [[0, 25, 50, None, None, None, None, None]]


@pytest.mark.parametrize("left", ["", '{"test_accuracy": 0.1}\n{"test_acc', "{}", "[0.1]"])
def test_damaged_metrics_are_one_line(tmp_path, capsys, monkeypatch, left):
    monkeypatch.setattr(loco_reg_figures, "save", lambda *arguments: {})
    monkeypatch.setattr(reproduce, "_run", lambda jobs: [])
    fake(tmp_path / "smoke" / "loco-reg" / "digits-small" / "uniform-0", 0.7)
    metrics = tmp_path / "smoke" / "loco-reg" / "digits-small" / "uniform-0" / "metrics.jsonl"
    metrics.write_text(left)
    assert main(["reproduce", "loco-reg", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"loco-ext: {metrics}: expected a line of JSON for each epoch, remove its folder")
    assert said.count("\n") == 1


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("left", ["[]", "3", '{"data": "digits"}', '{"settings": 3}', '{"settings": {"training": []}}'])
def test_results_of_another_kind_are_one_line(tmp_path, capsys, monkeypatch, paper, left):
    monkeypatch.setattr(reproduce, "_run", lambda jobs: [])
    job = next(job for job in PAPERS[paper].jobs(JobPlan("smoke", tmp_path)) if job.result.suffix == ".json")
    job.folder.mkdir(parents=True)
    job.result.write_text(left)
    assert main(["reproduce", paper, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert re.match(rf"loco-ext: {re.escape(str(job.result))}, (content|settings|training): expected ", said)
    assert said.count("\n") == 1


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


SAME = {"reproduce.json", "frontier.json", "efcn.json", "landscapes.json", "regions.json", "model.safetensors"}


def content(folder):
    """Return the bytes of all pages, records of experiments and weights, by path below the folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.name in SAME}


def times(paths):
    return {path: path.stat().st_mtime_ns for path in paths}


def test_a_failed_job_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    ran = []

    def fail_first(words):
        ran.append(words)
        if len(ran) == 2:
            raise torch.OutOfMemoryError("the memory is full")
        return 1 if len(ran) == 1 else 0

    jobs = sorted(loco_reg.jobs(JobPlan("smoke", tmp_path)), key=lambda job: job.stage)
    monkeypatch.setattr(reproduce.commands, "run", fail_first)
    with pytest.raises(reproduce.FailedJobsError, match=f"without them: {jobs[0].name}, {jobs[1].name}$"):
        reproduce._ended(reproduce._run(jobs), [])
    assert len(ran) == len(jobs)
    said = capsys.readouterr().err
    assert "job 8 of 8, loco-reg/digits-small/paper-1.5-1; about" in said
    assert "OutOfMemoryError: the memory is full" in said


# Stands for the program on the path: it passes its arguments on, as starting Python with torch takes seconds.
PROGRAM = """#!{python} -S
import sys
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send(sys.argv[1:])
    code, said = server.recv()
sys.stdout.write(said)
sys.exit(code)
"""


def begin_in(folder):
    os.chdir(folder)
    without_drawing()


def answer(connection, folder):
    """Run the command line that a program has passed on, and answer with its exit code and what it prints."""
    said = Path(tempfile.mkdtemp(dir=folder), "said.txt")
    process = start_command(connection.recv(), said, change=functools.partial(begin_in, folder))
    process.join()
    connection.send((process.exitcode, said.read_text()))


def serve(listener, folder):
    """Answer all programs, several at a time, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=answer, args=(listener.accept(), folder), daemon=True).start()


@pytest.mark.slow
def test_the_example_with_xargs_runs(tmp_path):
    """All lines of the page's example run in two processes; the command that follows has nothing left to train."""
    (example,) = re.findall(r"^```sh\n(for stage.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    address = str(tmp_path / "socket")
    (tmp_path / "loco-ext").write_text(PROGRAM.format(python=sys.executable, address=address))
    (tmp_path / "loco-ext").chmod(0o755)
    here = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with Listener(address) as listener:
        threading.Thread(target=serve, args=(listener, tmp_path), daemon=True).start()
        found = subprocess.run(["bash", "-ec", example], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "job 1 of" not in found.stdout
    page = json.loads((tmp_path / "runs/reproduce/smoke/loco-reg/reproduce.json").read_text())
    table = next(table for table in page["tables"] if table["title"].startswith("Table 5"))
    assert [row[2] for row in table["rows"]] == [2, 2, 2]
    assert all(math.isfinite(row[3]) for row in table["rows"])
    assert len(page["figures"]) == 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of all papers at the preset smoke, whose figures are empty."""
    folder = tmp_path_factory.mktemp("whole")
    process = start_command(["reproduce", "all", "--out", folder], folder / "said.txt", change=without_drawing)
    process.join()
    said = (folder / "said.txt").read_text()
    assert process.exitcode == 0, said
    assert "Warning" not in said
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_the_preset_smoke_reproduces_all_papers(whole, capsys):
    """No layer's factors fall back to (1, 1), and each rule makes other weights out of the same first ones."""
    assert main(["reproduce", "all", "--out", str(whole), "--json"]) == 0
    printed = capsys.readouterr()
    assert "job 1 of" not in printed.err
    pages = dict(zip(PAPERS, json.loads(printed.out).values(), strict=True))
    for paper, page in pages.items():
        unreproduced = [table for table in page["tables"] if not table["rows"]]
        assert all("Not reproduced" in table["notes"][0] for table in unreproduced)
        assert page["figures"]
        assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in page["figures"].values())
        text = (whole / "smoke" / paper / "reproduce.md").read_text()
        assert text.count("![") == len(page["figures"])
    factors = next(table for table in pages["loco-reg"]["tables"] if table["title"].startswith("Table 6"))
    assert len(factors["rows"]) == 3
    assert all(1.0 not in row[2:] for row in factors["rows"])
    for seed in (0, 1):
        names = (f"{arm}-{seed}/model.safetensors" for arm in ("uniform", "local-1.5", "paper-1.5"))
        assert len({(whole / "smoke/loco-reg/digits-small" / name).read_bytes() for name in names}) == 3


KILLS = (  # a file that a job writes on its way, and the job's result
    ("loco-reg/digits-small/uniform-1/checkpoint.pt", "model.safetensors"),
    ("sparsity/resnet8-a/rings-plain/alpha-0.01/path-0.25/point-00.pt", "../frontier.json"),
    ("efcn/plain8/switch-000/branches/000-full/before.json", "../../efcn.json"),
    ("efcn/plain8/switch-001/cnn/weights-001.safetensors", "../efcn.json"),
    ("efcn/plain8/switch-001/branches/001-full/checkpoint.pt", "../../efcn.json"),
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
        kill_when(reached.exists, *command, change=without_drawing)
        assert not (reached.parent / result).exists()
        assert times(kept) == kept
        jobs = [job for module in PAPERS.values() for job in module.jobs(plan("smoke", tmp_path))]
        # Some files are written once more for the epoch that was not complete, or are removed in the end.
        changes = ("settings.json", "weights-001.safetensors", "001-full/checkpoint.pt")
        kept = times([*(job.result for job in jobs if job.done), *([] if name.endswith(changes) else [reached])])
    run_command(*command, change=without_drawing)
    assert times(kept) == kept
    assert content(tmp_path) == content(whole)
