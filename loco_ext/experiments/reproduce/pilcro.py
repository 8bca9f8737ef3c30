"""PILCRO: networks trained with its losses and without, with random crops and without.

Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again": Tables 1 and 3, figures 3, 4 and 6.
"""

import math
from typing import Any, NamedTuple

from loco_ext.analysis.corruptions import FAMILIES, LEVELS
from loco_ext.experiments import figures, landscapes, landscapes_figures
from loco_ext.experiments.landscapes_settings import PLAIN, PRESETS, Arm
from loco_ext.experiments.reproduce.jobs import Job, JobPlan, read_records
from loco_ext.experiments.reproduce.pages import Page, Table
from loco_ext.experiments.reproduce.published import published

PAPER = "pilcro"
CROPS = {"RC-": ("--no-crop",), "RC+": ()}
FIGURES = {"top1": "accuracy", "top5": "top5", "total_variation": "total_variation", "loss": "loss"}


class Scale(NamedTuple):
    """The size of a preset: arms and the paper's arm beside each, seeds, options of all jobs."""

    arms: dict[str, str]
    seeds: int
    options: tuple[str, ...]
    minutes: float
    means: str


def _measured(images: int) -> tuple[str, ...]:
    """Return the options that measure on this many images, or on fewer where a measurement takes long."""
    names = {"landscape": images, "corrupted": images // 4, "ablated": images // 10, "baseline": max(2, images // 50)}
    few = [word for name, count in names.items() for word in (f"--{name}-images", str(count))]
    inputs = max(4, images // 20)  # with fewer than two there is no correlation
    return (*few, "--resampled-inputs", str(inputs), "--resampling-images", str(images // 4))


_ARMS = {"plain": "plain", "target:10": "target:10", "curvature:0.1": "curvature:1"}
SCALES = {
    "smoke": Scale(
        {"plain": "plain", "target:10": "target:10"},
        1,
        ("--preset", "short", "--samples", "64", "--epochs", "1", "--batch-size", "32", *_measured(20)),
        0.02,
        "The preset smoke shows that everything runs: an epoch on 64 digits, beside the paper's ResNet-50, CIFAR-100.",
    ),
    "cpu": Scale(
        _ARMS,
        2,
        ("--preset", "short", "--samples", "4000", "--epochs", "6", "--batch-size", "32", *_measured(400)),
        1.5,
        "Cut down by the preset cpu: the small CNN on {images} for 6 epochs, two seeds, alpha 10 and 0.1, beside the "
        "paper's ResNet-50 on CIFAR-100 after 200 epochs with alpha 10 and 1.",
    ),
    "paper": Scale(
        {arm: arm for arm in PRESETS["paper"]["arms"]},
        1,
        ("--preset", "paper"),
        30_000.0,
        "The paper's protocol on CIFAR-100. Its crops have reflection padding, ours zeros.",
    ),
}


def jobs(plan: JobPlan) -> list[Job]:
    """Return a job for each seed, arm and way to crop."""
    scale, found = SCALES[plan.preset], []
    data = None if plan.preset == "paper" else plan.images
    words = () if data is None else ("--dataset", data)
    for crops, cropped in CROPS.items():
        for seed in range(scale.seeds):
            for arm in scale.arms:
                name = f"{PAPER}/{crops}/{Arm.parse(arm).folder}-{seed}"
                options = (*scale.options, *words, *cropped, "--arms", arm, "--seed", str(seed), "--seeds", "1")
                found.append(plan.job(name, "landscapes", *options, minutes=scale.minutes, data=data))
    return found


def page(plan: JobPlan) -> Page:
    """Return the tables of what is done, and the figures of each way to crop."""
    records = {crops: _merged(plan, crops) for crops in CROPS}
    shown = {}
    for crops, record in records.items():
        out = plan.folder(f"{PAPER}/{crops}")
        figures.save(landscapes_figures.draw(record), out)
        for what in ("landscapes", "training", "robustness", "ablation"):
            shown[f"{crops}: {what}"] = out / f"{what}.png"
    tables = [_accuracies(plan, records), _robustness(plan, records), _imagenet()]
    title = "PILCRO (Moens, Yu, Salimi-Khorshidi 2020)"
    return Page(title, SCALES[plan.preset].means.format(images=plan.training_images(4000)), tables, shown)


def _merged(plan: JobPlan, crops: str) -> dict[str, Any]:
    """Return one record of all jobs with these crops that are done; its lists are empty if none is.

    Once a plain network is done, networks of seeds without one are left out, as they have no partner.
    """
    records = read_records(jobs(plan), f"{PAPER}/{crops}/", "networks")
    networks = [network for record in records for network in record["networks"]]
    if partners := {network["seed"] for network in networks if network["arm"] == PLAIN}:
        networks = [network for network in networks if network["seed"] in partners]
    first = records[0] if records else {}
    return first | {"networks": networks, "arms": landscapes.summaries(networks)}


def _accuracies(plan: JobPlan, records: dict[str, dict[str, Any]]) -> Table:
    columns = {"crops": "", "arm": "", "seeds": "d"}
    for name in FIGURES:
        form = {"total_variation": ".2g", "loss": ".3f"}.get(name, ".2%")
        columns |= {name.replace("_", " "): form, f"paper: {name.replace('_', ' ')}": form}
    columns |= {"ablation": ".3f", "Lemma 1": ".2f", "paper's row": ""}
    rows: list[list[Any]] = []
    for crops, record in records.items():
        for arm, theirs in SCALES[plan.preset].arms.items():
            summary = record["arms"].get(arm, {})
            networks = [n for n in record["networks"] if n["arm"] == arm]
            row: list[Any] = [crops, arm, len(networks)]
            for column, name in FIGURES.items():
                row += [_mean(summary, name), published(PAPER, "Table 1", f"{crops}, {theirs}", column)]
            rows.append([*row, _mean(summary, "ablation"), _mean(summary, "spearman"), f"{crops}, {theirs}"])
    notes = [
        "RC+: crops and flips are random; RC-: flips alone. Means over seeds. Ablation is the area under the curve of "
        "figure 6, which the paper has for ImageNet alone, and Lemma 1 the rank correlation of its two importances."
    ]
    return Table("Table 1: accuracies and total variations", columns, rows, notes)


def _mean(summary: dict[str, Any], name: str) -> float | None:
    return summary.get(name, {}).get("mean")


def _robustness(plan: JobPlan, records: dict[str, dict[str, Any]]) -> Table:
    columns = {"crops": "", "arm": "", "corruption": ""}
    for level in range(1, LEVELS + 1):
        columns |= {f"level {level}": ".2f", f"paper: {level}": ".2f"}
    rows: list[list[Any]] = []
    for crops, record in records.items():
        for arm, theirs in SCALES[plan.preset].arms.items():
            found = [n for n in record["networks"] if n["arm"] == arm and not n["diverged"]]
            for family in FAMILIES:
                row: list[Any] = [crops, arm, family]
                for level in range(1, LEVELS + 1):
                    kept = [landscapes.family_accuracy(n, family, level, "kept_probability") for n in found]
                    known = [value for value in kept if value is not None and math.isfinite(value)]
                    row.append(sum(known) / len(known) if known else None)
                    row.append(published(PAPER, "Table 3", f"{crops}, {theirs}", f"{family}, level {level}"))
                rows.append(row)
    notes = [
        "Share of the label's probability that is kept, of images that are classified correctly without corruption."
    ]
    return Table("Table 3: robustness against corruptions", columns, rows, notes)


def _imagenet() -> Table:
    note = "Not reproduced: the experiments hold all images in memory, which ImageNet does not fit."
    return Table("Tables 2 and 4, figure 5: ImageNet", {}, [], [note])
