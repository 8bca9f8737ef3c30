"""The CUDA optimizer step executed on the CPU, under sanitizers, against the CPU's own kernels.

The tests of the operators run the same kernels through torch; here every tensor has memory of exactly its own.
"""

from pathlib import Path

import pytest
from cuda_on_cpu import build

SOURCES = [
    *(build.CSRC / "optim_step" / name for name in ("cuda.cu", "gpu_table.cpp", "cpu.cpp", "blocks.cpp")),
    *(build.CSRC / "common" / name for name in ("convert.cpp", "cuda_upload.cu")),
    *(build.CSRC / "ring_prox" / name for name in ("kernel.cpp", "rows.cpp")),
]
CHECK = build.HERE / "check_optim_step.cpp"


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitized"])
def check(request: pytest.FixtureRequest, compiled: Path) -> Path:
    name = f"check_optim_step_{'sanitized' if request.param else 'plain'}"
    return build.compile_program([*SOURCES, CHECK], compiled / name, sanitize=request.param)


@pytest.mark.parametrize("order", build.ORDERS)
def test_random_calls_give_the_cpus_bits(check: Path, order: str) -> None:
    count = 60
    done = build.run_program(check, 1000 * build.ORDERS.index(order), count, order=order)
    assert (done.returncode, done.stdout) == (0, f"{count} calls\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_many_random_calls_give_the_cpus_bits(check: Path) -> None:
    done = build.run_program(check, 100_000, 5_000, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("threadIdx.x - head;", "threadIdx.x - head + 1;"),  # the tail begins one element late
        ("(chunk.index + 1) * kChunk;", "(chunk.index + 1) * kChunk + 1;"),  # chunks overlap
        ("__syncthreads();", ""),
        ("(phase + (run == 1 ? at : at / run))", "(run == 1 ? at : at / run)"),  # chunks begin the map anew
        ("if (is_set(p.found_inf)) return;\n  const Chunk", "const Chunk"),
    ],
    ids=["tail", "chunk", "barrier", "phase", "found_inf"],
)
def test_planted_mistakes_are_found(right: str, wrong: str, tmp_path: Path) -> None:
    text = SOURCES[0].read_text()
    assert right in text
    broken = tmp_path / "cuda.cu"
    broken.write_text(text.replace(right, wrong))
    program = build.compile_program([broken, *SOURCES[1:], CHECK], tmp_path / "check", flags=["-fsanitize=address"])
    found = [build.run_program(program, 0, 200, order=order).returncode for order in ("forward", "reverse")]
    assert any(found)
