"""Networks trained on CIFAR-10 under a penalty, timed unchanged and compacted.

    python -m bench.trained_cifar10 --data DIR      takes twenty minutes on one core; writes bench/results/

The networks are ResNet-8 and its plain twin with 16 to 64 channels, and with four times as many, on 5,000 training
and 2,500 test images. From the dense network, each strength is trained for one epoch under the exact prox of
rings, weaker strengths first, with batch norms folded and without a refit.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness, machine, tables
from loco_ext.experiments import data, frontier, settings
from loco_ext.experiments.samples import Samples

MODELS = ("resnet8", "plain8")
TRAIN, TEST = 5_000, 2_500
DENSE_EPOCHS = 6
STRENGTHS = {  # by width, from most of the multiply-adds to a few of them
    1.0: (0.013, 0.017, 0.02, 0.023, 0.027, 0.032),
    4.0: (0.004, 0.005, 0.006, 0.007, 0.008, 0.009),
}


def path(model: str, width: float) -> frontier.FrontierSettings:
    """Return the settings of one network."""
    training = settings.from_preset(
        "quick",
        model=model,
        width=width,
        data="cifar10",
        epochs=1,
        batch_size=32,
        optimizer="adam",
        learning_rate=1e-3,
        weight_decay=1e-4,
        penalty="rings",
    )
    return frontier.FrontierSettings(
        training, dense_epochs=DENSE_EPOCHS, refit_epochs=0, strengths=STRENGTHS[width], path="up", latency=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.trained_cifar10", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's binary files")
    parser.add_argument("--runs", type=Path, default=Path("runs/trained_cifar10"), help="folder for the networks")
    parser.add_argument("--out", type=Path, help="JSON file (default: in bench/results)")
    arguments = parser.parse_args(argv)
    whole = data.load("cifar10", arguments.data).first(TRAIN)
    test = Samples(*(part[:TEST] for part in whole.test))
    dataset = data.Dataset(whole.name, whole.train, test, whole.classes, whole.augmented)
    networks: dict[str, Any] = {}
    with harness.num_threads(1):
        for width, model in itertools.product(STRENGTHS, MODELS):
            runs = arguments.runs / f"{model}-{width:g}"
            networks[f"{model}, width {width:g}"] = frontier.measure(
                path(model, width), dataset, runs, "cpu", resume=True
            )
    report = {
        "benchmark": "trained_cifar10",
        "machine": machine.describe(),
        "settings": {"training_samples": TRAIN, "test_samples": TEST, "dense_epochs": DENSE_EPOCHS},
        "networks": networks,
    }
    tables.publish(report, arguments.out or harness.RESULTS / "trained_cifar10-resnet8.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
