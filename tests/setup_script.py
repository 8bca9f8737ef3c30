"""Runs of setup.py that build nothing."""

import runpy
from pathlib import Path
from typing import Any

import pytest


def run_setup(**variables: str) -> dict[str, Any]:
    """Run setup.py with variables of the environment; return what it defines, by name."""
    import setuptools  # machines on which only GPUs are tested may lack it
    from torch.utils import cpp_extension

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)  # it would set up logging
        defaults = {"CUDA_HOME": str(cpp_extension.CUDA_HOME), "LOCO_CUDA": "0", "MAX_JOBS": "1"}
        for name, value in {**defaults, **variables}.items():
            patch.setenv(name, value)
        return runpy.run_path(str(Path(__file__).parents[1] / "setup.py"))
