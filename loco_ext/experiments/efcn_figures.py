"""Figures of the eFCN experiment, after the paper's figures 2 to 8 and 12, drawn from the content of ``efcn.json``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from loco_ext.experiments.efcn_settings import CNN
from loco_ext.experiments.figures import finish, write

Record = dict[str, Any]
MARKERS = "x+^sd*"
PANELS = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}
MOST = 4  # maximum number of switch times in a figure with a row or column for each


def save(record: Record, out: Path) -> None:
    """Write a PNG for each figure that the record has data for."""
    for name, figure in draw(record):
        write(figure, out / f"{name}.png")


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
    names = _relaxations(record)
    figure = Figure(figsize=(10, 3.6 * len(names)), layout="constrained")
    cells = figure.subplots(len(names), 2, squeeze=False)
    for row, relax in zip(cells, names, strict=True):
        for axes, name in zip(row, ("train_loss", "test_accuracy"), strict=True):
            _draw_course(axes, record["cnn"], name, color="black", label="CNN")
            if record["fcn"]:
                _draw_course(axes, record["fcn"], name, color="tab:red", label="FCN")
            branches = _branches(record, relax)
            for branch, color in zip(branches, _colors(len(branches)), strict=True):
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
    for number, relax in enumerate(_relaxations(record)):
        _draw_by_time(accuracy, record, relax, number, lambda b: b["epochs"][-1]["test_accuracy"], _title(relax))
        for axes, name in zip(others, ("gradient_norm", "top_eigenvalue"), strict=True):
            for when, line in (("before", "--"), ("after", "-")):
                value = _getter(when, name)
                _draw_by_time(axes, record, relax, number, value, f"{_title(relax)}, {when}", linestyle=line)
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
    for row, name in zip(cells, ("delta_locality", "delta_sharing"), strict=True):
        for number, relax in enumerate(_relaxations(record)[1:]):
            branches = _branches(record, relax)
            deltas = [branch["epochs"][-1][name] for branch in branches]
            times = [branch["switch_time"] for branch in branches]
            losses = [branch["start"]["train_loss"] for branch in branches]
            accuracies = [branch["epochs"][-1]["test_accuracy"] for branch in branches]
            style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "", "label": _title(relax)}
            for axes, x, y in zip(row, (times, losses, deltas), (deltas, deltas, accuracies), strict=True):
                axes.plot(_numbers(x), _numbers(y), **style)
        if record["fcn"]:
            last, start = record["fcn"]["epochs"][-1], record["fcn"]["start"]
            row[1].plot(*_numbers([start["train_loss"], last[name]]), "o", color="tab:blue", label="FCN")
            row[2].plot(*_numbers([last[name], last["test_accuracy"]]), "o", color="tab:blue", label="FCN")
        label = name.replace("_", " ")
        row[0].set(xlabel="switch time", ylabel=label)
        row[1].set(xlabel="initial training loss", ylabel=label)
        row[2].set(xlabel=label, ylabel="final test accuracy")
        for axes in row:
            finish(axes, "x-small")
    return figure


def filters(branches: list[Record]) -> Figure:
    """Draw figure 5: a filter of the first layer, one row per switch time, one column per epoch of the branch."""
    epochs = list(branches[0]["filters"])
    figure = Figure(figsize=(2.6 * len(epochs) + 1, 2.6 * len(branches)), layout="constrained")
    figure.suptitle(f"A filter of the first layer, {_title(branches[0]['relax'])}: ln |weight|")
    cells = figure.subplots(len(branches), len(epochs), squeeze=False)
    for row, branch in zip(cells, branches, strict=True):
        for axes, epoch in zip(row, epochs, strict=True):
            drawn = _draw_logarithm(axes, branch["filters"][epoch])
            axes.set_title(f"from {branch['switch_time']}, after {epoch}", fontsize="small")
            figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


def fcn_filters(fcn: Record) -> Figure:
    """Draw figure 6: a filter of the standard fully connected network before and after training, and the difference."""
    first, last = (np.array(fcn["filters"][epoch]) for epoch in _ends(fcn["filters"]))
    figure = Figure(figsize=(9, 3), layout="constrained")
    figure.suptitle("A filter of the first layer, FCN from scratch: ln |weight|")
    titles = ("at first", "trained", "the difference")
    for axes, values, title in zip(figure.subplots(1, 3), (first, last, last - first), titles, strict=True):
        figure.colorbar(_draw_logarithm(axes, values), ax=axes, shrink=0.8)
        axes.set_title(title)
    return figure


def masked(record: Record) -> Figure:
    """Draw figure 7: final test accuracy, and that of the local and of the off-local blocks alone."""
    names = [relax for relax in _relaxations(record) if "local_accuracy" in _branches(record, relax)[0]["epochs"][-1]]
    figure = Figure(figsize=(4.8 * len(names), 3.8), layout="constrained")
    for axes, relax in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        parts = {"all blocks": "test_accuracy", "local blocks": "local_accuracy", "others": "off_local_accuracy"}
        for number, (label, name) in enumerate(parts.items()):
            _draw_by_time(axes, record, relax, number, lambda b, name=name: b["epochs"][-1][name], label)
        axes.set(title=_title(relax), ylabel="final test accuracy", ylim=(0, 1))
        finish(axes, "x-small")
    return figure


def corners(branches: list[Record]) -> Figure:
    """Draw figure 8: a corner of the first layer's weight matrix as it was lifted, and after training."""
    figure = Figure(figsize=(8, 3.6 * len(branches)), layout="constrained")
    figure.suptitle("First rows and columns of the first layer's matrix: ln |weight|")
    for row, branch in zip(figure.subplots(len(branches), 2, squeeze=False), branches, strict=True):
        for axes, values, when in zip(row, branch["corners"], ("lifted", "trained on"), strict=True):
            figure.colorbar(_draw_logarithm(axes, values), ax=axes, shrink=0.8)
            axes.set_title(f"{_title(branch['relax'])} from {branch['switch_time']}, {when}", fontsize="small")
    return figure


def interpolations(branches: list[Record]) -> Figure:
    """Draw figure 12: losses and accuracies between the trained network (alpha = 0) and a lifted one, one per row."""
    figure = Figure(figsize=(14, 2.8 * len(branches)), layout="constrained")
    for row, branch in zip(figure.subplots(len(branches), 4, squeeze=False), branches, strict=True):
        for axes, (name, title) in zip(row, PANELS.items(), strict=True):
            for method, color in zip(branch["interpolations"], ("tab:green", "tab:blue", "tab:red"), strict=True):
                points = branch["interpolations"][method]
                alphas = [point["alpha"] for point in points]
                axes.plot(alphas, _numbers([point[name] for point in points]), color=color, marker=".", label=method)
            axes.set(xlabel="alpha", ylabel=title)
            axes.set_title(f"{_title(branch['relax'])} from {branch['switch_time']}", fontsize="small")
            finish(axes, "x-small" if axes is row[-1] else None)
    return figure


def _relaxations(record: Record) -> list[str]:
    """Return the relaxations in recorded order; "cnn", the network itself trained on, comes first."""
    return list(dict.fromkeys(branch["relax"] for branch in record["branches"]))


def _title(relax: str) -> str:
    names = {"cnn": "CNN, trained on", "lcn": "LCN", "full": "eFCN"}
    return names.get(relax, f"grown by {relax}")


def _branches(record: Record, relax: str) -> list[Record]:
    return [branch for branch in record["branches"] if branch["relax"] == relax]


def _widest(branches: list[Record]) -> list[Record]:
    """Return at most MOST branches of the last relaxation, from the first switch time to the last."""
    branches = [branch for branch in branches if branch["relax"] == branches[-1]["relax"]]
    if len(branches) <= MOST:
        return branches
    return [branches[round(i * (len(branches) - 1) / (MOST - 1))] for i in range(MOST)]


def _ends(pictures: dict[str, Any]) -> tuple[str, str]:
    return min(pictures, key=int), max(pictures, key=int)


def _getter(when: str, name: str) -> Any:
    return lambda branch: branch[when].get(name)


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Replace None, JSON's null for numbers that are not finite, by NaN."""
    return [np.nan if value is None else value for value in values]


def _colors(count: int) -> list[Any]:
    return [matplotlib.colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def _draw_course(axes: Axes, network: Record, name: str, **style: Any) -> None:
    values = [network["start"][name], *(epoch[name] for epoch in network["epochs"])]
    axes.plot(range(len(values)), _numbers(values), marker=".", linewidth=1, **style)


def _draw_by_time(
    axes: Axes, record: Record, relax: str, number: int, value: Any, label: str, linestyle: str = ":"
) -> None:
    branches = _branches(record, relax)
    times = [branch["switch_time"] for branch in branches]
    line: dict[str, Any] = {"color": f"C{number}", "linewidth": 1, "linestyle": linestyle, "label": label}
    axes.plot(times, _numbers([value(branch) for branch in branches]), marker=MARKERS[number % len(MARKERS)], **line)
    _scale_epochs(axes)
    axes.set(xlabel="switch time")


def _scale_epochs(axes: Axes) -> None:
    """Make the epoch axis logarithmic from epoch 1 on."""
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_references(axes: Axes, record: Record) -> None:
    for network, label, line in ((record["cnn"], "best CNN", "-"), (record["fcn"], "best FCN", "--")):
        if network:
            best = max(_numbers([epoch["test_accuracy"] for epoch in network["epochs"]]))
            axes.axhline(best, color="black", linewidth=1, linestyle=line, label=label)


def _draw_logarithm(axes: Axes, values: Any) -> AxesImage:
    """Draw log magnitudes of weights; those that are zero or missing stay white."""
    sizes = np.abs(np.array(values, dtype=float))
    axes.set(xticks=[], yticks=[])
    return axes.imshow(np.log(sizes, out=np.full_like(sizes, np.nan), where=sizes > 0), cmap="viridis")
