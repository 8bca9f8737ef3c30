"""The command ``loco-ext info``."""

import argparse

DESCRIPTION = "Shows versions, which libraries are loaded or why not, and the backend of every operation."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options; the command has none."""


def run(arguments: argparse.Namespace) -> None:
    """Print versions, compiled libraries and the backend of every operation."""
    from loco_ext import info

    if arguments.json or not arguments.quiet:
        info.main(as_json=arguments.json)
