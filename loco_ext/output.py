"""Output of the process: files that are never half written, JSON that every reader accepts, progress on a terminal."""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

Rows = tuple[list[str], list[list[str]]]  # a table: the headers of its columns, and the cells of each row

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """Suppress progress inside the block, if ``wanted``."""
    before = _quiet.set(wanted or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(before)


def shows_progress() -> bool:
    """Return whether progress is shown: only on a terminal, not if quiet, and not if TQDM_DISABLE is set."""
    return sys.stderr.isatty() and not _quiet.get() and os.environ.get("TQDM_DISABLE", "0") in ("", "0")


def note(text: str) -> None:
    """Print to stderr what is being done, unless quiet."""
    if not _quiet.get():
        print(text, file=sys.stderr)


def progress_bar(total: int, label: str, *, unit: str, shown: bool = True) -> "tqdm[Any]":
    """Return a progress bar on stderr, disabled if progress is not shown."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit=unit, disable=not (shown and shows_progress()))


@contextmanager
def status(logger: str) -> Iterator[None]:
    """Show the last message of the logger named ``logger`` on a terminal while the block runs."""
    from rich.console import Console
    from rich.markup import escape

    if not shows_progress():
        yield
        return
    log = logging.getLogger(logger)
    with Console(stderr=True).status("") as line:
        handler = logging.Handler()
        handler.emit = lambda record: line.update(escape(record.getMessage()))  # type: ignore[method-assign]
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table of cells; the first column is aligned on the left, the others on the right.

    A table that is too wide has its headers broken between words; one that is still too wide is printed in parts, each
    with the first column, so that no cell is cut.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, rows = Console(), list(rows)
    cells = [max([0, *(len(row[place]) for row in rows)]) for place in range(len(headers))]
    widths = [max(pair) for pair in zip(cells, map(len, headers), strict=True)]
    if _width_of(widths) > console.width:
        words = (max(map(len, header.split()), default=0) for header in headers)
        widths = [max(pair) for pair in zip(cells, words, strict=True)]
    for part in _parts(widths, console.width):
        table = Table(title=title)
        for place in part:
            table.add_column(headers[place], justify="right" if place else "left", width=widths[place], overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[place]) for place in part))  # as texts: a name may have brackets in it
        console.print(table)
        title = None


def _width_of(widths: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths, the lines between them and spaces included."""
    return sum(widths) + 3 * len(widths) + 1


def _parts(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Return the columns of each part of a table within the limit: the first one, and at least one other."""
    parts = [[0]]
    for place in range(1, len(widths)):
        if len(parts[-1]) > 1 and _width_of([widths[each] for each in (*parts[-1], place)]) > limit:
            parts.append([0])
        parts[-1].append(place)
    return parts


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows))


def setting_text(value: Any, separator: str = ",") -> str:
    """Return a setting as text.

    >>> setting_text((70, 140)), setting_text(()), setting_text(True), setting_text({"0": [1.0, 0.5]}, ", ")
    ('70,140', 'none', 'yes', '0: 1, 0.5')
    """
    if value is None or value in ((), []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return separator.join(setting_text(each, separator) for each in value)
    if isinstance(value, dict):
        return "; ".join(f"{name}: {setting_text(entry, separator)}" for name, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def cell(value: float | None, form: str, missing: str = "") -> str:
    """Return the text of a table's cell, ``missing`` for None.

    >>> cell(0.5, ".1%"), cell(None, ".1%")
    ('50.0%', '')
    """
    return missing if value is None else format(value, form)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces it if the block succeeds and is removed if it fails.

    The new file is flushed to disk before it replaces the old one, and the replacement is on disk when this returns.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def unfinished(path: Path) -> bool:
    """Return whether a process was killed while it was replacing the file ``path``."""
    return any(path.parent.glob(f".{path.name}.*.part"))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes; no other process may be writing to ``folder``."""
    for path in folder.glob(".*.part"):
        if re.fullmatch(r"\..+\.\d+\.part", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def one_line(text: str, longest: int | None = None) -> str:
    r"""Return text as one line that every terminal shows unchanged, of at most ``longest`` characters of the text.

    Unprintable characters are escaped, and the middle of a longer text is left out.

    >>> one_line("a\nb"), one_line("0123456789", 5)
    ('a\\nb', '01…89')
    """
    if longest is not None and len(text) > longest:
        end = (longest - 1) // 2
        text = f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(record: Any, indent: int | None = None) -> str:
    """Return JSON of plain data; NaN and infinities, which JSON cannot express, become null.

    >>> json_text({"loss": float("nan"), "epochs": (1, 2)})
    '{"loss": null, "epochs": [1, 2]}'
    """
    return json.dumps(_finite(record), indent=indent, allow_nan=False)


def write_json(path: Path, record: Any, indent: int | None = 2) -> None:
    """Replace a file by the JSON of plain data."""
    with replacing(path) as temporary:
        temporary.write_text(json_text(record, indent) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
