"""Opening of files for reading."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for the writer of a pipe.

    Raises:
        OSError: the file is missing, cannot be read, or is a folder, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a regular file, found a folder, a pipe or a device", str(path))
    return os.fdopen(descriptor, "rb")
