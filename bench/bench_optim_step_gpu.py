"""One optimizer step over all parameters of a network on an NVIDIA GPU: torch's implementations against ours.

Each case is a network, a rule, a dtype (of parameters, gradients and states) and a mode: steps called one by one
("eager") or replayed from a CUDA graph. Its candidates run interleaved, on the same parameters, gradients and moments,
timed as bench/gpu_timer.py does. An eager step takes the longer of the times of GPU and host, a replayed one the GPU's.
"cuda" and "triton" are ours, with uniform decay or with LOCO-REG's map.

apex, whose optimizers are multi-tensor-apply kernels like torch's fused ones, is measured in float32 where it is
installed; for other dtypes it keeps its states in float32.
"""

import functools
import importlib
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

import loco_ext
from bench import harness, shapes
from bench.bench_optim_step import (
    LEARNING_RATE,
    LOCALITY,
    RULES,
    WEIGHT_DECAY,
    Parameters,
    Rule,
    State,
    Step,
    make_parameters,
    our_step,
    step_on,
    torch_step,
)
from bench.command import Command, Job
from bench.gpu_timer import GpuTimer, both, capture, forced, step_seconds
from bench.targets import target
from loco_ext.ops import backends
from loco_ext.optim.locality import decay_maps

DEVICE = "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = ("eager", "graph")
BACKENDS = {"cuda": "native", "triton": "triton"}  # our candidates, and the backend of the package that each uses
MOMENTS = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}

# name: (numerator, denominator)
RATIOS = {
    "loco / uniform": ("cuda_loco", "cuda_uniform"),
    "cuda / torch fused": ("cuda_uniform", "torch_fused"),
    "cuda / torch foreach": ("cuda_uniform", "torch_foreach"),
    "cuda / apex": ("cuda_uniform", "apex"),
    "triton / torch fused": ("triton_uniform", "torch_fused"),
    "triton loco / uniform": ("triton_loco", "triton_uniform"),
}

# Networks that the targets of "cuda" apply to.
LARGE = ("resnet50", "vit_b")
LEAST_SHARE = 0.85
LEAST_SPEEDUP = 1.3
MOST_LOCO = 1.03
MOST_HOST_MICROSECONDS = 100.0


@dataclass(frozen=True)
class Case:
    """The parameters of one table row; the names are keys of the constants above."""

    network: str
    rule: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return " ".join(asdict(self).values())

    @property
    def element_size(self) -> int:
        return DTYPES[self.dtype].itemsize


def backend_step(
    rule: Rule, parameters: Parameters, state: State, *, backend: str, locality: tuple[float, float] | None
) -> Step:
    """Return our step in one of our backends."""
    return forced(our_step(rule, parameters, state, locality=locality), backend)


def apex_step(rule: Rule, parameters: Parameters, state: State) -> Step:
    """Return the step of apex's multi-tensor-apply kernels; FusedAdam is AdamW by default."""
    optimizers = importlib.import_module("apex.optimizers")
    optimizer = optimizers.FusedAdam if rule.decoupled else optimizers.FusedSGD
    return step_on(optimizer(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **rule.arguments), state)


CANDIDATES: dict[str, Callable[..., Step]] = {
    "torch_foreach": functools.partial(torch_step, implementation="foreach"),
    "torch_fused": functools.partial(torch_step, implementation="fused"),
    "apex": apex_step,
    **{
        f"{name}_{decay}": functools.partial(backend_step, backend=backend, locality=locality)
        for name, backend in BACKENDS.items()
        for decay, locality in (("uniform", None), ("loco", LOCALITY))
    },
}


def not_measured() -> dict[str, str]:
    """Return the candidates that cannot run here, and why."""
    reasons = {}
    if find_spec("apex") is None:
        reasons["apex"] = "not installed; torch's fused optimizers are its approach, multi-tensor apply"
    if (reason := backends.missing("optim_step", "triton", "cuda")) is not None:
        reasons |= {name: reason for name in CANDIDATES if name.startswith("triton")}
    return reasons


def candidates_of(case: Case) -> list[str]:
    """Return the candidates that can run; those with a map only for networks that it applies to."""
    left_out = set(not_measured())
    if case.dtype != "float32":
        left_out.add("apex")
    parameters = [torch.empty(shape, device="meta") for shape in shapes.GPU_NETWORKS[case.network]()]
    if all(found is None for found in decay_maps(parameters, LOCALITY)):
        left_out |= {"cuda_loco", "triton_loco"}
    return [name for name in CANDIDATES if name not in left_out]


def make_state(case: Case, name: str, moments: dict[torch.nn.Parameter, dict[str, torch.Tensor]]) -> State:
    """Return the state of one candidate: shared moments, and its own step counts on the device that it expects."""
    on_host = name == "torch_foreach" and case.mode == "eager"
    state: State = defaultdict(dict)
    for parameter, shared in moments.items():
        state[parameter] = dict(shared)
        if case.rule == "adamw":
            state[parameter]["step"] = torch.zeros((), device="cpu" if on_host else DEVICE)
    return state


def make_steps(case: Case) -> dict[str, Step]:
    """Return the step of every candidate."""
    rule = RULES[case.rule]
    if case.mode == "graph" and rule.decoupled:
        rule = replace(rule, arguments=rule.arguments | {"capturable": True})
    parameters = make_parameters(case.network, DEVICE, DTYPES[case.dtype])
    moments = {p: {key: torch.zeros_like(p, requires_grad=False) for key in MOMENTS[case.rule]} for p in parameters}
    steps = {name: CANDIDATES[name](rule, parameters, make_state(case, name, moments)) for name in candidates_of(case)}
    return {name: capture(step) for name, step in steps.items()} if case.mode == "graph" else steps


def record(case: Case, gpu: dict[str, harness.Timing], host: dict[str, harness.Timing], copy: float) -> dict[str, Any]:
    """Return timings, total time of a step, bandwidth beside that of a copy, and ratios."""
    elements = [math.prod(shape) for shape in shapes.GPU_NETWORKS[case.network]()]
    moved = RULES[case.rule].arrays * case.element_size * sum(elements)
    on_gpu = {name: timing.median for name, timing in gpu.items()}
    steps = step_seconds(gpu, host, case.mode)
    rates = {name: moved / seconds for name, seconds in on_gpu.items()}
    return {
        **asdict(case),
        "tensors": len(elements),
        "elements": sum(elements),
        "bytes": moved,
        "candidates": {name: timings | {"seconds": steps[name]} for name, timings in both(gpu, host).items()},
        "bandwidth": {name: {"bytes_per_second": rate, "of_copy": rate / copy} for name, rate in rates.items()},
        "ratios": {"gpu": ratios(on_gpu), "step": ratios(steps)},
    }


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Return the entries of RATIOS whose two candidates were run."""
    return {name: seconds[a] / seconds[b] for name, (a, b) in RATIOS.items() if a in seconds and b in seconds}


def count_syncs(rule: Rule, backend: str) -> int:
    """Count how many of five steps of ours wait for the GPU, each with new gradients and another learning rate."""
    parameters = make_parameters("resnet18", DEVICE)
    arguments = rule.arguments | {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "locality": LOCALITY}
    optimizer = rule.our_class(parameters, **arguments)
    count = 0
    with loco_ext.backend(backend):
        optimizer.step()
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            optimizer.param_groups[0]["lr"] *= 0.9
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                count += 1
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return count


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of the CUDA step beside the measurements, in the worst of the cases that count."""
    records = report["results"]
    names = {id(r): str(Case(*(r[key] for key in ("network", "rule", "dtype", "mode")))) for r in records}
    large = [r for r in records if r["network"] in LARGE]
    small = [r for r in records if r["network"] == "thousand_small"]
    eager = [r for r in records if r["mode"] == "eager"]

    def of_ours(chosen: Sequence[dict[str, Any]], value: Callable[[dict[str, Any], str], float]) -> dict[str, float]:
        found = ((r, name) for r in chosen for name in r["candidates"] if name.startswith("cuda"))
        return {f"{names[id(r)]}, {name}": value(r, name) for r, name in found}

    def speedup(chosen: Sequence[dict[str, Any]]) -> dict[str, float]:
        return {names[id(r)]: 1 / r["ratios"]["step"]["cuda / torch fused"] for r in chosen}

    shares = of_ours(large, lambda r, name: r["bandwidth"][name]["of_copy"])
    loco = {names[id(r)]: r["ratios"]["gpu"]["loco / uniform"] for r in records if "cuda_loco" in r["candidates"]}
    host = of_ours(eager, lambda r, name: 1e6 * r["candidates"][name]["host"]["median"])
    waiting = {name: float(count) for name, count in report["syncs"].items() if name.startswith("cuda")}
    return [
        *target("share of copy bandwidth, ResNet-50 and ViT-B", LEAST_SHARE, shares, at_least=True),
        *target("times faster than torch fused, ResNet-50 and ViT-B", LEAST_SPEEDUP, speedup(large), at_least=True),
        *target("times faster than torch fused, 1,000 small tensors", LEAST_SPEEDUP, speedup(small), at_least=True),
        *target("loco / uniform on the GPU", MOST_LOCO, loco, at_least=False),
        *target("host time of a step in microseconds", MOST_HOST_MICROSECONDS, host, at_least=False),
        *target("steps that wait for the GPU", 0, waiting, at_least=False),
    ]


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, chosen, missing = job.report, job.arguments, not_measured()
    cases = [*itertools.product(chosen.networks, chosen.rules, chosen.dtypes, chosen.modes)]
    report["settings"] |= {"weight_decay": WEIGHT_DECAY, "locality": LOCALITY, "cases": len(cases)}
    report["not_measured"] = missing
    report["syncs"] = {
        f"{name} {rule}": count_syncs(RULES[rule], backend)
        for name, backend in BACKENDS.items()
        for rule in chosen.rules
        if f"{name}_uniform" not in missing
    }
    timer = GpuTimer(job.effort)
    report["copy_bandwidth"] = timer.copy_bandwidth
    for case in itertools.starmap(Case, cases):
        gpu, host = timer.compare(functools.partial(make_steps, case), str(case))
        job.add(record(case, gpu, host, timer.copy_bandwidth["median"]))
        report["targets"] = targets(report)


EFFORT = harness.Effort(min_rounds=30, min_seconds=0.7)
main = Command(
    "bench_optim_step_gpu",
    __doc__,
    run,
    {"networks": shapes.GPU_NETWORKS, "rules": RULES, "dtypes": DTYPES, "modes": MODES},
    EFFORT,
    gpu=("optim_step", "native"),
).main


if __name__ == "__main__":
    sys.exit(main())
