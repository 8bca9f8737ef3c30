"""Paths from a trained network to networks lifted from its past, on CIFAR-10: the eFCN paper's figure 12, shortened.

    python -m bench.efcn_paths_cifar10 --data DIR      takes half an hour on one core; writes bench/results/

The VanillaCNN is trained as in :mod:`bench.efcn_cifar10`. From its epoch 10, the network itself and one without weight
sharing are trained on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import harness, machine, tables
from loco_ext.experiments import data, efcn
from loco_ext.experiments.efcn_settings import LCN, EfcnSettings, efcn_preset

EPOCHS, BRANCH_EPOCHS = 30, 10
SWITCH_TIMES = (10,)
LANDSCAPE_SAMPLES, POINTS, STRING_STEPS = 1000, 11, 100


def study() -> EfcnSettings:
    """Return the settings of the run."""
    return efcn_preset(
        "paper",
        epochs=EPOCHS,
        switch_times=SWITCH_TIMES,
        relaxations=(LCN,),
        branch_epochs=BRANCH_EPOCHS,
        fcn_epochs=0,
        power_iterations=0,
        landscape_samples=LANDSCAPE_SAMPLES,
        interpolation_points=POINTS,
        string_steps=STRING_STEPS,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train the networks, evaluate the paths, write the JSON file and print its table."""
    parser = argparse.ArgumentParser(prog="python -m bench.efcn_paths_cifar10", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's binary files")
    parser.add_argument("--runs", type=Path, default=Path("runs/efcn_paths_cifar10"), help="folder for the networks")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "efcn_paths-vanilla.json", help="JSON file")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    arguments = parser.parse_args(argv)
    dataset = data.load("cifar10", arguments.data)
    record = efcn.measure(study(), dataset, arguments.runs, arguments.device, resume=True)
    named = ("relax", "switch_time", "interpolations")
    report = {
        "benchmark": "efcn_paths",
        "machine": machine.describe(),
        "settings": record["settings"],
        "networks": [{name: branch[name] for name in named} for branch in record["branches"]],
    }
    tables.publish(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
