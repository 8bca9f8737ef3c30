"""Importance landscapes on CIFAR-10: the small CNN with PILCRO and without, and with noise on its images instead.

    python -m studies.landscapes_cifar10 --data DIR      takes some minutes on one core; writes studies/results/

Few images and few epochs.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from loco_ext.experiments import landscapes
from loco_ext.experiments.data import load
from loco_ext.experiments.landscapes_settings import LandscapesSettings, landscapes_preset
from studies import summaries, tables
from studies.options import Data, Device, Out, Runs

TRAINING_IMAGES, TEST_IMAGES, EPOCHS, BATCH_SIZE, SEEDS = 2000, 1000, 4, 32, 3
ARMS = ("plain", "target:10", "curvature:0.1", "noise:0.2")
MEASURED = {"landscape_images": 400, "corrupted_images": 100, "ablated_images": 32, "resampling_images": 100}
MEASURED |= {"resampled_inputs": 20, "baseline_images": 8}


def study(seeds: int) -> LandscapesSettings:
    """Return the settings."""
    return landscapes_preset("short", arms=ARMS, seeds=seeds, epochs=EPOCHS, batch_size=BATCH_SIZE, **MEASURED)


def save(record: dict[str, Any], runs: Path, out: Path) -> None:
    """Write the report, print its tables, and copy the heatmaps beside it."""
    kept = {name: record[name] for name in ("settings", "training_samples", "test_samples")}
    tables.publish("landscapes_cifar10", out, **kept, **summaries.landscapes(record))
    shutil.copy(runs / "landscapes.png", out.with_suffix(".png"))


def main(
    data: Data,
    runs: Runs = Path("runs/landscapes_cifar10"),
    out: Out = tables.RESULTS / "landscapes_cifar10-small.json",
    seeds: Annotated[int, typer.Option(min=1, help="Networks of each arm.")] = SEEDS,
    device: Device = "cpu",
) -> None:
    """Run the study, write the JSON file and a figure beside it, print the tables."""
    images = load("cifar10", data).first(TRAINING_IMAGES, TEST_IMAGES)
    record = landscapes.measure(study(seeds), images, runs, device, resume=True)
    save(record, runs, out)


if __name__ == "__main__":
    typer.run(main)
