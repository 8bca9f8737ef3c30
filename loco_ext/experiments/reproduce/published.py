"""Values that the papers publish, each with its source."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def entries() -> list[dict[str, Any]]:
    """Return all values: paper, where it stands, row, column, value and unit."""
    return json.loads(files(__package__).joinpath("published.json").read_text())


def published(paper: str, where: str, row: str, column: str) -> Any:
    """Return one value, or None where the paper has none.

    >>> published("loco-reg", "Table 5", "CIFAR-10, VGG13", "uniform")
    6.26
    """
    return _index().get((paper, where, row, column))


@cache
def _index() -> dict[tuple[str, str, str, str], Any]:
    return {(e["paper"], e["where"], e["row"], e["column"]): e["value"] for e in entries()}
