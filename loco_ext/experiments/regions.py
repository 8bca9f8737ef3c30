"""Measure how much ROLL widens linear regions: fully connected networks with and without it, over a grid of settings.

    settings.json    the settings, commit and versions
    runs/            one file for each network: its settings, test accuracy and radii, or that it has diverged
    regions.json     everything: settings, commit, versions, all networks and the ratios of their radii
    regions.png      median radius against accuracy
    toy.png          linear regions of three networks of the plane

After a kill, networks that were finished are kept, and the others are trained again to the same numbers.

Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019): the training is that of its
MNIST experiment, four layers of 300 units, SGD with Nesterov's momentum. Inputs are normalised by one mean and one
standard deviation, and radii are in units of pixels scaled to [0, 1].
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer import Option

from loco_ext.experiments import data, figures, files, region_pictures
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.models import fully_connected
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record, begin, cached_json, grouped, mean_and_error
from loco_ext.experiments.samples import Samples, unit_range
from loco_ext.experiments.settings import SettingsError, check_choice, check_fields, count_option, list_option
from loco_ext.folders import owned
from loco_ext.option_parsers import MOST
from loco_ext.output import Rows, cell, note, progress_bar, write_json
from loco_ext.regularizers import ROLL, region_radius

MOST_POINTS_LOST = 0.5  # percentage points of accuracy that a network may lose and still count
QUANTILES = (0.25, 0.5, 0.75)
NORMS = ("1", "2", "inf")  # p of the radii
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "quick": {
        "data": "digits",
        "epochs": 150,
        "learning_rate": 0.05,
        "momentum": 0.9,
        "strengths": (0.5,),
        "hinges": (0.25,),
        "percents": ("100",),
        "probes": 2,
        "seeds": 3,
    },
}
PRESETS_MEAN = (
    "Defaults of the other options. paper: the training of its MNIST experiment, and a grid around the settings that "
    "it reports; quick: handwritten digits of scikit-learn and one setting, with random probes, in ten minutes."
)
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class RegionsSettings:
    """Settings of the networks, their training, and the grid of :class:`loco_ext.regularizers.ROLL`'s arguments."""

    data: Annotated[
        Literal["mnist", "digits"],
        Option("--dataset", help="Data set: mnist, whose idx files --data has; or digits, which need no files."),
    ] = "mnist"
    epochs: Annotated[int, count_option(help="Number of passes over the training samples.")] = 20
    batch_size: Annotated[int, count_option(help="Number of samples per step.")] = 64
    learning_rate: Annotated[float, Option("--lr", min=0, help="Learning rate of all epochs.")] = 0.01
    momentum: Annotated[float, Option(min=0, max=1, help="Nesterov momentum, less than 1.")] = 0.5
    layers: Annotated[int, Option(min=1, max=100, help="Number of hidden layers.")] = 4
    units: Annotated[int, count_option(help="Number of units in each hidden layer.")] = 300
    strengths: Annotated[
        tuple[float, ...], list_option(float, "NUMBERS", help="Strengths of ROLL, called lambda in the paper.")
    ] = (0.25, 0.5, 1.0, 2.0, 4.0)
    hinges: Annotated[
        tuple[float, ...],
        list_option(float, "NUMBERS", help="Factors of the margin's part of the loss, called C in the paper."),
    ] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    percents: Annotated[
        tuple[str, ...],
        list_option(
            str, "PERCENTS", help="Percentages of units with the largest terms that ROLL counts, or max for one unit."
        ),
    ] = ("max", "25", "50", "75", "100")
    probes: Annotated[
        int, Option(min=0, max=MOST, help="Number of random probes of gradients in each step; 0 computes exact norms.")
    ] = 0
    seeds: Annotated[int, count_option(help="Number of networks for each setting, with consecutive seeds.")] = 1
    seed: Annotated[int, Option(min=0, max=2**62, help="Seed of the first network of each setting.")] = 0
    toy: Annotated[
        bool, Option(help="Also draw the linear regions of three networks with two inputs, which takes half a minute.")
    ] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.momentum >= 1:
            raise SettingsError(f"momentum: expected less than 1, got {self.momentum}")
        for name in ("strengths", "hinges", "percents"):
            if not getattr(self, name):
                raise SettingsError(f"{name}: expected at least one, got none")
        for strength, hinge, percent in self.grid:
            try:
                self.roll(strength, hinge, percent)
            except (TypeError, ValueError) as error:
                names = {"strength": "strengths", "hinge": "hinges", "top_percent": "percents"}
                name, _, rest = str(error).replace("'exact'", "0").partition(":")  # this option is a number
                raise SettingsError(f"{names.get(name, name)}:{rest}") from error

    @property
    def grid(self) -> Iterator[tuple[float, float, str]]:
        return itertools.product(self.strengths, self.hinges, self.percents)

    def roll(self, strength: float, hinge: float, percent: str, generator: torch.Generator | None = None) -> ROLL:
        """Return the loss of one place in the grid, with the source of its random probes."""
        return ROLL(strength, hinge, percent_of(percent), probes=self.probes or "exact", generator=generator)


def percent_of(text: str) -> Any:
    """Return the number, or "max"; other texts unchanged.

    >>> percent_of("25"), percent_of("max")
    (25.0, 'max')
    """
    try:
        return float(text)
    except ValueError:
        return text


def load(settings: RegionsSettings, folder: Path | None) -> Dataset:
    """Read the data set.

    Raises:
        DataError: there is no folder, or a file is missing, truncated or corrupted.
    """
    if settings.data == "digits":
        return data.load("digits", folder)
    if folder is None:
        raise files.DataError("folder: expected the folder that holds MNIST's idx files, got none")
    return Dataset("mnist", *files.mnist(folder), classes=10, augmented=False)


def measure(
    settings: RegionsSettings, samples: Dataset, out: Path, device: str, *, resume: bool = False
) -> dict[str, Any]:
    """Train and measure all networks, or those that ``out`` lacks; write the files listed above there.

    The result is the content of ``regions.json``. Errors are those of :func:`loco_ext.experiments.records.begin` and
    :func:`loco_ext.folders.owned`.
    """
    processes = Processes(torch.device(device))
    with owned(out):
        record = begin(out, settings, samples, processes, resume=resume)
        (out / "runs").mkdir(exist_ok=True)
        arms = [None, *settings.grid]
        record["networks"] = [
            _network(settings, samples, arm, seed, out / "runs", processes.device)
            for seed in range(settings.seed, settings.seed + settings.seeds)
            for arm in arms
        ]
        record["arms"] = summarise(record["networks"])
        figures.save(region_pictures.draw(record), out)
        if settings.toy:
            region_pictures.save_toy(out / "toy.png")
        write_json(out / "regions.json", record)  # last: the experiment is done where it is
    return record


def _network(
    settings: RegionsSettings, samples: Dataset, arm: tuple[float, float, str] | None, seed: int, out: Path, device: Any
) -> Record:
    """Train and measure one network, or read what was measured."""
    name = "vanilla" if arm is None else f"roll-{_exact(arm[0])}-{_exact(arm[1])}-{arm[2]}"
    path = out / f"{name}-{seed}.json"
    found = cached_json(path, lambda: _measured(settings, samples, arm, seed, name, device))
    if not isinstance(found, dict) or (found.get("name"), found.get("seed")) != (name, seed):
        raise SettingsError(f"{path}: expected the record of {name}, seed {seed}; remove it to measure anew")
    return found


def _exact(value: float) -> str:
    """Return a short text from which ``float`` makes the same number.

    >>> _exact(1.0), _exact(1e6), _exact(0.12345678)
    ('1', '1e+06', '0.12345678')
    """
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def _measured(
    settings: RegionsSettings, samples: Dataset, arm: tuple[float, float, str] | None, seed: int, name: str, device: Any
) -> Record:
    scale = Scale(samples.train)
    train, test = (
        (scale(part.images.to(device)).flatten(1), part.labels.to(device)) for part in (samples.train, samples.test)
    )
    sizes = [train[0].shape[1], *[settings.units] * settings.layers]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = fully_connected(sizes, samples.classes).to(device)
    probes = torch.Generator(device).manual_seed(seed)
    loss = None if arm is None else settings.roll(*arm, probes)
    label = f"{name}, seed {seed}"
    fit(model, *train, settings, seed, loss, label)
    strength, hinge, percent = arm or (0.0, None, None)
    record: Record = {"name": name, "seed": seed, "strength": strength, "hinge": hinge, "top_percent": percent}
    record["diverged"] = not all(parameter.isfinite().all() for parameter in model.parameters())
    if record["diverged"]:  # the other networks are still worth their training
        note(f"{label}: the training has diverged; expected finite weights")
        return record
    with torch.no_grad():
        accuracy = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    radii = {}
    for p in NORMS:
        radius = scale.deviation * region_radius(model, test[0], float(p)).double()
        radii[p] = radius.quantile(torch.tensor(QUANTILES, dtype=torch.float64, device=device)).tolist()
    return record | {"accuracy": accuracy, "radii": radii}


class Scale:
    """Normalisation of images by the mean and the standard deviation of all pixels of the training samples."""

    def __init__(self, samples: Samples) -> None:
        pixels = unit_range(samples.images)
        self.mean, self.deviation = pixels.mean().item(), pixels.std().item()

    def __call__(self, images: Tensor) -> Tensor:
        return (unit_range(images) - self.mean) / self.deviation


def fit(
    model: nn.Module, x: Tensor, y: Tensor, settings: RegionsSettings, seed: int, loss: Loss | None, label: str
) -> None:
    """Train the model in place, with the cross-entropy and an additional loss of the model and the inputs."""
    momentum = settings.momentum
    optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate, momentum, nesterov=momentum > 0)
    generator = torch.Generator().manual_seed(seed)
    with progress_bar(settings.epochs, label, unit="epoch") as bar:
        for _ in range(settings.epochs):
            for batch in torch.randperm(len(x), generator=generator).to(x.device).split(settings.batch_size):
                value = cross_entropy(model(x[batch]), y[batch])
                if loss is not None:
                    value = value + loss(model, x[batch])
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
            bar.update()


def summarise(networks: list[Record]) -> list[Record]:
    """Return means and standard errors over seeds of each setting, and of the ratios to the networks without ROLL.

    They are None where a network has diverged or its median radius is infinite.
    """
    arms = []
    plain = {network["seed"]: network for network in networks if network["name"] == "vanilla"}
    for found in grouped(networks, "name").values():
        pairs = [(network, plain[network["seed"]]) for network in found]
        lost = [100 * (_accuracy(vanilla) - _accuracy(network)) for network, vanilla in pairs]
        arms.append(
            {
                **{key: found[0][key] for key in ("name", "strength", "hinge", "top_percent")},
                "accuracy": mean_and_error([_accuracy(network) for network in found]),
                "points_lost": mean_and_error(lost),
                "median_radius": {p: mean_and_error([_median(network, p) for network in found]) for p in NORMS},
                "ratio": {p: mean_and_error([_ratio(*pair, p) for pair in pairs]) for p in NORMS},
            }
        )
    return arms


def _accuracy(network: Record) -> float:
    """Return the test accuracy; NaN for a network that has diverged."""
    return network.get("accuracy", math.nan)


def _median(network: Record, p: str) -> float:
    """Return the median radius; NaN for a network that has diverged, or where it is infinite."""
    value = None if network["diverged"] else network["radii"][p][1]
    return math.nan if value is None else value


def _ratio(ours: Record, vanilla: Record, p: str) -> float:
    return _median(ours, p) / (_median(vanilla, p) or math.nan)


def best(arms: list[Record]) -> Record | None:
    """Return the setting of the largest mean ratio in l2, if any loses fewer than 0.5 points of accuracy."""
    measured = [arm for arm in arms if arm["ratio"]["2"]["mean"] is not None]
    within = [arm for arm in measured if arm["points_lost"]["mean"] < MOST_POINTS_LOST]
    return max(within, key=lambda arm: arm["ratio"]["2"]["mean"], default=None)


def rows(record: Record) -> Rows:
    """Return headers and cells of a table of all settings; an asterisk marks the best within half a point."""
    chosen = best(record["arms"])
    headers = ["strength", "hinge", "percent", "accuracy", "radius, p=1", "p=2", "p=inf", "ratio, p=2"]
    cells = []
    for arm in record["arms"]:
        mark = " *" if arm is chosen else ""
        cells.append(
            [
                f"{arm['strength']:g}{mark}",
                cell(arm["hinge"], "g"),
                arm["top_percent"] or "",
                cell(arm["accuracy"]["mean"], ".2%"),
                *(cell(arm["median_radius"][p]["mean"], ".3g") for p in NORMS),
                cell(arm["ratio"]["2"]["mean"], ".1f"),
            ]
        )
    return headers, cells


def settings_of(preset: str, **options: Any) -> RegionsSettings:
    """Return the settings of a preset, with some replaced.

    Raises:
        SettingsError: the preset is unknown, or a setting is out of range.
    """
    check_choice("preset", preset, PRESETS)
    return RegionsSettings(**PRESETS[preset] | options)
