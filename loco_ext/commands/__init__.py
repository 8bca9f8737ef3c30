"""The commands of ``loco-ext``, one module each, and the code they share.

A module has ``DESCRIPTION``, ``add_options(parser)`` and ``run(arguments)``. It is imported only when its command is
used, because its dependencies take seconds to load and come with an extra.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from loco_ext import arguments as values
from loco_ext.errors import UserError, name_options
from loco_ext.output import one_line, quiet
from loco_ext.version import __version__

COMMANDS = {
    "demo": "train a small network with ordinary and with locality-promoting weight decay, make it smaller, lift it",
    "train": "train a network, its weight decay uniform or by locality",
    "frontier": "train a network with many strengths of a penalty: accuracy against multiply-adds",
    "efcn": "train a network, relax its convolutions at several times, and train on: the eFCN experiment",
    "analyze": "tell how local a network's kernels are, and which decay each layer wants",
    "compact": "make the smaller network that a trained one with zeros in its weights amounts to",
    "info": "show versions, compiled libraries and the backend of every operation",
}


class Parser(argparse.ArgumentParser):
    """A parser that adds its options on first use, and prints errors as one line without the usage."""

    fill: Callable[["Parser"], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def options(self) -> Mapping[str, str]:
        """Return the options by the names of their values."""
        return {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}


def run(argv: Sequence[str] | None) -> int:
    """Run the command in ``argv``; None means the process's arguments. Errors made by the user are printed to stderr.

    Returns:
        The exit code.
    """
    arguments = None
    try:
        arguments = _parser().parse_args(argv)
        with quiet(arguments.quiet):
            arguments.command(arguments)
    except UserError as error:
        options = {} if arguments is None else arguments.parser.options()
        print(f"loco-ext: {one_line(name_options(str(error), options))}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> Parser:
    parser = Parser(prog="loco-ext", description="Locality in convolutional networks as something you can turn.")
    parser.add_argument("--version", action="version", version=f"loco-ext {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help).fill = _fill
    return parser


def _fill(parser: Parser) -> None:
    command = importlib.import_module(f"loco_ext.commands.{parser.prog.split()[-1]}")
    parser.description = command.DESCRIPTION
    parser.epilog = getattr(command, "EPILOG", None)
    command.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors, and the JSON of --json")
    parser.set_defaults(command=command.run, parser=parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    parser.add_argument(
        "--device", type=values.device, default="cpu", help="torch device, such as cpu or cuda:1 (default: %(default)s)"
    )


def add_out(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Add the option --out; it is required if there is no default."""
    told = "" if default is None else " (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=default, required=default is None, help=f"folder {what}{told}")


def add_data(parser: argparse.ArgumentParser, what: str = "digits need none") -> None:
    """Add the option --data."""
    parser.add_argument("--data", type=Path, dest="folder", metavar="DIR", help=f"folder of the data set; {what}")


def add_samples(parser: argparse.ArgumentParser) -> None:
    """Add the option --samples."""
    parser.add_argument("--samples", type=values.count, help="train with the first so many samples (default: all)")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the option --resume."""
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out, if there is something")


def given(arguments: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the options that were given and are fields of the dataclass ``kind``, by name."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in vars(arguments).items() if name in fields and value is not None}


def tell(arguments: argparse.Namespace, record: Callable[[], str], show: Callable[[], None]) -> None:
    """Print ``record()``, which is JSON, if requested; otherwise let ``show`` print the result, unless --quiet."""
    if arguments.json:
        print(record())
    elif not arguments.quiet:
        show()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an error in writing inside the ``with`` into one that names ``folder``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out: expected a folder that can be written to, got {str(folder)!r}: {error.strerror or error}"
        ) from error


def make_writable(folder: Path) -> None:
    """Create ``folder`` if it is missing and check that it is writable before time is spent on its content."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
