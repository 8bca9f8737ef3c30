"""Structured sparsity on CIFAR-10: networks that lost rings or filters against narrower ones with as many epochs.

    python -m studies.frontier_cifar10 --data DIR      takes about an hour on one core; writes studies/results/

The networks are ResNet-8 and its plain twin, with 5,000 training and 2,500 test images. The arms are the exact prox of
rings and of filters, one epoch for each strength, each from the previous strength (path "up"), with batch norms folded;
and the draft's own method (subgradient and tau), two epochs for every other strength. For the prox of rings, the
remaining network is refitted so that all networks are trained for the same number of epochs. They are compared with
uniformly narrower networks of equally many epochs, by the same recipe, or with batch norms and their larger learning
rate throughout. ResNet-8 with rings also has the other warm starts, downward from the strength that leaves nothing,
and the effect of batch norms.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from loco_ext.experiments import figures, frontier, frontier_figures, run, settings
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.processes import Processes
from loco_ext.output import replacing
from studies import summaries, tables
from studies.options import Data, Out, Runs

MODELS = ("resnet8", "plain8")
PENALTIES = ("rings", "kernels")
TRAIN, TEST = 5_000, 2_500
DENSE_EPOCHS, POINTS, REFIT_EPOCHS = 12, 16, 3
STRENGTHS = tuple(0.002 * 100 ** (i / (POINTS - 1)) for i in range(POINTS))
SEARCHED_POINTS = 8
BATCH_NORM_STRENGTHS = (0.001, 0.003, 0.01, 0.03)
TAUS = (0.003, 0.03, 0.1)
WIDTHS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.125)


def recipe(model: str, penalty: str | None, epochs: int = 1, width: float = 1.0) -> settings.Settings:
    """Return the settings of a training."""
    return settings.from_preset(
        "quick",
        model=model,
        width=width,
        data="cifar10",
        epochs=epochs,
        batch_size=32,
        optimizer="adam",
        learning_rate=1e-3,
        weight_decay=1e-4,
        penalty=penalty,
    )


def arms(model: str) -> dict[str, frontier.FrontierSettings]:
    """Return the settings by name."""

    def arm(penalty: str | None = None, epochs: int = 1, **options: Any) -> frontier.FrontierSettings:
        values: dict[str, Any] = {
            "dense_epochs": DENSE_EPOCHS,
            "refit_epochs": REFIT_EPOCHS,
            "strengths": STRENGTHS,
            "path": "up",
            "batch_norm": "folded",
        }
        return frontier.FrontierSettings(recipe(model, penalty, epochs), **values | options)

    more = len(STRENGTHS) + REFIT_EPOCHS
    found = {
        "width": arm(method="width", widths=WIDTHS, refit_epochs=more, latency=True),
        "width with batch norm": arm(method="width", widths=WIDTHS, dense_epochs=DENSE_EPOCHS + more, refit_epochs=0),
    }
    for penalty in PENALTIES:
        rings = penalty == "rings"
        found[f"{penalty} prox"] = arm(penalty, refit_epochs=REFIT_EPOCHS if rings else 0, latency=rings)
        options: dict[str, Any] = {"strengths": STRENGTHS[1::2], "taus": TAUS, "refit_epochs": 0}
        found[f"{penalty} subgradient"] = arm(penalty, epochs=2, method="subgradient", **options)
    if model == MODELS[0]:
        searched: dict[str, Any] = {"strengths": None, "points": SEARCHED_POINTS, "span": 1e-4, "refit_epochs": 0}
        for path in ("dense", "down"):
            found[f"rings prox, {path}"] = arm("rings", path=path, **searched)
        for kind in ("live", "scaled", "folded"):
            options = {"batch_norm": kind, "path": "dense", "strengths": BATCH_NORM_STRENGTHS, "refit_epochs": 0}
            found[f"rings prox, {kind}"] = arm("rings", epochs=2, **options)
    return found


def share_dense(setting: frontier.FrontierSettings, dataset: Dataset, folder: Path, out: Path) -> None:
    """Train the network that all paths start from once, and copy it to where this path looks for it."""
    run.run(setting.dense(1.0), dataset, folder, Processes(torch.device("cpu")), resume=True)
    target = out / "dense-1" / run.CHECKPOINT
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        shutil.copy(folder / run.CHECKPOINT, temporary)


def few_samples(data: Path) -> Dataset:
    """Return CIFAR-10's first samples."""
    return load("cifar10", data).first(TRAIN, TEST)


def study(data: Path, runs: Path, only: str | None = None) -> dict[str, Any]:
    """Return the records of all arms, by model and name; finished ones are read from their files."""
    dataset = few_samples(data)
    networks: dict[str, Any] = {}
    for model in MODELS:
        for name, setting in arms(model).items():
            if only not in (None, f"{model} {name}"):
                continue
            out = runs / f"{model}-{name.replace(', ', '-').replace(' ', '-')}"
            if setting.method != "width":
                share_dense(setting, dataset, runs / f"{model}-dense", out)
            networks.setdefault(model, {})[name] = frontier.measure(setting, dataset, out, "cpu", resume=True)
    return networks


def save(networks: dict[str, Any], out: Path) -> None:
    """Write the report and print its tables; draw errors against MACs with one panel for each model."""
    schedule = {
        "training_samples": TRAIN,
        "test_samples": TEST,
        "epochs": DENSE_EPOCHS + len(STRENGTHS) + REFIT_EPOCHS,
        "dense_epochs": DENSE_EPOCHS,
    }
    found = {
        model: {name: summaries.frontier(record) for name, record in arms.items()} for model, arms in networks.items()
    }
    tables.publish("frontier_cifar10", out, settings=schedule, networks=found)
    panels: dict[str, frontier_figures.Series] = {}
    dense = {}
    for model, arms in networks.items():
        dense[model] = arms["width"]["paths"][0]["macs"]
        for name, record in arms.items():
            if "," in name:
                continue
            for label, points in frontier_figures.by_tau(record).items():
                refitted = ", refitted" if points[0]["refitted"] and record["settings"]["method"] == "prox" else ""
                label = label.replace(record["settings"]["method"], name)
                panels.setdefault(model, {})[label + refitted] = points
    figures.write(frontier_figures.errors(panels, dense), out.with_suffix(".png"))


def main(
    data: Data,
    runs: Runs = Path("runs/frontier_cifar10"),
    out: Out = tables.RESULTS / "frontier_cifar10-resnet8.json",
    only: Annotated[
        str | None, typer.Option(help="Run only this arm, such as 'resnet8 rings prox', and write no report.")
    ] = None,
) -> None:
    """Run the study, write the JSON file and a figure beside it, print the tables."""
    networks = study(data, runs, only)
    if only is None:
        save(networks, out)


if __name__ == "__main__":
    typer.run(main)
