"""Operators torch.ops.loco_ext_on_cpu: the CUDA operators, bindings and kernels, compiled for and run on the CPU."""

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import loco_ext  # noqa: F401  (torch.ops must know our operators first)
from loco_ext.ops import backends
from tests.cuda_on_cpu import build

SOURCES = (
    *(f"optim_step/{name}" for name in ("cuda.cu", "cuda_prox.cu", "bind_cuda.cpp", "gather.cpp")),
    *("optim_step/gpu_table.cpp", "optim_step/step_args.cpp"),
    *(f"ring_prox/{name}" for name in ("cuda.cu", "cuda_joint.cu", "bind_cuda.cpp", "gpu_table.cpp")),
    *("common/cuda_upload.cu", "common/overlap.cpp"),
)


@cache
def library(folder: Path) -> ModuleType:
    """Compile the module in ``folder`` and import it, which registers the operators."""
    out = folder / f"_C_cuda_on_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    torch_libraries = Path(torch.__file__).parent / "lib"
    build.compile_program(
        [*(build.CSRC / name for name in SOURCES), build.HERE / "library.cpp", build.HERE / "module.cpp"],
        out,
        shared=True,
        include=[*map(Path, include_paths()), Path(sysconfig.get_paths()["include"])],
        defines=["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"],
        link=[f"-L{torch_libraries}", "-Wl,--no-as-needed", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"],
    )
    spec = importlib.util.spec_from_file_location("_C_cuda_on_cpu", out)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the native backend run these operators until monkeypatch ends."""
    monkeypatch.setattr(backends, "library", library(folder))
    monkeypatch.setattr(backends, "operators", lambda: torch.ops.loco_ext_on_cpu)
    monkeypatch.setattr(backends, "runs_gpu_kernels", lambda device: True)
