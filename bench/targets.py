"""Targets of the benchmarks beside what was measured, in the worst of the cases that count."""

from collections.abc import Mapping
from typing import Any


def target(name: str, limit: float, measured: Mapping[str, float], at_least: bool) -> list[dict[str, Any]]:
    """Return one entry with the worst measurement and its case; nothing if there was no measurement."""
    if not measured:
        return []
    where = (min if at_least else max)(measured, key=lambda key: measured[key])
    worst = measured[where]
    wanted = f"at {'least' if at_least else 'most'} {limit:g}"
    met = worst >= limit if at_least else worst <= limit
    return [{"name": name, "wanted": wanted, "measured": worst, "met": met, "where": where}]
