"""Content of a report: sections of figures and tables, and the numbers that a figure shows."""

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from loco_ext.experiments.figures import write_png

DOTS = 110  # per inch of a figure
LEAST, MOST = 54, 96  # pixels of the page per inch of a figure: letters stay readable, and do not become huge
UNNAMED = re.compile(r"_child\d+")  # matplotlib's labels of lines without one


class Table(NamedTuple):
    """A table of cells, with a caption or none."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


class Plot(NamedTuple):
    """A drawn figure, the sentence that stands for it where it is not seen, and its numbers.

    ``least`` and ``most`` are the widths in pixels that it is shown with.
    """

    title: str
    alt: str
    png: str  # encoded in base64
    least: int
    most: int
    tables: Sequence[Table]


@dataclass(frozen=True)
class Section:
    """A part of the page: its plots, below tables that are always visible."""

    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


def plot(title: str, alt: str, figure: Figure, tables: Sequence[Table] | None = None) -> Plot:
    """Draw a figure; with ``tables`` None, its numbers are read from its lines and images."""
    content, width = io.BytesIO(), figure.get_figwidth()
    tables = numbers(figure) if tables is None else tables
    for legend in filter(None, (*figure.legends, *(axes.get_legend() for axes in figure.axes))):
        for text in legend.get_texts():  # names of folders and settings may have dollars in them
            text.set_parse_math(False)
    write_png(figure, content, DOTS)
    png = base64.b64encode(content.getvalue()).decode()
    return Plot(title, alt, png, round(LEAST * width), round(MOST * width), tables)


def number(value: float | None) -> str:
    """Return a number with six significant digits, all digits of a whole one, and nothing for None and NaN.

    >>> number(0.123456789), number(12345678.0), number(None), number(float("nan"))
    ('0.123457', '12,345,678', '', '')
    """
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) < 2**53 and value == int(value) else f"{value:.6g}"


def numbers(figure: Figure) -> list[Table]:
    """Return a table of the numbers behind each line and image of a figure, except colour bars."""
    tables: list[Table] = []
    for axes in figure.axes:
        if axes.get_label() == "<colorbar>":
            continue
        caption = ", ".join(filter(None, (axes.get_title(), axes.get_ylabel())))
        if lines := [line for line in axes.lines if not UNNAMED.fullmatch(str(line.get_label()))]:
            tables.append(_of_lines(axes, lines, caption))
        images: list[Any] = [image.get_array() for image in axes.images]
        tables += [matrix(np.ma.filled(values, np.nan), caption) for values in images]
    return tables


def _of_lines(axes: Axes, lines: list[Line2D], caption: str) -> Table:
    """Return a column for each line if all have their places on the horizontal axis in common, else a row per point."""
    data = {str(line.get_label()): [np.ma.filled(part, np.nan) for part in line.get_data()] for line in lines}
    across = [str(line.get_label()) for line in lines if line.get_transform() != axes.transData]  # of axhline
    places = max((x for label, (x, _) in data.items() if label not in across), key=len)
    data |= {label: [places, np.full(len(places), data[label][1][0])] for label in across}
    columns = [dict(zip(x.tolist(), y.tolist(), strict=True)) for x, y in data.values()]
    whole = all(len(column) == len(x) for column, (x, _) in zip(columns, data.values(), strict=True))
    if whole and all(set(column) <= set(places.tolist()) for column in columns):
        rows = [[number(x), *(number(column.get(x)) for column in columns)] for x in places.tolist()]
        return Table([axes.get_xlabel(), *data], rows, caption)
    rows = [
        [label, number(a), number(b)]
        for label, (x, y) in data.items()
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    return Table(["line", axes.get_xlabel(), axes.get_ylabel()], rows, caption)


def matrix(values: np.ndarray | Tensor, caption: str) -> Table:
    """Return a table of a matrix, whose columns are numbered from 0."""
    rows = [[number(value) for value in row] for row in values.tolist()]
    return Table([str(column) for column in range(values.shape[1])], rows, caption)
