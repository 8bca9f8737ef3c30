"""Training samples per second: the loader alone, a plain torch loop with prepared batches, and our training loop.

The plain loop has normalised batches in memory and steps torch.optim's fused SGD; ours crops, flips and normalises its
batches, steps under a decay map, and records losses and accuracies. Both train the same network in the same memory
format, interleaved, in a process that keeps the memory it frees, as `loco-ext train` does. The address of a network
changes its time by several percent, so all are rebuilt several times, in changing order. Images are random: their
values do not change the time.
"""

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench import harness
from bench.command import Command, Job
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.samples import Samples
from loco_ext.experiments.settings import Settings, from_preset
from loco_ext.experiments.train import make_model, make_optimizer, train_epoch

STEPS = {"small": 8, "mobilenet": 4, "resnet18": 1, "vgg13": 1}  # steps per call, a few tenths of a second each
BATCH_SIZE = 128
LOCALITY = (0.5, 2.0)


def make_data(steps: int) -> Dataset:
    """Return ``steps`` batches of random images in CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    count = steps * BATCH_SIZE
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    samples = Samples(images, torch.randint(10, (count,), generator=generator))
    return Dataset("cifar10", samples, samples, classes=10, augmented=True)


def make_loader(data: Dataset, settings: Settings) -> Loader:
    """Return the loader as training makes it."""
    normalization = Normalization(data.train)
    device = torch.device("cpu")
    return Loader(data.train, normalization, device, batch_size=BATCH_SIZE, seed=0, augmented=settings.augment)


def loader_alone(data: Dataset, settings: Settings) -> Callable[[], object]:
    """Return a call that runs through one epoch of batches without training."""
    loader = make_loader(data, settings)
    return lambda: [len(labels) for _, labels, _ in loader.epoch(0)]


def plain_loop(data: Dataset, settings: Settings) -> Callable[[], object]:
    """Return a call that runs the loop that one would write with torch alone, on prepared batches."""
    batches = [(images, labels) for images, labels, _ in make_loader(data, settings).epoch(0)]
    model = make_model(settings, data)
    optimizer = torch.optim.SGD(
        model.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay, fused=True
    )

    def epoch() -> None:
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    return epoch


def our_loop(data: Dataset, settings: Settings) -> Callable[[], object]:
    """Return a call that runs an epoch of :func:`loco_ext.experiments.train.train`, including its progress bar."""
    loader = make_loader(data, settings)
    model = make_model(settings, data)
    optimizer = make_optimizer(settings, model, data)

    def epoch() -> None:
        with open(os.devnull, "w") as nowhere, tqdm(total=len(loader), file=nowhere) as progress:
            train_epoch(model, optimizer, loader, 0, progress)

    return epoch


CANDIDATES = {"loader alone": loader_alone, "plain torch loop": plain_loop, "ours": our_loop}


def measure(model: str, effort: harness.Effort) -> dict[str, Any]:
    """Return samples per second of all candidates, and how much longer our loop takes than the plain one."""
    settings = from_preset("quick", model=model, data="cifar10", locality=LOCALITY)
    data = make_data(STEPS[model])
    order = random.Random(model)

    def build() -> dict[str, Callable[[], object]]:
        return {name: CANDIDATES[name](data, settings) for name in order.sample(list(CANDIDATES), len(CANDIDATES))}

    timings = harness.compare(build, effort, model)
    count = len(data.train.labels)
    return {
        "model": model,
        **timings.record(),
        "samples_per_second": {name: count / timings[name].median for name in CANDIDATES},
        "overhead": timings.ratio("ours", "plain torch loop") - 1,
    }


def run(job: Job) -> None:
    """Run the measurements that the command line asks for."""
    job.report["settings"]["batch_size"] = BATCH_SIZE
    for model in job.arguments.models:
        for _ in job.threads():
            job.add(measure(model, job.effort))


EFFORT = harness.Effort(min_rounds=4, min_seconds=6.0, warmup=1, builds=8)
main = Command("bench_train", __doc__, run, {"models": STEPS}, EFFORT, keep_memory=True).main


if __name__ == "__main__":
    sys.exit(main())
