"""Report on trained networks: the magnitude of their weights by tap, as numbers, a table and a figure."""

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from loco_ext import geometry
from loco_ext.analysis import LocalityStatistics, locality_statistics
from loco_ext.analysis.conv_weights import conv_weights
from loco_ext.analysis.tables import STATISTICS, statistics_rows
from loco_ext.experiments.figures import finish, write
from loco_ext.output import print_table

CLASSES = ("centre", "edge", "corner")  # distance classes of a 3x3 kernel, nearest first


@dataclass(frozen=True)
class DemoNetwork:
    """Measurements of a trained network. Mean absolute weights are over all its 3x3 convolutions."""

    name: str
    optimizer: str
    locality: tuple[float, float]  # gamma and eta; (1, 1) is ordinary weight decay
    accuracy: float  # on the test samples after the last epoch, in [0, 1]
    accuracy_by_epoch: list[float]
    mean_abs_weight: dict[str, float]  # mean of each class: centre, edge, corner
    mean_abs_weight_by_tap: list[list[float]]  # [3][3]
    statistics: LocalityStatistics  # LOCO-REG, Table 4


def describe(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    locality: tuple[float, float],
    accuracies: list[float],
) -> DemoNetwork:
    """Measure a network that ``optimizer`` has trained; ``accuracies`` has one entry per epoch."""
    taps = torch.cat([weight.flatten(0, 1) for weight in conv_weights(model).values()]).abs().mean(0)  # [3, 3]
    index, distances = geometry.distance_classes((3, 3))
    means = [taps[index == number].mean().item() for number in range(len(distances))]
    return DemoNetwork(
        name=name,
        optimizer=f"{type(optimizer).__module__.removesuffix('.sgd')}.{type(optimizer).__name__}",
        locality=locality,
        accuracy=accuracies[-1],
        accuracy_by_epoch=accuracies,
        mean_abs_weight=dict(zip(CLASSES, means, strict=True)),
        mean_abs_weight_by_tap=taps.tolist(),
        statistics=locality_statistics(model),
    )


def print_networks(networks: list[DemoNetwork]) -> None:
    """Print test accuracy, mean absolute weight by distance, and LOCO-REG's Table 4 statistics of each network."""
    rows = []
    for network in networks:
        means = network.mean_abs_weight
        ratio = f"{means['centre'] / means['corner']:.2f}"
        rows.append([_label(network), f"{network.accuracy:.1%}", *(f"{means[name]:.4f}" for name in CLASSES), ratio])
    headers = ["decay (gamma, eta)", "accuracy", *CLASSES, "centre / corner"]
    print_table(headers, rows, "Test accuracy and mean |weight| of the 3x3 convolutions")
    print_table(*statistics_rows({_label(network): network.statistics for network in networks}), STATISTICS)


def save_figure(networks: list[DemoNetwork], path: Path) -> None:
    """Write a PNG: mean absolute weight by tap of every network, on one colour scale, and the test accuracies."""
    figure = Figure(figsize=(3.2 * len(networks) + 5, 3.6), layout="constrained")
    maps, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[3.2 * len(networks), 5])[0]
    maps.suptitle("Mean |weight| of the 3x3 convolutions, by tap and decay (gamma, eta)")
    highest = max(max(map(max, network.mean_abs_weight_by_tap)) for network in networks)
    for axes, network in zip(maps.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        _draw_taps(axes, network, highest)
    right.suptitle("Test accuracy")
    _draw_accuracies(right.subplots(), networks)
    write(figure, path)


def _draw_taps(axes: Axes, network: DemoNetwork, highest: float) -> None:
    axes.imshow(network.mean_abs_weight_by_tap, vmin=0, vmax=highest, cmap="Blues")
    for row, means in enumerate(network.mean_abs_weight_by_tap):
        for column, mean in enumerate(means):
            color = "white" if mean > 0.6 * highest else "black"
            axes.text(column, row, f"{mean:.4f}", ha="center", va="center", color=color)
    axes.set(xlabel=_label(network), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _draw_accuracies(axes: Axes, networks: list[DemoNetwork]) -> None:
    for network in networks:
        epochs = range(1, len(network.accuracy_by_epoch) + 1)
        label = f"{network.name}, in the end {network.accuracy:.1%}"
        axes.plot(epochs, network.accuracy_by_epoch, marker=".", label=label)
    # The first epochs start near chance; they are out of view so that the last ones can be told apart.
    largest_error = max(1 - network.accuracy for network in networks)
    axes.set(xlabel="epoch", ylim=(max(0.0, 1 - 6 * largest_error - 0.01), 1))
    finish(axes, "medium", whole=True, percent=True, loc="lower right")


def _label(network: DemoNetwork) -> str:
    gamma, eta = network.locality
    return f"{network.name} ({gamma:g}, {eta:g})"
