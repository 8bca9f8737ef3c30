"""Figures of the experiment with importance landscapes: heatmaps and curves, as in the paper's figures 3 to 6."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from loco_ext.analysis.corruptions import CORRUPTIONS, FAMILIES, LEVELS
from loco_ext.experiments.figures import finish
from loco_ext.experiments.records import Record, grouped


def draw(record: Record) -> Iterator[tuple[str, Figure]]:
    """Yield ``landscapes``, ``training`` and, where measured, ``robustness`` and ``ablation`` with their figures.

    Networks that have diverged are left out.
    """
    networks = [network for network in record["networks"] if not network["diverged"]]
    if not networks:
        return
    arms = by_arm(networks)
    yield "landscapes", landscapes(record, arms)
    yield "training", training(arms)
    if all("robustness" in network for network in networks):
        yield "robustness", robustness(arms)
    if all(network.get("ablation", {}).get("images") for network in networks):
        yield "ablation", ablation(arms)


def by_arm(networks: list[Record]) -> dict[str, list[Record]]:
    """Return the networks of each arm."""
    return grouped(networks, "arm")


def landscapes(record: Record, arms: dict[str, list[Record]]) -> Figure:
    """Draw the data's smoothness, and the mean landscapes before training and of each arm, all scaled alike."""
    first = next(iter(arms.values()))
    maps = {
        "smoothness of the data": np.array(record["smoothness"]),
        "before training": mean([network["at_first"]["landscape"]["map"] for network in first]),
        **{arm: mean([network["landscape"]["map"] for network in networks]) for arm, networks in arms.items()},
    }
    figure = Figure(figsize=(2.3 * len(maps) + 0.8, 2.7), layout="constrained")
    cells = figure.subplots(1, len(maps), squeeze=False)[0]
    highest = max(image.max() for image in maps.values())
    for axes, (title, image) in zip(cells, maps.items(), strict=True):
        drawn = axes.imshow(image, cmap="viridis", vmin=0, vmax=highest)
        axes.set_title(title, fontsize="small")
        axes.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=cells, label="importance")
    return figure


def training(arms: dict[str, list[Record]]) -> Figure:
    """Draw the test accuracy by epoch, means over seeds."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for arm, networks in arms.items():
        values = mean([network["test_accuracies"] for network in networks])
        axes.plot(range(1, len(values) + 1), values, marker=".", label=arm)
    axes.set(xlabel="epoch", ylabel="test accuracy")
    finish(axes, "x-small", percent=True)
    return figure


def robustness(arms: dict[str, list[Record]]) -> Figure:
    """Draw the accuracy by level of corruption, a panel for each family; level 0 is that of the clean images."""
    figure = Figure(figsize=(3.2 * len(FAMILIES), 3.4), layout="constrained")
    for axes, family in zip(figure.subplots(1, len(FAMILIES), sharey=True), FAMILIES, strict=True):
        names = [name for name, corruption in CORRUPTIONS.items() if corruption.family == family]
        for arm, networks in arms.items():
            found = [network["robustness"] for network in networks]
            clean = mean([each["clean_accuracy"] for each in found])
            corrupted = mean([each["accuracy"][name] for each in found for name in names])
            axes.plot(range(LEVELS + 1), [clean, *corrupted], marker=".", label=arm)
        axes.set(title=family, xlabel="level", xticks=range(LEVELS + 1))
        finish(axes, "x-small", percent=True)
    return figure


def ablation(arms: dict[str, list[Record]]) -> Figure:
    """Draw what is left of the predicted probability by share of the pixels that are replaced."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for arm, networks in arms.items():
        found = [network["ablation"] for network in networks]
        area = mean([each["area"] for each in found])
        values = mean([each["kept_probability"] for each in found])
        axes.plot(found[0]["shares"], values, marker=".", label=f"{arm} (area {area:.3f})")
    axes.set(xlabel="share of the pixels replaced, most relevant first", ylabel="share of the probability left")
    finish(axes, "x-small", percent=True)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    return figure


def mean(values: list[Any]) -> Any:
    """Return the mean over the first axis as an array."""
    return np.array(values, dtype=float).mean(0)
