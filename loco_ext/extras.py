"""Packages that only some of the package's parts need."""

from importlib.util import find_spec

from loco_ext.errors import UserError


class MissingExtraError(UserError, ModuleNotFoundError):
    """Packages that are not installed; the text says how to install them."""


def need(part: str, packages: dict[str, str], extra: str = "demo") -> None:
    """Raises MissingExtraError, with the command to use, unless all modules are there.

    Args:
        part: what needs them.
        packages: names of modules, and of the packages that bring them.
        extra: that brings them all.
    """
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{part} needs {', '.join(missing)}: install them with `{install_command(extra)}` in the folder of "
            "loco_ext's sources"
        )


def install_command(extra: str) -> str:
    """The command that installs an extra from the sources: the package is on no index.

    >>> install_command("demo")
    'pip install --no-build-isolation ".[demo]"'
    """
    return f'pip install --no-build-isolation ".[{extra}]"'
