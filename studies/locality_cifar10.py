"""A first LOCO-REG experiment on CIFAR-10: uniform decay against factors estimated from the uniform networks.

    python -m studies.locality_cifar10 --data DIR      takes about half an hour on two cores; writes studies/results/

The small CNN is trained with the preset "quick" from five seeds. Each arm uses the same seeds and thus the same initial
weights, order of samples and augmentations, so that differences are paired. The factors of an arm are estimated per
layer over the five uniform networks (LOCO-REG, Table 6), by the rule "local" and by the printed one, "paper".
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from safetensors.torch import load_file

from loco_ext import analysis
from loco_ext.experiments import run, settings
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.processes import Processes
from studies import summaries, tables
from studies.options import Data, Out, Runs

ETA_RULES = ("local", "paper")
Locality = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Study:
    """The networks of the study: where they are, and how many of them are trained for how long."""

    dataset: Dataset
    runs: Path
    seeds: int
    epochs: int
    stat: str

    def errors(self, name: str, locality: Locality | None) -> np.ndarray:
        """Train one network per seed, unless it is finished already; return their test errors in percent."""
        found = []
        for seed in range(self.seeds):
            setting = replace(self.settings, seed=seed, locality=locality)
            folder = self.runs / f"{name}-{seed}"
            history = run.run(setting, self.dataset, folder, Processes(torch.device("cpu")), resume=True)
            found.append(100 * (1 - history[-1].test_accuracy))
        return np.array(found)

    @property
    def settings(self) -> settings.Settings:
        return settings.from_preset("quick", model="small", data="cifar10", epochs=self.epochs)

    def estimate(self, eta_rule: str) -> Locality:
        """Estimate the factors per layer over all uniform networks."""
        models = [load_file(self.runs / f"uniform-{seed}" / "model.safetensors") for seed in range(self.seeds)]
        return analysis.estimate_locality(models, eta_rule=eta_rule, stat=self.stat)

    def report(self) -> dict[str, Any]:
        """Train all arms and compare them."""
        uniform = self.errors("uniform", None)
        arms: dict[str, dict[str, Any]] = {
            "uniform": {"locality": None, "summary": summaries.compare(uniform, uniform)}
        }
        for eta_rule in ETA_RULES:
            locality = self.estimate(eta_rule)
            errors = self.errors(f"{eta_rule}-{self.stat}", locality)
            arms[eta_rule] = {"locality": locality, "summary": summaries.compare(errors, uniform)}
        return {"settings": asdict(self.settings) | {"seeds": self.seeds, "stat": self.stat}, "arms": arms}


def main(
    data: Data,
    runs: Runs = Path("runs/locality_cifar10"),
    seeds: Annotated[int, typer.Option(min=2, help="Networks per arm; two are needed for a standard error.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each network.")] = 8,
    stat: Annotated[
        Literal["signed", "abs", "rms"], typer.Option(help="What of the weights the factors are estimated from.")
    ] = "signed",
    out: Out = tables.RESULTS / "locality_cifar10-signed.json",
) -> None:
    """Run the study, write the JSON file, print the table."""
    report = Study(load("cifar10", data), runs, seeds, epochs, stat).report()
    tables.publish("locality_cifar10", out.with_name(out.name.replace("signed", stat)), **report)


if __name__ == "__main__":
    typer.run(main)
