"""Shrink a trained network: train it with a penalty to learn filter sizes and widths, compact it, and evaluate it."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loco_ext import optim, sparsity
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import Epoch, evaluate, train
from loco_ext.output import print_table

STRENGTH, WEIGHTING = 0.015, "normalized"
BATCH_SIZE = 64  # batch size for which latency is optimised


@dataclass
class Shrunk:
    """The smaller network, and test accuracies in [0, 1] of the network with zeros and of the smaller one."""

    network: nn.Module
    report: sparsity.Report
    accuracy: float
    accuracy_compacted: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the network, as plain data."""
        accuracies = {"accuracy": self.accuracy, "accuracy_compacted": self.accuracy_compacted}
        return {"strength": STRENGTH, "weighting": WEIGHTING, **accuracies, **self.report.to_dict()}


def shrink(model: nn.Module, samples: Dataset, settings: Settings, processes: Processes) -> Shrunk:
    """Train a copy of ``model`` with a ring penalty on its filters, scaled by the batch norms, and compact it.

    Args:
        settings: of the training; its weight decay and locality are not used.
    """
    model = copy.deepcopy(model)
    penalties = sparsity.folded_penalties(model, sparsity.RingPenalty(STRENGTH, weighting=WEIGHTING))
    groups = optim.parameter_groups(model, 0.0, penalty=penalties)
    optimizer = optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)
    history: list[Epoch] = []
    train(model, optimizer, samples, settings, processes, label="rings", after_epoch=history.append)
    images = torch.zeros(BATCH_SIZE, samples.channels, samples.size, samples.size, device=processes.device)
    network, report = sparsity.compact(model, images)
    test = samples.test.to(processes.device)
    _, accuracy = evaluate(network, test, Normalization(samples.train), processes)
    return Shrunk(network, report, history[-1].test_accuracy, accuracy)


def print_shrunk(shrunk: Shrunk) -> None:
    """Print filter sizes, MACs and latency, before and after."""
    report = shrunk.report
    layers = [
        [
            layer.name,
            f"{layer.kernels_before} -> {layer.kernels_after}",
            ", ".join(f"{count} of {size}" for size, count in layer.sizes.items() if size != "0"),
            f"{layer.channels_before} -> {layer.channels_after}",
            f"{layer.macs_before:,} -> {layer.macs_after:,}",
        ]
        for layer in report.layers
    ]
    total = f"{report.macs_before:,} -> {report.macs_after:,}"
    print_table(
        ["layer", "filters", "sizes", "channels read", "MACs of an image"],
        [*layers, ["all", "", "", "", total]],
        "Ring penalty, then sparsity.compact: what is left of each layer",
    )
    before, after = report.latency_before or 0.0, report.latency_after or 0.0
    print(
        f"Latency of {BATCH_SIZE} images: {before * 1e3:.2f} ms -> {after * 1e3:.2f} ms. "
        f"Test accuracy: {shrunk.accuracy:.1%} -> {shrunk.accuracy_compacted:.1%}, compacted."
    )
