"""The CUDA optimizer step executed on the CPU, under sanitizers, against the CPU's own kernels, with penalties too.

The tests of the operators run the same kernels through torch; here every tensor has an allocation of exactly its size.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda_on_cpu import build

SOURCES = [
    *(
        f"optim_step/{name}"
        for name in (
            "cuda.cu",
            "cuda_prox.cu",
            "gpu_table.cpp",
            "cpu.cpp",
            "blocks.cpp",
            "summing_blocks.cpp",
        )
    ),
    *("common/convert.cpp", "common/cuda_upload.cu"),
    *("ring_prox/gpu_table.cpp", "ring_prox/kernel.cpp", "ring_prox/rows.cpp"),
]
CHECK = build.HERE / "check_optim_step.cpp"


def compile_check(out: Path, csrc: Path = build.CSRC, **options: Any) -> Path:
    return build.compile_program([*(csrc / name for name in SOURCES), CHECK], out, csrc=csrc, **options)


@pytest.fixture(scope="module")
def sanitized(compiled: Path) -> Path:
    """Compile the check program with all mistakes planted, none of which is made unless requested."""
    csrc = build.with_mistakes(compiled, MISTAKES.values())
    return compile_check(compiled / "check_optim_step_sanitized", csrc, sanitize=True, flags=["-O1"])


@pytest.fixture(scope="module", params=["plain", pytest.param("sanitized", marks=pytest.mark.slow)])
def check(request: pytest.FixtureRequest, compiled: Path) -> Path:
    if request.param == "sanitized":
        return request.getfixturevalue("sanitized")
    # At -O2, the CPU's steps alone take half a minute to compile.
    return compile_check(compiled / "check_optim_step_plain", flags=["-O1"])


@pytest.mark.parametrize("order", build.ORDERS)
def test_random_calls_give_what_the_cpu_does(check: Path, order: str) -> None:
    count = 20
    done = build.run_program(check, 1000 * build.ORDERS.index(order), count, order=order)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{count} calls, ")


def test_the_order_of_threads_and_blocks_changes_no_bit(check: Path) -> None:
    outputs = {build.run_program(check, 500, 10, order=order).stdout for order in build.ORDERS}
    assert len(outputs) == 1, outputs
    assert outputs.pop().startswith("10 calls, ")


@pytest.mark.slow
def test_many_random_calls_give_what_the_cpu_does(check: Path) -> None:
    done = build.run_program(check, 100_000, 100 if check.name.endswith("sanitized") else 500, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


# For each name, the file, the right text in it, and the text that makes the mistake if MISTAKE is true.
MISTAKES = {
    # The tail begins one element late.
    "tail": ("optim_step/cuda.cu", "threadIdx.x - head;", "threadIdx.x - head + MISTAKE;"),
    # Chunks overlap.
    "chunk": ("optim_step/cuda.cu", "(chunk.index + 1) * kChunk;", "(chunk.index + 1) * kChunk + MISTAKE;"),
    "barrier": ("optim_step/gpu_task.h", "__syncthreads();", "if (!MISTAKE) __syncthreads();"),
    # Each chunk restarts the map.
    "phase": (
        "optim_step/gpu_task.h",
        "(phase + (run == 1 ? at : at / run))",
        "((MISTAKE ? 0 : phase) + (run == 1 ? at : at / run))",
    ),
    "found_inf": (
        "optim_step/cuda.cu",
        "is_set(p.found_inf)) return;\n  const Entry",
        "(!MISTAKE && is_set(p.found_inf))) return;\n  const Entry",
    ),
    "prox_found_inf": (
        "optim_step/cuda_prox.cu",
        "if (is_set(p.found_inf)) return;",
        "if (!MISTAKE && is_set(p.found_inf)) return;",
    ),
    "prox_barrier": (
        "optim_step/cuda_prox.cu",
        "plain, squared);\n    __syncthreads();",
        "plain, squared);\n    if (!MISTAKE) __syncthreads();",
    ),
    "prox_kernel": (
        "optim_step/cuda_prox.cu",
        "(k - chunk.index) * rings.numel()",
        "(k - (MISTAKE ? 0 : chunk.index)) * rings.numel()",
    ),
    "prox_squared": ("optim_step/gpu_prox.h", "std::sqrt(step) * q", "(MISTAKE ? step : std::sqrt(step)) * q"),
    "prox_rounding": ("optim_step/gpu_prox.h", "random[n] = words[0];", "random[n] = words[MISTAKE];"),
    "prox_memory": (
        "optim_step/gpu_table.cpp",
        "std::max(work.bytes, of_entry.bytes)",
        "MISTAKE ? of_entry.bytes : std::max(work.bytes, of_entry.bytes)",
    ),
    "prox_step": (
        "optim_step/gpu_task.h",
        "lr_of(p, entry), entry.state[0] != nullptr)",
        "lr_of(p, entry), (entry.state[0] != nullptr) != MISTAKE)",
    ),
}


@pytest.mark.parametrize(("name", "right"), [mistake[:2] for mistake in MISTAKES.values()], ids=MISTAKES)
def test_planted_mistakes_fit_the_sources(name: str, right: str) -> None:
    build.planted((build.CSRC / name).read_text(), right, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=MISTAKES)
def test_planted_mistakes_are_found(sanitized: Path, number: int) -> None:
    assert build.is_found(sanitized, number, 600, ("forward", "reverse"))
