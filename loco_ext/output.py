"""What leaves the process: files that are never half written, JSON that every reader takes, progress on a terminal."""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """Shows no progress inside of the block, if ``wanted``."""
    before = _quiet.set(wanted or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(before)


def shows_progress() -> bool:
    """Whether progress is shown: on a terminal alone, not when quiet, and not where TQDM_DISABLE is set."""
    return sys.stderr.isatty() and not _quiet.get() and os.environ.get("TQDM_DISABLE", "0") in ("", "0")


def note(text: str) -> None:
    """Prints to stderr what is being done, unless quiet."""
    if not _quiet.get():
        print(text, file=sys.stderr)


def progress_bar(total: int, label: str, *, unit: str, shown: bool = True) -> "tqdm[Any]":
    """Returns a bar on stderr, which shows nothing where progress is not shown."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit=unit, disable=not (shown and shows_progress()))


@contextmanager
def status(logger: str) -> Iterator[None]:
    """Shows on a terminal, while the block runs, the last message of the logger named ``logger``."""
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which takes its place when the block ends well and is gone if it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of processes that were killed; nobody else may be writing to ``folder``."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def json_text(record: Any, indent: int | None = None) -> str:
    """JSON of plain data; NaN and infinities, which JSON has no words for, become null.

    >>> json_text({"loss": float("nan"), "epochs": (1, 2)})
    '{"loss": null, "epochs": [1, 2]}'
    """
    return json.dumps(_finite(record), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
