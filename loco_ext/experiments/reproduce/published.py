"""Values that the papers publish, as tables that say where they stand, with the unit of each column."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def tables() -> list[dict[str, Any]]:
    """Return the tables; the first cell of each row is its name, and null stands where the paper has no value."""
    return json.loads(files(__package__).joinpath("published.json").read_text())


def published(paper: str, where: str, row: str, column: str) -> Any:
    """Return one value, or None where the paper has none.

    >>> published("loco-reg", "Table 5", "CIFAR-10, VGG13", "uniform")
    6.26
    """
    return _values().get((paper, where, row, column))


@cache
def _values() -> dict[tuple[str, str, str, str], Any]:
    return {
        (table["paper"], table["where"], row, column): value
        for table in tables()
        for row, *cells in table["rows"]
        for column, value in zip(table["columns"], cells, strict=True)
    }
