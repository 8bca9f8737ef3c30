"""LOCO-REG: networks trained with uniform decay, with the factors estimated from them, and their statistics.

Schneider, "Locality-Promoting Representation Learning" (2022), Tables 3 to 6 and section 7.1. The networks of one seed
begin with the same weights and see the same samples in the same order, so that their errors are paired.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from torch import nn

from loco_ext.experiments.models import MODELS
from loco_ext.experiments.reproduce import loco_reg_figures
from loco_ext.experiments.reproduce.jobs import Job, JobPlan, read_record
from loco_ext.experiments.reproduce.pages import Page, Table
from loco_ext.experiments.reproduce.published import published
from loco_ext.experiments.settings import SettingsError

PAPER = "loco-reg"
RULES = ("local", "paper")
WIDE = "vgg13-5x5"  # section 7.1
SIMPLE = "small"  # the simple CNN of figures 1 and 2
SUPPORTED = 0.001  # p-value below which a network of section 7.1 counts
ROWS = {"small": "VGG13", "vgg13": "VGG13", "resnet18": "ResNet18", "mobilenet": "MobileNet"}
DATA = {"digits": "CIFAR-10", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist": "FASHION-MNIST"}
IMAGENET = ("VGG16", "ResNet50", "InceptionV3", "Xception", "MobileNet", "DenseNet121")
PARTS = ("all", "lower", "upper")
PAIRS = {"centre - neighbours": (0.0, 1.0), "neighbours - corners": (1.0, 2**0.5)}
PAIRS_5X5 = {
    **PAIRS,
    "corners - distance 2": (2**0.5, 2.0),
    "distance 2 - distance sqrt(5)": (2.0, 5**0.5),
    "distance sqrt(5) - distance sqrt(8)": (5**0.5, 8**0.5),
}


class Scale(NamedTuple):
    """The size of a preset."""

    data: tuple[str, ...] | None  # data sets; None for those at hand
    networks: tuple[str, ...]  # of Tables 4 and 5
    seeds: int  # number of networks of each kind
    modulations: tuple[float, ...]  # values of c
    options: tuple[str, ...]  # of the trainings
    minutes: dict[str, float]  # of a training by network
    means: str  # what the preset has cut down
    statistic: str = "signed"  # of the weights that factors are estimated from


SCALES = {
    "smoke": Scale(
        None,
        (SIMPLE,),
        2,
        (1.5,),
        ("--preset", "quick", "--epochs", "1", "--weight-decay", "0.1"),
        {SIMPLE: 0.02},
        "The preset smoke shows that everything runs: two networks for one epoch on digits, beside the paper's VGG13 "
        "on CIFAR-10. Its decay is strong, so that it acts in one epoch, and its factors come from magnitudes, "
        "since signed means are about 0 so early.",
        "abs",
    ),
    "cpu": Scale(
        None,
        (SIMPLE,),
        10,
        (1.5,),
        ("--preset", "quick", "--epochs", "4"),
        {SIMPLE: 1.0},
        "Cut down by the preset cpu: ten paired seeds of a small CNN on {images} for 4 epochs, c = 1.5, beside the "
        "paper's VGG13 after 250. Other networks, data sets, values of c and the kernels of 5x5 are not reproduced.",
    ),
    "paper": Scale(
        ("cifar10", "cifar100", "fashion-mnist"),
        ("vgg13", "resnet18", "mobilenet"),
        20,
        (0.5, 1.0, 1.5, 2.5),
        ("--preset", "paper"),
        {"vgg13": 1900.0, WIDE: 4500.0, "resnet18": 4600.0, "mobilenet": 700.0, SIMPLE: 60.0},
        "The paper's protocol: 20 paired seeds, 250 epochs. Its networks were trained in TensorFlow.",
    ),
}


class _Arm(NamedTuple):
    """One way to train; ``rule`` is None for uniform decay."""

    rule: str | None = None
    c: float = 0.0

    @property
    def name(self) -> str:
        return "uniform" if self.rule is None else f"{self.rule}-{self.c:g}"


def jobs(plan: JobPlan) -> list[Job]:
    """Return all jobs: uniform networks, then the factors estimated from them, then networks trained with these."""
    scale, found = SCALES[plan.preset], []
    for data, network in _pairs(plan):
        place = f"{PAPER}/{data}-{network}"
        for arm in _arms(scale):
            if arm.rule is not None:
                found.append(_analysis(plan, place, arm.name, scale.seeds, "--eta-rule", arm.rule, "--c", arm.c))
            found += [_training(plan, place, network, data, seed, arm) for seed in range(scale.seeds)]
    if plan.preset == "paper":
        place = f"{PAPER}/cifar100-{WIDE}"
        found += [_training(plan, place, WIDE, "cifar100", seed, _Arm()) for seed in range(scale.seeds)]
        found.append(_analysis(plan, place, "uniform", scale.seeds))
        found.append(_training(plan, f"{PAPER}/cifar10-{SIMPLE}", SIMPLE, "cifar10", 0, _Arm()))
    for row, path in _checkpoints(plan).items():
        found.append(plan.job(f"{PAPER}/imagenet/{row}", "analyze", path, minutes=0.1))
    return found


def _pairs(plan: JobPlan) -> Iterator[tuple[str, str]]:
    scale = SCALES[plan.preset]
    return ((data, network) for data in scale.data or (plan.images,) for network in scale.networks)


def _arms(scale: Scale) -> list[_Arm]:
    return [_Arm(), *(_Arm(rule, c) for rule in RULES for c in scale.modulations)]


def _training(plan: JobPlan, place: str, network: str, data: str, seed: int, arm: _Arm) -> Job:
    options: list[Any] = ["--model", network, "--dataset", data, "--seed", seed, *SCALES[plan.preset].options]
    if arm.rule is not None:
        options += ["--locality", plan.folder(place) / f"analysis-{arm.name}" / "analysis.json"]
    minutes = SCALES[plan.preset].minutes[network]
    stage = 1 if arm.rule is None else 3
    return plan.job(f"{place}/{arm.name}-{seed}", "train", *options, minutes=minutes, stage=stage)


def _analysis(plan: JobPlan, place: str, name: str, seeds: int, *options: Any) -> Job:
    weights = [plan.folder(place) / f"uniform-{seed}" / "model.safetensors" for seed in range(seeds)]
    words = [*weights, *options, "--weighting", "halves", "--stat", SCALES[plan.preset].statistic]
    return plan.job(f"{place}/analysis-{name}", "analyze", *words, minutes=0.05, stage=2)


def _checkpoints(plan: JobPlan) -> dict[str, Path]:
    """Return the user's files by row of Table 4: those whose names are a row's, before a hash like torchvision's."""
    if plan.checkpoints is None:
        return {}
    rows = {row.lower(): row for row in IMAGENET}
    files = {path.stem.lower().partition("-")[0]: path for path in sorted(plan.checkpoints.iterdir()) if path.is_file()}
    return {rows[name]: path for name, path in files.items() if name in rows}


def page(plan: JobPlan) -> Page:
    """Return the tables of what is done."""
    tables = [_networks(), _statistics(plan), _wide(plan), _errors(plan), _factors(plan)]
    data = (SCALES[plan.preset].data or (plan.images,))[0]
    trained = plan.folder(f"{PAPER}/{data}-{SIMPLE}/uniform-0/model.safetensors")
    figures = loco_reg_figures.save(trained, data, plan.data, plan.folder(PAPER))
    means = SCALES[plan.preset].means.format(images=plan.training_images(50_000))
    return Page("LOCO-REG (Schneider 2022)", means, tables, figures)


def _networks() -> Table:
    """Compare the convolutions of our networks with Table 3."""
    rows = []
    for name, row in (("vgg13", "VGG13"), ("mobilenet", "MobileNet")):
        found = [module for module in MODELS[name].make().modules() if isinstance(module, nn.Conv2d)]
        ours = {
            "convolutions": len(found),
            "kernel sizes": [module.kernel_size[0] for module in found],
            "output channels": [module.out_channels for module in found],
        }
        same = all(value == published(PAPER, "Table 3", row, column) for column, value in ours.items())
        rows.append([row, len(found), published(PAPER, "Table 3", row, "convolutions"), "yes" if same else "no"])
    columns = {"network": "", "convolutions": "d", "paper": "d", "sizes and channels the same": ""}
    note = "ResNet18 is that of He et al. for small images. Table 3 prints some shapes of VGG13 without input channels."
    return Table("Table 3: networks", columns, rows, [note])


def _statistics(plan: JobPlan) -> Table:
    """Compare the differences between taps with Table 4, means over the networks of all seeds."""
    columns = {"network": "", "paper's row": "", "layers": ""}
    columns |= {name: ".3f" for pair in PAIRS for name in (pair, f"paper: {pair}")}
    places = {
        (f"{network}, {data}", f"CIFAR-100, {ROWS[network]}"): f"{data}-{network}/analysis-{RULES[0]}-1.5"
        for data, network in _pairs(plan)
    }
    given = _checkpoints(plan)
    places |= {(row, f"ImageNet, {row}"): f"imagenet/{row}" for row in given}
    rows = [
        [name, row, part, *_cells(plan.folder(f"{PAPER}/{place}"), row, part)]
        for (name, row), place in places.items()
        for part in PARTS
    ]
    missing = [row for row in IMAGENET if row not in given]
    notes = [
        "Means over networks, in standard deviations of the layer; kernels of 3x3 alone count. The paper says that "
        "other data sets are like CIFAR-100."
    ]
    if missing:
        notes.append(f"Not reproduced without their files in --checkpoints: {', '.join(missing)}.")
    return Table("Table 4: differences of weights nearer and farther from the centre", columns, rows, notes)


def _cells(place: Path, row: str, part: str) -> list[Any]:
    cells: list[Any] = []
    for pair, distances in PAIRS.items():
        found = _differences(place, (3, 3), part, distances)
        mean = float(np.mean([cell["mean"] for cell in found])) if found else None
        cells += [mean, published(PAPER, "Table 4", row, f"{part}, {pair}")]
    return cells


def _differences(place: Path, size: tuple[int, int], part: str, distances: tuple[float, float]) -> list[dict[str, Any]]:
    """Return the cells of all networks of an analysis; none where that is not done."""
    analysis = _read(place / "analysis.json")
    networks = [] if analysis is None else analysis["statistics"].values()
    return [
        cell
        for network in networks
        for cell in network["cells"]
        if tuple(cell["kernel_size"]) == size and cell["part"] == part and np.allclose(cell["distances"], distances)
    ]


def _wide(plan: JobPlan) -> Table:
    """Compare kernels of 5x5 with section 7.1: the networks in which weights decrease with the distance."""
    title, columns = "Section 7.1: VGG13 with kernels of 5x5", {"difference": "", "networks": "d"}
    columns |= {"positive": "d", f"p < {SUPPORTED:g}": "d", "paper: positive of 20": "d", "paper: p below": "g"}
    if plan.preset != "paper":
        return Table(title, columns, [], [f"Not reproduced: the preset {plan.preset} has no kernels of 5x5."])
    place, row = plan.folder(f"{PAPER}/cifar100-{WIDE}/analysis-uniform"), "VGG13 with 5x5 kernels"
    rows: list[list[Any]] = []
    for pair, distances in PAIRS_5X5.items():
        found = _differences(place, (5, 5), "all", distances)
        positive = [cell for cell in found if cell["mean"] > 0]
        sure = [cell for cell in positive if cell["p_greater"] < SUPPORTED]
        theirs = [published(PAPER, "section 7.1", row, name) for name in (pair, f"{pair}, p below")]
        if pair == list(PAIRS_5X5)[-1]:
            theirs = [None, None]
        rows.append([pair, len(found), len(positive), len(sure), *theirs])
    note = "In three of the paper's 20 networks the last difference was significantly negative."
    return Table(title, columns, rows, [note])


def _errors(plan: JobPlan) -> Table:
    """Compare test errors with Table 5; the p-value is that of the one-sided paired t-test that LOCO-REG's are less."""
    columns = {"network": "", "decay": "", "seeds": "d", "error": ".2f", "difference": "+.2f", "p": ".2g"}
    columns |= {"paper's row": "", "paper: uniform": ".2f", "paper: LOCO-REG": ".2f", "paper: p below": "g"}
    rows: list[list[Any]] = []
    for data, network in _pairs(plan):
        place, scale = plan.folder(f"{PAPER}/{data}-{network}"), SCALES[plan.preset]
        uniform = _test_errors(place, _Arm(), scale.seeds)
        row = f"{DATA[data]}, {ROWS[network]}"
        theirs = [published(PAPER, "Table 5", row, column) for column in ("uniform", "LOCO-REG", "p below")]
        for arm in _arms(scale):
            errors = _test_errors(place, arm, scale.seeds)
            seeds = sorted(set(errors) & set(uniform))
            ours, others = (np.array([found[seed] for seed in seeds]) for found in (errors, uniform))
            rows.append([f"{network}, {data}", arm.name, len(seeds), *_compared(ours, others, arm), row, *theirs])
    notes = [
        "Percent of the test samples. The decay local-C has the factors of Table 6 with c = C, the corners' ratio the "
        "other way round; paper-C has them as printed. The difference from uniform decay and the p-value of the "
        "one-sided paired t-test are over the same seeds. The paper's c is 1.5."
    ]
    return Table("Table 5: test errors", columns, rows, notes)


def _compared(errors: np.ndarray, uniform: np.ndarray, arm: _Arm) -> list[float | None]:
    """Return the mean error, the difference from uniform decay, and the p-value that errors are less."""
    mean = float(errors.mean()) if len(errors) else None
    if arm.rule is None or mean is None:
        return [mean, None, None]
    differences = errors - uniform
    tested = len(errors) > 1 and np.ptp(differences) > 0
    p = float(stats.ttest_rel(errors, uniform, alternative="less").pvalue) if tested else None
    return [mean, float(differences.mean()), p]


def _test_errors(place: Path, arm: _Arm, seeds: int) -> dict[int, float]:
    """Return the test errors in percent of the networks that are done, by seed."""
    found = {}
    for seed in range(seeds):
        folder = place / f"{arm.name}-{seed}"
        if (folder / "model.safetensors").is_file():
            found[seed] = _last_error(folder / "metrics.jsonl")
    return found


def _last_error(path: Path) -> float:
    """Return the test error in percent after the last epoch, or raise SettingsError."""
    try:
        return 100 * (1 - json.loads(path.read_text().splitlines()[-1])["test_accuracy"])
    except (FileNotFoundError, ValueError, IndexError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{path}: expected a line of JSON for each epoch, remove its folder to train anew ({type(error).__name__})"
        ) from error


def _factors(plan: JobPlan) -> Table:
    """Return the factors (gamma, eta) of Table 6 by layer; the paper prints the formulas alone."""
    columns = {"network": "", "layer": "", **{f"{what}, {rule}": ".3f" for rule in RULES for what in ("gamma", "eta")}}
    rows: list[list[Any]] = []
    for data, network in _pairs(plan):
        place = plan.folder(f"{PAPER}/{data}-{network}")
        by_rule = [_read(place / f"analysis-{rule}-1.5" / "analysis.json") for rule in RULES]
        known = [analysis["locality"] for analysis in by_rule if analysis is not None]
        if len(known) == len(RULES):
            rows += [
                [f"{network}, {data}", layer, *(factor for locality in known for factor in locality[layer])]
                for layer in known[0]
            ]
    notes = ["c = 1.5. The paper gives the formulas, no values. Layers are uniform, (1, 1), where means are uncertain."]
    return Table("Table 6: factors by layer", columns, rows, notes)


def _read(path: Path) -> Any:
    return read_record(path, "statistics", "locality") if path.is_file() else None
