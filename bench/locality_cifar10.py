"""A first LOCO-REG experiment on CIFAR-10: uniform decay against factors estimated from the uniform networks.

    python -m bench.locality_cifar10 --data DIR      takes about half an hour on two cores; writes bench/results/

The small CNN is trained with the preset "quick" from five seeds. Each arm uses the same seeds and thus the same initial
weights, order of samples and augmentations, so that differences are paired. The factors of an arm are estimated per
layer over the five uniform networks (LOCO-REG, Table 6), by the rule "local" and by the printed one, "paper".
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import stats

from bench import harness, machine, tables
from loco_ext import analysis
from loco_ext.experiments import data, run, settings
from loco_ext.experiments.processes import Processes

ETA_RULES = ("local", "paper")
Locality = dict[str, tuple[float, ...]]


def train_arm(
    dataset: data.Dataset, name: str, locality: Locality | None, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train one network per seed; a network that is finished already is not trained again."""
    figures = []
    for seed in range(arguments.seeds):
        setting = settings.from_preset(
            "quick", model="small", data="cifar10", epochs=arguments.epochs, seed=seed, locality=locality
        )
        folder = arguments.runs / f"{name}-{seed}"
        history = run.run(setting, dataset, folder, Processes(torch.device("cpu")), resume=True)
        figures.append({"seed": seed, **asdict(history[-1])})
    return figures


def estimate(arguments: argparse.Namespace, eta_rule: str) -> Locality:
    """Estimate the factors per layer over all uniform networks."""
    models = [load_file(arguments.runs / f"uniform-{seed}" / "model.safetensors") for seed in range(arguments.seeds)]
    return analysis.estimate_locality(models, eta_rule=eta_rule, stat=arguments.stat)


def compare(arm: list[dict[str, Any]], uniform: list[dict[str, Any]]) -> dict[str, float]:
    """Return test errors in percent with standard error, absolute and relative to the uniform arm, paired by seed."""
    errors, reference = (np.array([100 * (1 - run["test_accuracy"]) for run in runs]) for runs in (arm, uniform))
    difference = errors - reference
    scale = len(errors) ** 0.5
    result = {"error": errors.mean(), "standard_error": errors.std(ddof=1) / scale}
    if arm is not uniform:
        result["difference"] = difference.mean()
        result["difference_standard_error"] = difference.std(ddof=1) / scale
        result["paired_p"] = stats.ttest_rel(errors, reference).pvalue if difference.any() else 1.0
    return {name: float(value) for name, value in result.items()}


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all arms and compare them."""
    dataset = data.load("cifar10", arguments.data)
    uniform = train_arm(dataset, "uniform", None, arguments)
    arms: dict[str, dict[str, Any]] = {
        "uniform": {"locality": None, "runs": uniform, "summary": compare(uniform, uniform)}
    }
    for eta_rule in ETA_RULES:
        locality = estimate(arguments, eta_rule)
        runs = train_arm(dataset, f"{eta_rule}-{arguments.stat}", locality, arguments)
        arms[eta_rule] = {"locality": locality, "runs": runs, "summary": compare(runs, uniform)}
    setting = settings.from_preset("quick", model="small", data="cifar10", epochs=arguments.epochs)
    return {
        "benchmark": "locality_cifar10",
        "machine": machine.describe(),
        "settings": asdict(setting) | {"seeds": arguments.seeds, "stat": arguments.stat},
        "arms": arms,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.locality_cifar10", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's binary files")
    parser.add_argument("--runs", type=Path, default=Path("runs/locality_cifar10"), help="folder for the networks")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--stat", choices=("signed", "abs", "rms"), default="signed", help="of the estimate")
    parser.add_argument("--out", type=Path, help="JSON file (default: in bench/results)")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds: expected at least 2, for a standard error; got {arguments.seeds}")
    report = study(arguments)
    tables.publish(report, arguments.out or harness.RESULTS / f"locality_cifar10-{arguments.stat}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
