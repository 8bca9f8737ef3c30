"""Building blocks of tables of results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loco_ext.output import markdown_table

Record = dict[str, Any]
Columns = list[tuple[str, Callable[[Record], str]]]  # the header of each column, and the cell of a record
RULE_NAMES = {"sgd": "SGD, momentum", "adam": "Adam", "adamw": "AdamW"}
MISSING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Table:
    """A title, one header per column, and rows of as many cells."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        return f"{self.title}\n\n{markdown_table(self.headers, self.rows)}"


def table(title: str, records: Sequence[Record], columns: Columns) -> Table:
    """Return a table of one row for each record."""
    return Table(
        title, [header for header, _ in columns], [[cell(record) for _, cell in columns] for record in records]
    )


def entry(key: str, form: str = "") -> Callable[[Record], str]:
    """Return a cell that shows an entry of a record in this form."""
    return lambda record: format(record[key], form)


def columns_of(records: Sequence[Record], key: str, form: Callable[[Any], str], suffix: str = "") -> Columns:
    """Return a column for each name under ``key`` that some record has, ours and the copy last.

    Its cells are what ``form`` makes of the entry; a dash where it is missing.
    """
    names = dict.fromkeys(name for record in records for name in record.get(key, {}))

    def column(name: str) -> Callable[[Record], str]:
        return lambda record: form(record[key][name]) if record[key].get(name) is not None else MISSING

    last = ("ours", "copy", "ours / copy")
    ordered = sorted(names, key=lambda name: name in last) if {"ours", "ours / copy"} & names.keys() else names
    return [(name.replace("_", " ") + suffix, column(name)) for name in ordered]


def significant(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def milliseconds(timing: Record) -> str:
    """Format the median of a timing."""
    return significant(1e3 * timing["median"])


def microseconds(timing: Record) -> str:
    """Format the GPU's median and, after the slash, the host's."""
    return " / ".join(significant(1e6 * timing[key]["median"]) for key in ("gpu", "host"))


def targets(report: Record, title: str) -> Table:
    """Return a table of the targets beside the measurements in the worst case."""
    columns: Columns = [
        ("of all cases", entry("name")),
        ("wanted", entry("wanted")),
        ("measured", lambda row: f"{row['measured']:.3g}"),
        ("met", lambda row: "yes" if row["met"] else "no"),
        ("worst case", entry("where")),
    ]
    return table(title, report["targets"], columns)
