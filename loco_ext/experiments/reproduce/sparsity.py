"""Structured sparsity: networks trained from scratch under penalties of many strengths alpha, then cut at tau.

The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": Table 2, figures 1, 3, 4 and 5,
and its variants. It announces pictures of filters and their correlations, which are drawn here.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from loco_ext.experiments import figures, frontier_figures
from loco_ext.experiments.models import MODELS
from loco_ext.experiments.reproduce import sparsity_filters
from loco_ext.experiments.reproduce.jobs import Job, JobPlan, read_record, read_records
from loco_ext.experiments.reproduce.pages import Page, Table
from loco_ext.experiments.reproduce.published import published

PAPER = "sparsity"
SCRATCH = ("--method", "subgradient", "--dense-epochs", "0", "--refit-epochs", "0", "--batch-norm", "live")
PENALTIES = ("kernels", "rings")
ROWS = {  # the draft's row of Table 2 by network
    "resnet20-a": "CIFAR-10, D = 20, 16/32/64",
    "plain20": "CIFAR-10, D = 20, 16/32/64",
    "resnet20-5x5": "CIFAR-10, D = 20, (64, 5) x 18",
    "plain20-5x5": "CIFAR-10, D = 20, (64, 5) x 18",
}
ARCHITECTURES = ROWS | {f"{kind}{d}-7x7": f"ImageNet, D = {d}" for kind in ("resnet", "plain") for d in (8, 18)}
VARIANTS = {  # eqs. 25, 29, 32 and 33, and the norm that section 3.4.1 names
    "normalized": ("--weighting", "normalized"),
    "scaled": ("--weighting", "scaled"),
    "linf": ("--group-norm", "linf"),
    "squared": ("--power", "2"),
}


class Scale(NamedTuple):
    """The size of a preset: networks, strengths, variants, options of these; strengths and epochs for eq. 34."""

    networks: tuple[str, ...]
    strengths: tuple[float, ...]
    variants: tuple[str, ...]
    options: tuple[str, ...]
    complexity: tuple[tuple[float, ...], int]
    minutes: float
    means: str


SCALES = {
    "smoke": Scale(
        ("resnet8-a",),
        (1e-2,),
        ("squared",),
        ("--width", "0.25", "--samples", "100", "--epochs", "1", "--batch-size", "50", "--taus", "0.001,0.3"),
        ((1e-2,), 1),
        0.05,
        "The preset smoke shows that everything runs: a narrow ResNet-8 for one epoch on 100 digits.",
    ),
    "cpu": Scale(
        ("resnet8-a", "plain8"),
        (1e-4, 1e-3, 1e-2),
        ("linf", "squared"),
        ("--samples", "5000", "--epochs", "15", "--lr", "0.1", "--taus", "0.001,0.01,0.1"),
        ((1e-7, 1e-6, 3e-6, 1e-4), 3),
        1.5,
        "Cut down by the preset cpu: ResNet-8 and its plain twin instead of networks of 20 layers, {images}, 15 "
        "epochs, three strengths.",
    ),
    "paper": Scale(
        tuple(ROWS),
        tuple(10**exponent for exponent in (-5.0, -4.5, -4.2, -4.0, -3.8, -3.5, -3.0, -2.5)),
        tuple(VARIANTS),
        ("--epochs", "164", "--lr", "0.1", "--weight-decay", "0.0001", "--taus", "0.0001,0.001,0.01,0.1"),
        ((1e-8, 1e-7, 1e-6), 164),
        600.0,
        "The draft states neither epochs nor learning rates; these are those of He et al. (2015) with a cosine.",
    ),
}


def jobs(plan: JobPlan) -> list[Job]:
    """Return a job for each network, penalty and strength, for each variant, and those of eq. 34."""
    scale, found = SCALES[plan.preset], []
    for network, penalty, strength in itertools.product(scale.networks, PENALTIES, scale.strengths):
        found.append(_path(plan, network, penalty, "plain", strength))
    for variant, penalty, strength in itertools.product(scale.variants, PENALTIES, scale.strengths):
        found.append(_path(plan, scale.networks[0], penalty, variant, strength, *VARIANTS[variant]))
    return [*found, *itertools.chain.from_iterable(_complexity(plan).values())]


def _path(plan: JobPlan, network: str, penalty: str, variant: str, strength: float, *options: str) -> Job:
    scale = SCALES[plan.preset]
    name = f"{PAPER}/{network}/{penalty}-{variant}/alpha-{strength:.3g}"
    words = ["--model", network, "--dataset", plan.images, "--penalty", penalty, "--strengths", repr(strength)]
    words += [*SCRATCH, *scale.options, *options]
    return plan.job(name, "frontier", *words, minutes=scale.minutes, data=plan.images)


def _complexity(plan: JobPlan) -> dict[float, tuple[Job, Job]]:
    """Return a training under eq. 34 and the compaction of what it leaves, by strength.

    They are trained by the prox, as its zeros are exact.
    """
    scale, found = SCALES[plan.preset], {}
    strengths, epochs = scale.complexity
    for strength in strengths:
        name = f"{PAPER}/{scale.networks[0]}/complexity/alpha-{strength:.3g}"
        words = ["--preset", "quick", "--model", scale.networks[0], "--dataset", plan.images, "--penalty", "complexity"]
        words += ["--strength", repr(strength), "--epochs", str(epochs)]
        training = plan.job(f"{name}/run", "train", *words, minutes=scale.minutes, data=plan.images)
        options = (training.folder, "--cost", "macs")
        compaction = plan.job(f"{name}/compact", "compact", *options, minutes=0.1, stage=2, data=plan.images)
        found[strength] = training, compaction
    return found


def page(plan: JobPlan) -> Page:
    """Return the tables of what is done, and the figures of each network and penalty."""
    scale, points = SCALES[plan.preset], []
    drawn: dict[str, Path] = {}
    families = [(network, "plain") for network in scale.networks]
    families += [(scale.networks[0], variant) for variant in scale.variants]
    for network, variant in families:
        for penalty in PENALTIES:
            family = f"{PAPER}/{network}/{penalty}-{variant}"
            record = _merged(plan, family)
            if record is None:
                continue
            points += [(network, penalty, variant, record, point) for point in record["paths"][0]["points"]]
            figures.save(frontier_figures.draw(record), plan.folder(family))
            drawn |= {
                f"{network}, {penalty}, {variant}: {what}": plan.folder(family) / f"{name}.png"
                for name, what in (
                    ("widths", "figure 1, filters left"),
                    ("sizes", "figure 3, filters of each size"),
                    ("errors", "figures 4 and 5, error by MACs"),
                )
            }
    networks = {network: _weights(plan, network) for network in scale.networks}
    pictures = plan.folder(f"{PAPER}/kernels.png")
    pictures.parent.mkdir(parents=True, exist_ok=True)
    if any(networks.values()):
        sparsity_filters.save(next(found for found in networks.values() if found), pictures)
    drawn["Kernels of the first layer, by strength"] = pictures
    tables = [_architectures(), _points(points), _eq34(plan), _correlations(networks)]
    means = scale.means.format(images=plan.training_images(5000))
    return Page("Structured sparsity (anonymous draft)", means, tables, drawn)


def _merged(plan: JobPlan, family: str) -> dict[str, Any] | None:
    """Return one record with the points of all strengths that are done, strongest first, or None."""
    records = read_records(jobs(plan), f"{family}/alpha-", "paths")
    if not records:
        return None
    found = [point for record in records for point in record["paths"][0]["points"]]
    path = records[0]["paths"][0] | {"points": sorted(found, key=lambda point: (-point["strength"], point["tau"]))}
    return records[0] | {"paths": [path]}


def _architectures() -> Table:
    """Compare the convolutions of our networks with Table 2."""
    rows: list[list[Any]] = []
    for name, row in ARCHITECTURES.items():
        found = [module for module in MODELS[name].make().modules() if isinstance(module, nn.Conv2d)]
        ours = [module.out_channels for module in found], [module.kernel_size[0] for module in found]
        theirs = published(PAPER, "Table 2", row, "widths"), published(PAPER, "Table 2", row, "kernel sizes")
        rows.append([name, len(found), row, len(theirs[0]), "yes" if ours == theirs else "no"])
    columns = {"network": "", "convolutions": "d", "draft's row": "", "draft: convolutions": "d", "the same": ""}
    notes = [
        "The draft counts D = 20 layers with the linear one, which makes 19 convolutions, and prints (64, 5) x 18.",
        "Not reproduced: trainings of the networks for ImageNet, whose images do not fit in memory; loco-ext train "
        "takes them, with images of your own that do.",
    ]
    return Table("Table 2: base architectures", columns, rows, notes)


def _points(points: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]]) -> Table:
    columns = {"network": "", "penalty": "", "variant": "", "alpha": ".2g", "tau": "g", "filters": "d", "MACs": ".1%"}
    columns |= {"error": ".2f"}
    rows = []
    for network, penalty, variant, record, point in points:
        filters = sum(sum(counts[1:]) for counts in point["kernels"].values())
        share = point["macs"] / record["paths"][0]["macs"]
        cells = [point["strength"], point["tau"], filters, share, frontier_figures.error(point)]
        rows.append([network, penalty, variant, *cells])
    notes = ["Test errors in percent after the training and the threshold tau; the draft has curves, no numbers."]
    return Table("Figures 1, 3, 4 and 5: families of architectures", columns, rows, notes)


def _eq34(plan: JobPlan) -> Table:
    """Return the table of the networks that the penalty of eq. 34 leaves."""
    columns = {"network": "", "alpha": ".2g", "MACs": ".1%", "error": ".2f"}
    rows: list[list[Any]] = []
    for strength, (_, compaction) in _complexity(plan).items():
        if compaction.done:
            report = read_record(compaction.result, "accuracy_after", "macs_before", "macs_after")
            error = None if report["accuracy_after"] is None else 100 * (1 - report["accuracy_after"])
            share = report["macs_after"] / report["macs_before"]
            rows.append([SCALES[plan.preset].networks[0], strength, share, error])
    notes = ["By the prox, whose zeros are exact, instead of a threshold. The draft has no numbers."]
    return Table("Eq. 34: the penalty of the multiply-accumulates", columns, rows, notes)


def _weights(plan: JobPlan, network: str) -> dict[str, dict[float, Path]]:
    """Return the trained weights by penalty and strength."""
    found: dict[str, dict[float, Path]] = {}
    for penalty, strength in itertools.product(PENALTIES, SCALES[plan.preset].strengths):
        job = _path(plan, network, penalty, "plain", strength)
        if job.done:
            found.setdefault(penalty, {})[strength] = next((job.folder / "runs").glob("*/model.safetensors"))
    return found


def _correlations(networks: dict[str, dict[str, dict[float, Path]]]) -> Table:
    rows = [
        [network, penalty, strength, *sparsity_filters.correlations(path)]
        for network, penalties in networks.items()
        for penalty, strengths in penalties.items()
        for strength, path in strengths.items()
    ]
    columns = {"network": "", "penalty": "", "alpha": ".2g", "mean": ".3f", "lowest layer": ".3f", "highest": ".3f"}
    notes = [
        "Mean magnitude of the correlation of pairs of filters of a layer, over layers, and its range over layers. The "
        "draft announces them without numbers. Not reproduced: their course over the iterations of a training."
    ]
    return Table("Correlations of filters by strength", columns, rows, notes)
