"""Folders that only one process at a time writes to, and only one command."""

import errno
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from loco_ext.errors import UserError
from loco_ext.output import remove_leftovers

LOCK = ".lock"
# Files of results, those that tell most about the command first.
RESULTS = (
    *("shrink.json", "frontier.json", "efcn.json", "landscapes.json", "regions.json", "demo.json", "report.json"),
    *("manifest.json", "settings.json", "checkpoint.pt", "model.safetensors"),
)


def check_results(folder: Path, own: Collection[str] = ()) -> None:
    """Raise UserError if ``folder`` has files of results that are not among ``own``, those of the calling command."""
    for name in RESULTS:
        if name not in own and (folder / name).exists():
            raise UserError(f"out: expected a folder without other results, got {folder}, which has {name}")


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to ``folder`` while the block runs.

    The folder is created if it is missing, and temporary files of killed processes are removed from it. The operating
    system holds the lock, on the file ``.lock``, and releases it with the process, however that ends; the file stays.

    Raises:
        BlockingIOError: another process writes to the folder.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing to it", str(folder)) from None
    with lock:
        remove_leftovers(folder)
        yield
