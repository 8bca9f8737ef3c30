"""setup.py reads the CUDA toolkit's folder and GPUs from nvcc; the tests make compilers up."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
GENERATIONS = ["75", "80", "86", "89", "90", "100", "120", "121"]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run setup.py without setuptools, which would set up the process's logging; return its functions."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name, value in {"CUDA_HOME": str(cpp_extension.CUDA_HOME), "LOCO_CUDA": "0", "MAX_JOBS": "1"}.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(ROOT / "setup.py"))


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_toolkit_is_where_nvcc_says_and_not_where_its_wrapper_is(setup, monkeypatch, tmp_path):
    toolkit = tmp_path / "cuda"
    make_program(toolkit / "bin" / "nvcc", f"echo '#$ _HERE_={toolkit}/bin' >&2; echo '#$ TOP={toolkit}/bin/..' >&2")
    make_program(tmp_path / "usr" / "bin" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "usr" / "bin"))
    assert setup["toolkit_of_nvcc"]() == str(toolkit)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup["toolkit_of_nvcc"]() is None


@pytest.mark.parametrize(
    ("newest", "architectures"),
    [("90", "7.5;8.0;9.0+PTX"), ("100", "7.5;8.0;9.0;10.0+PTX"), ("121", "7.5;8.0;9.0;10.0;12.0+PTX")],
)
def test_only_gpus_that_nvcc_knows_are_compiled_for(setup, tmp_path, newest, architectures):
    known = " ".join(f"compute_{name}" for name in GENERATIONS if int(name) <= int(newest))
    make_program(tmp_path / "bin" / "nvcc", f"for name in {known}; do echo $name; done")
    assert setup["supported_architectures"](str(tmp_path)) == architectures
