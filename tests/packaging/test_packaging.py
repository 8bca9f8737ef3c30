"""Tests of installing: wheel, source distribution, editable install, and a source install that cannot see torch."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
pytestmark = pytest.mark.slow
OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]


def run(*command, cwd=None, path=(), check=True, **variables):
    """Run a command with nothing but ``path`` on PYTHONPATH, and with these variables in its environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def copy_of_sources(folder):
    """Copy the repository's files as a fresh checkout has them, with nothing built."""
    built = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "build", "dist", "runs", ".*")
    return Path(shutil.copytree(ROOT, folder / "source", ignore=built))


# Compiles without optimisation, and for any CPU alone: files for one instruction set are read, but make empty objects.
COMPILER = """#!/bin/sh
case "$*" in *" -c "*build/capabilities/*)
    {cxx} "$@" -E > /dev/null || exit
    for word; do test "$before" != -o || object=$word; before=$word; done
    exec {cxx} -x c++ -c /dev/null -o "$object";;
esac
exec {cxx} "$@" -O0 -ULOCO_ALL_CAPABILITIES
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a source distribution and return its path; the compiler does little, to save minutes."""
    folder = tmp_path_factory.mktemp("wheel")
    source, compiler = copy_of_sources(folder), folder / "c++"
    compiler.write_text(COMPILER.format(cxx=os.environ.get("CXX", "c++")))
    compiler.chmod(0o755)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder / "dist", cwd=source)
    (archive,) = (folder / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", folder, archive, CXX=str(compiler))
    (found,) = folder.glob("loco_ext-*.whl")
    return found


def test_wheel_holds_the_package_and_nothing_else_at_the_top(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"loco_ext"}
    assert "loco_ext/triton_kernels/__init__.py" in names
    assert "loco_ext/py.typed" in names
    assert any(name.startswith("loco_ext/_C.") and name.endswith(".so") for name in names)


def test_wheel_installs_and_trains(wheel, tmp_path):
    target = tmp_path / "target"
    run(sys.executable, "-m", "pip", "install", *OFFLINE, "--target", target, wheel)
    done = run(sys.executable, SMOKE, cwd=tmp_path, path=[target])
    assert f"smoke ok: {target / 'loco_ext' / '__init__.py'}" in done.stdout


def test_an_editable_install_finds_every_package(tmp_path):
    """The test environment's own editable install is used from another folder."""
    done = run(sys.executable, SMOKE, cwd=tmp_path)
    assert f"smoke ok: {ROOT / 'loco_ext' / '__init__.py'}" in done.stdout
    where = run(sys.executable, "-c", "import loco_ext.triton_kernels as t; print(t.__file__)", cwd=tmp_path).stdout
    assert str(ROOT / "triton_kernels") in where


def test_pip_without_torch_passes_on_what_to_do(tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    here = Path(torch.__file__).parents[1]
    for name in ("pip", "setuptools", "_distutils_hack"):
        (packages / name).symlink_to(here / name)
    done = run(environment / "bin" / "python", "-m", "pip", "install", *OFFLINE, copy_of_sources(tmp_path), check=False)
    assert done.returncode != 0
    assert "pip install --no-build-isolation ." in done.stdout + done.stderr


def test_the_build_says_what_it_compiles_and_how_long_it_took():
    program = (
        "import runpy, sys, torch.utils.cpp_extension as e; "
        "e.BuildExtension.build_extensions = lambda self: None; "
        "sys.argv = ['setup.py', '-q', 'build_ext']; runpy.run_path('setup.py', run_name='__main__')"
    )
    said = run(sys.executable, "-c", program, cwd=ROOT).stderr
    assert re.search(r"loco_ext: compiling \d+ files, \d+ at a time.*\nloco_ext: compiled in \d+ seconds\n", said)
