"""Errors that the user can put right."""

from collections.abc import Mapping


class UserError(Exception):
    """An error that the user can put right: its text is all that the command line shows.

    Where it is about settings, their names come first, separated by commas and followed by a colon.
    """

    exit_code = 2


def name_options(text: str, options: Mapping[str, str]) -> str:
    """Return the text of an error with the options that were typed in place of the settings that it begins with.

    >>> name_options("learning_rate, seed: expected others", {"learning_rate": "--lr", "seed": "--seed"})
    '--lr, --seed: expected others'
    """
    names, colon, rest = text.partition(": ")
    if not colon or not all(name in options for name in names.split(", ")):
        return text
    return ", ".join(options[name] for name in names.split(", ")) + colon + rest
