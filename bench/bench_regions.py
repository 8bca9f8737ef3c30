"""Gradient norms of all units of a piecewise linear network, against autograd, vmap(jacrev) and BackPACK.

    pip install --no-deps backpack-for-pytorch==1.7.1 einops==0.8.2 unfoldNd==0.2.3
    python -m bench.bench_regions

The network has four layers of 300 units and MNIST's input size, as in Lee, Alvarez-Melis and Jaakkola (ICLR 2019), with
random weights. Ours includes finding the graph of the model and all that a call needs but the first layer's Gram
matrix, which calls with the same weight share. The loop over units takes the gradient of one unit for all samples at
once. BackPACK, where it is installed, has the Jacobians of one layer's units in the first bias at a time, as the square
root of a squared loss's Gauss-Newton matrix; ``--no-deps`` keeps out torchvision, which is not used here and breaks
imports beside torch's CPU build. All run interleaved, after our norms were found equal to the loop's in float64. The
cost of the Gram recursion is compared between input sizes, for small batches and for large ones.
"""

import copy
import functools
import importlib
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
from loco_ext.experiments.models import fully_connected
from loco_ext.regularizers import frozen, gradient_norms

LAYERS, UNITS, CLASSES = 4, 300, 10
INPUTS, LARGE_INPUTS = 784, 12_288
BATCHES = ("1", "8", "64")
GRAM_BATCHES = (1, 8, 64, 512)
IMAGE = (3, 32, 32)
RATIOS = {
    "loop / ours": ("loop", "ours"),
    "vmap(jacrev) / ours": ("vmap_jacrev", "ours"),
    "BackPACK / ours": ("backpack", "ours"),
}
NOT_MEASURED = {"auto_LiRPA": "its last release on the Python Package Index, 0.3, needs NumPy 1"}
MOST_SAMPLES = {"vmap_jacrev": 8, "backpack": 1}  # the Jacobians of more take gigabytes, or minutes

TARGET_BATCHES = (1, 8)
LEAST_OVER_LOOP, LEAST_OVER_JACREV, MOST_GRAM_GROWTH, LEAST_FEWER_PROBES = 50.0, 5.0, 1.15, 20.0
MOST_ERROR = 1e-10


def make_network(inputs: int) -> nn.Sequential:
    """Return the network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return fully_connected([inputs, *[UNITS] * LAYERS], CLASSES)


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
    around = frozen.Frozen(frozen.FrozenNetwork(model, x), x)
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


def by_backpack(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the same from BackPACK's Jacobians in the first bias, one pass for the units of each layer."""
    backpack, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    norms = []
    for place, layer in enumerate(model):
        if isinstance(layer, nn.ReLU):
            part = backpack.extend(copy.deepcopy(model[:place]))  # a copy: it adds hooks
            z, loss = part(x), backpack.extend(nn.MSELoss(reduction="sum"))  # whose Hessian is 2
            with backpack.backpack(extensions.SqrtGGNExact()):
                loss(z, torch.zeros_like(z)).backward()
            jacobian = part[0].bias.sqrt_ggn_exact.detach() / math.sqrt(2)  # [layer's units, N, first units]
            norms.append((jacobian @ part[0].weight.detach()).norm(dim=2).T)
    return torch.cat(norms, 1)


CANDIDATES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **{"ours": ours, "loop": loop, "vmap_jacrev": vmap_jacrev},
    **({"backpack": by_backpack} if find_spec("backpack") else {}),
}


def inputs_of(batch: int, size: int) -> Tensor:
    """Return random inputs."""
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(1))


def norm_error() -> float:
    """Return the largest relative difference of our norms from the loop's, in float64."""
    model, x = make_network(INPUTS).double(), inputs_of(2, INPUTS).double()
    exact = loop(model, x)
    return ((ours(model, x) - exact).abs() / exact).max().item()


def measure(batch: int, effort: harness.Effort) -> dict[str, Any]:
    """Return the times of all candidates, and their ratios."""
    model, x = make_network(INPUTS), inputs_of(batch, INPUTS)
    names = [name for name in CANDIDATES if batch <= MOST_SAMPLES.get(name, batch)]

    def build() -> dict[str, Callable[[], object]]:
        return {name: functools.partial(CANDIDATES[name], model, x) for name in names}

    timings = harness.compare(build, effort, f"norms, batch {batch}")
    return {"batch": batch, **timings.record(), "ratios": timings.ratios(RATIOS)}


def measure_gram(batch: int, effort: harness.Effort) -> dict[str, Any]:
    """Return the times of the Gram recursion for both input sizes, and their ratio."""
    problems = {str(size): (make_network(size), inputs_of(batch, size)) for size in (INPUTS, LARGE_INPUTS)}

    def build() -> dict[str, Callable[[], object]]:
        return {name: functools.partial(ours, *problem) for name, problem in problems.items()}

    timings = harness.compare(build, effort, f"Gram recursion, batch {batch}")
    return {"batch": batch, **timings.record(), "growth": timings.ratio(str(LARGE_INPUTS), str(INPUTS))}


def count_probes() -> list[dict[str, Any]]:
    """Return how many directions find all gradients of stacks of 3x3 convolutions, beside the size of an image."""
    records, x = [], torch.zeros(1, *IMAGE)
    for layers in (1, 2, 3, 4):
        channels = [IMAGE[0], *[8] * layers]
        stack = [layer for a, b in itertools.pairwise(channels) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
        around = frozen.Frozen(frozen.FrozenNetwork(nn.Sequential(*stack), x), x)
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
    growth = {f"batch {record['batch']}, threads {record['threads']}": record["growth"] for record in report["gram"]}
    found += target(f"Gram recursion, {LARGE_INPUTS:,} inputs / {INPUTS}", MOST_GRAM_GROWTH, growth, at_least=False)
    found += target("norms in float64, relative error", MOST_ERROR, {"all units": report["error"]}, at_least=False)
    fewer = {f"{r['layers']} layers": r["inputs"] / r["probes"] for r in report["probes"] if r["field"][0] <= 7}
    return found + target("inputs / probes, fields up to 7x7", LEAST_FEWER_PROBES, fewer, at_least=True)


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report = job.report
    report["not_measured"] = NOT_MEASURED | ({} if "backpack" in CANDIDATES else {"BackPACK": "not installed"})
    report |= {"error": norm_error(), "probes": count_probes(), "gram": []}
    for _ in job.threads():
        for batch in job.arguments.batches:
            job.add(measure(int(batch), job.effort))
        for size in GRAM_BATCHES:
            job.add(measure_gram(size, job.effort), to="gram")
    report["targets"] = targets(report)


EFFORT = harness.Effort(min_rounds=8, min_seconds=1.0, warmup=1, builds=2)
main = Command("bench_regions", __doc__, run, {"batches": BATCHES}, EFFORT, keep_memory=True).main


if __name__ == "__main__":
    sys.exit(main())
