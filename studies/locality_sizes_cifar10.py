"""When does locality help? Test errors on CIFAR-10 by number of training images, size of kernels, and optimizer.

    python -m studies.locality_sizes_cifar10 --data DIR --images 500,2000,5000 --kernels 3,5 --optimizers sgd
    python -m studies.locality_sizes_cifar10 --data DIR      all cells; both commands add to studies/results/

A cell is a number of images, a kernel size and an optimizer. In each, uniform decay is tuned first: two networks are
trained at each strength of a grid, from the weakest on until one is FAR worse than the best, and the strength of least
error on the last 5,000 training images, which these networks do not see, is taken. At that strength networks are then
trained from the same seeds with each arm's decay and measured on the test images, so that differences are paired. The
arm "estimated" has the factors of LOCO-REG's Table 6 by the rule "local", from magnitudes, since signed means are about
0 in many layers; they are the means of those of the two networks that the tuning has trained at that strength. All of
this favours uniform decay, if anything: the strength is tuned only for it. With ``--tuned``, decay towards the centre
is tuned in the same way, and there is a further arm with the strength that suits it; if that is the one of uniform
decay, the arm has the networks of "towards the centre".

On one core of an AMD EPYC a network takes 22 s of processor time for 500 images and kernels of 3x3, 37 s for 5x5, and
70 s for 5,000 images and 3x3. The first command trains at most 44 networks in each of six cells, in four to five hours;
all cells take about 60 hours.

The network is the small CNN at half of its width. It sees fewer images for more epochs, in proportion to the root.
Each network is added to the results when it is trained, and is not trained again: the study may be stopped at any time,
go on elsewhere, and be shared by processes that are given different cells or, where a cell is tuned, different seeds.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import nn

from bench import machine
from loco_ext import analysis
from loco_ext.experiments import settings
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import small_cnn
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.samples import Samples
from loco_ext.experiments.train import evaluate, make_optimizer
from loco_ext.option_parsers import separated
from studies import summaries, tables
from studies.fitting import fit
from studies.options import Data, Device
from studies.result_file import Record, ResultFile

NAME = "locality_sizes_cifar10"
WIDTH = 0.5
HELD_OUT = 5000  # images that strengths are chosen on, the last of the training images
EPOCHS_OF_ALL = 16  # epochs of all of CIFAR-10's images
STRENGTHS = {  # strengths of the weight decay
    "sgd": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "adamw": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
}
LEARNING_RATES = {"sgd": 0.1, "adamw": 1e-3}
TUNING_SEEDS = (1000, 1001)
FAR = 1.0  # percentage points above the least error; stronger decay is worse still
CPU = torch.device("cpu")
TUNING, ESTIMATED, CENTRE = "tuning", "estimated", "towards the centre"
TUNING_OF_CENTRE, TUNED = f"tuning, {CENTRE}", f"{CENTRE}, tuned"
ARMS: dict[str, tuple[float, float] | None] = {
    "uniform": None,
    CENTRE: (0.5, 2.0),
    "away from it": (2.0, 0.5),
    ESTIMATED: None,
}


class Cell(NamedTuple):
    """One comparison."""

    images: int
    kernel: int
    optimizer: str


@dataclass(frozen=True)
class Study:
    """CIFAR-10, and how a network of a cell is trained."""

    dataset: Dataset
    device: torch.device = CPU

    def training(self, cell: Cell, strength: float, seed: int, locality: Any = None) -> settings.Settings:
        values: Record = {"epochs": round(EPOCHS_OF_ALL * math.sqrt(50_000 / cell.images)), "batch_size": 64}
        values |= {"optimizer": cell.optimizer, "learning_rate": LEARNING_RATES[cell.optimizer]}
        values |= {"weight_decay": strength, "seed": seed, "locality": locality}
        return settings.from_preset("quick", model="small", data="cifar10", **values)

    def network(self, kernel: int, seed: int) -> nn.Module:
        """Return an untrained network with kernels of a size."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            network = small_cnn(self.dataset.channels, self.dataset.classes, self.dataset.size, width=WIDTH)
            for name, module in list(network.named_modules()):
                if isinstance(module, nn.Conv2d):
                    options: dict[str, Any] = {"padding": kernel // 2, "bias": module.bias is not None}
                    network.set_submodule(name, nn.Conv2d(module.in_channels, module.out_channels, kernel, **options))
        return network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def fit(self, cell: Cell, training: settings.Settings, images: int) -> nn.Module:
        """Return a network trained on the first ``images`` images."""
        network = self.network(cell.kernel, training.seed)
        optimizer = make_optimizer(training, network, self.dataset)
        return fit(network, optimizer, self.dataset.first(images), training, range(training.epochs))

    def error(self, network: nn.Module, images: int, measured: Samples) -> float:
        """Return the error in percent of a network that was trained on the first ``images`` images."""
        normalization = Normalization(self.dataset.first(images).train).to(self.device)
        return 100 * (1 - evaluate(network, measured.to(self.device), normalization, Processes(self.device))[1])

    def tune(self, cell: Cell, strength: float, seed: int, locality: Any = None) -> Record:
        """Return the error of a network on the held-out images, and the factors it suggests."""
        images = min(cell.images, len(self.dataset.train.labels) - HELD_OUT)
        network = self.fit(cell, self.training(cell, strength, seed, locality), images)
        held_out = Samples(*(part[-HELD_OUT:] for part in self.dataset.train))
        factors = analysis.estimate_locality(network, stat="abs")
        return {"error": self.error(network, images, held_out), "locality": factors}

    def compare(self, cell: Cell, strength: float, seed: int, locality: Any) -> Record:
        """Return the test error of a network."""
        network = self.fit(cell, self.training(cell, strength, seed, locality), cell.images)
        return {"error": self.error(network, cell.images, self.dataset.test)}


def of_cell(networks: list[Record], cell: Cell, arm: str) -> list[Record]:
    """Return the networks of a cell and arm."""
    return [n for n in networks if Cell(n["images"], n["kernel"], n["optimizer"]) == cell and n["arm"] == arm]


def chosen(
    networks: list[Record], cell: Cell, tuning: str = TUNING
) -> tuple[float, dict[str, tuple[float, ...]]] | None:
    """Return the strength of least mean error and the factors by layer; None where the tuning is not complete."""
    tuned = of_cell(networks, cell, tuning)
    errors: dict[float, float] = {}
    for strength in STRENGTHS[cell.optimizer]:
        found = {n["seed"]: n["error"] for n in tuned if n["strength"] == strength}
        if found.keys() != set(TUNING_SEEDS):
            return None
        errors[strength] = sum(found.values()) / len(found)
        if errors[strength] > min(errors.values()) + FAR:
            break
    best = min(errors, key=lambda strength: errors[strength])
    suggested = [network["locality"] for network in tuned if network["strength"] == best]
    means = {layer: np.mean([each[layer] for each in suggested], axis=0) for layer in suggested[0]}
    return best, {layer: tuple(factors.tolist()) for layer, factors in means.items()}


def summary(networks: list[Record]) -> list[Record]:
    """Return each tuned cell with the errors of its arms, compared with those of uniform decay by seed."""
    cells = sorted({Cell(n["images"], n["kernel"], n["optimizer"]) for n in networks}, key=lambda c: (c[2] != "sgd", c))
    found = []
    for cell in cells:
        tuned = chosen(networks, cell)
        if tuned is None:
            continue
        strengths = dict.fromkeys(ARMS, tuned[0])
        if (of_centre := chosen(networks, cell, TUNING_OF_CENTRE)) is not None:
            strengths[TUNED] = of_centre[0]
        errors = {arm: errors_by_seed(networks, cell, arm, strength) for arm, strength in strengths.items()}
        arms = {}
        for arm, own in errors.items():
            seeds = sorted(own.keys() & errors["uniform"].keys())
            if len(seeds) > 1:
                ours, uniform = (np.array([each[seed] for seed in seeds]) for each in (own, errors["uniform"]))
                compared = summaries.compare(ours, uniform if arm != "uniform" else ours)
                arms[arm] = {"strength": strengths[arm]} | compared
        found.append(cell._asdict() | {"strength": tuned[0], "locality": tuned[1], "arms": arms})
    return found


def errors_by_seed(networks: list[Record], cell: Cell, arm: str, strength: float) -> dict[int, float]:
    """Return the test errors of an arm."""
    trained = of_cell(networks, cell, CENTRE if arm == TUNED else arm)
    return {n["seed"]: n["error"] for n in trained if n["strength"] == strength}


def run(study: Study, results: ResultFile, cell: Cell, seeds: range, tuned_too: bool) -> None:
    """Train the networks of a cell that the results lack; ``tuned_too``: those that tune decay towards the centre."""

    def once(train: Callable[..., Record], arm: str, strength: float, seed: int, *given: Any) -> None:
        def measure() -> Record:
            begin = time.process_time()
            measured = train(cell, strength, seed, *given)
            seconds = time.process_time() - begin
            return measured | {"seconds": seconds, "device": machine.device_name(study.device)}

        results.once({**cell._asdict(), "arm": arm, "strength": strength, "seed": seed}, measure)

    def tune(arm: str, locality: Any) -> tuple[float, dict[str, tuple[float, ...]]]:
        for strength in STRENGTHS[cell.optimizer]:
            for seed in TUNING_SEEDS:
                once(study.tune, arm, strength, seed, locality)
            if (found := chosen(results.networks(), cell, arm)) is not None:
                break
        assert found is not None
        return found

    strength, suggested = tune(TUNING, None)
    for seed, arm in product(seeds, ARMS):
        once(study.compare, arm, strength, seed, suggested if arm == ESTIMATED else ARMS[arm])
    if tuned_too:
        strength, _ = tune(TUNING_OF_CENTRE, ARMS[CENTRE])
        for seed in seeds:
            once(study.compare, CENTRE, strength, seed, ARMS[CENTRE])


def main(
    data: Data,
    images: Annotated[
        str, typer.Option(help="Numbers of training images, the first of all, separated by commas.")
    ] = "500,2000,5000,20000,50000",
    kernels: Annotated[str, typer.Option(help="Kernel sizes.")] = "3,5,7",
    optimizers: Annotated[str, typer.Option(help="Optimizers, sgd and adamw.")] = "sgd,adamw",
    seeds: Annotated[int, typer.Option(min=1, help="Networks per arm; two are needed for a standard error.")] = 8,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    tuned: Annotated[bool, typer.Option(help="Also tune the strength of the decay towards the centre.")] = False,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="JSON file of the results.")] = tables.RESULTS / f"{NAME}-small.json",
) -> None:
    """Train the networks that the results lack, add them to the JSON file one by one, print the table."""
    torch.set_num_threads(1)
    study = Study(load("cifar10", data), torch.device(device))
    results = ResultFile(NAME, out, lambda networks: {"cells": summary(networks)})
    sizes, each_kernel = separated(int)(images), separated(int)(kernels)
    for optimizer, count, kernel in product(optimizers.split(","), sizes, each_kernel):
        run(study, results, Cell(count, kernel, optimizer), range(first, first + seeds), tuned)
    results.show()


if __name__ == "__main__":
    typer.run(main)
