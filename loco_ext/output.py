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
