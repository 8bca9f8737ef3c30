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


def forced(request: pytest.FixtureRequest, kernels: str) -> Iterator[str]:
    """Force the reference, or compiled kernels, so that a missing library fails tests instead of running the reference.

    kernels: "cpu", "cuda_on_cpu" for those of GPUs, compiled for the CPU, or "reference".
    """
    if kernels == "cuda_on_cpu":
        operators.use(request.getfixturevalue("monkeypatch"), request.getfixturevalue("compiled"))
    with loco_ext.backend("reference" if kernels == "reference" else "native"):
        yield kernels


@pytest.fixture(params=["cpu", "cuda_on_cpu"])
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force the CPU's kernels, then the GPU's."""
    yield from forced(request, request.param)


@pytest.fixture(params=["cpu", "cuda_on_cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force the CPU's kernels, then the GPU's, then the reference; return which."""
    yield from forced(request, request.param)


@pytest.fixture
def cuda_on_cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force the GPU's kernels."""
    yield from forced(request, "cuda_on_cpu")


@pytest.fixture(params=optim_step_cases.KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Force the compiled kernels as ``native`` does, for the tests of operators; a GPU, if any, steps cases too.

    Tests that ask for it run with the Triton kernels in Triton's interpreter, or with the reference, as well.
    """
    if request.param in ("cuda", "triton"):
        backend = "native" if request.param == "cuda" else "triton"
        monkeypatch.setattr(optim_step_cases, "ELSEWHERE", optim_step_cases.Gpu("cuda", backend))
    if request.param == "interpreter":
        monkeypatch.setattr(optim_step_cases, "ELSEWHERE", request.getfixturevalue("interpreter"))
    yield from forced(request, request.param)


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
