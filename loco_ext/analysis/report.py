"""What ``loco-ext analyze`` shows: the rows of LOCO-REG's Table 4, suggested factors, and a figure of the taps."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from loco_ext.analysis.locality import LocalityStatistics

PARTS = {"all": "all", "lower": "lower 1/2", "upper": "upper 1/2"}
_COLUMNS = 6  # of the figure


def stars(p_value: float) -> str:
    """As in the paper's tables: ``***`` below .001, ``**`` below .01, ``*`` below .1."""
    return "*" * sum(p_value < level for level in (0.1, 0.01, 0.001))


def statistics_table(named: dict[str, LocalityStatistics]) -> Table:
    """Return Table 4: means of the differences between the weights at consecutive distances from the centre.

    There is one row for each network, kernel size and pair of distances. A star stands for a one-sided t-test, as in
    the paper: below .1, .01, .001.
    """
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name, found in named.items():
        for cell in found.cells:
            distances = f"{cell.distances[0]:.3g} - {cell.distances[1]:.3g}"
            row = rows.setdefault((name, "x".join(map(str, cell.kernel_size)), distances), {})
            row[cell.part] = f"{cell.mean:.3f}{stars(cell.p_greater)}"
    table = Table(
        title="Weights closer to the centre minus weights further out, in standard deviations (LOCO-REG, Table 4)"
    )
    table.add_column("network", overflow="fold")
    for heading in ("kernel", "distances"):
        table.add_column(heading, no_wrap=True)
    for heading in PARTS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for (name, size, distances), cells in rows.items():
        table.add_row(escape(name), size, distances, *(cells.get(part, "") for part in PARTS))
    return table


def locality_table(locality: dict[str, tuple[float, ...]], title: str) -> Table:
    """The suggested factors of every layer: (gamma, eta), or one per distance class."""
    table = Table(title=title)
    table.add_column("layer")
    table.add_column("factors", justify="right")
    for name, factors in locality.items():
        table.add_row(escape(name), ", ".join(f"{factor:.3f}" for factor in factors))
    return table


def tap_figure(kernels: dict[str, Tensor]) -> Figure:
    """Mean absolute weight at every tap, one picture per layer; darker is larger, from 0 to the layer's largest.

    The slices of a 3-d kernel stand side by side.
    """
    columns = min(len(kernels), _COLUMNS)
    rows = math.ceil(len(kernels) / columns)
    height = 2.3 * rows + 0.6
    figure = Figure(figsize=(2.1 * columns, height))
    figure.suptitle("Mean |weight| by tap")
    # Fixed margins: a layout that is solved for takes minutes with a thousand layers.
    grid = {"left": 0.02, "right": 0.98, "bottom": 0.1 / height, "top": 1 - 0.6 / height, "hspace": 0.2, "wspace": 0.1}
    places = figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid).flat
    for axes in places:
        axes.set_axis_off()
    for axes, (name, weight) in zip(figure.axes, kernels.items(), strict=False):
        _draw_taps(axes, name, weight.abs().mean((0, 1)))
    return figure


def _draw_taps(axes: Axes, name: str, taps: Tensor) -> None:
    if taps.dim() == 3:
        taps = taps.transpose(0, 1).flatten(1)  # [height, depth * width]
    picture = taps.reshape(-1, taps.shape[-1])
    axes.imshow(picture.numpy(), vmin=0, vmax=picture.max().item() or 1, cmap="Blues")
    axes.set_title(name, fontsize="small", parse_math=False)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    figure.savefig(path, format="png", dpi=150)
