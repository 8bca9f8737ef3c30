"""Layers between convolution and full connection: block-sparse multiplication against convolution and others.

    python -m bench.bench_block_sparse            measures all, writes bench/results/, prints tables
    python -m bench.bench_block_sparse --quick    a first impression; writes nothing without --out

Each case is a layer and a batch, forward alone and forward with backward (gradients of input, values and bias). The
candidates of a case run interleaved (see bench/harness.py). conv2d has the layer's geometry and weights of its own that
all pixels share; the others compute with the same values, independently random for each pair of pixels, and each
result is compared with our float64 reference before anything is timed. NCHW and NHWC are the memory formats of input,
output and their gradients: contiguous and channels_last. For peers see bench/block_sparse_peers.py.

The C library keeps what is freed for the next call, whoever calls: the system's handing out of pages is not measured.

Memory is the growth of a fresh process during the second call beyond what it returns, over the size of the activations.
"""

import argparse
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

import loco_ext
from bench import harness, machine, tables
from bench.block_sparse_peers import PEERS, Candidate, Layer, Problem, cannot, trained
from bench.targets import target
from loco_ext import ops
from loco_ext.experiments.memory import keep_freed_memory

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
# Where the slower ways run too: some take seconds.
PEER_CASES = (("64-64 3x3 at 16", 64), ("64-64 3x3 at 16", 250), ("64-64 3x3 at 32", 64))
PASSES = ("forward", "training")
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# Of a result, in units of the largest output: what rounding may add up to, and no mistake in the method.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

RATIOS = {
    "ours / conv2d, NHWC": ("ours NHWC", "conv2d NHWC"),
    "ours / conv2d, NCHW": ("ours NCHW", "conv2d NCHW"),
    "ours / conv2d, bfloat16": ("ours bfloat16", "conv2d bfloat16"),
    "float32 / bfloat16, ours": ("ours NHWC", "ours bfloat16"),
    **{f"{name} / ours": (name, "ours NHWC") for name in PEERS},
}
# What is to be reached at batches of 64 and 250: ratio, pass, limit, whether at least.
TARGETS = (
    *((f"ours / conv2d, {name}", "forward", 1.15, False) for name in FORMATS),
    *((f"ours / conv2d, {name}", "training", 1.35, False) for name in FORMATS),
    *(("unfold+bmm / ours", name, 4.0, True) for name in PASSES),
    *(("JAX / ours", name, 8.0, True) for name in PASSES),
    *(("float32 / bfloat16, ours", name, 1.5, True) for name in PASSES),
)
MOST_MEMORY = 0.01


def make_problem(layer: Layer, batch: int) -> Problem:
    """Values of a size that keeps that of activations, all random."""
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
    """Input, which wants a gradient, and the output's gradient."""
    x, grad = (t.to(dtype, copy=True, memory_format=memory_format) for t in (problem.x, problem.grad))
    return x.requires_grad_(), grad


def ours(problem: Problem, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> Candidate:
    """As a layer calls it, images in and out."""
    layer, pattern = problem.layer, problem.pattern
    x, grad = images(problem, memory_format, dtype)
    values = problem.values.to(dtype, copy=True).requires_grad_()
    bias = torch.zeros(pattern.n_out, layer.channels_out, dtype=dtype, requires_grad=True)

    def forward() -> Tensor:
        y = ops.block_sparse_matmul(x.permute(0, 2, 3, 1).flatten(1, 2), values, pattern, bias)
        return y.unflatten(1, (layer.out_size, layer.out_size)).permute(0, 3, 1, 2)

    return trained(forward, [x, values, bias], grad)


def convolution(problem: Problem, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> Candidate:
    """torch's conv2d with random weights."""
    layer = problem.layer
    x, grad = images(problem, memory_format, dtype)
    shape = (layer.channels_out, layer.channels_in // layer.groups, layer.kernel, layer.kernel)
    weight = torch.randn(shape).to(dtype, memory_format=memory_format).requires_grad_()
    bias = torch.zeros(layer.channels_out, dtype=dtype, requires_grad=True)
    arguments = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
    return trained(lambda: conv2d(x, weight, bias, **arguments), [x, weight, bias], grad)


def makers(problem: Problem, peers: Sequence[str]) -> dict[str, Callable[[], Candidate]]:
    """The candidates of a case, each to be made."""
    half = (torch.channels_last, torch.bfloat16)
    return {
        **{f"conv2d {name}": functools.partial(convolution, problem, form) for name, form in FORMATS.items()},
        **{f"ours {name}": functools.partial(ours, problem, form) for name, form in FORMATS.items()},
        "conv2d bfloat16": functools.partial(convolution, problem, *half),
        "ours bfloat16": functools.partial(ours, problem, *half),
        **{name: functools.partial(PEERS[name], problem) for name in peers},
    }


def expected(problem: Problem) -> Tensor:
    """The output by our reference in float64, of the first samples."""
    some = Problem(problem.layer, problem.pattern, problem.x[:4].double(), problem.values.double(), problem.grad[:4])
    with loco_ext.backend("reference"):
        candidate = ours(some, torch.channels_last, torch.float64)
        return candidate.result(candidate.forward())


def check(name: str, found: Tensor, reference: Tensor) -> None:
    """Raises RuntimeError if an output is further from the reference than rounding takes it."""
    error = (found[: len(reference)].double() - reference).abs().max().item()
    if not error <= (limit := TOLERANCE[found.dtype] * reference.abs().max().item()):
        raise RuntimeError(f"{name}: expected the reference's result within {limit:g}, got an error of {error:g}")


def measure(layer: str, batch: int, threads: int, effort: harness.Effort, peers: Sequence[str]) -> list[dict[str, Any]]:
    """The records of a case, one for each pass: timings, and ratios within rounds."""
    problem = make_problem(LAYERS[layer], batch)
    reference = expected(problem)
    records = []
    with harness.num_threads(threads):
        candidates = {name: make() for name, make in makers(problem, peers).items()}
        for name, candidate in candidates.items():
            if not name.startswith("conv2d"):
                check(f"{layer}, {name}", candidate.result(candidate.forward()), reference)
        for mode in PASSES:
            calls = {name: call for name, c in candidates.items() if (call := getattr(c, mode)) is not None}
            label = f"{layer}, batch {batch}, {mode}, threads {threads}"
            timings = harness.compare(calls.copy, effort, label)
            records.append(
                {
                    "layer": layer,
                    "batch": batch,
                    "pass": mode,
                    "threads": threads,
                    "load_average": os.getloadavg()[0],
                    "candidates": {name: asdict(timing) for name, timing in timings.items()},
                    "ratios": {
                        name: timings.ratio(a, b) for name, (a, b) in RATIOS.items() if a in timings and b in timings
                    },
                }
            )
    return records


def extra_memory(layer: Layer, batch: int, name: str, mode: str) -> float | None:
    """Growth beyond what room for the results takes, over the activations' size; None where the system does not tell.

    That room is measured too, by filling tensors of their sizes: the process grows by whole pages.
    """
    problem = make_problem(layer, batch)
    candidate = makers(problem, ["unfold+bmm"] if name == "unfold+bmm" else [])[name]()
    torch.set_num_threads(1)
    # First calls bring in code, and what libraries set up once.
    first = getattr(candidate, mode)()
    # The output of a training pass lives until its gradient is known.
    results = (*first, problem.grad) if isinstance(first, tuple) else (first,)
    kept: list[Any] = [first, torch.empty_like(first[0]).fill_(1)]
    room = _growth(lambda: kept.append([torch.empty_like(result).fill_(1) for result in results]))
    peak = _growth(lambda: kept.append(getattr(candidate, mode)()))
    if room is None or peak is None:
        return None
    return max(peak - room, 0) / (problem.x.nbytes + problem.grad.nbytes)


def _growth(call: Callable[[], object]) -> int | None:
    """Of a call that keeps what it makes, so that the next one gets memory anew."""
    # What was freed before would serve the call without being seen to grow.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return harness.peak_extra_memory(call)


def measure_memory(layers: Sequence[str], batch: int = 64) -> list[dict[str, Any]]:
    """For each layer and pass, the share of the activations that ours, convolution and patches take besides."""
    names = ("ours NHWC", "conv2d NHWC", "unfold+bmm")
    return [
        {
            "layer": layer,
            "batch": batch,
            "pass": mode,
            "share": {
                name: harness.in_fresh_process(extra_memory, LAYERS[layer], batch, name, mode)
                for name in names
                if name != "unfold+bmm" or cannot(name, LAYERS[layer]) is None
            },
        }
        for layer in layers
        for mode in PASSES
    ]


def targets(results: Sequence[dict[str, Any]], memory: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is to be reached beside what is."""
    rows = []
    for name, mode, limit, at_least in TARGETS:
        found = {
            f"{r['layer']}, batch {r['batch']}, threads {r['threads']}": r["ratios"][name]
            for r in results
            if r["pass"] == mode and r["batch"] in (64, 250) and name in r["ratios"]
        }
        rows += target(f"{mode}: {name}", limit, found, at_least)
    shares = {
        f"{r['layer']}, batch {r['batch']}, {r['pass']}": share
        for r in memory
        if (share := r["share"]["ours NHWC"]) is not None
    }
    return rows + target("memory besides, of the activations", MOST_MEMORY, shares, at_least=False)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures what the command line asks for."""
    effort = harness.Effort(min_rounds=8, min_seconds=2.0, warmup=2, builds=1)
    if arguments.quick:
        effort = harness.Effort(min_rounds=5, min_seconds=0.3, warmup=1, builds=1)
    missing = {name: reason for name in PEERS if (reason := cannot(name, Layer(1, 1, 1, 1)))}
    report: dict[str, Any] = {
        "benchmark": "block_sparse",
        "machine": machine.describe() | {"jax": machine.package_version("jax")},
        "settings": asdict(effort) | {"tolerance": {str(k): v for k, v in TOLERANCE.items()}},
        "bandwidth": [harness.bandwidth(count, effort) for count in arguments.threads],
        "not_measured": missing,
        "results": [],
    }
    with loco_ext.backend("native"):
        for layer in arguments.layers:
            for batch in arguments.batches or BATCHES[layer]:
                wanted = PEERS if (layer, batch) in PEER_CASES else ()
                peers = [name for name in wanted if cannot(name, LAYERS[layer]) is None]
                for threads in arguments.threads:
                    report["results"] += measure(layer, batch, threads, effort, peers)
    report["memory"] = measure_memory(arguments.layers)
    report["targets"] = targets(report["results"], report["memory"])
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; only a full run writes the committed file by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.bench_block_sparse", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--batches", nargs="*", type=int, help="in place of each layer's own")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="in ascending order")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, help="JSON file; a full run has bench/results/block_sparse-<cpu>.json")
    arguments = parser.parse_args(argv)
    full = set(arguments.layers) == set(LAYERS) and not arguments.batches
    if arguments.out is None and full and not arguments.quick:
        arguments.out = harness.RESULTS / f"block_sparse-{machine.slug(machine.cpu_model())}.json"
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the JSON file, prints tables."""
    arguments = parse(argv)
    if os.getloadavg()[0] > 0.5:
        print("warning: something else is running; with several threads that costs whole time slices", file=sys.stderr)
    keep_freed_memory()
    report = run(arguments)
    tables.publish(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
