"""Speedup by compaction of torchvision and timm networks with half of their filters zeroed.

Half of each convolution's filters are zero, drawn at random, the same ones in all convolutions with equally many
filters, so that residual streams lose channels too. The same holds for the features of all linear layers but the last,
which are 1x1 convolutions in ConvNeXt. Weights are random; normalisations have the statistics of random images, and
random scales and shifts. torchvision and timm must be installed beside torch: pip install torchvision timm
"""

import sys
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bench import harness
from bench.command import Command, Job
from loco_ext import sparsity

_TORCHVISION = (
    "resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 vgg16_bn mobilenet_v2 mobilenet_v3_large mnasnet1_0 "
    "efficientnet_b0 regnet_y_400mf regnet_x_400mf convnext_tiny shufflenet_v2_x1_0 squeezenet1_1 googlenet"
)
_TIMM = "resnet50 efficientnet_b0 regnety_004 mobilenetv3_large_100 convnext_tiny ghostnet_100 repvgg_a2 dla34"
NETWORKS = tuple(f"tv:{name}" for name in _TORCHVISION.split()) + tuple(f"timm:{name}" for name in _TIMM.split())
IMAGE = (1, 3, 224, 224)
# Input shapes at which outputs are compared in float64, where the network accepts them.
CHECKED = ((2, 3, 160, 160), (1, 3, 192, 129), (1, 3, 192, 128))


def make(name: str) -> nn.Module:
    """Build an untrained network by its library and name, such as "tv:resnet18".

    Raises:
        ImportError: the library cannot be imported.
    """
    library, _, kind = name.partition(":")
    try:
        if library == "tv":
            from torchvision import models

            options = {"init_weights": False} if kind == "googlenet" else {}
            return models.get_model(kind, weights=None, **options)
        import timm

        return timm.create_model(kind, pretrained=False)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        raise ImportError(f"{name}: expected torchvision and timm for torch {torch.__version__}: {error}") from error


@torch.no_grad()
def halved(name: str) -> nn.Module:
    """Return the network with half of the filters zeroed, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = make(name)
        *hidden, _ = (module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear))
        for module in network.modules():
            if module in hidden:
                count = len(module.weight)
                order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
                module.weight[order[: count // 2]] = 0
            elif isinstance(module, _BatchNorm):
                module.momentum = 1.0
        network.train()(torch.randn(4, 3, 128, 128))
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                variance: Any = module.running_var
                variance[variance < 1e-6] = 1.0  # variance of filters that are zero
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)
    return network.eval()


def measure(name: str, effort: harness.Effort) -> dict[str, Any]:
    """Return seconds of the network and of its compacted version, interleaved, and their difference."""
    network, x = halved(name), torch.randn(IMAGE)
    started = time.process_time()
    smaller, report = sparsity.compact(network, x)
    seconds = time.process_time() - started
    calls = {"network": partial(network, x), "compacted": partial(smaller, x)}
    with torch.inference_mode():
        timings = harness.compare(calls.copy, effort, name, clock=harness.clock_of(time.thread_time))
    return {
        "network": name,
        **timings.record(),
        "speedup": timings.ratio("network", "compacted"),
        "speedup_reported": (report.latency_before or 1.0) / (report.latency_after or 1.0),
        "compaction_seconds": seconds,
        "error": difference(name),
        "macs": {"before": report.macs_before, "after": report.macs_after, "executed": report.macs_executed},
        "kept": report.notes.get("model"),
    }


@torch.no_grad()
def difference(name: str) -> float:
    """Return the largest relative difference of the float64 outputs at input shapes other than the example's."""
    network = halved(name).double()
    smaller, _ = sparsity.compact(network, torch.randn(IMAGE).double(), cost="macs")

    found = []
    for shape in CHECKED:
        x = torch.randn(shape).double()
        try:
            expected = network(x)
        except RuntimeError:  # some networks accept only even sizes
            continue
        found.append(float((smaller(x) - expected).abs().max() / expected.abs().max()))
    return max(found)


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    job.report["settings"] |= {"image": IMAGE, "rounds": job.effort.min_rounds}
    for name in job.arguments.networks:
        for _ in job.threads():
            job.add(measure(name, job.effort))


EFFORT = harness.Effort(min_rounds=15, min_seconds=0.0, warmup=1, builds=1)
main = Command("bench_zoo", __doc__, run, {"networks": NETWORKS}, EFFORT, threads=(1,), keep_memory=True).main


if __name__ == "__main__":
    sys.exit(main())
