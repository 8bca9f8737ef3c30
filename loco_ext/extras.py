"""Optional dependencies: packages that only some parts of this package need."""

from importlib.util import find_spec

from loco_ext.errors import UserError


class MissingExtraError(UserError, ModuleNotFoundError):
    """Raised for packages that are not installed; the text says how to install them."""


def need(part: str, packages: dict[str, str], extra: str = "demo") -> None:
    """Raise MissingExtraError, with the command to run, unless all modules are installed.

    Args:
        part: the part of this package that needs them.
        packages: names of modules, mapped to the packages that contain them.
        extra: the extra that installs them all.
    """
    missing = {module: package for module, package in packages.items() if find_spec(module) is None}
    if missing:
        raise MissingExtraError(
            f"{part} needs {', '.join(missing.values())}: install them with `{install_command(extra)}` in the folder "
            "of loco_ext's sources",
            name=next(iter(missing)),
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the sources, as the package is on no index.

    >>> install_command("demo")
    'pip install --no-build-isolation ".[demo]"'
    """
    return f'pip install --no-build-isolation ".[{extra}]"'
