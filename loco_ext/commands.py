"""What the commands of ``loco-ext`` share."""

import argparse
import tempfile
from pathlib import Path

from loco_ext import arguments as values


class UserError(Exception):
    """Something that the user can put right; its text is all that is shown."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option --device."""
    parser.add_argument(
        "--device", type=values.device, default="cpu", help="torch device, such as cpu or cuda:1 (default: %(default)s)"
    )


def make_writable(folder: Path) -> None:
    """Creates ``folder`` where it is missing, and tries it before time is spent on what is to be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise not_writable(folder, error) from error


def not_writable(folder: Path, error: OSError) -> UserError:
    """The error of a folder that cannot be written to."""
    return UserError(f"--out: expected a folder that can be written to, got {str(folder)!r}: {error.strerror or error}")
