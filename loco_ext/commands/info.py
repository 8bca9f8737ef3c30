"""The command ``loco-ext info``."""

import json

from loco_ext.commands import Result, command


@command()
def run() -> Result:
    """Show versions, which libraries are loaded or why not, and the backend of every operation."""
    from loco_ext import info

    return Result(lambda: json.dumps(info.collect(), indent=2), info.show)
