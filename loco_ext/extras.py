"""Packages that only some of the package's parts need."""

from importlib.util import find_spec


def need(part: str, packages: dict[str, str], extra: str = "demo") -> None:
    """Raises ModuleNotFoundError, with the command to use, unless all modules are there.

    Args:
        part: what needs them.
        packages: names of modules, and of the packages that bring them.
        extra: that brings them all.
    """
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{part} needs {', '.join(missing)}: install them with `pip install loco_ext[{extra}]`"
        )
