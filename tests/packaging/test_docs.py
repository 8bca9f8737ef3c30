"""The documentation site builds without warnings, its links and pictures lead somewhere, and its notebooks run."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Collects the anchors of a page, what it links to and shows, and its numbers of elements."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets, self.elements = {""}, [], {}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.elements[tag] = self.elements.get(tag, 0) + 1
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value and "://" not in value:
                self.targets.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    done = subprocess.run([*build, DOCS, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_links_pictures_and_tables_of_the_site_are_there(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for path, page in pages.items():
        for target in page.targets:
            file, _, anchor = target.partition("#")
            found = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            assert found.exists(), f"{path.name}: {target}"
            if found in pages and anchor:
                assert unquote(anchor) in pages[found].anchors, f"{path.name}: {target}"
    for source in [*DOCS.glob("*.md")]:
        tables = source.read_text().count("\n| --- ")
        assert pages[site / f"{source.stem}.html"].elements.get("table", 0) >= tables, source.name
    assert pages[site / "studies.html"].elements["img"] >= (DOCS / "studies.md").read_text().count("![")
    for path in NOTEBOOKS:
        assert pages[site / "notebooks" / f"{path.stem}.html"].elements["img"] >= 1


def test_the_api_reference_has_every_public_name(site):
    for name in ("analysis", "geometry", "nn", "ops", "optim", "regularizers", "sparsity"):
        anchors = Page(site / "api" / f"{name}.html").anchors
        module = importlib.import_module(f"loco_ext.{name}")
        ours = [n for n in module.__all__ if getattr(getattr(module, n), "__module__", "").startswith("loco_ext")]
        assert ours
        assert {f"loco_ext.{name}.{each}" for each in ours} <= anchors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_run_and_have_the_outputs_of_their_code(path, tmp_path, monkeypatch):
    """They train for one epoch here."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = importlib.util.spec_from_file_location("run_notebooks", DOCS / "run_notebooks.py")
    run_notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_notebooks)
    short = tmp_path / path.name
    short.write_text(re.sub(r"epochs=\d+", "epochs=1", path.read_text()))
    committed, new = nbformat.read(path, as_version=4), run_notebooks.run(short, tmp_path)
    kinds = [[[output.output_type for output in cell.get("outputs", [])] for cell in n.cells] for n in (committed, new)]
    assert kinds[0] == kinds[1]
    (picture,) = tmp_path.glob("*.png")
    assert (path.parent / picture.name).exists()
