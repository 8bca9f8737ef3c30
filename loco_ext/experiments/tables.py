"""Tables on the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table of cells; the first column is aligned on the left, the others on the right."""
    table = Table(title=title)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)
