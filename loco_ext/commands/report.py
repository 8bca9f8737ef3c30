"""The command ``loco-ext report``."""

from pathlib import Path
from typing import Annotated

import typer

from loco_ext.commands import Result, command, make_writable, writing_to
from loco_ext.output import json_text, note, one_line


@command()
def run(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that contain runs.")
    ],
    *,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Page to write. An existing file is replaced only if it is a report.")
    ] = Path("report.html"),
) -> Result:
    """Make one HTML page out of any runs, with figures and the numbers behind each figure.

    The page needs no other file and no network. The command finds the runs of all commands in the folders and below
    them; it names those that it cannot read and leaves them out. --json prints a line for each run: its settings,
    commit, versions, device, seconds of training, and results.
    """
    from loco_ext.report import page, runs

    found, problems = runs.find(folders)
    page.check_replaceable(out)
    make_writable(out.parent)
    with writing_to(out.parent):
        problems = page.write(out, found, problems)
    for problem in problems:
        note(f"loco-ext: left out: {one_line(problem)}")
    return Result(
        lambda: "\n".join(json_text(each.to_dict()) for each in found),
        lambda: print(f"The report is {one_line(str(out))}"),
    )
