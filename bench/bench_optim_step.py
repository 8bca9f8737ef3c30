"""One optimizer step over all parameters of a network: torch's implementations against ours.

The candidates of a network and rule run interleaved, on the same parameters, gradients and states: the addresses of
tensors change times by several percent, and sharing them changes all candidates alike; in addition, all are rebuilt
several times. Gradients are fixed random tensors. "map" is LOCO-REG's decay map (its section 6) applied by hand before
torch's step, to every convolution of more than one tap: the fastest way we know in eager PyTorch. On the network
"large", torch's copy, triad and in-place update of the same size run among the candidates.
"""

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import loco_ext
from bench import harness, shapes
from bench.command import Command, Job
from loco_ext import geometry, optim

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
LOCALITY = (0.5, 2.0)

Parameters = list[torch.nn.Parameter]
State = defaultdict[torch.Tensor, Any]
Step = Callable[[], object]


@dataclass(frozen=True)
class Rule:
    """An update rule; ``arrays`` counts the parameter-sized arrays that a step has to read or write."""

    torch_class: Callable[..., torch.optim.Optimizer]
    our_class: Callable[..., torch.optim.Optimizer]
    arguments: dict[str, Any]
    decoupled: bool
    arrays: int


RULES = {
    # Reads p, g, m; writes p, m.
    "sgd": Rule(torch.optim.SGD, optim.SGD, {"momentum": 0.9}, decoupled=False, arrays=5),
    # Reads p, g, m, v; writes p, m, v.
    "adamw": Rule(torch.optim.AdamW, optim.AdamW, {}, decoupled=True, arrays=7),
}

TORCH = {"loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def step_on(optimizer: torch.optim.Optimizer, state: State | None) -> Step:
    """Return the optimizer's step, on a state that is shared with other optimizers."""
    if state is not None:
        optimizer.state = state
    return optimizer.step


def torch_step(rule: Rule, parameters: Parameters, state: State | None = None, *, implementation: str) -> Step:
    """Return torch's own step with uniform decay."""
    arguments = rule.arguments | TORCH[implementation]
    return step_on(rule.torch_class(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **arguments), state)


def torch_map_step(rule: Rule, parameters: Parameters, state: State | None = None, *, implementation: str) -> Step:
    """Return torch's own step with the convolutions' decay applied separately before it, tap by tap."""
    mapped = [parameter for parameter in parameters if math.prod(parameter.shape[2:]) > 1]
    others = [parameter for parameter in parameters if math.prod(parameter.shape[2:]) == 1]
    groups = [{"params": mapped, "weight_decay": 0.0}, {"params": others, "weight_decay": WEIGHT_DECAY}]
    arguments = rule.arguments | TORCH[implementation]
    optimizer = rule.torch_class([group for group in groups if group["params"]], lr=LEARNING_RATE, **arguments)
    step = step_on(optimizer, state)
    decays = [WEIGHT_DECAY * expanded_map(parameter) for parameter in mapped]
    factors = [1 - LEARNING_RATE * decay for decay in decays]

    @torch.no_grad()
    def coupled() -> None:
        for parameter, decay in zip(mapped, decays, strict=True):
            assert parameter.grad is not None
            parameter.grad.addcmul_(parameter, decay)
        step()

    @torch.no_grad()
    def decoupled() -> None:
        for parameter, factor in zip(mapped, factors, strict=True):
            parameter.mul_(factor)
        step()

    return decoupled if rule.decoupled else coupled


def expanded_map(parameter: torch.Tensor) -> torch.Tensor:
    """Return the decay map repeated over input channels: rows long enough to vectorise, yet small beside the weight."""
    weights = geometry.decay_map(parameter.shape[2:], LOCALITY).to(parameter)
    return weights.expand_as(parameter[:1]).contiguous()


def our_step(
    rule: Rule,
    parameters: Parameters,
    state: State | None = None,
    *,
    locality: tuple[float, float] | None,
    cached: bool = True,
) -> Step:
    """Return our step with uniform decay, or with the map; ``cached=False`` collects all tensors anew in each step."""
    arguments = rule.arguments | {"locality": locality}
    optimizer: Any = rule.our_class(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **arguments)
    step = step_on(optimizer, state)

    def collect_and_step() -> None:
        optimizer._collected = []  # without the parameters of the last step, nothing is kept for the next one
        step()

    return step if cached else collect_and_step


CANDIDATES: dict[str, Callable[..., Step]] = {
    **{f"torch_{name}": functools.partial(torch_step, implementation=name) for name in TORCH},
    **{f"torch_{name}_map": functools.partial(torch_map_step, implementation=name) for name in TORCH},
    "ours_uniform": functools.partial(our_step, locality=None),
    "ours_loco": functools.partial(our_step, locality=LOCALITY),
    "ours_uncached": functools.partial(our_step, locality=None, cached=False),
}
LARGE_CANDIDATES = ("torch_loop", "torch_foreach", "torch_fused", "ours_uniform", "ours_loco")

# name: (numerator, denominator)
RATIOS = {
    "loco / uniform": ("ours_loco", "ours_uniform"),
    "uniform without a step cache / uniform": ("ours_uncached", "ours_uniform"),
    "uniform / torch fused": ("ours_uniform", "torch_fused"),
    "loco / torch fused": ("ours_loco", "torch_fused"),
    "loco / torch fused + map": ("ours_loco", "torch_fused_map"),
}


def make_parameters(network: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Parameters:
    """Return the network's parameters with fixed random values and gradients, which are drawn in float32."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in (shapes.GPU_NETWORKS | shapes.NETWORKS)[network]():
        value, grad = (torch.empty(shape, device=device).normal_(std=s, generator=generator) for s in (0.05, 1e-3))
        parameter = torch.nn.Parameter(value.to(dtype))
        parameter.grad = grad.to(dtype)
        parameters.append(parameter)
    return parameters


def make_steps(network: str, rule: Rule) -> dict[str, Step]:
    """Return the step of every candidate for this network."""
    parameters = make_parameters(network)
    state: State = defaultdict(dict)
    names = LARGE_CANDIDATES if network == "large" else tuple(CANDIDATES)
    return {name: CANDIDATES[name](rule, parameters, state) for name in names}


def measure(network: str, rule_name: str, effort: harness.Effort) -> dict[str, Any]:
    """Return the record of a network and rule: all candidates' timings, and ratios within rounds."""
    rule, sizes = RULES[rule_name], [math.prod(shape) for shape in shapes.NETWORKS[network]()]
    large = network == "large"

    def build() -> dict[str, Step]:
        return make_steps(network, rule) | (harness.stream_kernels(sum(sizes)) if large else {})

    timings = harness.compare(build, effort, f"{network} {rule_name}")
    record = {"network": network, "rule": rule_name, "tensors": len(sizes), "elements": sum(sizes)}
    record |= timings.record() | {"ratios": timings.ratios(RATIOS)}
    if large:
        medians = {name: timing.median for name, timing in timings.items()}
        record["bandwidth"] = step_bandwidth(medians, rule.arrays, sum(sizes))
    return record


def step_bandwidth(medians: dict[str, float], arrays: int, elements: int) -> dict[str, dict[str, float]]:
    """Return bytes per second of every call, counting the ``arrays`` a step must access, and the share of triad's."""
    moved = dict.fromkeys(medians, arrays) | harness.STREAM_ARRAYS
    rates = {name: 4 * elements * moved[name] / median for name, median in medians.items()}
    return {name: {"bytes_per_second": rate, "of_triad": rate / rates["triad"]} for name, rate in rates.items()}


def peak_memory(network: str, rule_name: str, candidate: str) -> dict[str, Any]:
    """Return the memory of the second step, when the state exists, beyond parameters, gradients and state."""
    parameters = make_parameters(network)
    with loco_ext.backend("native"):
        step = CANDIDATES[candidate](RULES[rule_name], parameters)
        step()
        extra = harness.peak_extra_memory(step)
    size = sum(4 * parameter.numel() for parameter in parameters)
    return {"rule": rule_name, "candidate": candidate, "extra_bytes": extra, "parameter_bytes": size}


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, arguments = job.report, job.arguments
    report["settings"] |= {"weight_decay": WEIGHT_DECAY, "locality": LOCALITY}
    report["bandwidth"] = [harness.bandwidth(job.effort) for _ in job.threads()]
    report["peak_memory"] = []
    with loco_ext.backend("native"):
        for network, rule in itertools.product(arguments.networks, arguments.rules):
            for _ in job.threads():
                job.add(measure(network, rule, job.effort))
    if "large" in arguments.networks:
        for rule, name in itertools.product(arguments.rules, LARGE_CANDIDATES):
            job.add(harness.in_fresh_process(peak_memory, "large", rule, name), to="peak_memory")


main = Command("bench_optim_step", __doc__, run, {"networks": shapes.NETWORKS, "rules": RULES}).main


if __name__ == "__main__":
    sys.exit(main())
