"""Building blocks of tables of results."""

import math
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

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
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        table = RichTable(*self.headers, title=self.title)
        for cells in self.rows:
            table.add_row(*cells)
        return table


def significant(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def milliseconds(record: dict[str, Any], candidate: str) -> str:
    """Format a candidate's median, or a dash where it was not run."""
    timing = record["candidates"].get(candidate)
    return significant(1e3 * timing["median"]) if timing else MISSING


def targets(report: dict[str, Any], title: str) -> Table:
    """Return a table of the targets beside the measurements in the worst case."""
    rows = [
        [row["name"], row["wanted"], f"{row['measured']:.3g}", "yes" if row["met"] else "no", row["where"]]
        for row in report["targets"]
    ]
    return Table(title, ["of all cases", "wanted", "measured", "met", "worst case"], rows)
