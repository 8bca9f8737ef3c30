"""Fixtures for all tests."""

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import optim_step_cases
import optim_step_triton
import pytest
import torch
from cuda_on_cpu import operators

import loco_ext


def pytest_collection_finish() -> None:
    """Garbage collections, of which benchmarks make many, need not look at a million objects of modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed and leaves torch's global settings as they were."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(params=["cpu", "cuda_on_cpu"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forces the compiled kernels, so that a missing library fails tests instead of running the reference.

    The CPU's; then the GPU's, compiled for the CPU.
    """
    if request.param == "cuda_on_cpu":
        operators.use(monkeypatch, request.getfixturevalue("compiled"))
    with loco_ext.backend("native"):
        yield


@pytest.fixture(params=["cpu", "cuda_on_cpu", *(["cuda", "triton"] if torch.cuda.is_available() else [])])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As ``native``, for the tests of operators: a GPU steps their cases too, where there is one."""
    if request.param in ("cuda", "triton"):
        backend = "native" if request.param == "cuda" else "triton"
        monkeypatch.setattr(optim_step_cases, "GPU", optim_step_cases.Gpu("cuda", backend))
    if request.param == "cuda_on_cpu":
        operators.use(monkeypatch, request.getfixturevalue("compiled"))
    with loco_ext.backend("native"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes and runs share the objects of what they compile for the CPU; those unused for a week are deleted."""
    cache = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    folder = cache.mkdir("objects") if cache else tmp_path_factory.mktemp("objects")
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > 7 * 24 * 3600:
                file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_ON_CPU_OBJECTS", str(folder))
        yield


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the session compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[optim_step_triton.Interpreter]:
    """Steps cases by the Triton kernels, in Triton's interpreter."""
    with optim_step_triton.start_interpreter() as started:
        yield started
