"""Headers and rows of the tables of locality statistics, as LOCO-REG's Table 4, and of suggested factors."""

from loco_ext.analysis.locality import LocalityStatistics
from loco_ext.output import Rows, one_line

PARTS = {"all": "all", "lower": "lower 1/2", "upper": "upper 1/2"}
STATISTICS = "Weights closer to the centre minus weights further out, in standard deviations (LOCO-REG, Table 4)"
_LONGEST_NAME = 80  # characters of a name in a table


def statistics_rows(named: dict[str, LocalityStatistics]) -> Rows:
    """Return Table 4: means of the differences between the weights at consecutive distances from the centre.

    There is one row for each network, kernel size and pair of distances. Stars mark the p-value of a one-sided t-test,
    as in the paper: ``***`` below .001, ``**`` below .01, ``*`` below .1.
    """
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name, found in named.items():
        for cell in found.cells:
            distances = f"{cell.distances[0]:.3g} - {cell.distances[1]:.3g}"
            row = rows.setdefault((name, "x".join(map(str, cell.kernel_size)), distances), {})
            row[cell.part] = f"{cell.mean:.3f}" + "*" * sum(cell.p_greater < level for level in (0.1, 0.01, 0.001))
    return ["network", "kernel", "distances", *PARTS.values()], [
        [one_line(name, _LONGEST_NAME), size, distances, *(cells.get(part, "") for part in PARTS)]
        for (name, size, distances), cells in rows.items()
    ]


def locality_rows(locality: dict[str, tuple[float, ...]]) -> Rows:
    """Return each layer's suggested factors: (gamma, eta), or one per distance class."""
    rows = [[one_line(name, _LONGEST_NAME), ", ".join(f"{f:.3f}" for f in found)] for name, found in locality.items()]
    return ["layer", "factors"], rows
