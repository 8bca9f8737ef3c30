"""The CUDA optimizer step executed on the CPU, under sanitizers, against the CPU's own kernels, with penalties too.

The tests of the operators run the same kernels through torch; here every tensor has memory of exactly its own.
"""

from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import build

SOURCES = [
    *(
        f"optim_step/{name}"
        for name in (
            "cuda.cu",
            "cuda_prox.cu",
            "cuda_coupled.cu",
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


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "sanitized"])
def check(request: pytest.FixtureRequest, compiled: Path) -> Path:
    name = f"check_optim_step_{'sanitized' if request.param else 'plain'}"
    # At -O2, the CPU's steps alone compile for half a minute.
    return compile_check(compiled / name, sanitize=request.param, flags=["-O1"])


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


MISTAKES = {
    "tail": ("cuda.cu", "threadIdx.x - head;", "threadIdx.x - head + 1;"),  # begins one element late
    "chunk": ("cuda.cu", "(chunk.index + 1) * kChunk;", "(chunk.index + 1) * kChunk + 1;"),  # chunks overlap
    "barrier": ("gpu_task.h", "__syncthreads();", ""),
    # Chunks begin the map anew.
    "phase": ("gpu_task.h", "(phase + (run == 1 ? at : at / run))", "(run == 1 ? at : at / run)"),
    "found_inf": ("cuda.cu", "is_set(p.found_inf)) return;\n  const Entry", "false) return;\n  const Entry"),
    "prox_found_inf": ("cuda_prox.cu", "if (is_set(p.found_inf)) return;", ""),
    "prox_barrier": ("cuda_prox.cu", "plain, squared);\n    __syncthreads();", "plain, squared);"),
    "prox_kernel": ("cuda_prox.cu", "(k - chunk.index) * rings.numel()", "k * rings.numel()"),
    "prox_squared": ("gpu_prox.h", "std::sqrt(step) * q", "step * q"),
    "prox_rounding": ("gpu_prox.h", "random[n] = words[0];", "random[n] = words[1];"),
    "layers_apart": ("gpu_prox.h", "kHeldUnit + kernel * bytes", "kHeldUnit + 0 * kernel * bytes"),
    "layer_sum": ("cuda_coupled.cu", "chunks[blockIdx.x].index + threadIdx.x", "threadIdx.x"),
    "layer_factor": ("cuda_coupled.cu", "q.searches[block.layer].factor.best()", "q.searches[0].factor.best()"),
    "layer_found_inf": (
        "cuda_coupled.cu",
        "(p.found_inf)) return;\n  const BlockKernel<Rule, T> block(p, q);\n  update",
        "(p.found_inf)) {}\n  const BlockKernel<Rule, T> block(p, q);\n  update",
    ),
    "prox_memory": ("gpu_table.cpp", "std::max(work.bytes, of_entry.bytes)", "of_entry.bytes"),
    "prox_step": ("rules.h", "buffer ? lr * (1 - row[kSgdDampening])", "!buffer ? lr * (1 - row[kSgdDampening])"),
}


@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_planted_mistakes_fit_the_sources(name: str, right: str, wrong: str) -> None:
    build.planted((build.CSRC / "optim_step" / name).read_text(), right, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_planted_mistakes_are_found(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    csrc = build.with_mistake(tmp_path, f"optim_step/{name}", right, wrong)
    program = compile_check(tmp_path / "check", csrc, flags=["-O1", "-fsanitize=address"])
    assert build.is_found(program, None, 200, ("forward", "reverse"))
