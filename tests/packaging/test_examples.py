"""Every example in the documentation runs: docstrings, README and docs; links there lead somewhere."""

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
import warnings
from pathlib import Path

import pytest
import typer

import loco_ext
from loco_ext import commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(loco_ext.__path__, "loco_ext.")
    if not module.name.endswith(("._C", ".__main__"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = doctest.testmod(module)
    assert result.failed == 0


@pytest.mark.parametrize("kind", ["optim", "ops", "geometry", "analysis", "nn", "regularizers", "sparsity"])
def test_everything_public_has_an_example(kind):
    """The example is of a module whose examples run."""
    module = importlib.import_module(f"loco_ext.{kind}")
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    public = [getattr(module, name) for name in names]
    ours = [thing for thing in public if getattr(thing, "__module__", "").startswith("loco_ext") and callable(thing)]
    assert ours
    for thing in ours:
        assert ">>>" in (thing.__doc__ or ""), f"{thing.__name__} has no example"
        assert thing.__module__ in MODULES


def blocks(page, language):
    """Return the code of a page in one language; ```py is Python that imports other training libraries."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pages
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {"__name__": "example"})


OTHER_LIBRARIES = [block for page in PAGES for block in blocks(page, "py")]


@pytest.mark.slow
@pytest.mark.parametrize("block", OTHER_LIBRARIES, ids=[block.split()[1] for block in OTHER_LIBRARIES])
def test_python_with_other_libraries_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for statement in ast.parse(block).body:
        if isinstance(statement, ast.Import):
            pytest.importorskip(statement.names[0].name)
    exec(block, {"__name__": "example"})


@pages
def test_commands_in_the_documentation_exist(page, tmp_path, monkeypatch):
    """Every ``loco-ext`` command parses, ``python -m`` names a module, ``make`` a target."""
    monkeypatch.chdir(tmp_path)
    analysis = Path("runs/analysis/analysis.json")  # an option reads it
    analysis.parent.mkdir(parents=True)
    analysis.write_text('{"locality": {}}')
    text = page.read_text()
    inline = re.findall(r"`((?:make|python -m|loco-ext) [^`]+)`", text)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    for line in inline + lines:
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert f"\n{words[0]}:" in makefile, line
        elif program == "python" and "NAME" not in line:
            assert importlib.util.find_spec(words[1]), line
        elif program == "loco-ext" and words[0] != "--help":
            command = typer.main.get_command(commands._application(words[0])).commands[words[0]]
            if line in lines:
                command.make_context(words[0], words[1:])
            else:  # an excerpt
                options = {option for parameter in command.params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= options, line


@pages
def test_code_in_the_documentation_names_what_exists(page):
    """Inline code such as ``loco_ext.ops.optim_step_sgd`` or ``sparsity.compact`` leads to an object."""
    text = page.read_text()
    packages = "|".join(name for name in loco_ext.__all__ if not name.startswith("_"))
    names = {f"loco_ext.{name}" for name in re.findall(rf"`((?:{packages})\.\w+)", text)}
    for path in names | set(re.findall(r"\bloco_ext(?:\.\w+)+", text)):
        parts = path.split(".")
        thing = loco_ext
        for i, part in enumerate(parts[1:], 2):
            if not hasattr(thing, part):
                importlib.import_module(".".join(parts[:i]))
            thing = getattr(thing, part)


def headings(page):
    """Return the marks and the title of each heading of a page."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^(#+) (.*)$", without_code, flags=re.MULTILINE)


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for _, title in headings(page)}


@pages
def test_links_in_the_documentation_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_index_lists_all_pages_and_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) < 200
    docs, index = ROOT / "docs", (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"\]\(([^)#]+)\)", index))
    assert {page.relative_to(docs).as_posix() for page in PAGES[1:]} - {"index.md"} <= listed
    of_site = {
        f"{name}{suffix}" for name in re.findall(r"^[\w/-]+$", index, flags=re.M) for suffix in (".md", ".ipynb")
    }
    assert listed <= of_site
    for page in PAGES:
        assert [marks for marks, _ in headings(page)].count("#") == 1, page.name
