"""Figures of the frontier, after the structured-sparsity draft's figures 1 and 3 to 5, drawn from ``frontier.json``."""

from collections.abc import Iterator

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from loco_ext.experiments.figures import finish
from loco_ext.experiments.records import Record

Series = dict[str, list[Record]]  # points of one method, by label of their line


def dense_path(record: Record) -> Record:
    """Return the path that starts from the network with the most MACs, whatever the order of the widths."""
    return max(record["paths"], key=lambda path: path["macs"])


def draw(record: Record) -> Iterator[tuple[str, Figure]]:
    """Yield ``widths`` and ``sizes``, which show the points of the largest tau, if any, and ``errors``."""
    if points := with_largest_tau(record):
        tau = f", tau = {points[0]['tau']:g}" if points[0]["tau"] > 0 else ""
        yield "widths", widths(points, f"Filters left by layer and strength{tau}")
        yield "sizes", sizes(points, f"Filters of each size by layer and strength{tau}")
    yield "errors", errors({"": by_tau(record)}, dense_path(record)["macs"])


def with_largest_tau(record: Record) -> list[Record]:
    """Return the points with a penalty whose filters are counted; there are none of narrower networks."""
    points = [point for point in record["paths"][0]["points"] if point["strength"] > 0]
    if record["settings"]["method"] == "width" or not points:
        return []
    largest = max(point["tau"] for point in points)
    return [point for point in points if point["tau"] == largest]


def by_tau(record: Record) -> Series:
    """Return a frontier's points, grouped by tau where there are several."""
    settings, series = record["settings"], Series()
    for path in record["paths"]:
        for point in path["points"]:
            tau = f", tau {point['tau']:g}" if settings["method"] == "subgradient" else ""
            series.setdefault(settings["method"] + tau, []).append(point)
    return series


def error(point: Record) -> float:
    """Return a recorded point's test error in percent, after its refit if it had one."""
    return 100 * (1 - (point["refitted"] or point["metrics"])["accuracy"])


def widths(points: list[Record], title: str) -> Figure:
    """Draw figure 1: the number of filters left in each layer as the height of an area, one area for each strength."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    envelope = [sum(counts) for counts in points[0]["kernels"].values()]
    areas = {point["strength"]: [sum(counts[1:]) for counts in point["kernels"].values()] for point in points}
    figure.colorbar(_draw_areas(axes, areas, envelope), ax=axes, label="strength")
    axes.set(title=title, xlabel="convolution", ylabel="filters left")
    return figure


def sizes(points: list[Record], title: str) -> Figure:
    """Draw figure 3: the number of filters of one size in each layer, one panel for each size."""
    count = max(len(counts) for point in points for counts in point["kernels"].values())
    figure = Figure(figsize=(3.4 * count, 3.6), layout="constrained")
    figure.suptitle(title)
    envelope = [sum(counts) for counts in points[0]["kernels"].values()]
    for size, axes in enumerate(figure.subplots(1, count, sharey=True, squeeze=False)[0]):
        areas = {
            point["strength"]: [(*counts, *[0] * count)[size] for counts in point["kernels"].values()]
            for point in points
        }
        scale = _draw_areas(axes, areas, envelope)
        axes.set(title=f"size {size}", xlabel="convolution")
    figure.colorbar(scale, ax=axes, label="strength")
    return figure


def errors(panels: dict[str, Series], dense: int | dict[str, int]) -> Figure:
    """Draw figures 4 and 5: test error against MACs, one line for each series, one panel for each title.

    Args:
        dense: MACs of the dense network, or one number for each panel.
    """
    figure = Figure(figsize=(6.4 * len(panels), 4.4), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, points in series.items():
            line = sorted((point["macs"], error(point)) for point in points)
            axes.plot(*zip(*line, strict=True), marker=".", linewidth=1, label=label)
        whole = dense if isinstance(dense, int) else dense[title]
        axes.axvline(whole, color="grey", linestyle="--", linewidth=1)
        # Empty networks, which have no place on a logarithmic axis, are drawn at the left edge.
        axes.set_xscale("symlog", linthresh=max(whole / 1000, 1))
        axes.set_xlim(0, 1.3 * whole)
        axes.set(title=title, xlabel="MACs of one sample", ylabel="test error in percent")
        finish(axes, "small")
    return figure


def _draw_areas(axes: Axes, areas: dict[float, list[int]], envelope: list[int]) -> ScalarMappable:
    """Draw areas around a horizontal line, the largest at the back; return the scale of their colours."""
    layers = np.arange(1, len(envelope) + 1)
    norm = LogNorm(min(areas), max(max(areas), min(areas) * 1.01))
    colors = matplotlib.colormaps["viridis"]
    for strength, heights in sorted(areas.items(), key=lambda area: -sum(area[1])):
        half = np.array(heights) / 2
        axes.fill_between(layers, -half, half, color=colors(norm(strength)), alpha=0.55, linewidth=0)
        axes.plot(layers, half, layers, -half, color=colors(norm(strength)), linewidth=0.8)
    for sign in (-0.5, 0.5):
        axes.plot(layers, sign * np.array(envelope), color="black", linestyle="--", linewidth=1)
    axes.set(xlim=(1, max(len(envelope), 2)), xticks=layers)
    axes.tick_params(axis="x", labelsize="small")
    axes.yaxis.set_major_formatter(lambda value, _: f"{2 * abs(value):g}")
    axes.spines[["top", "right"]].set_visible(False)
    return ScalarMappable(norm, colors)
