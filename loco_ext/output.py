"""Files that are never half written, and JSON that every reader takes."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which takes its place when the block ends well and is gone if it does not.

    The new file is on the disk before it takes the old one's place, and that it has is on the disk when this returns.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of processes that were killed; nobody else may be writing to ``folder``."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def one_line(text: str, longest: int | None = None) -> str:
    r"""Returns text as one line that every terminal shows as it is, of at most ``longest`` characters of the text.

    What cannot be printed is escaped, and the middle of what is longer is left out.

    >>> one_line("a\nb"), one_line("0123456789", 5)
    ('a\\nb', '01…89')
    """
    if longest is not None and len(text) > longest:
        end = (longest - 1) // 2
        text = f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _flush(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
