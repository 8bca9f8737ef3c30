"""Tests of the package's names: modules that are slow to import are loaded on first access."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import loco_ext

CODE = """
import sys
import loco_ext
assert "loco_ext.analysis" not in sys.modules
assert "torch._dynamo" not in sys.modules  # it takes longer than all of loco_ext
assert "scipy.optimize" not in sys.modules  # likewise
assert {"analysis", "optim", "backend", "__version__", "__file__"} <= set(dir(loco_ext))
assert callable(loco_ext.analysis.locality_statistics)
"""


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_when_it_is_asked_for():
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(loco_ext, name) is not None for name in loco_ext.__all__)
    with pytest.raises(AttributeError, match="module 'loco_ext' has no attribute 'kernels'"):
        _ = loco_ext.kernels


def test_every_package_is_installed():
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(root).parts) for path in (root / "loco_ext").rglob("__init__.py")}
    assert set(listed) == there | {"loco_ext.triton_kernels"}
