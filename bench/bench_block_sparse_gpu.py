"""Layers between convolution and full connection on an NVIDIA GPU: ours in Triton against convolution, unfold and bmm.

Layers and candidates are those of bench/bench_block_sparse.py, timed as bench/gpu_timer.py does. A forward pass has one
product and its backward pass two, and each must at least read or write input, output and values once; the time of a
device copy of that many bytes is reported as the floor. All candidates multiply "float32" in IEEE arithmetic and "tf32"
in TF32.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import loco_ext
from bench import bench_block_sparse, harness
from bench.bench_block_sparse import LAYERS, PASSES, convolution, expected, make_problem
from bench.block_sparse_peers import Candidate, Problem, cannot, unfold_bmm
from bench.command import Command, Job
from bench.gpu_timer import GpuTimer, both
from bench.targets import target

DEVICE = "cuda"
REFERENCE = "64-64 3x3 at 32"


@dataclass(frozen=True)
class Arithmetic:
    """Dtype and multiplication mode of a case; the tolerance is relative to the largest output."""

    dtype: torch.dtype
    tf32: bool
    tolerance: float


ARITHMETIC = {
    "bfloat16": Arithmetic(torch.bfloat16, False, 1e-2),
    "tf32": Arithmetic(torch.float32, True, 4e-3),
    "float32": Arithmetic(torch.float32, False, 1e-4),
}
BATCHES = {name: (250,) for name in LAYERS} | {REFERENCE: (1, 64, 250)}
PRODUCTS = {"forward": 1, "training": 3}
RATIOS = {
    "ours / conv2d, NHWC": ("ours", "conv2d NHWC"),
    "ours / conv2d, NCHW": ("ours", "conv2d NCHW"),
    "unfold+bmm / ours": ("unfold+bmm", "ours"),
}
# Targets on an H100 for the reference layer in bfloat16, forward and backward: at most twice the minimum that its
# nominal memory bandwidth of 3.35 TB/s allows, and at least this many times faster than unfold and bmm.
MOST_MICROSECONDS = 2 * 3 * 41.0
LEAST_SPEEDUP = 4.0


@contextlib.contextmanager
def multiplying(arithmetic: Arithmetic) -> Iterator[None]:
    """Make everything multiply float32 numbers in that mode inside the ``with``."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, precision = matmul.fp32_precision, "tf32" if arithmetic.tf32 else "ieee"
    flags = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    try:
        matmul.fp32_precision = precision
        with cudnn.flags(**flags, allow_tf32=arithmetic.tf32):
            yield
    finally:
        matmul.fp32_precision = before


def on_gpu(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem with its tensors on the GPU in the dtype."""
    x, values, grad = (tensor.to(DEVICE, dtype) for tensor in (problem.x, problem.values, problem.grad))
    return Problem(problem.layer, problem.pattern.to(DEVICE), x, values, grad)


def makers(problem: Problem) -> dict[str, Callable[[], Candidate]]:
    """Return a builder for each candidate."""
    dtype = problem.x.dtype
    found: dict[str, Callable[[], Candidate]] = {
        "conv2d NCHW": functools.partial(convolution, problem, torch.contiguous_format, dtype),
        "conv2d NHWC": functools.partial(convolution, problem, torch.channels_last, dtype),
        "ours": functools.partial(bench_block_sparse.ours, problem, torch.channels_last, dtype),
    }
    if cannot("unfold+bmm", problem.layer) is None:
        found["unfold+bmm"] = functools.partial(unfold_bmm, problem)
    return found


def make_candidates(label: str, problem: Problem, reference: Tensor, tolerance: float) -> dict[str, Candidate]:
    """Return every candidate; results computed with our values are first compared with the reference."""
    candidates = {}
    for name, make in makers(problem).items():
        with torch.device(DEVICE):
            candidates[name] = make()
        if not name.startswith("conv2d"):
            result = candidates[name].result(candidates[name].forward())
            harness.check(f"{label}, {name}", result[: len(reference)].cpu(), reference, tolerance)
    return candidates


def measure(layer: str, batch: int, arithmetic: str, timer: GpuTimer) -> list[dict[str, Any]]:
    """Return the records of a case, one for each pass."""
    on_host, how = make_problem(LAYERS[layer], batch), ARITHMETIC[arithmetic]
    reference = expected(on_host)
    problem = on_gpu(on_host, how.dtype)
    label = f"{layer}, batch {batch}, {arithmetic}"
    moved = sum(tensor.nbytes for tensor in (problem.x, problem.values, problem.grad))
    records = []
    with multiplying(how):
        candidates = make_candidates(label, problem, reference, how.tolerance)
        for mode in PASSES:
            calls = {name: getattr(candidate, mode) for name, candidate in candidates.items()}
            gpu, host = timer.compare(functools.partial(dict, calls), f"{label}, {mode}")
            floor = PRODUCTS[mode] * moved / timer.copy_bandwidth["median"]
            records.append(
                {
                    "layer": layer,
                    "batch": batch,
                    "arithmetic": arithmetic,
                    "pass": mode,
                    "floor": floor,
                    "of_floor": gpu["ours"].median / floor,
                    "candidates": both(gpu, host),
                    "ratios": gpu.ratios(RATIOS),
                }
            )
    return records


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets beside the measurements."""
    microseconds, speedups = {}, {}
    for record in report["results"]:
        case = (record["layer"], record["batch"], record["arithmetic"], record["pass"])
        if case == (REFERENCE, 250, "bfloat16", "training"):
            microseconds[REFERENCE] = 1e6 * record["candidates"]["ours"]["gpu"]["median"]
            speedups[REFERENCE] = record["ratios"]["unfold+bmm / ours"]
    name = "microseconds forward and backward in bfloat16"
    return [
        *target(name, MOST_MICROSECONDS, microseconds, at_least=False),
        *target("times faster than unfold+bmm, the same", LEAST_SPEEDUP, speedups, at_least=True),
    ]


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Return layer, batch and arithmetic of each case; only the reference layer is measured in all arithmetics."""
    return [
        (layer, batch, arithmetic)
        for layer in arguments.layers
        for batch in BATCHES[layer]
        for arithmetic in arguments.arithmetic
        if arithmetic == "bfloat16" or (layer == REFERENCE and batch == max(BATCHES[layer]))
    ]


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    cases = cases_of(job.arguments)
    job.report["settings"]["cases"] = len(cases) * len(PASSES)
    timer = GpuTimer(job.effort)
    job.report["copy_bandwidth"] = timer.copy_bandwidth
    with loco_ext.backend("triton"):
        for case in cases:
            job.add(*measure(*case, timer))
            job.report["targets"] = targets(job.report)


EFFORT = harness.Effort(min_rounds=30, min_seconds=0.7, builds=1)
main = Command(
    "bench_block_sparse_gpu",
    __doc__,
    run,
    {"layers": LAYERS, "arithmetic": ARITHMETIC},
    EFFORT,
    gpu=("block_sparse", "triton"),
).main


if __name__ == "__main__":
    sys.exit(main())
