"""What tables of results are made of."""

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
        """The table as GitHub renders it."""
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(*self.headers, title=self.title)
        for cells in self.rows:
            table.add_row(*cells)
        return table


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def milliseconds(record: dict[str, Any], candidate: str) -> str:
    """A candidate's median, or a dash where it was not run."""
    timing = record["candidates"].get(candidate)
    return significant(1e3 * timing["median"]) if timing else MISSING


def targets(report: dict[str, Any], title: str) -> Table:
    """What is to be reached, and what is, in the worst case."""
    rows = [
        [row["name"], row["wanted"], f"{row['measured']:.3g}", "yes" if row["met"] else "no", row["where"]]
        for row in report["targets"]
    ]
    return Table(title, ["of all cases", "wanted", "measured", "met", "worst case"], rows)
