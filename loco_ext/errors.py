"""Errors that the user can correct, and the texts of others."""

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


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its class if it has none."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
