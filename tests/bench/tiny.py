"""Patches that let the benchmarks run in seconds: small networks and layers, and those of a GPU on the CPU."""

import dataclasses

import torch

import loco_ext
from bench import (
    bench_block_sparse,
    bench_block_sparse_gpu,
    bench_compact,
    bench_landscape,
    bench_optim_step,
    bench_optim_step_gpu,
    bench_regions,
    bench_ring_prox,
    bench_ring_prox_gpu,
    bench_train,
    harness,
    machine,
    shapes,
)
from bench.block_sparse_peers import Layer
from loco_ext.ops import backends

TINY = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1, builds=1)
GPU = {
    "gpu": "Made-Up GPU 80GB",
    "capability": "9.0",
    "multiprocessors": 100,
    "gpu_memory_bytes": 1 << 36,
    "l2_bytes": 50 << 20,
    "driver": "1.2.3",
    "cuda": "13.0",
    "triton": "3.6.0",
}
CONVOLUTION = [(5, 3, 3, 3), (4, 5, 1, 1), (7,)]
LAYERS = {
    bench_block_sparse_gpu.REFERENCE: Layer(4, 4, 5, 3),
    "smaller": Layer(3, 4, 8, 4, stride=2, padding=2),
    "groups": Layer(6, 4, 5, 3, groups=2),
}


def make_small(monkeypatch):
    """Replace networks, layers and weights by small ones, measure few rounds, compile nothing, start no process."""

    def patch(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    bandwidth = harness.bandwidth
    patch(harness, Effort=lambda **_: TINY, in_fresh_process=lambda function, *arguments: function(*arguments))
    patch(harness, bandwidth=lambda threads, effort: bandwidth(threads, TINY, elements=1000))
    patch(shapes, NETWORKS={"resnet50": lambda: iter(CONVOLUTION), "large": lambda: iter([(7, 5, 3, 3)])})
    patch(bench_compact, BATCH_SIZE=2)
    patch(bench_landscape, BATCH_SIZE={"small": 2}, TARGETS=("small",), MEMORY_BATCH_SIZE=2, MEMORY_RUNS=1)
    patch(bench_regions, UNITS=6, INPUTS=9, LARGE_INPUTS=20, GRAM_BATCHES=(1, 3))
    patch(bench_train, STEPS={"small": 1}, BATCH_SIZE=8)
    patch(torch, compile=lambda function: function)
    penalties = {name: case.penalty for name, case in bench_ring_prox.CASES.items()}
    strengths = {name: 0.2 if penalty.norm == "linf" else 0.05 for name, penalty in penalties.items()}
    cases = {
        name: dataclasses.replace(
            case, shape=(9, 5, 3, 3), penalty=dataclasses.replace(case.penalty, strength=strengths[name])
        )
        for name, case in bench_ring_prox.CASES.items()
    }
    for module in (bench_ring_prox, bench_ring_prox_gpu):
        patch(module, CASES=cases)
    for each in (bench_block_sparse, bench_block_sparse_gpu):
        patch(each, LAYERS=LAYERS, BATCHES=dict.fromkeys(LAYERS, (6,)) | {bench_block_sparse_gpu.REFERENCE: (250,)})
    patch(bench_block_sparse, PEER_CASES=(("groups", 6),), extra_memory=lambda *_: 0.002)
    for each in (bench_block_sparse, bench_block_sparse_gpu):
        monkeypatch.setitem(each.COMMAND.options, "layers", LAYERS)
    monkeypatch.setitem(bench_landscape.COMMAND.options, "models", {"small": 2})
    monkeypatch.setitem(bench_optim_step.COMMAND.options, "networks", shapes.NETWORKS)


def run_on_the_cpu(monkeypatch):
    """Run the benchmarks of a GPU on the CPU, with eager steps in place of graphs and the native backend for Triton."""
    make_steps, backend = bench_optim_step_gpu.make_steps, loco_ext.backend
    monkeypatch.setattr(
        bench_optim_step_gpu, "make_steps", lambda case: make_steps(dataclasses.replace(case, mode="eager"))
    )
    monkeypatch.setattr(bench_ring_prox_gpu, "capture", lambda step: step)
    small = {name: lambda: iter(CONVOLUTION) for name in ("resnet18", "resnet50", "thousand_small")}
    monkeypatch.setattr(shapes, "GPU_NETWORKS", small)
    for module in (bench_optim_step_gpu, bench_ring_prox_gpu, bench_block_sparse_gpu):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(loco_ext, "backend", lambda name: backend("native"))
    monkeypatch.setattr(backends, "missing", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(machine, "no_gpu", lambda: None)
    monkeypatch.setattr(machine, "gpu", lambda: GPU)
    monkeypatch.setattr(harness, "gpu_seconds", harness.host_seconds)
    monkeypatch.setattr(harness, "gpu_cache_flush", lambda: torch.ones(1000).sum)
    monkeypatch.setattr(harness, "gpu_bandwidth", lambda effort: {"median": 1e12, "best": 2e12})
