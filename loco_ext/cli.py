"""The command line, ``loco-ext``. A user's error is one line on stderr and exit code 2."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Something that the user can put right; its text is all that is shown."""


class _Parser(argparse.ArgumentParser):
    """Reports an error like every other one: without the usage, which is several lines long."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default the process's arguments; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
    except UserError as error:
        print(f"loco-ext: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loco-ext", description="Locality in convolutional networks as something you can turn.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small network with ordinary and with locality-promoting weight decay",
        description="Trains the same small network twice on handwritten digits, with ordinary and with "
        "locality-promoting weight decay, and shows where in the kernels the weights end up. Takes seconds.",
    )
    demo.add_argument(
        "--out", type=Path, default="runs", help="folder for metrics, figure and checkpoints (default: %(default)s)"
    )
    demo.add_argument(
        "--seed", type=_seed, default=0, help="decides initial weights and order of samples (default: %(default)s)"
    )
    demo.add_argument(
        "--device", type=_device, default="cpu", help="torch device, such as cpu or cuda:1 (default: %(default)s)"
    )
    demo.add_argument(
        "--epochs", type=_epochs, default=40, help="passes over the training samples (default: %(default)s)"
    )
    demo.add_argument("--json", action="store_true", help="print the metrics as JSON instead of a table")
    demo.set_defaults(command=_demo)

    info = commands.add_parser(
        "info",
        help="show versions, compiled libraries and the backend of every operation",
        description="Shows versions, which libraries are loaded or why not, and the backend of every operation.",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(command=_info)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    # Imported by the command that needs them: they take seconds to load, and come with an extra.
    try:
        from loco_ext.experiments import demo, report
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error

    _make_writable(arguments.out)
    settings = demo.Settings(seed=arguments.seed, device=arguments.device, epochs=arguments.epochs)
    networks = demo.run(settings, arguments.out)
    if arguments.json:
        print(demo.to_json(settings, networks))
    else:
        report.print_table(networks)
        print(f"Metrics, figure and checkpoints are in {arguments.out}")


def _info(arguments: argparse.Namespace) -> None:
    from loco_ext import info

    info.main(as_json=arguments.json)


def _make_writable(folder: Path) -> None:
    """Creates ``folder`` where it is missing, and tries it before time is spent on what is to be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"--out: expected a folder that can be written to, got {str(folder)!r}: {error.strerror}"
        ) from error


def _epochs(text: str) -> int:
    return _integer(text, range(1, 10**6 + 1))


def _seed(text: str) -> int:
    return _integer(text, range(2**63))


def _integer(text: str, allowed: range) -> int:
    if not text.isdecimal() or int(text) not in allowed:
        raise argparse.ArgumentTypeError(f"expected an integer from {allowed[0]} to {allowed[-1]}, got {text!r}")
    return int(text)


def _device(text: str) -> str:
    import torch

    try:
        torch.zeros(1, device=text).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises differs from device to device
        raise argparse.ArgumentTypeError(f"expected a device that torch can use here, got {text!r}") from error
    return text
