"""Folders that only one process at a time writes to."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from loco_ext.output import remove_leftovers

LOCK = ".lock"


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
