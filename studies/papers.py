"""The tables and figures of the papers that ``loco-ext reproduce`` has made, as they are committed and shown.

python -m studies.papers FOLDER     copies those of FOLDER, such as runs/reproduce/cpu, to studies/results/papers/
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from bench import generated
from loco_ext.commands.reproduce import PAPERS

RESULTS = Path(__file__).parent / "results" / "papers"
PAGE = generated.DOCS / "papers.md"
_FIGURE = re.compile(r"^(!\[.*\]\()(.+)(\))$", re.MULTILINE)


def collect(folder: Path, results: Path = RESULTS) -> list[str]:
    """Copy the pages of a preset's folder, and the figures that they show, to a folder of results.

    Returns:
        The papers that were there.

    Raises:
        ValueError: ``folder`` has no paper's page.
    """
    found = [paper for paper in PAPERS if (folder / paper / "reproduce.md").is_file()]
    if not found:
        raise ValueError(f"folder: expected the folder of a preset, such as runs/reproduce/cpu, got {str(folder)!r}")
    for paper in found:
        shutil.rmtree(results / paper, ignore_errors=True)
        figures = json.loads((folder / paper / "reproduce.json").read_text())["figures"]
        for name in ("reproduce.json", "reproduce.md", *figures.values()):
            target = results / paper / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / paper / name, target)
    return found


def sections(results: Path = RESULTS, page: Path = PAGE) -> dict[str, str]:
    """Return the Markdown of each paper for a page with a heading of the second level for it, by the paper's name."""
    return {paper.replace("-", "_"): _section(results / paper, page) for paper in PAPERS}


def _section(folder: Path, page: Path) -> str:
    path = folder / "reproduce.md"
    if not path.is_file():
        return f"\n{generated.nothing_yet(folder.name)}\n\n"
    _, text = path.read_text().split("\n", 1)  # the page has the title
    link = Path(os.path.relpath(folder, page.parent)).as_posix()
    text = _FIGURE.sub(lambda match: f"{match[1]}{link}/{match[2]}{match[3]}", text)
    return re.sub(r"^## ", "### ", text, flags=re.MULTILINE) + "\n"


def main(folder: Annotated[Path, typer.Argument(help="Folder of a preset, such as runs/reproduce/cpu.")]) -> None:
    """Copy the tables and figures of the papers to the committed results."""
    print("copied:", ", ".join(collect(folder)))


if __name__ == "__main__":
    typer.run(main)
