"""Structured sparsity on CIFAR-10: networks that lost rings or kernels against narrower ones with as many epochs.

    python -m bench.frontier_cifar10 --data DIR      takes about an hour on one core; writes bench/results/

The networks are ResNet-8 and its plain twin, with 5,000 training and 2,500 test images. The arms are the exact prox of
rings and of kernels, one epoch for each strength, each from the previous strength (path "up"), with batch norms folded;
and the draft's own method (subgradient and tau), two epochs for every other strength. For the prox of rings, the
remaining network is refitted so that all networks are trained for the same number of epochs. They are compared with
uniformly narrower networks of equally many epochs, by the same recipe, or with batch norms and their larger learning
rate throughout. ResNet-8 with rings also has the other warm starts, downward from the strength that leaves nothing,
and the effect of batch norms.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import harness, machine, tables
from loco_ext.experiments import data, figures, frontier, run, settings
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.samples import Samples
from loco_ext.output import replacing

MODELS = ("resnet8", "plain8")
PENALTIES = ("rings", "kernels")
TRAIN, TEST = 5_000, 2_500
DENSE_EPOCHS, POINTS, REFIT_EPOCHS = 12, 16, 3
STRENGTHS = tuple(0.002 * 100 ** (i / (POINTS - 1)) for i in range(POINTS))
SEARCHED_POINTS = 8
BATCH_NORM_STRENGTHS = (0.001, 0.003, 0.01, 0.03)
TAUS = (0.003, 0.03, 0.1)
WIDTHS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.125)


def arms(model: str) -> dict[str, frontier.FrontierSettings]:
    """Return the settings by name."""

    def arm(penalty: str | None = None, epochs: int = 1, **options: Any) -> frontier.FrontierSettings:
        training = settings.from_preset(
            "quick",
            model=model,
            data="cifar10",
            epochs=epochs,
            batch_size=32,
            optimizer="adam",
            learning_rate=1e-3,
            weight_decay=1e-4,
            penalty=penalty,
        )
        values: dict[str, Any] = {
            "dense_epochs": DENSE_EPOCHS,
            "refit_epochs": REFIT_EPOCHS,
            "strengths": STRENGTHS,
            "path": "up",
        }
        return frontier.FrontierSettings(training, **values | options)

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


def share_dense(setting: frontier.FrontierSettings, dataset: data.Dataset, folder: Path, out: Path) -> None:
    """Train the network that all paths start from once, and copy it to where this path looks for it."""
    run.run(setting.dense(1.0), dataset, folder, Processes(torch.device("cpu")), resume=True)
    target = out / "dense-1" / run.CHECKPOINT
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        shutil.copy(folder / run.CHECKPOINT, temporary)


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the records of all arms, by model and name; finished ones are read from their files."""
    whole = data.load("cifar10", arguments.data).first(TRAIN)
    test = Samples(*(part[:TEST] for part in whole.test))
    dataset = data.Dataset(whole.name, whole.train, test, whole.classes, whole.augmented)
    networks: dict[str, Any] = {}
    for model in MODELS:
        for name, setting in arms(model).items():
            if arguments.only and arguments.only != f"{model} {name}":
                continue
            out = arguments.runs / f"{model}-{name.replace(', ', '-').replace(' ', '-')}"
            if setting.method != "width":
                share_dense(setting, dataset, arguments.runs / f"{model}-dense", out)
            record = frontier.measure(setting, dataset, out, "cpu", resume=True)
            networks.setdefault(model, {})[name] = record
    return networks


def report_of(networks: dict[str, Any]) -> dict[str, Any]:
    """Return the records of all arms by model and name, and the facts they share."""
    return {
        "benchmark": "frontier_cifar10",
        "machine": machine.describe(),
        "settings": {
            "training_samples": TRAIN,
            "test_samples": TEST,
            "epochs": DENSE_EPOCHS + len(STRENGTHS) + REFIT_EPOCHS,
            "dense_epochs": DENSE_EPOCHS,
        },
        "networks": networks,
    }


def save(report: dict[str, Any], out: Path) -> None:
    """Write the JSON file and, beside it, a figure of errors against multiply-adds with one panel for each model."""
    harness.write_json(out, report)
    panels: dict[str, figures.Series] = {}
    dense = {}
    for model, arms in report["networks"].items():
        dense[model] = arms["width"]["paths"][0]["multiply_adds"]
        for name, record in arms.items():
            if "," in name:
                continue
            for label, points in figures.by_tau(record).items():
                refitted = ", refitted" if points[0]["refitted"] and record["settings"]["method"] == "prox" else ""
                label = label.replace(record["settings"]["method"], name)
                panels.setdefault(model, {})[label + refitted] = points
    figures.write(figures.errors(panels, dense), out.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, write the JSON file and a figure beside it, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.frontier_cifar10", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's binary files")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier_cifar10"), help="folder for the networks")
    parser.add_argument("--only", metavar="ARM", help="such as 'resnet8 rings prox': run this, write no report")
    parser.add_argument("--out", type=Path, help="JSON file (default: in bench/results)")
    arguments = parser.parse_args(argv)
    networks = study(arguments)
    if arguments.only:
        return 0
    report = report_of(networks)
    out = arguments.out or harness.RESULTS / "frontier_cifar10-resnet8.json"
    save(report, out)
    print(f"written: {out}", file=sys.stderr)
    tables.show(report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
