"""A network of half of the MACs, made while it trains, beside one of fewer channels that costs as much."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from loco_ext import sparsity
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.models import small_cnn
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import make_budget, make_model, make_optimizer, measure_accuracies, train
from loco_ext.output import print_table

SHARE = 0.5  # share of the MACs that remains
WIDTH = 0.7  # factor of the channels of a network of as many MACs
BATCH_SIZE = 64  # batch size for which latency is optimised


@dataclass(frozen=True)
class Row:
    """Test accuracy in [0, 1] of one network; MACs of an image, parameters and latency after compaction."""

    name: str
    accuracy: float
    macs: int
    parameters: int
    latency: float | None


@dataclass
class ShrunkDemo:
    """The smaller network, its test accuracies in [0, 1] before and after compaction, and the networks to compare."""

    network: nn.Module
    report: sparsity.Report
    accuracy: float
    accuracy_compacted: float
    networks: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the network, as plain data."""
        accuracies = {"accuracy": self.accuracy, "accuracy_compacted": self.accuracy_compacted}
        return {"macs": SHARE, **accuracies, "networks": list(map(asdict, self.networks)), **self.report.to_dict()}


def shrink(dense: nn.Module, samples: Dataset, settings: Settings, processes: Processes) -> ShrunkDemo:
    """Train a network with a budget and one of fewer channels, and compare them with a trained one of all channels.

    Args:
        dense: network that was trained with the settings.
    """
    model = make_model(settings, samples).to(processes.device)
    accuracy = _train(model, samples, replace(settings, macs=SHARE), processes, "budget")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        narrow = small_cnn(samples.channels, samples.classes, samples.size, width=WIDTH)
    narrow = narrow.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    narrower = _train(narrow, samples, settings, processes, "fewer channels")
    rows = []
    (whole,) = measure_accuracies(samples, processes, dense)
    for name, each, right in (("all", dense, whole), ("fewer channels", narrow, narrower), ("budget", model, accuracy)):
        network, report = sparsity.compact(each, samples.blank(processes.device, BATCH_SIZE))
        rows.append(Row(name, right, report.macs_after, report.parameters_after, report.latency_after))
    (compacted,) = measure_accuracies(samples, processes, network)  # the last one was made with the budget
    return ShrunkDemo(network, report, accuracy, compacted, rows)


def _train(model: nn.Module, samples: Dataset, settings: Settings, processes: Processes, label: str) -> float:
    """Train a network in place, and return its test accuracy."""
    optimizer = make_optimizer(settings, model)
    budget = make_budget(settings, model, optimizer, samples, processes)
    return train(model, optimizer, samples, settings, processes, label=label, budget=budget)[-1].test_accuracy


def print_shrunk(shrunk: ShrunkDemo) -> None:
    """Print filter sizes, MACs and latency, before and after."""
    report = shrunk.report
    layers = [
        [
            layer.name,
            f"{layer.filters_before} -> {layer.filters_after}",
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
        f"Trained with sparsity.Budget(..., macs={SHARE}), then sparsity.compact: what is left of each layer",
    )
    networks = [
        [row.name, f"{row.accuracy:.1%}", f"{row.macs:,}", f"{row.parameters:,}", f"{(row.latency or 0) * 1e3:.2f} ms"]
        for row in shrunk.networks
    ]
    print_table(
        ["channels", "test accuracy", "MACs of an image", "parameters", f"latency of {BATCH_SIZE}"],
        networks,
        f"A budget of {SHARE:.0%} of the MACs, and uniformly fewer channels; trained as long, and compacted",
    )
    print(f"Test accuracy: {shrunk.accuracy:.1%} -> {shrunk.accuracy_compacted:.1%}, compacted.")
