"""Linear regions: networks with and without ROLL, and the radii of the regions around test samples.

Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019): the fully connected networks
of its MNIST experiment, and its figure 1.
"""

from typing import Any, NamedTuple

from loco_ext.experiments import figures, region_pictures, regions
from loco_ext.experiments.reproduce.jobs import Job, JobPlan, read_records
from loco_ext.experiments.reproduce.pages import Page, Table
from loco_ext.experiments.reproduce.published import published

PAPER = "linear-regions"
WHERE = "MNIST, fully connected (section 5)"
THEIRS = {  # the paper's rows by strength, hinge and percent
    (0.0, None, None): "vanilla",
    (2.0, 0.25, "100"): "ROLL, strength 2, hinge 0.25, percent 100",
    (2.0, 1.0, "100"): "ROLL, strength 2, hinge 1, percent 100",
}


class Scale(NamedTuple):
    """The size of a preset: the options of each job by its name, and the strength that stands for the paper's 2."""

    options: dict[str, tuple[str, ...]]
    strength: float
    minutes: float
    means: str


_DIGITS = ("--preset", "quick", "--hinges", "0.25,1", "--seeds", "1")
_GRID = regions.RegionsSettings()
SCALES = {
    "smoke": Scale(
        {"seed-0": (*_DIGITS, "--epochs", "1", "--units", "8", "--layers", "2", "--samples", "100", "--no-toy")},
        0.5,
        0.05,
        "The preset smoke shows that everything runs: one epoch on digits, beside the paper's networks on MNIST.",
    ),
    "cpu": Scale(
        {f"seed-{seed}": (*_DIGITS, "--seed", str(seed)) for seed in range(2)},
        0.5,
        5.0,
        "Cut down by the preset cpu: handwritten digits of 8x8 pixels for 150 epochs, two seeds, and two settings of "
        "ROLL, whose strength 0.5 stands for the paper's 2.",
    ),
    "paper": Scale(
        {
            f"strength-{strength:g}-percent-{percent}": ("--strengths", f"{strength:g}", "--percents", percent)
            for strength in _GRID.strengths
            for percent in _GRID.percents
        },
        2.0,
        600.0,
        "The paper's protocol: its training on MNIST, and a grid around the settings that it reports.",
    ),
}


def jobs(plan: JobPlan) -> list[Job]:
    """Return a job for each seed or, in ``paper``, for each strength and percentage; the first draws the plane."""
    scale, found = SCALES[plan.preset], []
    for place, (name, options) in enumerate(scale.options.items()):
        words = options if place == 0 or "--no-toy" in options else (*options, "--no-toy")
        found.append(plan.job(f"{PAPER}/{name}", "regions", *words, minutes=scale.minutes))
    return found


def page(plan: JobPlan) -> Page:
    """Return the table of radii of what is done, and the pictures."""
    records = read_records(jobs(plan), PAPER, "networks")
    networks = {(n["name"], n["seed"]): n for record in records for n in record["networks"]}
    arms = regions.summarise(list(networks.values()))
    out = plan.folder(PAPER)
    out.mkdir(parents=True, exist_ok=True)
    if arms:
        figures.save(region_pictures.draw({"arms": arms}), out)
    shown = {"Median radius against accuracy": out / "regions.png"}
    shown["Figure 1: linear regions of networks of the plane"] = jobs(plan)[0].folder / "toy.png"
    title = "Linear regions (Lee, Alvarez-Melis, Jaakkola 2019)"
    return Page(title, SCALES[plan.preset].means, [_radii(plan, arms)], shown)


def _radii(plan: JobPlan, arms: list[dict[str, Any]]) -> Table:
    columns = {"strength": "g", "hinge": "g", "percent": "", "accuracy": ".2%"}
    columns |= {f"radius, p = {p}": ".2g" for p in regions.NORMS}
    columns |= {"over vanilla": ".1f", "paper's row": "", "paper: accuracy": ".0f", "paper: radius, p = 2": ".2g"}
    columns |= {"paper: over vanilla": ".1f"}
    rows: list[list[Any]] = []
    for arm in arms:
        row = _their_row(plan, arm)
        theirs = [published(PAPER, WHERE, row, what) for what in ("test accuracy", "median radius, p = 2")]
        vanilla = published(PAPER, WHERE, "vanilla", "median radius, p = 2")
        radii = [arm["median_radius"][p]["mean"] for p in regions.NORMS]
        cells = [arm["strength"], arm["hinge"], arm["top_percent"], arm["accuracy"]["mean"], *radii]
        rows.append([*cells, arm["ratio"]["2"]["mean"], row or None, *theirs, theirs[1] and theirs[1] / vanilla])
    best = regions.best(arms)
    notes = ["Means over seeds; medians over test samples, in pixels of [0, 1]; ratios of the radii for p = 2."]
    if best is not None:
        setting = f"strength {best['strength']:g}"
        if best["hinge"] is not None:
            setting += f", hinge {best['hinge']:g}, percent {best['top_percent']}"
        notes.append(f"Widest at less than half a point of accuracy lost: {setting}.")
    notes.append("Not reproduced: the networks on CalTech-256 and speech, whose data and networks this package lacks.")
    return Table("Radii of linear regions", columns, rows, notes)


def _their_row(plan: JobPlan, arm: dict[str, Any]) -> str:
    """Return the paper's row beside which a setting stands, or an empty text."""
    strength = 2.0 if arm["strength"] == SCALES[plan.preset].strength else arm["strength"]
    return THEIRS.get((strength, arm["hinge"], arm["top_percent"]), "")
