"""Layers between convolution and full connection: block-sparse multiplication against convolution and other methods.

Each case is a layer and a batch, forward alone and forward with backward (gradients of input, values and bias). The
candidates of a case run interleaved (see bench/harness.py). conv2d has the layer's geometry, with its own weights
shared by all pixels. The others compute with the same values, independently random for each pair of pixels, and each
result is compared with our float64 reference before timing. NCHW and NHWC are the memory formats of input, output and
their gradients: contiguous and channels_last. For peers see bench/block_sparse_peers.py.

The C library keeps freed memory for the next call of any candidate, so that page faults are not measured. Memory is
the growth of a fresh process during the second call beyond its results, divided by the size of the activations.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

import loco_ext
from bench import harness
from bench.block_sparse_peers import PEERS, Candidate, Layer, Problem, cannot, trained
from bench.command import Command, Job
from bench.targets import target
from loco_ext import ops
from loco_ext.version import package_version

LAYERS = {
    "64-64 3x3 at 16": Layer(64, 64, 16, 3),
    "64-64 3x3 at 32": Layer(64, 64, 32, 3),
    "eFCN 1: 3-64 4x4/2 at 32": Layer(3, 64, 32, 4, stride=2, padding=2),
    "eFCN 2: 64-64 5x5 at 8": Layer(64, 64, 8, 5, padding=2),
    "eFCN 3: 64-64 3x3 at 3": Layer(64, 64, 3, 3),
    "256-256 3x3 at 8": Layer(256, 256, 8, 3),
    "depthwise 64 7x7 at 16": Layer(64, 64, 16, 7, padding=3, groups=64),
}
BATCHES = dict.fromkeys(LAYERS, (64, 250)) | dict.fromkeys(("64-64 3x3 at 16", "64-64 3x3 at 32"), (1, 8, 64, 250))
# Cases in which the slower peers run too; some take seconds.
PEER_CASES = (("64-64 3x3 at 16", 64), ("64-64 3x3 at 16", 250), ("64-64 3x3 at 32", 64))
PASSES = ("forward", "training")
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# Error allowed relative to the largest output: enough for rounding, too little for a mistake in the method.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

RATIOS = {
    "ours / conv2d, NHWC": ("ours NHWC", "conv2d NHWC"),
    "ours / conv2d, NCHW": ("ours NCHW", "conv2d NCHW"),
    "ours / conv2d, bfloat16": ("ours bfloat16", "conv2d bfloat16"),
    "float32 / bfloat16, ours": ("ours NHWC", "ours bfloat16"),
    **{f"{name} / ours": (name, "ours NHWC") for name in PEERS},
}
# Targets at batches of 64 and 250: ratio, pass, limit, and whether the limit is a minimum.
TARGETS = (
    *((f"ours / conv2d, {name}", "forward", 1.15, False) for name in FORMATS),
    *((f"ours / conv2d, {name}", "training", 1.35, False) for name in FORMATS),
    *(("unfold+bmm / ours", name, 4.0, True) for name in PASSES),
    *(("JAX / ours", name, 8.0, True) for name in PASSES),
    *(("float32 / bfloat16, ours", name, 1.5, True) for name in PASSES),
)
MOST_MEMORY, MEMORY_BATCH = 0.01, 64


def make_problem(layer: Layer, batch: int) -> Problem:
    """Return random values, scaled to preserve the magnitude of activations, and a random batch."""
    generator = torch.Generator().manual_seed(0)
    pattern = layer.pattern()
    depth, width = layer.channels_in // layer.groups, layer.channels_out // layer.groups
    values = (
        torch.randn(pattern.nnz, layer.groups, depth, width, generator=generator) / (depth * layer.kernel**2) ** 0.5
    )
    x = torch.randn(batch, layer.channels_in, layer.size, layer.size, generator=generator)
    grad = torch.randn(batch, layer.channels_out, layer.out_size, layer.out_size, generator=generator)
    return Problem(layer, pattern, x, values, grad)


def images(problem: Problem, memory_format: torch.memory_format, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the input, which requires a gradient, and the gradient of the output."""
    x, grad = (t.to(dtype, copy=True, memory_format=memory_format) for t in (problem.x, problem.grad))
    return x.requires_grad_(), grad


def ours(problem: Problem, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> Candidate:
    """Return our product as a layer calls it, with images as input and output."""
    layer, pattern = problem.layer, problem.pattern
    x, grad = images(problem, memory_format, dtype)
    values = problem.values.to(dtype, copy=True).requires_grad_()
    bias = torch.zeros(pattern.n_out, layer.channels_out, dtype=dtype, requires_grad=True)

    def forward() -> Tensor:
        y = ops.block_sparse_matmul(x.permute(0, 2, 3, 1).flatten(1, 2), values, pattern, bias)
        return y.unflatten(1, (layer.out_size, layer.out_size)).permute(0, 3, 1, 2)

    return trained(forward, [x, values, bias], grad)


def convolution(problem: Problem, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> Candidate:
    """Return torch's conv2d with random weights."""
    layer = problem.layer
    x, grad = images(problem, memory_format, dtype)
    shape = (layer.channels_out, layer.channels_in // layer.groups, layer.kernel, layer.kernel)
    weight = torch.randn(shape).to(dtype, memory_format=memory_format).requires_grad_()
    bias = torch.zeros(layer.channels_out, dtype=dtype, requires_grad=True)
    arguments = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
    return trained(lambda: conv2d(x, weight, bias, **arguments), [x, weight, bias], grad)


def makers(problem: Problem, peers: Sequence[str]) -> dict[str, Callable[[], Candidate]]:
    """Return a builder for each candidate of a case."""
    half = (torch.channels_last, torch.bfloat16)
    return {
        **{f"conv2d {name}": functools.partial(convolution, problem, form) for name, form in FORMATS.items()},
        **{f"ours {name}": functools.partial(ours, problem, form) for name, form in FORMATS.items()},
        "conv2d bfloat16": functools.partial(convolution, problem, *half),
        "ours bfloat16": functools.partial(ours, problem, *half),
        **{name: functools.partial(PEERS[name], problem) for name in peers},
    }


def expected(problem: Problem) -> Tensor:
    """Return the output of our float64 reference for the first samples."""
    some = Problem(problem.layer, problem.pattern, problem.x[:4].double(), problem.values.double(), problem.grad[:4])
    with loco_ext.backend("reference"):
        candidate = ours(some, torch.channels_last, torch.float64)
        return candidate.result(candidate.forward())


def measure(layer: str, batch: int, effort: harness.Effort, peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the records of a case, one for each pass: timings, and ratios within rounds."""
    problem = make_problem(LAYERS[layer], batch)
    reference = expected(problem)
    candidates = {name: make() for name, make in makers(problem, peers).items()}
    for name, candidate in candidates.items():
        if not name.startswith("conv2d"):
            found = candidate.result(candidate.forward())
            harness.check(f"{layer}, {name}", found[: len(reference)], reference, TOLERANCE[found.dtype])
    records = []
    for mode in PASSES:
        calls = {name: call for name, c in candidates.items() if (call := getattr(c, mode)) is not None}
        timings = harness.compare(calls.copy, effort, f"{layer}, batch {batch}, {mode}")
        case = {"layer": layer, "batch": batch, "pass": mode}
        records.append(case | timings.record() | {"ratios": timings.ratios(RATIOS)})
    return records


def extra_memory(layer: Layer, batch: int, name: str, mode: str) -> float | None:
    """Return the memory growth beyond the results, over the activations' size; None where the system does not tell.

    The memory for the results is measured too, by filling tensors of their sizes, because a process grows by whole
    pages.
    """
    problem = make_problem(layer, batch)
    candidate = makers(problem, ["unfold+bmm"] if name == "unfold+bmm" else [])[name]()
    torch.set_num_threads(1)
    # The first call loads code and one-time state of libraries.
    first = getattr(candidate, mode)()
    # The output of a training pass stays allocated until its gradient is known.
    results = (*first, problem.grad) if isinstance(first, tuple) else (first,)
    kept: list[Any] = [first, torch.empty_like(first[0]).fill_(1)]
    room = _growth(lambda: kept.append([torch.empty_like(result).fill_(1) for result in results]))
    peak = _growth(lambda: kept.append(getattr(candidate, mode)()))
    if room is None or peak is None:
        return None
    return max(peak - room, 0) / (problem.x.nbytes + problem.grad.nbytes)


def _growth(call: Callable[[], object]) -> int | None:
    """Return the growth during a call whose results are kept, so that the next call needs new memory."""
    # Memory freed before could otherwise serve the call without visible growth.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return harness.peak_extra_memory(call)


def measure_memory(layers: Sequence[str]) -> list[dict[str, Any]]:
    """Return, by layer and pass, the extra memory of ours, convolution and unfold+bmm as a share of the activations."""
    names = ("ours NHWC", "conv2d NHWC", "unfold+bmm")
    return [
        {
            "layer": layer,
            "batch": MEMORY_BATCH,
            "pass": mode,
            "share": {
                name: harness.in_fresh_process(extra_memory, LAYERS[layer], MEMORY_BATCH, name, mode)
                for name in names
                if name != "unfold+bmm" or cannot(name, LAYERS[layer]) is None
            },
        }
        for layer in layers
        for mode in PASSES
    ]


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets beside the measurements."""
    rows = []
    for name, mode, limit, at_least in TARGETS:
        found = {
            f"{r['layer']}, batch {r['batch']}, threads {r['threads']}": r["ratios"][name]
            for r in report["results"]
            if r["pass"] == mode and r["batch"] in (64, 250) and name in r["ratios"]
        }
        rows += target(f"{mode}: {name}", limit, found, at_least)
    shares = {
        f"{r['layer']}, batch {r['batch']}, {r['pass']}": share
        for r in report["memory"]
        if (share := r["share"]["ours NHWC"]) is not None
    }
    return rows + target("memory besides, of the activations", MOST_MEMORY, shares, at_least=False)


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, arguments = job.report, job.arguments
    report["machine"]["jax"] = package_version("jax")
    report["settings"]["tolerance"] = {str(k): v for k, v in TOLERANCE.items()}
    report["bandwidth"] = [harness.bandwidth(job.effort) for _ in job.threads()]
    report["not_measured"] = {name: reason for name in PEERS if (reason := cannot(name, Layer(1, 1, 1, 1)))}
    with loco_ext.backend("native"):
        for layer in arguments.layers:
            for batch in BATCHES[layer]:
                wanted = PEERS if (layer, batch) in PEER_CASES else ()
                peers = [name for name in wanted if cannot(name, LAYERS[layer]) is None]
                for _ in job.threads():
                    job.add(*measure(layer, batch, job.effort, peers))
    report["memory"] = measure_memory(arguments.layers)
    report["targets"] = targets(report)


EFFORT = harness.Effort(min_rounds=8, min_seconds=2.0, warmup=2, builds=1)
main = Command("bench_block_sparse", __doc__, run, {"layers": LAYERS}, EFFORT, keep_memory=True).main


if __name__ == "__main__":
    sys.exit(main())
