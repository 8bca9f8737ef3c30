"""Sections on trained networks: learning curves of all runs together, filters, and how many have which size."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from loco_ext.analysis.tap_figure import tap_figure
from loco_ext.checkpoints import DamagedFileError, load_weights
from loco_ext.experiments.figures import finish
from loco_ext.experiments.records import Record
from loco_ext.output import json_text, one_line, setting_text
from loco_ext.report.content import Plot, Section, Table, matrix, number, plot
from loco_ext.report.runs import Run, RunError, differing
from loco_ext.sparsity import kernel_sizes

LONGEST_LABEL = 60  # characters of a line's label
MOST_FILTERS = 64  # filters in a picture
COLUMNS = 8  # columns of the picture of filters
WIDTH = 4.6  # inches of a figure that fills the width of a phone
setting = partial(setting_text, separator=", ")
Sizes = dict[str, Counter[str]]  # numbers of filters by layer and size


def learning_curves(runs: list[Run]) -> Section:
    """Draw losses and accuracies of all runs that train one network; those that differ in their seed share a colour."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if run.epochs:
            known = {name: value for name, value in run.settings.items() if name != "seed"}
            alike.setdefault(json_text(known) if run.command == "train" else str(run.folder), []).append(run)
    groups = dict(zip(_labels([found[0] for found in alike.values()]), alike.values(), strict=True))
    text = "Test samples have solid lines, training ones dashed. A bold line is the mean over the seeds of one setting."
    return Section("Learning curves", text, plots=[_curves(groups, what) for what in ("accuracy", "loss")])


def _labels(runs: list[Run]) -> list[str]:
    """Return a different label for each run: for a training, its settings that at most half of the trainings share."""
    trainings = [run.settings for run in runs if run.command == "train"]
    values = {name: Counter(setting(each.get(name)) for each in trainings) for name in differing(trainings)}
    labels: list[str] = []
    for run in runs:
        texts = {name: setting(run.settings.get(name)) for name in values if name not in ("seed", "weights")}
        rare = [f"{name} {text}" for name, text in texts.items() if values[name][text] <= len(trainings) / 2]
        label = ", ".join(rare) or f"{run.settings.get('model')} on {run.settings.get('data')}"
        label = one_line(label if run.command == "train" else f"{run.command} {run.name}", LONGEST_LABEL)
        label = f" {label}" if label.startswith("_") else label  # matplotlib would not list it
        labels.append(f"{label} ({run.name})" if label in labels else label)
    return labels


def _curves(groups: Mapping[str, list[Run]], what: str) -> Plot:
    figure = Figure(figsize=(WIDTH, 3.4 + 0.18 * len(groups)), layout="constrained")
    axes = figure.subplots()
    handles = []
    colors = matplotlib.colormaps["tab10" if len(groups) <= 10 else "tab20"]
    for place, (label, runs) in enumerate(groups.items()):
        for samples, line in (("train", "--"), ("test", "-")):
            curves = [_values(run, f"{samples}_{what}") for run in runs]
            style: dict[str, Any] = {
                "color": colors(place % colors.N),
                "linestyle": line,
                "marker": ".",
                "markersize": 3,
            }
            for run, values in zip(runs, curves, strict=True):
                alone = len(runs) == 1
                name = f"{label}, {samples}" if alone else f"{run.name}, {samples}"
                width = {"linewidth": 1.6 if samples == "test" else 1} if alone else {"linewidth": 0.7, "alpha": 0.5}
                axes.plot(range(1, len(values) + 1), values, label=name, **style, **width)
            if len(runs) > 1:
                mean = np.mean([values[: min(map(len, curves))] for values in curves], axis=0)
                name = f"{label}, {samples}, mean of {len(runs)}"
                axes.plot(range(1, len(mean) + 1), mean, label=name, linewidth=1.8, **style)
        handles.append((axes.lines[-1], label if len(runs) == 1 else f"{label} ({len(runs)} seeds)"))
    axes.set(xlabel="epoch", ylabel=what)
    finish(axes, whole=True, percent=what == "accuracy")
    lines, names = zip(*handles, strict=True)
    figure.legend(lines, names, loc="outside lower left", frameon=False, fontsize="small")
    last = "; ".join(f"{label} {number(_values(runs[-1], f'test_{what}')[-1])}" for label, runs in groups.items())
    return plot(what.capitalize(), f"{what.capitalize()} by epoch, on test samples in the end: {last}", figure)


def _values(run: Run, name: str) -> list[float]:
    return [math.nan if epoch[name] is None else epoch[name] for epoch in run.epochs]


def filters(run: Run) -> list[Plot]:
    """Draw the filters of a network's first layer and, if some filters are smaller, the number of each size by layer.

    Commands that write no weights have other pictures: ``shrink`` and ``compact`` only the sizes, ``analyze`` and
    ``demo`` the mean magnitude of each tap.
    """
    if run.command in ("shrink", "compact"):
        counted = {layer["name"]: Counter(layer["sizes"]) for layer in run.content["layers"]}
        return [_sizes(run, counted)] if counted else []
    if run.command in ("analyze", "demo"):
        return [_taps(run)]
    path = run.folder / "model.safetensors"
    if run.command != "train" or not path.exists():  # a run that has not been finished
        return []
    try:
        weights = {name: weight for name, weight in load_weights(path).items() if weight.dim() == 4 and weight.numel()}
    except DamagedFileError as error:
        raise RunError(f"{path}: {error}") from error
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    ordered = dict(sorted(weights.items(), key=lambda entry: _natural(entry[0])))
    channels = run.content["dataset"]["channels"]
    first = [name for name, weight in ordered.items() if weight.shape[1] == channels]
    plots = [_filters(run, first[0], ordered[first[0]])] if first else []
    kind = run.settings.get("kind", "half")
    odd = {name: all(size % 2 for size in weight.shape[2:]) for name, weight in ordered.items()}
    sizes = {name: kernel_sizes(w, kind if odd[name] else "half").tolist() for name, w in ordered.items()}
    if any(len(set(found)) > 1 or 0 in found for found in sizes.values()):
        plots.append(_sizes(run, {name.removesuffix(".weight"): Counter(map(str, sizes[name])) for name in sizes}))
    return plots


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which "2.weight" comes before "10.weight"."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _filters(run: Run, name: str, weight: Tensor) -> Plot:
    """Draw the first layer's filters, [C_out, C_in, height, width]: red, green and blue where it has three channels."""
    weight = weight.float()[:MOST_FILTERS]
    count, channels, height, width = weight.shape
    columns, rows = min(count, COLUMNS), math.ceil(count / COLUMNS)
    colored = channels == 3
    pixels = weight if colored else weight.mean(1, keepdim=True)
    largest = pixels.abs().amax((1, 2, 3), keepdim=True).clamp(min=torch.finfo().tiny)
    tiles = torch.ones(rows * columns, pixels.shape[1], height + 1, width + 1)  # white, with a line between filters
    tiles[:count, :, :height, :width] = 0.5 + pixels / largest / 2  # each filter by its own largest weight
    picture = tiles.view(rows, columns, -1, height + 1, width + 1).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    figure = Figure(figsize=(WIDTH, WIDTH * rows * (height + 1) / (COLUMNS * (width + 1))))
    axes = figure.add_axes((0, 0, columns / COLUMNS, 1))
    axes.set_axis_off()
    axes.imshow((picture if colored else picture[..., 0]).numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
    taps = [f"{c},{y},{x}" for c in range(channels) for y in range(height) for x in range(width)]
    cells = [[str(i), *map(number, row)] for i, row in enumerate(weight.flatten(1).tolist())]
    title = f"First layer of {run.name}"
    alt = f"The first {count} filters of layer {name}, each from its least to its largest weight"
    return plot(title, alt, figure, [Table(["filter", *taps], cells, "Weights by channel, row and column")])


def _sizes(run: Run, sizes: Sizes) -> Plot:
    """Draw the number of filters of each size as stacked bars, one bar for each layer."""
    order = sorted({size for counts in sizes.values() for size in counts}, key=_natural)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    below = np.zeros(len(sizes))
    for size, color in zip(order, matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(order))), strict=True):
        heights = np.array([counts[size] for counts in sizes.values()])
        axes.bar(range(1, len(sizes) + 1), heights, bottom=below, label=size, color=color)
        below += heights
    axes.set(xlabel="layer", ylabel="filters")
    finish(axes, whole=True)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small", title="size")
    rows = [[name, *(str(counts[size]) for size in order)] for name, counts in sizes.items()]
    total = sum(sizes.values(), Counter())
    alt = "Filters by layer and size; in all, " + ", ".join(f"{total[size]:,} of size {size}" for size in order)
    return plot(f"Sizes of the filters of {run.name}", alt, figure, [Table(["layer", *order], rows)])


def _taps(run: Run) -> Plot:
    """Draw the mean magnitude of the weights at each tap."""
    if run.command == "demo":
        found: Record = {each["name"]: each["mean_abs_weight_by_tap"] for each in run.content["networks"]}
    else:
        found = run.content["mean_abs_weight"]
    taps = {name: torch.tensor(values) for name, values in found.items()}
    tables = [matrix(values.reshape(-1, values.shape[-1]), name) for name, values in taps.items()]
    alt = "Pictures of the mean absolute weight by tap of " + ", ".join(taps)
    return plot(f"Mean |weight| by tap, {run.name}", alt, tap_figure(taps), tables)
