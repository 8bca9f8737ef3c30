"""The CUDA optimizer step executed on the CPU, under sanitizers, against the CPU's own kernels, with penalties too.

The tests of the operators run the same kernels through torch; here every tensor has an allocation of exactly its size.
"""

from pathlib import Path

import pytest

from tests.cuda_on_cpu import build

pytestmark = pytest.mark.slow  # the CPU's steps and the GPU's take a minute to compile with sanitizers

SOURCES = [
    *(f"optim_step/{name}" for name in ("cuda.cu", "cuda_prox.cu", "gpu_table.cpp")),
    *(f"optim_step/{name}" for name in ("cpu.cpp", "blocks.cpp", "random.cpp")),
    *("common/convert.cpp", "common/cuda_upload.cu"),
    *("ring_prox/gpu_table.cpp", "ring_prox/rows.cpp"),
]
MISTAKES = (
    *("tail", "chunk", "barrier", "phase", "found_inf", "prox_found_inf", "prox_barrier", "prox_filter"),
    *("prox_squared", "prox_rounding", "prox_memory", "prox_step", "unaligned", "range", "host_pointer"),
)


@pytest.fixture(scope="module")
def check(compiled: Path) -> Path:
    """Compile the check program with all mistakes planted, none of which is made unless requested."""
    sources = [*(build.CSRC / name for name in SOURCES), build.HERE / "check_optim_step.cpp"]
    return build.compile_program(sources, compiled / "check_optim_step", sanitize=True)


def test_random_calls_give_what_the_cpu_does_and_the_same_bits_in_every_order(check: Path) -> None:
    build.check_orders(check, 500, 20)


def test_many_random_calls_give_what_the_cpu_does(check: Path) -> None:
    build.check_many(check, 100)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(check: Path, mistake: str) -> None:
    assert build.is_found(check, f"step_{mistake}", 600, ("forward", "reverse"))
