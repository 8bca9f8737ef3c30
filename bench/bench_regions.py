"""Gradient norms of all units of a piecewise linear network, against autograd unit by unit and vmap(jacrev).

    python -m bench.bench_regions

The network has four layers of 300 units and MNIST's input size, as in Lee, Alvarez-Melis and Jaakkola (ICLR 2019), with
random weights. Ours includes tracing the model and all that a call needs. The loop over units takes the gradient of one
unit for all samples at once. All run interleaved, after their norms were found equal in float64. The cost of the Gram
recursion is compared between input sizes, for a batch that the factorisation of the first layer is shared by.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from bench import harness
from bench.command import Command, Job
from bench.targets import target
from loco_ext.regularizers import frozen, gradient_norms

LAYERS, UNITS, CLASSES = 4, 300, 10
INPUTS, LARGE_INPUTS = 784, 12_288
BATCHES = ("1", "8", "64")
GRAM_BATCH = 512
IMAGE = (3, 32, 32)
RATIOS = {"loop / ours": ("loop", "ours"), "vmap(jacrev) / ours": ("vmap_jacrev", "ours")}
MOST_JACREV = 8  # samples; the Jacobians of more take gigabytes

TARGET_BATCHES = (1, 8)
LEAST_OVER_LOOP, LEAST_OVER_JACREV, MOST_GRAM_GROWTH, LEAST_FEWER_PROBES = 50.0, 5.0, 1.15, 20.0
MOST_ERROR = 1e-10


def make_network(inputs: int) -> nn.Sequential:
    """Return the network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        sizes = [inputs, *[UNITS] * LAYERS]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(UNITS, CLASSES))


def pre_activations(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the inputs of all ReLUs."""
    found = []
    for layer in model:
        if isinstance(layer, nn.ReLU):
            found.append(x)
        x = layer(x)
    return found


@torch.no_grad()
def ours(model: nn.Module, x: Tensor) -> Tensor:
    """Return the norms of the gradients of all units, ``[N, units]``."""
    around = frozen.Frozen(frozen.Network(model), x)
    probes = gradient_norms.choose_probes(around, 2)
    norms = gradient_norms.gradient_norms(around, probes, 2, probes.count, x)
    return torch.cat([part.expand(len(x), -1) for part in norms.values()], 1)


def loop(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the same by one backward pass for each unit, of all samples together."""
    x = x.clone().requires_grad_()
    norms = []
    for layer in pre_activations(model, x):
        for unit in range(layer.shape[1]):
            (gradient,) = torch.autograd.grad(layer[:, unit].sum(), x, retain_graph=True)
            norms.append(gradient.norm(dim=1))
    return torch.stack(norms, 1)


def vmap_jacrev(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the same from the Jacobian of each sample, by torch.func."""

    def units(sample: Tensor) -> Tensor:
        return torch.cat(pre_activations(model, sample), -1)

    with torch.no_grad():
        return torch.func.vmap(torch.func.jacrev(units))(x).norm(dim=2)


CANDIDATES: dict[str, Callable[[Any, Tensor], Tensor]] = {"ours": ours, "loop": loop, "vmap_jacrev": vmap_jacrev}


def inputs_of(batch: int, size: int) -> Tensor:
    """Return random inputs."""
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(1))


def norm_error() -> float:
    """Return the largest relative difference of our norms from the loop's, in float64."""
    model, x = make_network(INPUTS).double(), inputs_of(2, INPUTS).double()
    exact = loop(model, x)
    return ((ours(model, x) - exact).abs() / exact).max().item()


def measure(batch: int, threads: int, effort: harness.Effort) -> dict[str, Any]:
    """Return the times of all candidates, and their ratios."""
    model, x = make_network(INPUTS), inputs_of(batch, INPUTS)
    names = [name for name in CANDIDATES if name != "vmap_jacrev" or batch <= MOST_JACREV]

    def build() -> dict[str, Callable[[], object]]:
        return {name: functools.partial(CANDIDATES[name], model, x) for name in names}

    with harness.num_threads(threads):
        timings = harness.compare(build, effort, f"norms, batch {batch}, threads {threads}")
    return {
        "batch": batch,
        "threads": threads,
        "candidates": timings.to_dict(),
        "ratios": timings.ratios(RATIOS),
    }


def measure_gram(threads: int, effort: harness.Effort) -> dict[str, Any]:
    """Return the times of the Gram recursion for both input sizes, and their ratio."""
    problems = {str(size): (make_network(size), inputs_of(GRAM_BATCH, size)) for size in (INPUTS, LARGE_INPUTS)}

    def build() -> dict[str, Callable[[], object]]:
        return {name: functools.partial(ours, *problem) for name, problem in problems.items()}

    with harness.num_threads(threads):
        timings = harness.compare(build, effort, f"Gram recursion, threads {threads}")
    return {
        "batch": GRAM_BATCH,
        "threads": threads,
        "candidates": timings.to_dict(),
        "growth": timings.ratio(str(LARGE_INPUTS), str(INPUTS)),
    }


def count_probes() -> list[dict[str, Any]]:
    """Return how many directions find all gradients of stacks of 3x3 convolutions, beside the size of an image."""
    records = []
    for layers in (1, 2, 3, 4):
        channels = [IMAGE[0], *[8] * layers]
        stack = [layer for a, b in itertools.pairwise(channels) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
        around = frozen.Frozen(frozen.Network(nn.Sequential(*stack)), torch.zeros(1, *IMAGE))
        probes = gradient_norms.choose_probes(around, 2)
        records.append({"layers": layers, "field": probes.extents, "probes": probes.count, "inputs": math.prod(IMAGE)})
    return records


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets beside what was measured."""
    found = []
    limits = (("loop / ours", LEAST_OVER_LOOP), ("vmap(jacrev) / ours", LEAST_OVER_JACREV))
    for (name, limit), batch in itertools.product(limits, TARGET_BATCHES):
        judged = [record for record in report["results"] if record["batch"] == batch]
        measured = {f"threads {record['threads']}": record["ratios"][name] for record in judged}
        found += target(f"{name}, batch {batch}", limit, measured, at_least=True)
    growth = {f"threads {record['threads']}": record["growth"] for record in report["gram"]}
    found += target(f"Gram recursion, {LARGE_INPUTS:,} inputs / {INPUTS}", MOST_GRAM_GROWTH, growth, at_least=False)
    found += target("norms in float64, relative error", MOST_ERROR, {"all units": report["error"]}, at_least=False)
    fewer = {f"{r['layers']} layers": r["inputs"] / r["probes"] for r in report["probes"] if r["field"][0] <= 7}
    return found + target("inputs / probes, fields up to 7x7", LEAST_FEWER_PROBES, fewer, at_least=True)


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report, threads = job.report, job.arguments.threads
    installed = find_spec("auto_LiRPA") is not None
    report["not_measured"] = {"auto_LiRPA": "has no candidate here" if installed else "not installed"}
    report |= {"error": norm_error(), "probes": count_probes(), "gram": []}
    for count, batch in itertools.product(threads, job.arguments.batches):
        job.add(measure(int(batch), count, job.effort))
    for count in threads:
        job.add(measure_gram(count, job.effort), to="gram")
    report["targets"] = targets(report)


EFFORT = {"min_rounds": 8, "min_seconds": 1.0, "warmup": 1, "builds": 2}
COMMAND = Command("bench_regions", __doc__, run, {"batches": BATCHES}, effort=EFFORT, keep_memory=True)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
