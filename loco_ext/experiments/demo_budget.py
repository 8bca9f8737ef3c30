"""A network of half of the MACs, made while it trains, beside one of fewer channels that costs as much."""

from dataclasses import replace

import torch
from torch import nn

from loco_ext import sparsity
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.models import small_cnn
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import make_budget, make_model, make_optimizer, measure_accuracies, train
from loco_ext.output import print_table

SHARE = 0.5  # share of the MACs that remains
WIDTH = 0.7  # factor of the channels of a network of as many MACs
BATCH_SIZE = 64  # batch size for which latency is optimised


def shrink(
    dense: nn.Module, samples: Dataset, settings: Settings, processes: Processes
) -> tuple[nn.Module, sparsity.Report, Record]:
    """Train a network with a budget and one of fewer channels, and compare them with a trained one of all channels.

    Args:
        dense: network that was trained with the settings.

    Returns:
        The network with the budget, compacted, its report, and a record: what the report says, and test accuracies in
        [0, 1]; of each of the three networks also the MACs of an image, parameters and latency after compaction.
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
        costs = {what: getattr(report, f"{what}_after") for what in ("macs", "parameters", "latency")}
        rows.append({"name": name, "accuracy": right, **costs})
    (compacted,) = measure_accuracies(samples, processes, network)  # the last one was made with the budget
    accuracies = {"accuracy": accuracy, "accuracy_compacted": compacted}
    return network, report, {"macs": SHARE, **accuracies, "networks": rows, **report.to_dict()}


def _train(model: nn.Module, samples: Dataset, settings: Settings, processes: Processes, label: str) -> float:
    """Train a network in place, and return its test accuracy."""
    optimizer = make_optimizer(settings, model, samples)
    budget = make_budget(settings, model, optimizer, samples, processes)
    return train(model, optimizer, samples, settings, processes, label=label, budget=budget)[-1].test_accuracy


def print_shrunk(record: Record) -> None:
    """Print filter sizes, MACs and latency, before and after."""

    def change(of: Record, what: str) -> str:
        return f"{of[f'{what}_before']:,} -> {of[f'{what}_after']:,}"

    layers = [
        [
            layer["name"],
            change(layer, "filters"),
            ", ".join(f"{count} of {size}" for size, count in layer["sizes"].items() if size != "0"),
            change(layer, "channels"),
            change(layer, "macs"),
        ]
        for layer in record["layers"]
    ]
    print_table(
        ["layer", "filters", "sizes", "channels read", "MACs of an image"],
        [*layers, ["all", "", "", "", change(record, "macs")]],
        f"Trained with sparsity.Budget(..., macs={SHARE}), then sparsity.compact: what is left of each layer",
    )
    networks = [
        [
            network["name"],
            f"{network['accuracy']:.1%}",
            *(f"{network[what]:,}" for what in ("macs", "parameters")),
            f"{network['latency'] * 1e3:.2f} ms",
        ]
        for network in record["networks"]
    ]
    print_table(
        ["channels", "test accuracy", "MACs of an image", "parameters", f"latency of {BATCH_SIZE}"],
        networks,
        f"A budget of {SHARE:.0%} of the MACs, and uniformly fewer channels; trained as long, and compacted",
    )
    print(f"Test accuracy: {record['accuracy']:.1%} -> {record['accuracy_compacted']:.1%}, compacted.")
