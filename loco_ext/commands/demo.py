"""The command ``loco-ext demo``."""

import argparse
from pathlib import Path
from typing import Any

from loco_ext import arguments as values
from loco_ext.commands import add_device, add_out, make_writable, tell, writing_to

DESCRIPTION = (
    "Trains the same small network twice on handwritten digits, with ordinary and with locality-promoting weight "
    "decay, and shows where in the kernels the weights end up. Then trains the second on with a penalty that chooses "
    "kernels and their sizes, makes the smaller network of it, and trains it on with weights of their own for all "
    "positions. Takes a minute."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext demo``."""
    add_out(parser, "for metrics, figure and checkpoints", "runs")
    told = "decides initial weights and order of samples (default: %(default)s)"
    parser.add_argument("--seed", type=values.seed, default=0, help=told)
    add_device(parser)
    told = "passes over the training samples (default: %(default)s)"
    parser.add_argument("--epochs", type=values.count, default=40, help=told)


def run(arguments: argparse.Namespace) -> None:
    """Run the demo, write its results to ``--out`` and print its tables."""
    from loco_ext.experiments import demo

    out: Path = arguments.out
    make_writable(out)
    settings = demo.Settings(seed=arguments.seed, device=arguments.device, epochs=arguments.epochs)
    with writing_to(out):
        results = demo.run(settings, out)
    tell(arguments, lambda: demo.to_json(settings, results), lambda: _show(results, out))


def _show(results: Any, out: Path) -> None:
    from loco_ext.experiments import lifting, report, shrinking

    report.print_tables(results.networks)
    shrinking.print_table(results.shrunk)
    lifting.print_table(results.lifted)
    print(f"Metrics, figure and checkpoints are in {out}")
