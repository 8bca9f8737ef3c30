"""Latency of networks with half of their MACs removed: unchanged and compacted.

Filters vanish at random, or lose outer half rings, or both, until half of the network's MACs remain by eq. 10
of the draft. The candidates are the network; the network with its batch norms folded, for comparison because compaction
folds them too; and the compacted network with and without folding. All run in eval mode, interleaved, in the same
memory format, after their outputs were found equal. Freed memory is kept for the next call: which sizes the C library
returns to the system depends on what ran before, and page faults would dominate the time of a small network.
"""

import copy
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import harness
from bench.command import Command, Job
from loco_ext import geometry, sparsity
from loco_ext.experiments.frontier import fold
from loco_ext.experiments.models import MODELS

NETWORKS = ("small", "resnet8", "vgg13", "resnet18")
PATTERNS = ("kernels", "sizes", "mixed")
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
BATCH_SIZE, IMAGE = 32, (3, 32, 32)


def half(name: str, pattern: str) -> nn.Module:
    """Return the network with half of its MACs removed, by bisection of the probability to strike a filter."""
    lower, upper = 0.0, 1.0
    for _ in range(8):
        chance = (lower + upper) / 2
        model = struck(name, pattern, chance)
        _, report = sparsity.compact(model, torch.zeros(1, *IMAGE), cost="macs")
        if report.macs_after > report.macs_before / 2:
            lower = chance
        else:
            upper = chance
    return struck(name, pattern, upper)


def struck(name: str, pattern: str, chance: float) -> nn.Module:
    """Return the network with random weights and statistics, and each filter struck with this probability."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = MODELS[name].make(IMAGE[0], 10, IMAGE[1]).eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                _strike(module.weight.detach(), pattern, chance)
            elif isinstance(module, nn.BatchNorm2d):
                statistics: Any = module
                nn.init.uniform_(statistics.running_var, 0.5, 2.0)
                nn.init.normal_(statistics.running_mean, std=0.1)
                nn.init.normal_(statistics.bias, std=0.1)
    return model


def _strike(weight: Tensor, pattern: str, chance: float) -> None:
    rings = geometry.ring_index(tuple(weight.shape[2:]))
    dies, shrinks = torch.rand(2, len(weight))
    size = torch.randint(1, int(rings.max()) + 1, (len(weight),)) if rings.max() > 0 else torch.zeros(len(weight))
    for one, dying, shrinking, lost in zip(weight, dies, shrinks, size, strict=True):
        if pattern != "sizes" and dying < (chance if pattern == "kernels" else chance / 2):
            one.zero_()
        if pattern != "kernels" and shrinking < chance:
            one[:, rings < lost] = 0


def measure(name: str, pattern: str, memory_format: str, effort: harness.Effort) -> dict[str, Any]:
    """Return latencies of all candidates, MACs, and speedups of the compacted network."""
    layout: dict[str, Any] = {"memory_format": FORMATS[memory_format]}
    network, x = half(name, pattern).to(**layout), torch.randn(BATCH_SIZE, *IMAGE).contiguous(**layout)
    compacted, report = sparsity.compact(network, x)
    unfolded, _ = sparsity.compact(network, x, fold_norms=False)
    folded = copy.deepcopy(network)
    fold(folded)
    folded.to(**layout)
    networks: dict[str, nn.Module] = {"network": network, "norms folded": folded}
    networks |= {"compacted, norms kept": unfolded, "compacted": compacted}

    def build() -> dict[str, Callable[[], object]]:
        return {key: partial(copy.deepcopy(candidate), x) for key, candidate in networks.items()}

    with torch.inference_mode():
        expected = network(x)
        for candidate in networks.values():
            torch.testing.assert_close(candidate(x), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        timings = harness.compare(build, effort, f"{name}, {pattern}, {memory_format}")
    return {
        **{"network": name, "pattern": pattern, "memory_format": memory_format},
        **timings.record(),
        "speedup": timings.ratio("network", "compacted"),
        "speedup_norms_kept": timings.ratio("network", "compacted, norms kept"),
        "speedup_over_folded": timings.ratio("norms folded", "compacted"),
        "macs": {"before": report.macs_before, "after": report.macs_after, "executed": report.macs_executed},
        "notes": report.notes,
    }


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    job.report["settings"] |= {"batch_size": BATCH_SIZE, "image": IMAGE}
    chosen = job.arguments
    for case in itertools.product(chosen.networks, chosen.patterns, chosen.formats):
        for _ in job.threads():
            job.add(measure(*case, job.effort))


EFFORT = harness.Effort(min_rounds=8, min_seconds=1.5, warmup=1, builds=2)
main = Command(
    "bench_compact",
    __doc__,
    run,
    {"networks": NETWORKS, "patterns": PATTERNS, "formats": FORMATS},
    EFFORT,
    keep_memory=True,
).main


if __name__ == "__main__":
    sys.exit(main())
