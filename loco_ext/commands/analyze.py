"""The command ``loco-ext analyze``."""

import argparse
from pathlib import Path

from loco_ext import arguments as values
from loco_ext.commands import add_out, make_writable, tell, writing_to
from loco_ext.errors import UserError
from loco_ext.output import json_text, one_line

DESCRIPTION = (
    "Measures how weights change with the distance from the centre of their kernel (LOCO-REG, Table 4), and suggests "
    "(gamma, eta) for every layer (Table 6), over all checkpoints given."
)
CHOICES = {
    "weighting": (("halves", "layers", "matrices"), "of the statistics"),
    "eta_rule": (("local", "paper"), "of the suggested factors: local, or as printed in the paper, inverted"),
    "stat": (("signed", "abs", "rms"), "they are estimated from"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext analyze``."""
    files = "safetensors, or a torch file of weights only"
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help=files)
    add_out(parser, "for analysis.json and taps.png", "runs/analysis")
    for name, (choices, help) in CHOICES.items():
        flag, told = f"--{name.replace('_', '-')}", f"{help} (default: %(default)s)"
        parser.add_argument(flag, choices=choices, default=choices[0], help=told)
    told = "strength of the modulation (default: %(default)s)"
    parser.add_argument("--c", type=values.number, default=1.5, help=told)


def run(arguments: argparse.Namespace) -> None:
    """Measure the locality of checkpoints, write the analysis to ``--out`` and print it."""
    from loco_ext.commands import checkpoint_analysis as command

    try:
        analysis = command.analyze(
            arguments.checkpoints,
            weighting=arguments.weighting,
            eta_rule=arguments.eta_rule,
            stat=arguments.stat,
            c=arguments.c,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    make_writable(arguments.out)
    with writing_to(arguments.out):
        command.save(analysis, arguments.out)

    def show() -> None:
        command.show(analysis)
        print(f"analysis.json, for `loco-ext train --locality`, and taps.png are in {one_line(str(arguments.out))}")

    tell(arguments, lambda: json_text(analysis.to_dict(), indent=2), show)
