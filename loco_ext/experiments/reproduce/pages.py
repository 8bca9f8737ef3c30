"""Pages: a paper's tables, with our values beside the published ones, and its figures."""

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loco_ext.output import markdown_table, print_table, replacing, write_json

NONE = "\u2013"  # shown where a value is missing


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str  # what it shows, beginning with the paper's number of it
    columns: dict[str, str]  # format specifications by column; "" is for texts
    rows: list[list[Any]]  # texts and numbers, None or not finite where there is none
    notes: list[str] = field(default_factory=list)  # below the table, such as what was not reproduced and why

    def cells(self) -> list[list[str]]:
        forms = self.columns.values()
        return [[_text(value, form) for value, form in zip(row, forms, strict=True)] for row in self.rows]


@dataclass(frozen=True)
class Page:
    """The tables and figures of one paper."""

    title: str  # the paper
    scale: str  # what the preset has cut down
    tables: list[Table]
    figures: dict[str, Path] = field(default_factory=dict)  # files by caption; those that do not exist are left out
    commits: list[str] = field(default_factory=list)  # of the code that the results were computed with

    def show(self) -> None:
        """Print the tables and their notes."""
        print(f"{self.title}\n{self.scale}")
        for table in self.tables:
            if table.rows:
                print_table(list(table.columns), table.cells(), table.title)
            else:
                print(table.title)
            for note in table.notes:
                print(note)

    def to_dict(self) -> dict[str, Any]:
        """Return the page as plain data; figures are paths as a shell in the current folder takes them."""
        tables = [{**asdict(table), "columns": list(table.columns)} for table in self.tables]
        figures = {caption: str(path) for caption, path in self.figures.items() if path.is_file()}
        about = {"title": self.title, "scale": self.scale, "commits": self.commits}
        return about | {"tables": tables, "figures": figures}

    def save(self, out: Path) -> None:
        """Write reproduce.json and reproduce.md to a folder, whose figures they name by their paths below it."""
        out.mkdir(parents=True, exist_ok=True)
        figures = {caption: _below(out, path) for caption, path in self.figures.items() if path.is_file()}
        write_json(out / "reproduce.json", self.to_dict() | {"figures": figures})
        with replacing(out / "reproduce.md") as temporary:
            temporary.write_text(self._markdown(out))

    def _markdown(self, out: Path) -> str:
        parts = [f"# {self.title}", self.scale]
        for table in self.tables:
            parts.append(f"## {table.title}")
            if table.rows:
                parts.append(markdown_table(list(table.columns), table.cells()))
            parts += table.notes
        for caption, path in self.figures.items():
            if path.is_file():
                parts.append(f"![{caption}]({_below(out, path)})")
        parts += [f"Code: {', '.join(self.commits)}."] if self.commits else []
        return "\n\n".join(parts) + "\n"


def _below(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _text(value: Any, form: str) -> str:
    """Return a cell's text.

    >>> _text(0.5, ".1%"), _text("uniform", "")
    ('50.0%', 'uniform')
    """
    missing = value is None or (isinstance(value, float) and not math.isfinite(value))
    return NONE if missing else format(value, form if isinstance(value, int | float) else "")
