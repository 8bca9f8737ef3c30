"""Command-line options made from the fields of a settings dataclass."""

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Option:
    """The option that sets a field; the field is annotated with it: ``Annotated[int, Option("passes", int)]``.

    ``help`` says what the field controls. ``parse`` converts a text to a value; with ``bool`` the option is a switch,
    turned off with the prefix ``--no-``. ``flag`` is the option's name, None for ``--`` and the field's name.
    ``metavar`` stands for the value in the help.
    """

    help: str
    parse: Callable[[str], Any] = str
    flag: str | None = None
    metavar: str | None = None


def add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    presets: Mapping[str, Mapping[str, Any]],
    only: Collection[str] | None = None,
) -> None:
    """Add an option for each annotated field of the dataclass ``kind``; its value is None if it is not given.

    Args:
        presets: values of the fields by the name of the preset; the help shows them as defaults. A field without any is
            required.
        only: the fields that get an option; None for all that are annotated with one.
    """
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        found = [extra for extra in getattr(hints[each.name], "__metadata__", ()) if isinstance(extra, Option)]
        if not found or (only is not None and each.name not in only):
            continue
        (option,) = found
        values = {name: preset.get(each.name, each.default) for name, preset in presets.items()}
        values = {name: value for name, value in values.items() if value is not MISSING}
        how: dict[str, Any] = {"type": option.parse, "metavar": option.metavar}
        if option.parse is bool:
            how = {"action": argparse.BooleanOptionalAction, "default": None}
        flag = option.flag or f"--{each.name.replace('_', '-')}"
        help = (option.help + _told(values)).replace("%", "%%")
        parser.add_argument(flag, dest=each.name, required=not values, help=help, **how)


def _told(values: Mapping[str, Any]) -> str:
    """Return the defaults as text for the help.

    >>> _told({"paper": 250, "quick": 8}), _told({"paper": (70, 140), "quick": (70, 140)})
    (' (paper: 250, quick: 8)', ' (default: 70,140)')
    """
    texts = {name: _text(value) for name, value in values.items()}
    if len(set(texts.values())) > 1:
        return f" ({', '.join(f'{name}: {text}' for name, text in texts.items())})"
    return "".join(f" (default: {text})" for text in set(texts.values()))


def _text(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
