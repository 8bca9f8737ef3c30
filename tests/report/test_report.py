"""``loco-ext report``: its numbers are those of the runs, its page needs nothing else, and its errors name a file."""

import base64
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loco_ext.checkpoints import save_weights
from loco_ext.cli import main
from loco_ext.experiments import curves, figures, frontier, frontier_figures, region_pictures
from loco_ext.report import content
from loco_ext.report.experiments import accuracy_by_cost
from loco_ext.report.page import MARK
from loco_ext.report.runs import Run, find
from loco_ext.report.training import filters, learning_curves
from loco_ext.version import commit

DIGITS = "--dataset digits --epochs 1"
TRAIN = f"train --model small {DIGITS} --preset quick --epochs 2 --batch-size 400 --lr 0.05"
PLAIN8 = f"--model plain8 --width 0.25 {DIGITS} --samples 50 --batch-size 25"
NAME = '<b>&"rings" $x$'  # name of a folder
RUNS = {
    "seed0": TRAIN,
    "seed1": f"{TRAIN} --seed 1",
    NAME: f"{TRAIN} --penalty rings --strength 0.5",
    "frontier": f"frontier {PLAIN8} --dense-epochs 1 --strengths 10,0.001 --refit-epochs 0",
    "efcn": f"efcn {PLAIN8} --switch 0,1 --relax lcn --branch-epochs 1 --fcn-epochs 0 --power-iterations 0 "
    "--landscape-samples 25 --interpolation-points 0",
    "landscapes": f"landscapes --preset short --model small {DIGITS} --samples 50 --batch-size 25 --seeds 2 "
    "--arms plain,noise:0.3 --landscape-images 10 --corrupted-images 0 --ablated-images 0 --resampled-inputs 0",
    "regions": "regions --epochs 1 --units 8 --layers 1 --strengths 0.5 --hinges 1 --probes 1 --seeds 1 --samples 50",
    "shrink": "shrink seed0 --macs 0.5 --epochs 1 --importance norm --granularity filters",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make a tiny run of each command, without its own pictures; return the folder of them all."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module in (curves, figures):
            patch.setattr(module, "save", lambda *given: None)
        patch.setattr(region_pictures, "save_toy", lambda path: None)
        torch.set_num_threads(1)
        for name, line in RUNS.items():
            assert main([*line.split(), "--out", name, "--quiet"]) == 0
    return folder


class Page(HTMLParser):
    """A page's elements, its text, the tables by the title of the section or figure above, and their cells."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text, self.tables, self.heading, self.inside = [], "", {}, None, None
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag
        if tag in ("h2", "figcaption"):
            self.heading = ""
        if tag == "table":
            self.tables.setdefault(self.heading, []).append([])
        if tag == "tr":
            self.tables[self.heading][-1].append([])
        if tag in ("th", "td"):
            self.tables[self.heading][-1][-1].append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        self.text += text
        if self.inside in ("h2", "figcaption"):
            self.heading += text
        if self.inside in ("th", "td"):
            self.tables[self.heading][-1][-1][-1] += text

    def column(self, heading, name, table=0):
        """Return the numbers of a column of a table; None for an empty cell."""
        header, *rows = self.tables[heading][table]
        cells = [row[header.index(name)].replace(",", "") for row in rows]
        return [float(cell) if cell else None for cell in cells]


@pytest.fixture(scope="module")
def page(runs):
    out = runs.parent / "new" / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "DOTS", 40)  # takes half of the time
        assert main(["report", str(runs), "--out", str(out), "--quiet"]) == 0
    return Page(out)


@pytest.fixture
def undrawn(monkeypatch):
    """Leave a page's pictures empty."""
    monkeypatch.setattr(content, "write_png", lambda *given: None)


def read(runs, name):
    return json.loads((runs / name).read_text())


def metrics(runs, name):
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def test_learning_curves_are_those_of_the_runs_and_means_those_of_their_seeds(runs, page):
    for what, samples in itertools.product(("accuracy", "loss"), ("train", "test")):
        title = what.capitalize()
        of = {name: [epoch[f"{samples}_{what}"] for epoch in metrics(runs, name)] for name in ("seed0", "seed1", NAME)}
        (mean,) = [name for name in page.tables[title][0][0] if name.endswith(f"{samples}, mean of 2")]
        expected = {f"{seed}, {samples}": of[seed] for seed in ("seed0", "seed1")}
        expected |= {mean: np.mean([of["seed0"], of["seed1"]], 0)}
        expected |= {f"penalty rings, strength 0.5, {samples}": of[NAME]}
        for name, values in expected.items():
            assert page.column(title, name) == pytest.approx(values, rel=1e-5)


def test_the_table_of_runs_has_their_results_and_what_differs(runs, page):
    header, *rows = page.tables["Runs"][0]
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert found.keys() == RUNS.keys()
    for name in ("seed0", NAME):
        assert f"test accuracy {metrics(runs, name)[-1]['test_accuracy']:.2%}" in found[name]["results"]
        assert found[name]["device"] == "cpu"
        assert f"torch {torch.__version__}" in found[name]["code"]
        assert found[name]["training"] == f"{sum(epoch['seconds'] for epoch in metrics(runs, name)):.1f} s"
    assert found["seed1"]["settings that differ"].splitlines() == ["seed 1", "penalty none", "strength 0"]
    assert found[NAME]["settings that differ"].splitlines() == ["seed 0", "penalty rings", "strength 0.5"]
    small = read(runs, "shrink/report.json")
    assert f"macs after {small['macs_after']:,}" in found["shrink"]["results"]
    (settings,) = [table for table in page.tables["Runs"] if table[0] == ["train", NAME, "seed0", "seed1"]]
    assert ["learning_rate", "0.05", "0.05", "0.05"] in settings


def test_filters_are_those_of_the_weights(runs, page):
    weights = load_file(runs / NAME / "model.safetensors")
    names = [name for name in weights if weights[name].dim() == 4]
    first = min(names, key=lambda name: int(name.split(".")[0]))
    table = page.tables[f"First layer of {NAME}"][0]
    shown = np.array([[float(cell) for cell in row[1:]] for row in table[1:]])
    np.testing.assert_allclose(shown, weights[first].flatten(1), rtol=1e-5)
    header, *rows = page.tables[f"Sizes of the filters of {NAME}"][0]
    for name, *counts in rows:
        alive = weights[f"{name}.weight"].ne(0).flatten(2).any(1)  # half rings go from the top left corner on
        lines = alive.view(-1, 3, 3)
        sizes = Counter(str(int(max(each.any(0).sum(), each.any(1).sum()))) for each in lines)
        assert dict(zip(header[1:], counts, strict=True)) == {size: str(sizes[size]) for size in header[1:]}
    assert "Sizes of the filters of seed0" not in page.tables
    header, row, *_ = page.tables["Sizes of the filters of shrink"][0]
    sizes = read(runs, "shrink/report.json")["layers"][0]["sizes"]
    assert dict(zip(header[1:], row[1:], strict=True)).items() >= {(size, str(n)) for size, n in sizes.items()}


def test_experiments_are_shown_with_their_numbers(runs, page):
    (path,) = read(runs, "frontier/frontier.json")["paths"]
    title = "Test error by cost, plain8 on digits"
    found = sorted(zip(page.column(title, "MACs of one sample"), page.column(title, "prox"), strict=True))
    expected = sorted((point["macs"], 100 * (1 - point["metrics"]["accuracy"])) for point in path["points"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    last = path["points"][-1]["kernels"]
    assert [list(map(int, row[1:])) for row in page.tables["Sizes of filters"][-1][1:]] == list(last.values())
    efcn = read(runs, "efcn/efcn.json")
    losses = [efcn["cnn"]["start"]["train_loss"], *(epoch["train_loss"] for epoch in efcn["cnn"]["epochs"])]
    assert page.column("Dynamics", "CNN") == pytest.approx(losses, rel=1e-5)
    norms = [branch["after"]["gradient_norm"] for branch in efcn["branches"] if branch["relax"] == "lcn"]
    gradient = next(i for i, t in enumerate(page.tables["Accuracy, gradient and curvature"]) if "LCN, after" in t[0])
    assert page.column("Accuracy, gradient and curvature", "LCN, after", gradient) == pytest.approx(norms, rel=1e-5)
    networks = read(runs, "landscapes/landscapes.json")["networks"]
    plain = np.mean([network["landscape"]["map"] for network in networks if network["arm"] == "plain"], 0)
    np.testing.assert_allclose(np.array(page.tables["Landscapes"][2][1:], float), plain, rtol=1e-5)
    arms = read(runs, "regions/regions.json")["arms"]
    radii = [float(row[-1]) for row in page.tables["Radius by accuracy"][0][1:]]
    assert sorted(radii) == pytest.approx(sorted(arm["median_radius"]["2"]["mean"] for arm in arms), rel=1e-5)


def test_the_page_needs_nothing_else_and_names_are_text(page):
    assert NAME in page.text
    assert not [tag for tag, _ in page.elements if tag == "b"]
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "srcset", "href", "action", "poster", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    for elsewhere in ("http:", "https:", "url(", "@import"):
        assert elsewhere not in page.html.partition("<body>")[0]
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert len(images) == page.html.count("<figure") >= 12
    for image in images:
        assert len(image["alt"]) > 20
        assert base64.b64decode(image["src"].partition(",")[2], validate=True).startswith(b"\x89PNG\r\n\x1a\n")
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {attributes["href"][1:] for tag, attributes in page.elements if tag == "a"} <= ids
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    assert "prefers-color-scheme: dark" in page.html


@pytest.mark.usefixtures("undrawn")
def test_runs_are_lines_of_json(runs, capsys, tmp_path):
    folders = [str(runs / name) for name in ("regions", "shrink", "regions")]
    assert main(["report", *folders, "--out", str(tmp_path / "report.html"), "--json"]) == 0
    shrink, regions = map(json.loads, capsys.readouterr().out.splitlines())
    assert (shrink["command"], regions["command"]) == ("shrink", "regions")
    record = read(runs, "regions/settings.json")
    assert regions["settings"] == record["settings"] | {"data_digest": record["digest"]}
    own = {"macs": 0.5, "granularity": "filters", "batch_size": 64, "learning_rate": 0.025, "epochs": 1}
    digest = read(runs, "shrink/training/settings.json")["dataset"]["digest"]
    assert shrink["settings"].items() >= (own | {"weight_decay": 0.001, "data_digest": digest}).items()
    assert shrink["metrics"]["test_accuracy"] == read(runs, "shrink/report.json")["accuracy_after"]
    assert shrink["seconds"] == metrics(runs, "shrink/training")[0]["seconds"]
    assert shrink["versions"] == regions["versions"] == read(runs, "seed0/settings.json")["versions"]
    assert shrink["commit"] == regions["commit"] == commit()
    assert shrink.keys() == {"folder", "command", "settings", "commit", "versions", "device", "seconds", "metrics"}


def test_runs_on_other_data_are_no_seeds_of_one_setting_and_all_names_have_numbers(runs, tmp_path):
    """Matplotlib would not list names that begin with an underscore."""
    for name in ("seed0", "seed1"):
        shutil.copytree(runs / name, tmp_path / name)
    record = read(tmp_path, "seed1/settings.json")
    record["dataset"]["digest"] = "0123456789ab"
    (tmp_path / "seed1" / "settings.json").write_text(json.dumps(record))
    found, _ = find([tmp_path])
    accuracy, _ = learning_curves(found).plots
    assert not [name for name in accuracy.tables[0].headers if "mean of" in name]
    assert [name for name in accuracy.tables[0].headers if "data_digest 0123456789ab" in name]
    names = ("_a", "_child0")
    found = [replace(found[0], folder=tmp_path / name, settings={}, name=name) for name in names]
    accuracy, _ = learning_curves(found).plots
    expected = {f"{name}, {samples}" for name in names for samples in ("train", "test")}
    assert set(accuracy.tables[0].headers) >= expected


WITHOUT_VERSIONS = '{"settings": {}, "dataset": {}, "processes": {"device": "cpu", "count": 1}, "versions": 3}'
DAMAGES = {
    "frontier.json": ("{", "frontier.json: expected JSON"),
    "efcn.json": ('{"settings": {}}', "expected the files of loco-ext efcn (KeyError: "),
    "settings.json": (WITHOUT_VERSIONS, "settings and"),
    "metrics.jsonl": ("", "metrics.jsonl: expected at least one epoch"),
    "model.safetensors": ("weights", "model.safetensors: "),
    "regions.json": (None, "expected a run that is finished"),
}


@pytest.mark.usefixtures("undrawn")
def test_what_is_broken_is_named_and_left_out(runs, tmp_path, capsys):
    said = []
    for file, (text, message) in DAMAGES.items():
        name = file.removesuffix(".json") if file.removesuffix(".json") in RUNS else "seed1"
        copy = tmp_path / "runs" / f"{file} of {name}"
        shutil.copytree(runs / name, copy)
        (copy / file).unlink() if text is None else (copy / file).write_text(text)
        assert main(["report", str(copy), "--out", str(tmp_path / "none.html")]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("loco-ext: ")
        assert printed.err.count("\n") == 1
        assert message in printed.err
        said.append(printed.err.removeprefix("loco-ext: ").strip())
    assert not (tmp_path / "none.html").exists()
    assert main(["report", str(tmp_path), str(runs / "seed0"), "--out", str(tmp_path / "some.html")]) == 0
    printed = capsys.readouterr()
    assert sorted(printed.err.splitlines()) == sorted(f"loco-ext: left out: {text}" for text in said)
    page = Page(tmp_path / "some.html")
    (row,) = page.tables["Runs"][0][1:]
    assert row[0].endswith("runs/seed0")
    assert all(text in page.text for text in said)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e308", "1" + "0" * 400], ids=["NaN", "inf", "large", "integer"])
@pytest.mark.parametrize("name", ["seconds", "test_loss"])
def test_a_number_that_cannot_be_shown_leaves_out_only_its_run(runs, tmp_path, capsys, name, value):
    shutil.copytree(runs / "seed1", tmp_path / "broken")
    file = tmp_path / "broken" / "metrics.jsonl"
    file.write_text(re.sub(f'(?<="{name}": )[^,]+', value, file.read_text()))
    assert main(["report", str(tmp_path), str(runs / "seed0"), "--out", str(tmp_path / "page.html")]) == 0
    assert f"left out: {tmp_path / 'broken'}: " in capsys.readouterr().err
    (row,) = Page(tmp_path / "page.html").tables["Runs"][0][1:]
    assert row[0].endswith("runs/seed0")


@pytest.mark.usefixtures("undrawn")
def test_only_a_report_is_replaced(runs, tmp_path, capsys):
    other, old = tmp_path / "notes.html", tmp_path / "old.html"
    other.write_text("<!doctype html><title>Notes</title>")
    line = ["report", str(runs / "regions"), "--out"]
    for out in (other, tmp_path):
        assert main([*line, str(out)]) == 2
        assert "--out: expected " in capsys.readouterr().err
    assert other.read_text() == "<!doctype html><title>Notes</title>"
    old.write_text(f'<!doctype html>{MARK} 0.1.0">')
    assert main([*line, str(old)]) == 0
    assert "Linear regions" in old.read_text()


def point(macs, accuracy):
    return {"macs": macs, "refitted": None, "metrics": {"accuracy": accuracy}}


def test_lines_with_places_of_their_own_have_a_row_for_each_point():
    figure = frontier_figures.errors({"": {"a": [point(1, 0.5), point(1, 0.75)], "b": [point(3, 1.0)]}}, 4)
    (table,) = content.numbers(figure)
    assert table.rows == [["a", "1", "25"], ["a", "1", "50"], ["b", "3", "0"]]


def test_the_widest_network_is_the_dense_one_in_any_order_of_the_widths(tmp_path, monkeypatch):
    rest = {"strength": 0.0, "tau": 0.0, "kernels": {"0": [0, 4]}, "latency_before": None, "latency_after": None}
    found = [(0.5, point(300, 0.7)), (1.0, point(1000, 0.8)), (0.25, point(100, 0.75))]
    paths = [{"width": width, **each, "points": [each | rest]} for width, each in found]
    record = {"settings": {"method": "width"}, "paths": paths, "versions": {}, "device": "cpu"}
    (tmp_path / "frontier.json").write_text(json.dumps(record))
    ((run,), _) = find([tmp_path])
    assert (run.metrics["dense_macs"], run.metrics["dense_accuracy"]) == (1000, 0.8)
    header, rows = frontier.rows(record)
    assert [row[header.index("of dense")] for row in rows] == ["30.0%", "100.0%", "10.0%"]
    drawn, errors = [], frontier_figures.errors
    monkeypatch.setattr(frontier_figures, "errors", lambda panels, dense: drawn.append(dense) or errors(panels, dense))
    figures.save(frontier_figures.draw(record), tmp_path)
    accuracy_by_cost([run])
    assert drawn == [1000, 1000]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_into_the_window_of_a_browser(page, runs, width):
    if importlib.util.find_spec("PySide6") is None or importlib.util.find_spec("PySide6.QtWebEngineCore") is None:
        pytest.skip("PySide6-WebEngine is not installed")
    path = runs.parent / "new" / "report.html"
    command = [sys.executable, "-m", "tests.report.browser", str(path), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["window"] == width
    assert found["width"] <= width
    assert len(found["images"]) == page.html.count("<figure")
    assert min(found["images"]) > 0
    assert found["console"] == []


def test_kernels_of_even_sizes_have_sizes_though_the_rings_are_full(tmp_path):
    weights = {"0.weight": torch.ones(3, 1, 3, 3), "1.weight": torch.ones(2, 3, 2, 2)}
    weights["1.weight"][0] = 0
    save_weights(tmp_path / "model.safetensors", weights)
    run = Run(tmp_path, {"kind": "full"}, {}, {"dataset": {"channels": 1}}, name="run", command="train")
    *_, sizes = filters(run)
    (table,) = sizes.tables
    assert table.headers == ["layer", "0", "2", "3"]
    assert table.rows == [["0", "0", "0", "3"], ["1", "1", "1", "0"]]
