"""Every example in the documentation runs: docstrings and README."""

import doctest
import importlib
import pkgutil
import re
import warnings
from pathlib import Path

import pytest

import loco_ext

README = Path(__file__).parents[2] / "README.md"
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(loco_ext.__path__, "loco_ext.")
    if not module.name.endswith(("._C", ".__main__"))
)
# Users look here first; each of these needs an example.
SHOWN = {"loco_ext.info", "loco_ext.optim.adam", "loco_ext.optim.groups", "loco_ext.optim.sgd"}
SHOWN |= {
    "loco_ext.analysis.cohesion",
    "loco_ext.analysis.interpolation",
    "loco_ext.analysis.landscape",
    "loco_ext.analysis.locality",
    "loco_ext.analysis.masking",
    "loco_ext.geometry.block_distances",
    "loco_ext.geometry.block_pattern",
    "loco_ext.geometry.conv",
    "loco_ext.geometry.taps",
    "loco_ext.nn.deviations",
    "loco_ext.nn.locally_connected",
    "loco_ext.ops.backends",
    "loco_ext.ops.landscape",
    "loco_ext.ops.optim_step",
    "loco_ext.ops.ring_prox",
    "loco_ext.penalties.folded",
    "loco_ext.penalties.group",
    "loco_ext.penalties.kkt",
    "loco_ext.penalties.rings",
    "loco_ext.penalties.strengths",
    "loco_ext.regularizers.landscape",
    "loco_ext.regularizers.path_counts",
    "loco_ext.regularizers.pilcro",
    "loco_ext.regularizers.linear_regions",
    "loco_ext.regularizers.roll",
    "loco_ext.sparsity.compaction.compact",
    "loco_ext.sparsity.complexity",
    "loco_ext.sparsity.export",
    "loco_ext.sparsity.files",
    "loco_ext.sparsity.frontier",
    "loco_ext.sparsity.folded_norms",
}


def test_all_modules_are_found():
    assert set(MODULES) >= SHOWN | {"loco_ext.cli", "loco_ext.experiments.demo", "loco_ext.reference.rounding"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or name not in SHOWN


@pytest.mark.parametrize("kind", ["optim", "ops", "geometry", "analysis", "nn", "regularizers", "sparsity"])
def test_everything_public_has_an_example(kind):
    module = importlib.import_module(f"loco_ext.{kind}")
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    public = [getattr(module, name) for name in names]
    ours = [thing for thing in public if getattr(thing, "__module__", "").startswith("loco_ext") and callable(thing)]
    assert ours
    for thing in ours:
        assert ">>>" in (thing.__doc__ or ""), f"{thing.__name__} has no example"


def test_python_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_code_in_the_readme_names_what_exists():
    """Inline code such as ``loco_ext.ops.optim_step_sgd`` leads to an object."""
    paths = set(re.findall(r"\bloco_ext(?:\.\w+)+", README.read_text()))
    assert paths
    for path in paths:
        parts = path.split(".")
        thing = loco_ext
        for i, part in enumerate(parts[1:], 2):
            if not hasattr(thing, part):
                importlib.import_module(".".join(parts[:i]))
            thing = getattr(thing, part)
