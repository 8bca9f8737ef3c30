"""Output of ``loco-ext analyze``: the rows of LOCO-REG's Table 4, suggested factors, and a figure of the taps."""

import itertools
import math
import warnings
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text
from torch import Tensor

from loco_ext.analysis.locality import LocalityStatistics
from loco_ext.output import one_line

PARTS = {"all": "all", "lower": "lower 1/2", "upper": "upper 1/2"}
_COLUMNS = 6  # pictures per row of the figure
_MOST_PICTURES = 300  # pictures in the figure
_LONGEST_TITLE = 28  # characters of a picture's title
_LONGEST_NAME = 80  # characters of a name in a table


def stars(p_value: float) -> str:
    """Return the significance stars of the paper's tables: ``***`` below .001, ``**`` below .01, ``*`` below .1."""
    return "*" * sum(p_value < level for level in (0.1, 0.01, 0.001))


def statistics_table(named: dict[str, LocalityStatistics]) -> Table:
    """Return Table 4: means of the differences between the weights at consecutive distances from the centre.

    There is one row for each network, kernel size and pair of distances. Stars mark the p-value of a one-sided t-test,
    as in the paper: below .1, .01, .001.
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
        table.add_row(_name(name), size, distances, *(cells.get(part, "") for part in PARTS))
    return table


def locality_table(locality: dict[str, tuple[float, ...]], title: str) -> Table:
    """Return a table of each layer's suggested factors: (gamma, eta), or one per distance class."""
    table = Table(title=title)
    table.add_column("layer")
    table.add_column("factors", justify="right")
    for name, factors in locality.items():
        table.add_row(_name(name), ", ".join(f"{factor:.3f}" for factor in factors))
    return table


def _name(name: str) -> Text:
    return Text(one_line(name, _LONGEST_NAME))


def tap_figure(kernels: dict[str, Tensor]) -> Figure:
    """Draw the mean absolute weight of every tap, one picture per layer; darker is larger, from 0 to the layer maximum.

    The slices of a 3-d kernel stand side by side. At most the first 300 layers are drawn.
    """
    drawn = dict(itertools.islice(kernels.items(), _MOST_PICTURES))
    columns = min(len(drawn), _COLUMNS)
    rows = math.ceil(len(drawn) / columns)
    width, height = 2.1 * columns, 2.3 * rows + 0.6
    figure = Figure(figsize=(width, height))
    some = "" if len(drawn) == len(kernels) else f", of the first {len(drawn)} of {len(kernels)} layers"
    figure.suptitle("Mean |weight| by tap" + some)
    # All pictures share one axes object, in inches from its upper left corner, because creating axes is slow.
    axes = figure.add_axes((0, 0, 1, 1 - 0.5 / height))
    axes.set_axis_off()
    for i, (name, weight) in enumerate(drawn.items()):
        row, column = divmod(i, columns)
        _draw_taps(axes, 2.1 * column, 2.3 * row, name, weight.abs().mean((0, 1)))
    axes.set(xlim=(0, width), ylim=(height - 0.5, 0))
    return figure


def _draw_taps(axes: Axes, left: float, top: float, name: str, taps: Tensor) -> None:
    """Draw a picture of at most 1.9 inches in either direction, below its title."""
    if taps.dim() == 3:
        taps = taps.transpose(0, 1).flatten(1)  # [height, depth * width]
    picture = taps.reshape(-1, taps.shape[-1])
    height, width = (1.9 * size / max(picture.shape) for size in picture.shape)
    x, y = left + (2.1 - width) / 2, top + 0.3 + (1.9 - height) / 2
    box = (x, x + width, y + height, y)
    axes.imshow(picture.numpy(), extent=box, vmin=0, vmax=picture.max().item() or 1, cmap="Blues")
    title = one_line(name, _LONGEST_TITLE)
    axes.text(left + 1.05, top + 0.25, title, size="small", ha="center", parse_math=False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # matplotlib draws a box for a missing glyph
        figure.savefig(path, format="png", dpi=150)
