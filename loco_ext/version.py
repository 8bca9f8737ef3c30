"""The version of the package and the commit of its code, which the build reads here too; versions of other packages."""

import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> str:
    """Return the commit of a checkout, with "-dirty" if tracked files differ from it; elsewhere the package's version.

    It is that of the first call: what changes later has not been imported.
    """
    file = Path(__file__)
    try:
        # An installed package may be inside of someone else's repository, which does not track it.
        _git("ls-files", "--error-unmatch", file.name)
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return __version__


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
