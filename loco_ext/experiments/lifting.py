"""Lift a trained network: its convolutions become locally connected layers, which are trained on."""

from dataclasses import replace

from torch import nn as modules

from loco_ext import nn, optim
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import measure_accuracies, train
from loco_ext.output import print_table

RADIUS = 1  # pixels on each side beyond the receptive field of the convolutions
SLOWER = 10.0  # factor by which the learning rate is divided, as in the eFCN paper


def lift(model: modules.Module, samples: Dataset, settings: Settings, processes: Processes) -> Record:
    """Relax a copy of ``model`` and train it; return its deviation from the convolutions and test accuracies in [0, 1].

    Args:
        settings: of the training; its weight decay and locality are not used.
    """
    network = nn.to_efcn(model, samples.blank(processes.device), relax=RADIUS)
    before, lifted = measure_accuracies(samples, processes, model, network)
    settings = replace(settings, learning_rate=settings.learning_rate / SLOWER)
    optimizer = optim.SGD(network.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    history = train(network, optimizer, samples, settings, processes, label="lifted")
    return {
        "radius": RADIUS,
        "deviation": nn.deviation(network)._asdict(),
        "parameters_before": sum(p.numel() for p in model.parameters()),
        "parameters_after": sum(p.numel() for p in network.parameters()),
        "accuracy_before": before,
        "accuracy_lifted": lifted,
        "accuracy": history[-1].test_accuracy,
    }


def print_lifted(record: Record) -> None:
    """Print what lifting and training have changed."""
    rows = (("the convolutions", "before", "_before"), ("lifted", "after", "_lifted"), ("trained further", "after", ""))
    print_table(
        ["", "weights", "test accuracy"],
        [[name, f"{record[f'parameters_{of}']:,}", f"{record[f'accuracy{when}']:.1%}"] for name, of, when in rows],
        f"nn.to_efcn: weights of its own for each position, {RADIUS} pixel more on each side",
    )
    deviation = record["deviation"]
    print(
        f"Of the lifted layers' weights {deviation['delta_locality']:.2%} are where no convolution reads, and "
        f"{deviation['delta_sharing']:.2%} are apart from the nearest convolution, by their norms."
    )
