"""Sizes at which every benchmark runs in seconds, and stand-ins for a GPU, so that those of a GPU run on the CPU."""

import dataclasses
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

import loco_ext
from bench import bench_block_sparse as block_sparse
from bench import bench_block_sparse_gpu as block_sparse_gpu
from bench import bench_compact as compact
from bench import bench_landscape as landscape
from bench import bench_optim_step_gpu as optim_step_gpu
from bench import bench_regions as regions
from bench import bench_ring_prox as ring_prox
from bench import bench_ring_prox_gpu as ring_prox_gpu
from bench import bench_train as train
from bench import bench_zoo as zoo
from bench import command, gpu_timer, harness, machine, shapes
from bench.block_sparse_peers import Layer
from loco_ext.experiments.models import small_cnn
from loco_ext.ops import backends

GPU = {"gpu": "Made-Up GPU 80GB", "capability": "9.0", "multiprocessors": 100, "l2_bytes": 50 << 20}
GPU |= {"driver": "1.2.3", "cuda": "13.0", "triton": "3.6.0"}
EFFORT = harness.Effort(min_rounds=2, min_seconds=0.0, warmup=1, builds=1)
LAYERS = {block_sparse_gpu.REFERENCE: Layer(4, 4, 5, 3), "strided": Layer(3, 4, 8, 4, stride=2, padding=2)}
LAYERS["groups"] = Layer(6, 4, 5, 3, groups=2)
BATCHES = dict.fromkeys(LAYERS, (6,)) | {block_sparse_gpu.REFERENCE: (250,)}


@contextmanager
def replaced(attributes):
    """Replace attributes of modules, of dictionaries the entries, inside the ``with``."""
    with ExitStack() as stack:
        for module, values in attributes.items():
            for name, value in values.items():
                old = getattr(module, name)
                patch = mock.patch.dict(old, value, clear=True) if isinstance(old, dict) else None
                stack.enter_context(patch or mock.patch.object(module, name, value))
        yield


def smaller(case):
    """Return a case of bench_ring_prox with a small weight of which the prox leaves a part."""
    penalty = dataclasses.replace(case.penalty, strength=0.2 if case.penalty.norm == "linf" else 0.05)
    return dataclasses.replace(case, shape=(9, 5, 3, 3), penalty=penalty)


def tiny():
    """Replace networks, layers and weights by small ones, measure few rounds, compile nothing, start no process."""
    names = {"NETWORKS": ("resnet50", "large"), "GPU_NETWORKS": ("resnet18", "resnet50", "thousand_small")}
    bandwidth, parameters = harness.bandwidth, [(5, 3, 3, 3), (4, 5, 1, 1), (7,)]
    return replaced(
        {
            command: {"QUICK": EFFORT},
            harness: {
                "bandwidth": lambda effort: bandwidth(effort, elements=1000),
                "in_fresh_process": lambda function, *given: function(*given),
            },
            torch: {"compile": lambda function: function},
            shapes: {table: dict.fromkeys(found, lambda: iter(parameters)) for table, found in names.items()},
            block_sparse: {"LAYERS": LAYERS, "BATCHES": BATCHES, "PEER_CASES": (("groups", 6),)}
            | {"extra_memory": lambda *_: 0.002},
            block_sparse_gpu: {"BATCHES": BATCHES},
            compact: {"BATCH_SIZE": 2},
            landscape: {"BATCH_SIZE": {"small": 2}, "TARGETS": ("small",), "MEMORY_BATCH_SIZE": 2, "MEMORY_RUNS": 1},
            regions: {"UNITS": 6, "INPUTS": 9, "LARGE_INPUTS": 20, "GRAM_BATCHES": (1, 3)},
            ring_prox: {"CASES": {name: smaller(case) for name, case in ring_prox.CASES.items()}},
            train: {"STEPS": {"small": 1}, "BATCH_SIZE": 8},
            zoo: {"IMAGE": (1, 3, 32, 32), "CHECKED": ((2, 3, 16, 16),), "make": lambda name: small_cnn(3, 10, 32)},
        }
    )


def on_the_cpu():
    """Run the benchmarks of a GPU on the CPU, with eager steps in place of graphs and the native backend for Triton."""
    make_steps, backend = optim_step_gpu.make_steps, loco_ext.backend
    eager = {"make_steps": lambda case: make_steps(dataclasses.replace(case, mode="eager"))}
    return replaced(
        {
            optim_step_gpu: eager | {"DEVICE": "cpu"},
            ring_prox_gpu: {"capture": lambda step: step, "DEVICE": "cpu"},
            block_sparse_gpu: {"DEVICE": "cpu"},
            loco_ext: {"backend": lambda name: backend("native")},
            backends: {"missing": lambda *arguments: None},
            torch.cuda: {"synchronize": lambda: None, "set_sync_debug_mode": lambda mode: None},
            machine: {"no_gpu": lambda: None, "gpu": lambda: GPU},
            gpu_timer: {"seconds": harness.host_seconds, "cache_flush": lambda: torch.ones(1000).sum}
            | {"copy_bandwidth": lambda effort, flush: {"median": 1e12, "best": 2e12}},
        }
    )
