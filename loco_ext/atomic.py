"""Files that are never half written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which takes its place when the block ends well and is gone if it does not."""
    temporary = path.with_name(f".{path.name}.part")  # of a fixed name: what a killed process leaves is replaced
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
