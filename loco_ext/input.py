"""Opening of files for reading, and checks of what they hold."""

import errno
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

NUMBER = int | float | None  # in JSON, where null stands for NaN


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


def check_form(value: Any, form: Any, name: str = "content") -> None:
    """Raise ValueError unless plain data has a form: a type, a list of one form, or a dict of the entries' forms.

    Other entries of a dict are not looked at. The message names the entry, what was expected and what came.
    """
    kind = type(form) if isinstance(form, list | dict) else form
    if not isinstance(value, kind):
        expected = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"{name}: expected {expected}, got {reprlib.repr(value)}")
    if isinstance(form, list):
        form = dict.fromkeys(range(len(value)), form[0])
    for key, each in form.items() if isinstance(form, dict) else ():
        if isinstance(value, dict) and key not in value:
            raise ValueError(f"{name}: expected an entry {key!r}, got {reprlib.repr(value)}")
        check_form(value[key], each, f"{name}[{key!r}]")
