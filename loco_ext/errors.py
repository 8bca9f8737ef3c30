"""Errors that the user can correct."""

from collections.abc import Mapping


class UserError(Exception):
    """An error that the user can correct; the command line shows only its text.

    If it is about settings, the text begins with their names, separated by commas and followed by a colon.
    """

    exit_code = 2


def name_options(text: str, options: Mapping[str, str]) -> str:
    """Return an error's text with the leading names of settings replaced by the options that were typed.

    >>> name_options("learning_rate, seed: expected others", {"learning_rate": "--lr", "seed": "--seed"})
    '--lr, --seed: expected others'
    """
    names, colon, rest = text.partition(": ")
    if not colon or not all(name in options for name in names.split(", ")):
        return text
    return ", ".join(options[name] for name in names.split(", ")) + colon + rest
