"""Networks of half and a quarter of ResNet-8's MACs on CIFAR-10: filters removed in training against fewer channels.

    python -m studies.budget_cifar10 --data DIR      takes about an hour on one core; writes studies/results/

All arms have the same recipe, epochs and seeds, and thus order of samples and augmentations, so that differences are
paired. "width" has uniformly fewer channels from the beginning; "filters" and "rings" begin with all channels and are
made smaller in the first half of the training (``loco-ext train --macs``).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from loco_ext import sparsity
from loco_ext.experiments import run, settings
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.train import make_model
from studies import summaries, tables
from studies.options import Data, Out, Runs

SHARES = (0.5, 0.25)
WIDTHS = np.arange(64, 0, -1) / 64
LATENCY_BATCHES = (1, 64)
Arm = tuple[str, float]  # way and share


@dataclass(frozen=True)
class Study:
    """The networks of the study: where they are, and how many of them are trained for how long."""

    dataset: Dataset
    runs: Path
    seeds: int
    epochs: int

    def training(self, **options: Any) -> settings.Settings:
        values = {"model": "resnet8", "data": "cifar10", "epochs": self.epochs, "weight_decay": 5e-4}
        return settings.from_preset("quick", **values | options)

    def arms(self) -> dict[Arm, settings.Settings]:
        """Return the settings by way and share."""
        found = {("dense", 1.0): self.training()}
        whole = self.report(self.training()).macs_before
        for share in SHARES:
            width = next(w for w in WIDTHS if self.report(self.training(width=w)).macs_before <= share * whole)
            found["width", share] = self.training(width=float(width))
            for granularity in ("filters", "rings"):
                found[granularity, share] = self.training(macs=share, granularity=granularity)
        return found

    def report(self, setting: settings.Settings, folder: Path | None = None, batch: int = 1) -> sparsity.Report:
        """Return compaction's report on a network: as it begins, counted; or as it was trained, timed."""
        model = make_model(setting, self.dataset).eval()
        if folder is not None:
            model.load_state_dict(torch.load(folder / run.CHECKPOINT, weights_only=True)["model"])
        images = torch.zeros(batch, self.dataset.channels, self.dataset.size, self.dataset.size)
        return sparsity.compact(model, images, cost="macs" if folder is None else "measured")[1]

    def networks(self, only: str | None = None) -> Iterator[tuple[Arm, settings.Settings, Path]]:
        """Yield each network's arm, settings and folder, all arms of a seed before the next seed."""
        arms = self.arms()
        for seed in range(self.seeds):
            for (way, share), setting in arms.items():
                folder = self.runs / f"{way}-{share:g}-{seed}"
                if only in (None, folder.name):
                    yield (way, share), replace(setting, seed=seed), folder

    def measure(self) -> dict[str, Any]:
        """Train all networks and compare them."""
        found: dict[Arm, list[dict[str, Any]]] = {}
        for arm, setting, folder in self.networks():
            history = run.run(setting, self.dataset, folder, Processes(torch.device("cpu")), resume=True)
            reports = [self.report(setting, folder, batch) for batch in LATENCY_BATCHES]
            latencies = [report.latency_after or report.latency_before for report in reports]
            record = {"error": 100 * (1 - history[-1].test_accuracy), "macs": reports[0].macs_after}
            found.setdefault(arm, []).append(record | {"latencies": latencies})
        return {
            "settings": asdict(self.training()) | {"seeds": self.seeds},
            "training_samples": len(self.dataset.train.labels),
            "latency_batches": LATENCY_BATCHES,
            "macs": self.report(self.training()).macs_before,
            "arms": [summary(*arm, records, found) for arm, records in found.items()],
        }


def summary(way: str, share: float, records: list[dict[str, Any]], found: dict[Arm, Any]) -> dict[str, Any]:
    """Return an arm's errors, compared with those of fewer channels, its MACs and its latencies."""
    errors, others = (np.array([r["error"] for r in each]) for each in (records, found.get(("width", share), records)))
    return {
        "way": way,
        "share": share,
        "errors": summaries.compare(errors, errors if way in ("dense", "width") else others),
        "macs": float(np.mean([r["macs"] for r in records])),
        "latencies": np.median([r["latencies"] for r in records], axis=0).tolist(),
    }


def main(
    data: Data,
    runs: Runs = Path("runs/budget_cifar10"),
    seeds: Annotated[int, typer.Option(min=2, help="Networks per arm; two are needed for a standard error.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each network.")] = 12,
    images: Annotated[int, typer.Option(min=1, help="Training images, the first of all 50,000.")] = 10_000,
    only: Annotated[
        str | None, typer.Option(help="Train this network alone, as 'filters-0.5-0', and write no report.")
    ] = None,
    out: Out = tables.RESULTS / "budget_cifar10-resnet8.json",
) -> None:
    """Run the study, write the JSON file, print the table."""
    study = Study(load("cifar10", data).first(images), runs, seeds, epochs)
    if only is not None:
        for _, setting, folder in study.networks(only):
            run.run(setting, study.dataset, folder, Processes(torch.device("cpu")), resume=True)
        return
    tables.publish("budget_cifar10", out, **study.measure())


if __name__ == "__main__":
    typer.run(main)
