"""PILCRO on a training step: one application by each route, what training pays for it, and peak memory.

A plain step is a forward and a backward pass with torch.optim's fused SGD. The routes compute the gradient of the same
curvature loss on the same images: ours; torch's own double backward, create_graph; and torch.func's forward mode, whose
tangents another backward pass differentiates. BackPACK and auto_LiRPA have no gradients of a network's input gradients
in its parameters. All of them are called in turn, so that they see the same machine. Times are the process's CPU time:
calls take seconds, in which a shared machine runs other processes too.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.functional import cross_entropy

from bench import harness
from bench.command import Command, Job
from bench.targets import target
from loco_ext import ops
from loco_ext.experiments.models import find_model
from loco_ext.regularizers import PILCRO

BATCH_SIZE = {"small": 64, "resnet18": 16}
MEMORY_BATCH_SIZE = 64
MEMORY_RUNS = 5  # processes whose median peak counts: the allocator's peaks differ by a tenth from run to run
EVERY = 10  # steps from one application to the next, as in the paper
TARGETS = ("resnet18",)


def training_step(model: nn.Module, x: Tensor, regulariser: PILCRO | None = None) -> Callable[[], object]:
    """Return a call that trains for one step, with a regulariser that is called before the forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    labels = torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        extra = None if regulariser is None else regulariser(model, x)
        loss = cross_entropy(model(x), labels)
        (loss if extra is None else loss + extra).backward()
        optimizer.step()

    return step


def by_pilcro(model: nn.Module, x: Tensor, **options: Any) -> Callable[[], object]:
    """Return a call that computes the loss and adds its gradient to the parameters."""
    pilcro = PILCRO(every=1, **options)
    return lambda: pilcro(model, x).backward()


def by_torch_func(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a call that computes the gradient by torch.func.jvp and a backward pass."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def call() -> None:
        model.eval()
        images = x.clone().requires_grad_()
        logits = model(images)
        classes = torch.multinomial(logits.detach().softmax(1), 1)
        (g,) = torch.autograd.grad(logits.gather(1, classes).sum(), images)
        g.requires_grad_()
        (u,) = torch.autograd.grad(ops.landscape(g).loss, g)
        tangents = jvp(lambda images: functional_call(model, parameters, (images,)), (x,), (u,))[1]
        torch.autograd.grad(tangents.gather(1, classes).sum(), list(parameters.values()), allow_unused=True)
        model.train()

    return call


ROUTES: dict[str, Callable[[nn.Module, Tensor], Callable[[], object]]] = {
    "ours": by_pilcro,
    "ours, two chunks": lambda model, x: by_pilcro(model, x, chunk_size=-(-len(x) // 2)),
    "double backward": lambda model, x: by_pilcro(model, x, route="double_backward"),
    "torch.func": by_torch_func,
}


def make(model: str, batch_size: int) -> tuple[nn.Module, Tensor]:
    """Return a network and random images: their values do not change the time."""
    torch.manual_seed(0)
    return find_model(model).make(3, 10, 32), torch.randn(batch_size, 3, 32, 32)


def measure(model: str, effort: harness.Effort) -> dict[str, Any]:
    """Return seconds of a plain step and of one application by each route, and their ratios."""

    def build() -> dict[str, Callable[[], object]]:
        network, x = make(model, BATCH_SIZE[model])
        return {"plain step": training_step(network, x)} | {name: route(network, x) for name, route in ROUTES.items()}

    timings = harness.compare(build, effort, model, clock=harness.clock_of(time.process_time))
    steps = {name: timings.ratio(name, "plain step") for name in ROUTES}
    return {
        "model": model,
        "batch_size": BATCH_SIZE[model],
        **timings.record(),
        "steps": steps,  # the time of one application in plain steps
        "amortised": {name: 1 + ratio / EVERY for name, ratio in steps.items()},
        "speedup": {name: timings.ratio(name, "ours") for name in ROUTES if name not in ("ours", "ours, two chunks")},
    }


def median_peak(model: str, options: dict[str, Any] | None) -> int | None:
    """Return the median over several processes of :func:`peak_memory`."""
    peaks = [harness.in_fresh_process(peak_memory, model, options) for _ in range(MEMORY_RUNS)]
    known = sorted(peak for peak in peaks if peak is not None)
    return known[len(known) // 2] if known else None


def peak_memory(model: str, options: dict[str, Any] | None) -> int | None:
    """Return the bytes that a network, its optimizer's state and two steps take at their peak."""

    def train() -> None:
        network, x = make(model, MEMORY_BATCH_SIZE)
        step = training_step(network, x, None if options is None else PILCRO(every=1, **options))
        step()
        step()

    return harness.peak_extra_memory(train)


MEMORY = {
    "plain step": None,
    "ours": {},
    "ours, two chunks": {"chunk_size": MEMORY_BATCH_SIZE // 2},
    "double backward": {"route": "double_backward"},
}


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    report = job.report
    report["settings"]["every"] = EVERY
    report["memory"] = []
    for model in TARGETS:
        peaks = {name: median_peak(model, options) for name, options in MEMORY.items()}
        plain = peaks["plain step"]
        shares = {name: peak / plain for name, peak in peaks.items() if name != "plain step" and peak and plain}
        record = {"model": model, "batch_size": MEMORY_BATCH_SIZE, "peak": peaks, "share": shares}
        job.add(record, to="memory")
    for model in job.arguments.models:
        for _ in job.threads():
            job.add(measure(model, job.effort))
    report["targets"] = targets(report)


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    results = [record for record in report["results"] if record["model"] in TARGETS]
    where = [f"{record['model']}, threads {record['threads']}" for record in results]

    def each(key: str, name: str) -> dict[str, float]:
        return {place: record[key][name] for place, record in zip(where, results, strict=True)}

    shares = {r["model"]: r["share"]["ours"] for r in report["memory"] if r["model"] in TARGETS and r["share"]}
    return [
        *target("time of training at T = 10 over plain training", 1.2, each("amortised", "ours"), at_least=False),
        *target("times faster than the double backward", 2.0, each("speedup", "double backward"), at_least=True),
        *target("peak memory over that of plain training", 1.3, shares, at_least=False),
    ]


EFFORT = harness.Effort(min_rounds=3, min_seconds=0.0, warmup=1, builds=1)
main = Command("bench_landscape", __doc__, run, {"models": BATCH_SIZE}, EFFORT).main


if __name__ == "__main__":
    sys.exit(main())
