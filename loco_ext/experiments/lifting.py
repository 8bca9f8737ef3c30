"""Lift a trained network: its convolutions become locally connected layers, which are trained on."""

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn as modules

from loco_ext import nn, optim
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import measure_accuracies, train
from loco_ext.output import print_table

RADIUS = 1  # pixels on each side beyond the receptive field of the convolutions
SLOWER = 10.0  # factor by which the learning rate is divided, as in the eFCN paper


@dataclass
class Lifted:
    """The lifted network, its deviation from the convolutions, and test accuracies in [0, 1].

    The accuracies are those of the original network, of the lifted one, and of the lifted one after training.
    """

    network: modules.Module
    deviation: nn.Deviation
    parameters_before: int
    parameters_after: int
    accuracy_before: float
    accuracy_lifted: float
    accuracy: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the network, as plain data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "network"}
        return {"radius": RADIUS, **plain, "deviation": self.deviation._asdict()}


def lift(model: modules.Module, samples: Dataset, settings: Settings, processes: Processes) -> Lifted:
    """Relax a copy of ``model`` and train it.

    Args:
        settings: of the training; its weight decay and locality are not used.
    """
    network = nn.to_efcn(model, samples.blank(processes.device), relax=RADIUS)
    before, lifted = measure_accuracies(samples, processes, model, network)
    settings = replace(settings, learning_rate=settings.learning_rate / SLOWER)
    optimizer = optim.SGD(network.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    history = train(network, optimizer, samples, settings, processes, label="lifted")
    return Lifted(
        network,
        nn.deviation(network),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in network.parameters()),
        accuracy_before=before,
        accuracy_lifted=lifted,
        accuracy=history[-1].test_accuracy,
    )


def print_lifted(lifted: Lifted) -> None:
    """Print what lifting and training have changed."""
    print_table(
        ["", "weights", "test accuracy"],
        [
            ["the convolutions", f"{lifted.parameters_before:,}", f"{lifted.accuracy_before:.1%}"],
            ["lifted", f"{lifted.parameters_after:,}", f"{lifted.accuracy_lifted:.1%}"],
            ["trained on", f"{lifted.parameters_after:,}", f"{lifted.accuracy:.1%}"],
        ],
        f"nn.to_efcn: weights of its own for each position, {RADIUS} pixel more on each side",
    )
    print(
        f"Of the lifted layers' weights {lifted.deviation.delta_locality:.2%} are where no convolution reads, and "
        f"{lifted.deviation.delta_sharing:.2%} are apart from the nearest convolution, by their norms."
    )
