"""The exact prox of ring penalties on an NVIDIA GPU, alone and after an optimizer step.

The cases are those of bench/bench_ring_prox.py, timed as bench/gpu_timer.py does.
"cuda" and "triton" are ours. Steps are called one by one ("eager") or replayed from a CUDA graph. A prox alone must at
least read the weight, and the metric if there is one, and write the result; the bandwidth of that traffic is reported
beside a device copy's. Eager and compiled PyTorch run in float32.
"""

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

import loco_ext
from bench import bench_ring_prox, harness
from bench.bench_optim_step import State, Step, make_parameters
from bench.bench_optim_step_gpu import BACKENDS, DTYPES, MODES
from bench.bench_ring_prox import CASES, NETWORK, RULES, STEPS, make_weight, penalised_step
from bench.command import Command, Job
from bench.gpu_timer import GpuTimer, both, capture, forced, step_seconds
from bench.ring_prox_peers import PEERS
from loco_ext.ops import backends

DEVICE = "cuda"
PEER_NAMES = ("torch_groups", "torch_rings", "torch_compile")
# Errors allowed relative to the largest weight.
TOLERANCES = {"float32": bench_ring_prox.TOLERANCE, "bfloat16": 2.0**-8}


def not_measured() -> dict[str, str]:
    """Return the candidates that cannot run here, and why."""
    if (reason := backends.missing("ring_prox", "triton", "cuda")) is None:
        return {}
    return {"triton": reason, "torch_compile": reason}


def make_calls(name: str, dtype: str, reference: Tensor, missing: Collection[str]) -> dict[str, Step]:
    """Return the prox of every candidate; each result is first compared with the reference."""
    case = CASES[name]
    weight = make_weight(case.shape, DEVICE, DTYPES[dtype])
    ours = bench_ring_prox.ours(case, weight).call
    calls: dict[str, Callable[[], Any]] = {}
    for label, backend in BACKENDS.items():
        if label not in missing:
            with loco_ext.backend(backend):
                harness.check(f"{name} {dtype}, {label}", ours(), reference, TOLERANCES[dtype])
            calls[label] = forced(ours, backend)
    for label in PEER_NAMES:
        if dtype == "float32" and label in case.peers and label not in missing:
            candidate = PEERS[label](bench_ring_prox.problem_of(case, weight))
            result = candidate.result(candidate.call())
            harness.check(f"{name} {dtype}, {label}", result, reference, TOLERANCES[dtype])
            calls[label] = candidate.call
    return calls


def measure_prox(name: str, dtype: str, timer: GpuTimer, missing: Collection[str]) -> dict[str, Any]:
    """Return the record of a case in one dtype."""
    reference = bench_ring_prox.expected(CASES[name], make_weight(CASES[name].shape, DEVICE, DTYPES[dtype]))
    build = functools.partial(make_calls, name, dtype, reference, missing)
    gpu, host = timer.compare(build, f"{name} {dtype}")
    copy = timer.copy_bandwidth["median"]
    moved = (3 if CASES[name].metric else 2) * math.prod(CASES[name].shape) * DTYPES[dtype].itemsize
    return {
        "case": name,
        "dtype": dtype,
        "shape": CASES[name].shape,
        "bytes": moved,
        "candidates": both(gpu, host),
        "of_copy": {label: moved / gpu[label].median / copy for label in gpu if label in BACKENDS},
    }


def make_steps(rule_name: str, mode: str, missing: Collection[str]) -> dict[str, Step]:
    """Return our steps with and without a penalty, in each backend, on the same parameters and states."""
    parameters = make_parameters(NETWORK, DEVICE)
    state: State = defaultdict(dict)
    steps = {
        f"{label}_{name}": forced(penalised_step(RULES[rule_name], parameters, state, least), backend)
        for label, backend in BACKENDS.items()
        if label not in missing
        for name, least in STEPS.items()
    }
    return {name: capture(step) for name, step in steps.items()} if mode == "graph" else steps


def measure_step(rule_name: str, mode: str, timer: GpuTimer, missing: Collection[str]) -> dict[str, Any]:
    """Return the record of a rule in a mode."""
    build = functools.partial(make_steps, rule_name, mode, missing)
    gpu, host = timer.compare(build, f"{NETWORK} {rule_name} {mode}")
    seconds = step_seconds(gpu, host, mode)
    return {
        "network": NETWORK,
        "rule": rule_name,
        "mode": mode,
        "candidates": both(gpu, host),
        "ratios": {
            f"{label}, {name}": seconds[f"{label}_{a}"] / seconds[f"{label}_{b}"]
            for label in BACKENDS
            for name, (a, b) in bench_ring_prox.STEP_RATIOS.items()
            if f"{label}_{a}" in seconds
        },
    }


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, chosen, missing = job.report, job.arguments, not_measured()
    cases = len(chosen.cases) * len(chosen.dtypes) + len(chosen.rules) * len(chosen.modes)
    report["settings"] |= {"strength": bench_ring_prox.STRENGTH, "cases": cases}
    report |= {"not_measured": missing, "steps": []}
    timer = GpuTimer(job.effort)
    report["copy_bandwidth"] = timer.copy_bandwidth
    for name, dtype in itertools.product(chosen.cases, chosen.dtypes):
        job.add(measure_prox(name, dtype, timer, missing))
    for rule, mode in itertools.product(chosen.rules, chosen.modes):
        job.add(measure_step(rule, mode, timer, missing), to="steps")


EFFORT = harness.Effort(min_rounds=30, min_seconds=0.7)
main = Command(
    "bench_ring_prox_gpu",
    __doc__,
    run,
    {"cases": CASES, "dtypes": DTYPES, "rules": RULES, "modes": MODES},
    EFFORT,
    gpu=("ring_prox", "native"),
).main


if __name__ == "__main__":
    sys.exit(main())
