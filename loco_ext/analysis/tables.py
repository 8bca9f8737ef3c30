"""Tables of locality statistics, as LOCO-REG's Table 4, and of suggested factors."""

from rich.table import Table
from rich.text import Text

from loco_ext.analysis.locality import LocalityStatistics
from loco_ext.output import one_line

PARTS = {"all": "all", "lower": "lower 1/2", "upper": "upper 1/2"}
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
