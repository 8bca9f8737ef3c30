"""Sections on the experiments: frontier, eFCN, importance landscapes and linear regions."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from matplotlib.figure import Figure

from loco_ext.experiments import (
    efcn,
    efcn_figures,
    frontier,
    frontier_figures,
    landscapes,
    landscapes_figures,
    region_pictures,
    regions,
)
from loco_ext.experiments.records import Record
from loco_ext.output import Rows, one_line
from loco_ext.report.content import Plot, Section, Table, plot
from loco_ext.report.runs import Run


class _Experiment(NamedTuple):
    """The content of an experiment's section: how to draw its figures, their titles and descriptions, and its table."""

    title: str
    draw: Callable[[Record], Iterator[tuple[str, Figure]]]
    shown: Mapping[str, tuple[str, str]]
    rows: Callable[[Record], Rows]
    text: str = ""


def section(run: Run) -> Section:
    """Return the section on one run of an experiment: the table that its command prints, and its figures."""
    kind = EXPERIMENTS[run.command]
    numbers = _sizes(run.content) if run.command == "frontier" else None
    drawn = [(kind.shown[name], figure) for name, figure in kind.draw(run.content) if name in kind.shown]
    plots = [plot(title, alt, figure, numbers) for (title, alt), figure in drawn]
    return Section(f"{kind.title}: {run.name}", kind.text, [Table(*kind.rows(run.content))], plots)


def _sizes(record: Record) -> list[Table]:
    """Return the numbers of filters of each size that the figures of a frontier show."""
    tables = []
    for point in frontier_figures.with_largest_tau(record):
        count = max(map(len, point["kernels"].values()))
        rows = [[name, *(str(n) for n in counts)] for name, counts in point["kernels"].items()]
        caption = f"strength {point['strength']:.3g}, filters by size"
        tables.append(Table(["layer", *map(str, range(count))], rows, caption))
    return tables


def accuracy_by_cost(runs: list[Run]) -> list[Plot]:
    """Draw the points of all frontiers together, in one figure for each network and data set."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(f"{run.settings.get('model')} on {run.settings.get('data')}", []).append(run)
    plots = []
    for title, found in together.items():
        series: frontier_figures.Series = {}
        for run in found:
            for label, points in frontier_figures.by_tau(run.content).items():
                series[label if len(found) == 1 else f"{label}, {one_line(run.name)}"] = points
        dense = max(frontier_figures.dense_path(run.content)["macs"] for run in found)
        alt = "Test error in percent by multiply-accumulates of " + ", ".join(series)
        plots.append(plot(f"Test error by cost, {title}", alt, frontier_figures.errors({"": series}, dense)))
    return plots


EXPERIMENTS = {
    "frontier": _Experiment(
        "Frontier",
        frontier_figures.draw,
        {
            "widths": ("Filters left", "Number of filters left in each layer, one area for each strength"),
            "sizes": ("Sizes of filters", "Number of filters of each size in each layer, one panel for each size"),
        },
        frontier.rows,
    ),
    "efcn": _Experiment(
        "Between convolution and full connection",
        efcn_figures.draw,
        {
            "dynamics": (
                "Dynamics",
                "Training loss and test accuracy by epoch, by when networks were lifted",
            ),
            "landscape": (
                "Accuracy, gradient and curvature",
                "Final test accuracy, norm of the gradient and largest eigenvalue of the Hessian by switch time",
            ),
            "deviations": (
                "Deviation from the convolutions",
                "Deviation from locality and from weight sharing by switch time, initial loss and final accuracy",
            ),
            "filters": ("A filter of the first layer", "Logarithms of the weights of one output pixel, by epoch"),
            "fcn_filters": (
                "A filter of the fully connected network",
                "Logarithms of the weights of one output pixel before and after training, and of the difference",
            ),
            "masked": ("Local and off-local blocks", "Final test accuracy with all, local and off-local blocks alone"),
            "interpolations": (
                "Between the networks",
                "Losses and accuracies along paths from the trained network to lifted ones",
            ),
        },
        efcn.rows,
        "Deviations are shares of the norm; the folder of the run has a picture of the weight matrix, too.",
    ),
    "landscapes": _Experiment(
        "Importance landscapes",
        landscapes_figures.draw,
        {
            "landscapes": ("Landscapes", "Heatmaps of the importance of each pixel: of the data, and of each arm"),
            "training": ("Test accuracy by epoch", "Test accuracy by epoch, means over the seeds of each arm"),
            "robustness": ("Accuracy under corruption", "Accuracy by level of corruption, a panel for each family"),
            "ablation": ("Ablation", "Share of the probability left by share of the pixels replaced"),
        },
        landscapes.rows,
        "Means over the seeds of each arm, plus or minus standard errors; TV is the total variation of the landscape.",
    ),
    "regions": _Experiment(
        "Linear regions",
        region_pictures.draw,
        {"regions": ("Radius by accuracy", "Median radius of the linear regions by test accuracy of each setting")},
        regions.rows,
        "Medians over test samples, means over seeds; an asterisk marks the best setting within half a point.",
    ),
}
