"""Paths from a trained network to networks lifted from its past, on CIFAR-10: the eFCN paper's figure 12, shortened.

    python -m studies.efcn_paths_cifar10 --data DIR      takes half an hour on one core; writes studies/results/

The VanillaCNN is trained as in :mod:`studies.efcn_cifar10`. From its epoch 10, the network itself and one without
weight sharing are trained on.
"""

from pathlib import Path

import typer

from loco_ext.experiments import efcn
from loco_ext.experiments.data import load
from loco_ext.experiments.efcn_settings import LCN, EfcnSettings, efcn_preset
from studies import summaries, tables
from studies.options import Data, Device, Out, Runs

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


def main(
    data: Data,
    runs: Runs = Path("runs/efcn_paths_cifar10"),
    out: Out = tables.RESULTS / "efcn_paths-vanilla.json",
    device: Device = "cpu",
) -> None:
    """Train the networks, evaluate the paths, write the JSON file and print its table."""
    record = efcn.measure(study(), load("cifar10", data), runs, device, resume=True)
    networks = [summaries.paths(branch) for branch in record["branches"]]
    tables.publish("efcn_paths", out, settings=record["settings"], networks=networks)


if __name__ == "__main__":
    typer.run(main)
