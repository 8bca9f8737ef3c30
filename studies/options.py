"""Command-line options of the studies."""

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[Path, typer.Option(help="Folder with CIFAR-10's binary files.")]
Runs = Annotated[Path, typer.Option(help="Folder for the networks; a study that was killed goes on from there.")]
Out = Annotated[Path, typer.Option(help="JSON file of the results.")]
Device = Annotated[str, typer.Option(help="Torch device.")]
