"""Networks trained on CIFAR-10 under a penalty, timed unchanged and compacted.

    python -m studies.trained_cifar10 --data DIR      takes twenty minutes on one core; writes studies/results/

The networks are ResNet-8 and its plain twin with 16 to 64 channels, and with four times as many, on 5,000 training
and 2,500 test images. From the dense network, each strength is trained for one epoch under the exact prox of
rings, weaker strengths first, with batch norms folded and without a refit.
"""

import itertools
from pathlib import Path

import typer

from loco_ext.experiments import frontier
from loco_ext.threads import num_threads
from studies import summaries, tables
from studies.frontier_cifar10 import MODELS, TEST, TRAIN, few_samples, recipe
from studies.options import Data, Out, Runs

DENSE_EPOCHS = 6
STRENGTHS = {  # strengths for each width, which leave most of the MACs to a few of them
    1.0: (0.013, 0.017, 0.02, 0.023, 0.027, 0.032),
    4.0: (0.004, 0.005, 0.006, 0.007, 0.008, 0.009),
}


def path(model: str, width: float) -> frontier.FrontierSettings:
    """Return the settings of one network."""
    training = recipe(model, "rings", width=width)
    return frontier.FrontierSettings(
        training, dense_epochs=DENSE_EPOCHS, refit_epochs=0, strengths=STRENGTHS[width], path="up", latency=True
    )


def main(
    data: Data,
    runs: Runs = Path("runs/trained_cifar10"),
    out: Out = tables.RESULTS / "trained_cifar10-resnet8.json",
) -> None:
    """Train, write the JSON file, print the table."""
    dataset, networks = few_samples(data), {}
    with num_threads(1):
        for width, model in itertools.product(STRENGTHS, MODELS):
            record = frontier.measure(path(model, width), dataset, runs / f"{model}-{width:g}", "cpu", resume=True)
            networks[f"{model}, width {width:g}"] = summaries.frontier(record)
    schedule = {"training_samples": TRAIN, "test_samples": TEST, "dense_epochs": DENSE_EPOCHS}
    tables.publish("trained_cifar10", out, settings=schedule, networks=networks)


if __name__ == "__main__":
    typer.run(main)
