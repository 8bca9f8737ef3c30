"""The Sphinx directive ``command-help``: a section with the help of each command of ``loco-ext``."""

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from loco_ext import commands


class CommandHelp(SphinxDirective):
    """Return a section for each command."""

    def run(self) -> list[nodes.Node]:
        return [section(name) for name in commands.COMMANDS]


def section(name: str) -> nodes.section:
    """Return the section of one command."""
    command = typer.main.get_command(commands._application(name)).commands[name]
    text = command.get_help(typer.Context(command, info_name=f"loco-ext {name}", terminal_width=96))
    return nodes.section("", nodes.title("", name), nodes.literal_block(text, text, language="text"), ids=[name])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
