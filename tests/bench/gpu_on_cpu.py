"""Patches that let the GPU benchmarks run on the CPU, on small networks, with eager steps in place of graphs."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import loco_ext
from bench import bench_optim_step_gpu, harness, machine, shapes
from loco_ext.ops import backends

TINY = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1, builds=1)
FACTS = {
    "gpu": "Made-Up GPU 80GB",
    "capability": "9.0",
    "multiprocessors": 100,
    "gpu_memory_bytes": 1 << 36,
    "l2_bytes": 50 << 20,
    "driver": "1.2.3",
    "cuda": "13.0",
    "triton": "3.6.0",
}


def run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the benchmark to run on the CPU, on small networks, with eager steps in place of graphs."""

    def tiny() -> Iterator[shapes.Shape]:
        yield from shapes.conv(3, 5, 3)

    make_steps, backend = bench_optim_step_gpu.make_steps, loco_ext.backend
    monkeypatch.setattr(
        bench_optim_step_gpu, "make_steps", lambda case: make_steps(dataclasses.replace(case, mode="eager"))
    )
    networks = {"resnet18": tiny, "resnet50": tiny, "thousand_small": lambda: iter([(64,)] * 3)}
    monkeypatch.setattr(shapes, "GPU_NETWORKS", networks)
    monkeypatch.setattr(bench_optim_step_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(loco_ext, "backend", lambda name: backend("native"))
    monkeypatch.setattr(backends, "missing", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(machine, "no_gpu", lambda: None)
    monkeypatch.setattr(machine, "gpu", lambda: FACTS)
    monkeypatch.setattr(harness, "gpu_seconds", harness.host_seconds)
    monkeypatch.setattr(harness, "gpu_cache_flush", lambda: torch.ones(1000).sum)
    monkeypatch.setattr(harness, "gpu_bandwidth", lambda effort: {"median": 1e12, "best": 2e12})
    monkeypatch.setattr(harness, "Effort", lambda **arguments: TINY)
