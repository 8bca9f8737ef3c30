"""Figures of the eFCN experiment, after the paper's figures 2 to 8 and 12, drawn from the content of ``efcn.json``."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loco_ext.experiments.efcn_settings import CNN
from loco_ext.experiments.figures import finish
from loco_ext.experiments.records import Record, grouped

MARKERS = "x+^sd*"
PANELS = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}
MOST = 4  # maximum number of switch times in a figure with a row or column for each


def draw(record: Record) -> Iterator[tuple[str, Figure]]:
    """Yield the name of each figure that the record has data for, and the figure."""
    lifted = [branch for branch in record["branches"] if branch["relax"] != CNN]
    yield "dynamics", dynamics(record)
    yield "landscape", landscape(record)
    yield "deviations", deviations(record)
    yield "filters", filters(_widest(lifted))
    if record["fcn"]:
        yield "fcn_filters", fcn_filters(record["fcn"])
    if any("local_accuracy" in branch["epochs"][-1] for branch in lifted):
        yield "masked", masked(record)
    yield "corners", corners([branch for branch in lifted if branch["corners"]])
    if joined := [branch for branch in lifted if branch["interpolations"]]:
        yield "interpolations", interpolations(_widest(joined))


def dynamics(record: Record) -> Figure:
    """Draw figure 2: training loss and test accuracy over the epochs, one panel for each relaxation and quantity."""
    groups = grouped(record["branches"], "relax")
    figure = Figure(figsize=(10, 3.6 * len(groups)), layout="constrained")
    cells = figure.subplots(len(groups), 2, squeeze=False)
    for row, (relax, branches) in zip(cells, groups.items(), strict=True):
        for axes, name in zip(row, ("train_loss", "test_accuracy"), strict=True):
            _draw_course(axes, record["cnn"], name, color="black", label="CNN")
            if record["fcn"]:
                _draw_course(axes, record["fcn"], name, color="tab:red", label="FCN")
            colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(branches)))
            for branch, color in zip(branches, colors, strict=True):
                _draw_course(axes, branch, name, color=color, label=f"from epoch {branch['switch_time']}")
            _scale_epochs(axes)
            axes.set(title=_title(relax), xlabel="epoch of its own training", ylabel=PANELS[name])
            if name == "train_loss":
                axes.set_yscale("log")
            finish(axes, "x-small" if axes is row[-1] else None)
    return figure


def landscape(record: Record) -> Figure:
    """Draw figure 3: final test accuracy, gradient norm and largest eigenvalue before and after, by switch time."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    accuracy, *others = figure.subplots(1, 3)
    for number, (relax, branches) in enumerate(grouped(record["branches"], "relax").items()):
        _draw_by_time(accuracy, branches, number, _last(branches, "test_accuracy"), _title(relax))
        for axes, name in zip(others, ("gradient_norm", "top_eigenvalue"), strict=True):
            for when, line in (("before", "--"), ("after", "-")):
                values = [branch[when].get(name) for branch in branches]
                _draw_by_time(axes, branches, number, values, f"{_title(relax)}, {when}", linestyle=line)
    _draw_references(accuracy, record)
    accuracy.set(ylabel="final test accuracy")
    for axes, title in zip(others, ("norm of the gradient", "largest eigenvalue of the Hessian"), strict=True):
        axes.set_yscale("log")
        axes.set(ylabel=title)
    for axes in (accuracy, *others):
        finish(axes, "x-small")
    return figure


def deviations(record: Record) -> Figure:
    """Draw figure 4: deviation from the convolutions by switch time, initial loss and final test accuracy.

    The upper row is the paper's: off-local weights. The lower row adds the deviation from weight sharing.
    """
    figure = Figure(figsize=(13, 7), layout="constrained")
    cells = figure.subplots(2, 3)
    lifted = grouped((branch for branch in record["branches"] if branch["relax"] != CNN), "relax")
    for row, name in zip(cells, ("delta_locality", "delta_sharing"), strict=True):
        for number, (relax, branches) in enumerate(lifted.items()):
            deltas, accuracies = _last(branches, name), _last(branches, "test_accuracy")
            times = [branch["switch_time"] for branch in branches]
            losses = [branch["start"]["train_loss"] for branch in branches]
            style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "", "label": _title(relax)}
            for axes, x, y in zip(row, (times, losses, deltas), (deltas, deltas, accuracies), strict=True):
                axes.plot(_array(x), _array(y), **style)
        if record["fcn"]:
            last, start = record["fcn"]["epochs"][-1], record["fcn"]["start"]
            row[1].plot(*_array([start["train_loss"], last[name]]), "o", color="tab:blue", label="FCN")
            row[2].plot(*_array([last[name], last["test_accuracy"]]), "o", color="tab:blue", label="FCN")
        label = name.replace("_", " ")
        row[0].set(xlabel="switch time", ylabel=label)
        row[1].set(xlabel="initial training loss", ylabel=label)
        row[2].set(xlabel=label, ylabel="final test accuracy")
        for axes in row:
            finish(axes, "x-small")
    return figure


def filters(branches: list[Record]) -> Figure:
    """Draw figure 5: a filter of the first layer, one row per switch time, one column per epoch of the branch."""
    rows = [
        {f"from {branch['switch_time']}, after {epoch}": weights for epoch, weights in branch["filters"].items()}
        for branch in branches
    ]
    title = f"A filter of the first layer, {_title(branches[0]['relax'])}: ln |weight|"
    return _logarithms(title, rows, (2.6 * len(rows[0]) + 1, 2.6 * len(rows)))


def fcn_filters(fcn: Record) -> Figure:
    """Draw figure 6: a filter of the standard fully connected network before and after training, and the difference."""
    first, *_, last = map(_array, fcn["filters"].values())  # by epoch
    row = {"at first": first, "trained": last, "the difference": last - first}
    return _logarithms("A filter of the first layer, FCN from scratch: ln |weight|", [row], (9, 3), "large")


def masked(record: Record) -> Figure:
    """Draw figure 7: final test accuracy, and that of the local and of the off-local blocks alone."""
    groups = grouped((each for each in record["branches"] if "local_accuracy" in each["epochs"][-1]), "relax")
    figure = Figure(figsize=(4.8 * len(groups), 3.8), layout="constrained")
    cells = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (relax, branches) in zip(cells, groups.items(), strict=True):
        parts = {"all blocks": "test_accuracy", "local blocks": "local_accuracy", "others": "off_local_accuracy"}
        for number, (label, name) in enumerate(parts.items()):
            _draw_by_time(axes, branches, number, _last(branches, name), label)
        axes.set(title=_title(relax), ylabel="final test accuracy", ylim=(0, 1))
        finish(axes, "x-small")
    return figure


def corners(branches: list[Record]) -> Figure:
    """Draw figure 8: a corner of the first layer's weight matrix as it was lifted, and after training."""
    rows = [
        {
            f"{_title(branch['relax'])} from {branch['switch_time']}, {when}": values
            for when, values in zip(("lifted", "trained on"), branch["corners"], strict=True)
        }
        for branch in branches
    ]
    title = "First rows and columns of the first layer's matrix: ln |weight|"
    return _logarithms(title, rows, (8, 3.6 * len(rows)))


def interpolations(branches: list[Record]) -> Figure:
    """Draw figure 12: losses and accuracies between the trained network (alpha = 0) and a lifted one, one per row."""
    figure = Figure(figsize=(14, 2.8 * len(branches)), layout="constrained")
    for row, branch in zip(figure.subplots(len(branches), 4, squeeze=False), branches, strict=True):
        for axes, (name, title) in zip(row, PANELS.items(), strict=True):
            for method, color in zip(branch["interpolations"], ("tab:green", "tab:blue", "tab:red"), strict=True):
                points = branch["interpolations"][method]
                alphas = [point["alpha"] for point in points]
                axes.plot(alphas, _array([point[name] for point in points]), color=color, marker=".", label=method)
            axes.set(xlabel="alpha", ylabel=title)
            axes.set_title(f"{_title(branch['relax'])} from {branch['switch_time']}", fontsize="small")
            finish(axes, "x-small" if axes is row[-1] else None)
    return figure


def _title(relax: str) -> str:
    names = {"cnn": "CNN, trained on", "lcn": "LCN", "full": "eFCN"}
    return names.get(relax, f"grown by {relax}")


def _last(branches: list[Record], name: str) -> list[Any]:
    """Return a figure of the last epoch of each branch; None where a network does not have it."""
    return [branch["epochs"][-1].get(name) for branch in branches]


def _widest(branches: list[Record]) -> list[Record]:
    """Return at most MOST branches of the last relaxation, from the first switch time to the last."""
    branches = [branch for branch in branches if branch["relax"] == branches[-1]["relax"]]
    if len(branches) <= MOST:
        return branches
    return [branches[round(i * (len(branches) - 1) / (MOST - 1))] for i in range(MOST)]


def _array(values: Sequence[Any]) -> np.ndarray:
    """Return numbers, at any depth, as an array in which None, JSON's null for numbers that are not finite, is NaN."""
    return np.array(values, dtype=float)


def _draw_course(axes: Axes, network: Record, name: str, **style: Any) -> None:
    values = [network["start"][name], *(epoch[name] for epoch in network["epochs"])]
    axes.plot(range(len(values)), _array(values), marker=".", linewidth=1, **style)


def _draw_by_time(
    axes: Axes, branches: list[Record], number: int, values: list[Any], label: str, linestyle: str = ":"
) -> None:
    times = [branch["switch_time"] for branch in branches]
    line: dict[str, Any] = {"color": f"C{number}", "linewidth": 1, "linestyle": linestyle, "label": label}
    axes.plot(times, _array(values), marker=MARKERS[number % len(MARKERS)], **line)
    _scale_epochs(axes)
    axes.set(xlabel="switch time")


def _scale_epochs(axes: Axes) -> None:
    """Make the epoch axis logarithmic from epoch 1 on."""
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_references(axes: Axes, record: Record) -> None:
    for network, label, line in ((record["cnn"], "best CNN", "-"), (record["fcn"], "best FCN", "--")):
        if network:
            best = max(_array([epoch["test_accuracy"] for epoch in network["epochs"]]))
            axes.axhline(best, color="black", linewidth=1, linestyle=line, label=label)


def _logarithms(title: str, rows: list[dict[str, Any]], size: tuple[float, float], font: str = "small") -> Figure:
    """Draw log magnitudes of weights by the title of each picture; those that are zero or missing stay white."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    for line, pictures in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for axes, (name, values) in zip(line, pictures.items(), strict=True):
            sizes = np.abs(_array(values))
            logarithms = np.log(sizes, out=np.full_like(sizes, np.nan), where=sizes > 0)
            axes.set_title(name, fontsize=font)
            axes.set(xticks=[], yticks=[])
            figure.colorbar(axes.imshow(logarithms, cmap="viridis"), ax=axes, shrink=0.8)
    return figure
