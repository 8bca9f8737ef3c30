"""Linear regions of networks trained with and without ROLL on handwritten digits, in paired runs.

    python -m studies.regions_digits      takes a quarter of an hour on one core; writes studies/results/

The networks, their training and the settings are those of ``loco-ext regions``, preset ``quick``.
"""

import shutil
from pathlib import Path

import typer

from loco_ext.experiments import regions
from loco_ext.threads import num_threads
from studies import tables
from studies.options import Out, Runs


def main(
    runs: Runs = Path("runs/regions_digits"),
    out: Out = tables.RESULTS / "regions_digits-quick.json",
) -> None:
    """Train, write the JSON file and the pictures beside it, print the table."""
    setting = regions.settings_of("quick")
    with num_threads(1):
        record = regions.measure(setting, regions.load(setting, None), runs, "cpu", resume=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    for picture in ("regions", "toy"):
        shutil.copy(runs / f"{picture}.png", out.with_name(f"{out.stem}-{picture}.png"))
    kept = ("settings", "training_samples", "test_samples", "arms")
    tables.publish("regions_digits", out, **{name: record[name] for name in kept})


if __name__ == "__main__":
    typer.run(main)
