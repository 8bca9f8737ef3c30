"""Style and files of figures."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from loco_ext.output import replacing


def finish(axes: Axes, legend: str | None = None, *, whole: bool = False, percent: bool = False, **where: Any) -> None:
    """Draw a faint grid, no frame at the top and on the right, and a legend in letters of this size, if any.

    ``whole``: the numbers below the horizontal axis are whole ones; ``percent``: those beside the other are in percent.
    """
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        axes.legend(frameon=False, fontsize=legend, **where)


def save(drawn: Iterable[tuple[str, Figure]], out: Path) -> None:
    """Write a PNG for each name and figure to a folder."""
    for name, figure in drawn:
        write(figure, out / f"{name}.png")


def write(figure: Figure, path: Path) -> None:
    """Write a PNG atomically."""
    with replacing(path) as temporary:
        write_png(figure, temporary, dpi=150)


def write_png(figure: Figure, file: Path | BinaryIO, dpi: float) -> None:
    """Write a PNG, in which a box stands for each character that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, format="png", dpi=dpi)
