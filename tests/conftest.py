"""Fixtures for all tests."""

import contextlib
import gc
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loco_ext
from tests import triton_runs
from tests.cuda_on_cpu import operators
from tests.optim_step import cases as optim_step_cases


def pytest_collection_finish() -> None:
    """Exempt the million objects of modules and tests from the many garbage collections of the benchmarks."""
    gc.collect()
    gc.freeze()


# torch.manual_seed also looks for devices of other kinds, which takes longer than all else that starts a test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Start every test from one seed, and restore torch's global settings after it."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def one_thread() -> None:
    """Use one thread: small tensors gain nothing from more, which wait for one another where cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Compile as if for the first time, and leave nothing compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu", "cuda_on_cpu"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Force the compiled kernels, so that a missing library fails tests instead of running the reference.

    Each test runs with the CPU's kernels, then with the GPU's, compiled for the CPU.
    """
    if request.param == "cuda_on_cpu":
        operators.use(monkeypatch, request.getfixturevalue("compiled"))
    with loco_ext.backend("native"):
        yield


@pytest.fixture(params=["native", "cuda_on_cpu", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Force the CPU's kernels, the GPU's, compiled for the CPU, or the reference; return which."""
    if request.param == "cuda_on_cpu":
        operators.use(monkeypatch, request.getfixturevalue("compiled"))
    with loco_ext.backend("reference" if request.param == "reference" else "native"):
        yield request.param


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Iterator[None]:
    """Force the GPU's compiled kernels, compiled for the CPU."""
    operators.use(monkeypatch, compiled)
    with loco_ext.backend("native"):
        yield


@pytest.fixture(params=optim_step_cases.KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Force the compiled kernels as ``native`` does, for the tests of operators; a GPU, if any, steps cases too.

    Tests that ask for it run with the Triton kernels in Triton's interpreter, or with the reference, as well.
    """
    if request.param in ("cuda", "triton"):
        backend = "native" if request.param == "cuda" else "triton"
        monkeypatch.setattr(optim_step_cases, "ELSEWHERE", optim_step_cases.Gpu("cuda", backend))
    if request.param == "interpreter":
        monkeypatch.setattr(optim_step_cases, "ELSEWHERE", request.getfixturevalue("interpreter"))
    if request.param == "cuda_on_cpu":
        operators.use(monkeypatch, request.getfixturevalue("compiled"))
    with loco_ext.backend("reference" if request.param == "reference" else "native"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Let files reach the disk whenever they do: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compilations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share what is compiled between processes and runs, keyed by content; delete what is older than a week."""
    cache = getattr(request.config, "cache", None)  # there is no cache with -p no:cacheprovider
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in (("CUDA_ON_CPU_OBJECTS", "objects"), ("TRITON_CACHE_DIR", "triton")):
            folder = cache.mkdir(name) if cache else tmp_path_factory.mktemp(name)
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > 7 * 24 * 3600:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            patch.setenv(variable, str(folder))
        yield


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what the session compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Make a process group of this process alone; yield its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def interpreter_process() -> Iterator[ProcessPoolExecutor]:
    """Yield a process in which Triton's kernels run in Triton's interpreter."""
    with triton_runs.start_interpreter() as pool:
        yield pool
