"""The command ``loco-ext report``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from loco_ext.commands import Result, command, make_writable, writing_to
from loco_ext.errors import UserError
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
    _check(out, page.is_report)
    make_writable(out.parent)
    with writing_to(out.parent):
        problems = page.write(out, found, problems)
    for problem in problems:
        note(f"loco-ext: left out: {one_line(problem)}")
    return Result(
        lambda: "\n".join(json_text(each.to_dict()) for each in found),
        lambda: print(f"The report is {one_line(str(out))}"),
    )


def _check(out: Path, is_report: Callable[[Path], bool]) -> None:
    """Raise UserError if something else than a report would be replaced."""
    try:
        if not out.exists() or is_report(out):
            return
    except OSError as error:
        raise UserError(f"out: expected a file that can be replaced, got {str(out)!r}: {error.strerror}") from error
    raise UserError(f"out: expected a new file, or a report to replace, got {str(out)!r}")
