"""The host's time for an optimizer step on a GPU, measured without one: kernels are launched and run no block.

    python -m tests.cuda_on_cpu.host_time [REPEATS]

"cpu" is the step on the CPU itself, "cuda" the CUDA operators compiled for it, "triton" the Triton path without its
launches. Tensors have 64 elements. "kept": gradients stay where they are; "new": every step has gradients in new
memory, as after ``zero_grad()``.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import loco_ext
from loco_ext import optim
from tests.cuda_on_cpu import operators
from tests.triton_runs import let_triton_serve_cpus

RULES = {"SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}, "AdamW": {"lr": 1e-3}}


def times(name: str, tensors: int, new: bool, repeats: int) -> list[float]:
    """Return the microseconds of steps that are like the one before."""
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
    optimizer = getattr(optim, name)(params, **RULES[name])
    taken = []
    for i in range(repeats + 5):
        if new or i == 0:
            optimizer.zero_grad()
            for p in params:
                p.grad = torch.ones_like(p)
        begin = time.perf_counter()
        optimizer.step()
        taken.append(1e6 * (time.perf_counter() - begin))
    return sorted(taken[5:])


def stub_triton(patch: pytest.MonkeyPatch) -> None:
    """Let the Triton path serve CPU tensors and launch nothing."""
    from loco_ext.triton_kernels import optim_step

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    let_triton_serve_cpus(patch)
    for name in ("step_kernel", "prepare_kernel"):
        patch.setattr(optim_step, name, Kernel())


def main(repeats: int) -> None:
    """Print the medians, and in parentheses the times that a fifth and four fifths of the steps stay below."""
    torch.set_num_threads(1)
    os.environ["CUDA_ON_CPU_LAST_BLOCKS"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        for path in ("cpu", "cuda", "triton"):
            with pytest.MonkeyPatch.context() as patch, loco_ext.backend("triton" if path == "triton" else "native"):
                if path == "cuda":
                    operators.use(patch, Path(folder))
                if path == "triton":
                    stub_triton(patch)
                for tensors in (161, 1000):
                    for name in RULES:
                        for new in (False, True):
                            taken = times(name, tensors, new, repeats)
                            low, high = taken[len(taken) // 5], taken[len(taken) * 4 // 5]
                            print(
                                f"{path:6} {tensors:5} tensors  {name:5}  {'new' if new else 'kept':4}  "
                                f"{statistics.median(taken):8.1f} us ({low:.1f}, {high:.1f})",
                                flush=True,
                            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
