"""The exact prox of ring penalties, alone and as the last part of an optimizer step: others against ours.

Alone: the prox runs on the float32 weight of a convolution of 512 x 512 x 3 x 3, whose filters have magnitudes such
that some vanish and others lose rings. The candidates of a case run interleaved (see bench/harness.py) on the same
weight, which is rewritten before every call because torchao works in place. Each result is compared with our float64
reference before timing. "copy" is torch's clone of the weight, the unavoidable traffic. For the other candidates see
bench/ring_prox_peers.py; one whose package is missing is left out, and the report says so.

Step: over all parameters of ResNet-50, without a penalty, with a penalty on every filter of more than one tap, and with
one on every convolution, which is the default of parameter_groups.
"""

import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import loco_ext
from bench import harness, ring_prox_peers
from bench.bench_optim_step import LEARNING_RATE, WEIGHT_DECAY, Parameters, Rule, State, Step, make_parameters, step_on
from bench.bench_optim_step import RULES as STEP_RULES
from bench.command import Command, Job
from bench.ring_prox_peers import PEERS, Candidate, Problem
from bench.table import RULE_NAMES
from bench.targets import target
from loco_ext import geometry, optim, sparsity
from loco_ext.version import package_version

SHAPE = (512, 512, 3, 3)
NETWORK = "resnet50"
STRENGTH = 1e-3  # in a step: too small to empty the network during the measurement
# Gradients are shifted by these between the steps before the measurement, so that second moments are averages, as in
# training: those of a single gradient have values near 0, which make Adam's metric far more uneven than in training.
SHIFTS = range(7919, 7919 * 17, 7919)
# Error allowed relative to the largest weight: enough for float32 rounding, too little for a mistake in the method.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A penalty, evaluated with step size 1, whether it has a metric, and which peers compute the same prox."""

    penalty: sparsity.RingPenalty | sparsity.KernelPenalty
    peers: tuple[str, ...] = ()
    metric: bool = False
    shape: tuple[int, ...] = field(default=SHAPE, kw_only=True)


EUCLIDEAN = ("torch_groups", "torch_masks", "torch_rings", "torch_compile", "spams")
CASES = {
    "half rings": Case(sparsity.RingPenalty(1.0), EUCLIDEAN),
    "rings": Case(sparsity.RingPenalty(1.0, kind="full"), EUCLIDEAN),
    "kernels": Case(sparsity.KernelPenalty(1.0), (*EUCLIDEAN, "torchao")),
    "half rings, metric": Case(sparsity.RingPenalty(1.0), metric=True),
    "half rings, linf": Case(sparsity.RingPenalty(20.0, norm="linf"), ("spams",)),
}

# name: (numerator, denominator)
RATIOS = {
    "eager by groups / ours": ("torch_groups", "ours"),
    "eager by masks / ours": ("torch_masks", "ours"),
    "eager by ring sums / ours": ("torch_rings", "ours"),
    "compiled / ours": ("torch_compile", "ours"),
    "SPAMS / ours": ("spams", "ours"),
    "torchao / ours": ("torchao", "ours"),
    "ours / copy": ("ours", "copy"),
}

RULES = {
    "sgd": STEP_RULES["sgd"],
    "adam": Rule(torch.optim.Adam, optim.Adam, {}, decoupled=False, arrays=STEP_RULES["adamw"].arrays),
    "adamw": STEP_RULES["adamw"],
}
# Minimum number of taps of the filters that have a penalty.
STEPS = {"without": math.inf, "spatial": 2, "all": 1}
STEP_RATIOS = {"more than one tap / without": ("spatial", "without"), "all / without": ("all", "without")}

# Targets, see ``targets``.
LEAST_SPEEDUP = 20.0
MOST_STEP = {"sgd": 1.15, "adam": 1.5, "adamw": 1.5}


def make_weight(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random filters, the largest 30 times the smallest, whose weights decrease from the centre outwards."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1.0, 0.5, shape[0]).view(-1, *[1] * (len(shape) - 1))
    rings = geometry.ring_index(shape[2:])
    by_tap = 0.1 * ((1 + rings) / (1 + rings.max())).square()
    return (torch.randn(shape, generator=generator) * sizes * by_tap).to(device, dtype)


def make_metric(weight: Tensor) -> Tensor:
    """Return a random metric that varies within a filter as much as Adam's."""
    generator = torch.Generator().manual_seed(1)
    return (0.5 * torch.randn(weight.shape, generator=generator)).exp().to(weight)


def problem_of(case: Case, weight: Tensor) -> Problem:
    """Return the case in the form that peers take."""
    penalty = case.penalty
    rings = penalty.filters(weight).rings
    return Problem(weight, rings, penalty.strength * penalty.group_weights(weight), penalty.norm)


def ours(case: Case, weight: Tensor) -> Candidate:
    """Return our prox as a user calls it."""
    metric = make_metric(weight) if case.metric else None
    return Candidate(functools.partial(case.penalty.prox, weight, 1.0, metric))


def make_candidates(case: Case, weight: Tensor, missing: dict[str, str]) -> dict[str, Candidate]:
    """Return all candidates that run on this weight."""
    peers = {name: PEERS[name](problem_of(case, weight)) for name in case.peers if name not in missing}
    return {**peers, "ours": ours(case, weight), "copy": Candidate(weight.clone)}


def expected(case: Case, weight: Tensor) -> Tensor:
    """Return the prox of the case's weight by our float64 reference."""
    with loco_ext.backend("reference"):
        return case.penalty.prox(weight.double(), 1.0, make_metric(weight).double() if case.metric else None)


def measure_prox(name: str, effort: harness.Effort, reference: Tensor, missing: dict[str, str]) -> dict[str, Any]:
    """Return the record of a case: timings, and ratios within rounds."""
    case = CASES[name]
    source = make_weight(case.shape)
    weight = torch.empty_like(source)

    def restore(_: str) -> None:
        weight.copy_(source)

    def build() -> dict[str, Callable[[], object]]:
        restore("")
        candidates = make_candidates(case, weight, missing)
        for label, candidate in candidates.items():
            restore(label)
            if label != "copy":
                harness.check(f"{name}, {label}", candidate.result(candidate.call()), reference, TOLERANCE)
        return {label: candidate.call for label, candidate in candidates.items()}

    timings = harness.compare(build, effort, name, restore)
    zeros = (reference == 0).double().mean().item()
    record = {"case": name, "shape": case.shape, "zeros": zeros}
    return record | timings.record() | {"ratios": timings.ratios(RATIOS)}


def penalties_of(parameters: Parameters, least_taps: float) -> list[sparsity.Penalty | None] | None:
    """Return a ring penalty for each convolution weight with at least ``least_taps`` taps; None where there is none."""
    penalty: sparsity.Penalty = sparsity.RingPenalty(STRENGTH)
    chosen = [penalty if p.dim() == 4 and p.shape[2:].numel() >= least_taps else None for p in parameters]
    return chosen if any(chosen) else None


def make_steps(network: str, rule: Rule) -> dict[str, Step]:
    """Return the steps of STEPS, on the same parameters and states, after some training steps."""
    parameters = make_parameters(network)
    state: State = defaultdict(dict)
    steps = {name: penalised_step(rule, parameters, state, least) for name, least in STEPS.items()}
    for shift in SHIFTS:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.flatten().roll(shift).view_as(parameter))
        steps["without"]()
    return steps


def penalised_step(rule: Rule, parameters: Parameters, state: State, least_taps: float) -> Step:
    """Return our step with a penalty on the convolutions that have at least ``least_taps`` taps."""
    arguments = rule.arguments | {"penalty": penalties_of(parameters, least_taps)}
    return step_on(rule.our_class(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **arguments), state)


def measure_step(rule_name: str, effort: harness.Effort) -> dict[str, Any]:
    """Return the record of a rule: timings, and ratios within rounds."""
    build = functools.partial(make_steps, NETWORK, RULES[rule_name])
    timings = harness.compare(build, effort, f"{NETWORK} {rule_name}")
    return {"network": NETWORK, "rule": rule_name, **timings.record(), "ratios": timings.ratios(STEP_RATIOS)}


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets beside the measurements."""
    speedups = {
        f"{r['case']}, threads {r['threads']}": r["ratios"]["eager by groups / ours"]
        for r in report["results"]
        if r["case"] == "half rings"
    }
    rows = target("half rings alone: eager by groups / ours", LEAST_SPEEDUP, speedups, at_least=True)
    for rule, limit in MOST_STEP.items():
        found = {
            f"{name}, threads {r['threads']}": value
            for r in report["steps"]
            if r["rule"] == rule
            for name, value in r["ratios"].items()
        }
        rows += target(f"{RULE_NAMES[rule]}: step with the penalty / without", limit, found, at_least=False)
    return rows


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, arguments, missing = job.report, job.arguments, ring_prox_peers.not_installed()
    report["machine"] |= {name: package_version(name) for name in ("spams-bin", "torchao")}
    report["settings"] |= {"strength": STRENGTH, "weight_decay": WEIGHT_DECAY, "tolerance": TOLERANCE}
    report["bandwidth"] = [harness.bandwidth(job.effort) for _ in job.threads()]
    report |= {"not_measured": missing, "steps": []}
    with loco_ext.backend("native"):
        for name in arguments.cases:
            reference = expected(CASES[name], make_weight(CASES[name].shape))
            for _ in job.threads():
                job.add(measure_prox(name, job.effort, reference, missing))
        for rule in arguments.rules:
            for _ in job.threads():
                job.add(measure_step(rule, job.effort), to="steps")
    report["targets"] = targets(report)


main = Command("bench_ring_prox", __doc__, run, {"cases": CASES, "rules": RULES}).main


if __name__ == "__main__":
    sys.exit(main())
