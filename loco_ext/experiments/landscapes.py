"""The experiment with importance landscapes: networks trained with PILCRO and without, from the same seeds.

    settings.json            the settings, commit and versions
    ARM-SEED/                the training of each network, its weights, and its measurements as JSON
    landscapes.json          everything: settings, commit, versions, all networks' measurements, and each arm's summary
    *.png                    landscapes, test accuracies by epoch, accuracies under corruption, ablation curves

A run that was killed resumes from its last complete epoch or measurement and reaches the same numbers.

Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again": section 4, appendices A, D and E. The
paper has one seed and no other remedies.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from loco_ext.analysis import (
    CORRUPTIONS,
    ablation_curve,
    corrupt,
    gradient_importance,
    integrated_gradients,
    permutation_importance,
)
from loco_ext.analysis.corruptions import FAMILIES, LEVELS
from loco_ext.checkpoints import save_weights
from loco_ext.experiments import figures, landscapes_figures, run
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.landscapes_settings import NOISE, PLAIN, Arm, LandscapesSettings
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record, begin, cached_json, mean_and_error, read, rounded, with_error
from loco_ext.experiments.samples import Samples, unit_range
from loco_ext.experiments.settings import SettingsError, settings_errors
from loco_ext.experiments.train import make_model
from loco_ext.folders import owned
from loco_ext.input import NUMBER
from loco_ext.output import Rows, note, progress_bar, write_json
from loco_ext.regularizers import data_smoothness, importance_landscape, total_variation

BATCH = 500
TOP = 5  # the second accuracy counts an image as correct if its label is among this many largest logits
ABLATED_SHARES = tuple(k / 16 for k in range(17))  # shares of an image's pixels that are ablated
DIGITS = 5  # significant digits of the maps that are written
SEED = 0  # seed of the random numbers of all measurements, the same for all networks

_LANDSCAPE = {"map": [[NUMBER]], "total_variation": NUMBER}
_BY_CORRUPTION = {name: [NUMBER] for name in CORRUPTIONS}
_FORMS: dict[str, Any] = {  # of the measurements' files
    "at_first": {"landscape": _LANDSCAPE},
    "test": dict.fromkeys(("loss", "top1", "top5"), NUMBER),
    "landscape": _LANDSCAPE,
    "robustness": {"clean_accuracy": NUMBER, "accuracy": _BY_CORRUPTION, "kept_probability": _BY_CORRUPTION},
    "ablation": {"images": int, "shares": [NUMBER], "kept_probability": [NUMBER], "area": NUMBER},
    "resampling": dict.fromkeys(("spearman", "pearson_of_roots", "ratio"), NUMBER),
}


def measure(settings: LandscapesSettings, data: Dataset, out: Path, device: str, *, resume: bool = False) -> Record:
    """Train and measure all networks, or resume those in ``out``; write the files listed above there.

    The result is the content of ``landscapes.json``.

    Raises:
        SettingsError: settings do not fit the data or the model, or as for :func:`loco_ext.experiments.records.begin`.
        OSError: as for :func:`loco_ext.folders.owned`.
    """
    settings.training.check_data(data)
    if data.size < 2:
        raise SettingsError(f"data: expected images of at least 2x2 pixels, got {data.size}x{data.size}")
    processes = Processes(torch.device(device))
    experiment = _Experiment(settings, data, out, processes)
    with owned(out):
        record = begin(out, settings, data, processes, resume=resume)
        record["smoothness"] = rounded(experiment.smoothness, DIGITS)
        arms = [Arm.parse(name) for name in settings.arms]
        record["networks"] = [experiment.network(arm, number) for number in range(settings.seeds) for arm in arms]
        record["arms"] = summaries(record["networks"])
        write_json(out / "landscapes.json", record, indent=None)
        record = read(out / "landscapes.json")
        figures.save(landscapes_figures.draw(record), out)
    return record


class Noisy(nn.Module):
    """Network that computes the same as ``network``, but for normal noise on its images in training mode.

    Args:
        noise: standard deviation of the noise.
    """

    def __init__(self, network: nn.Module, noise: float) -> None:
        super().__init__()
        self.network, self.noise = network, noise

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x + self.noise * torch.randn_like(x) if self.training else x)


class _Experiment:
    """The networks of one experiment, and the measurements on them."""

    def __init__(self, settings: LandscapesSettings, data: Dataset, out: Path, processes: Processes) -> None:
        self.settings, self.data, self.out, self.processes = settings, data, out, processes
        self.normalization = Normalization(data.train).to(processes.device)
        self.smoothness = data_smoothness(self.batches(data.train.images))

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield normalised batches on the device."""
        return (self.normalization(batch.to(self.processes.device)) for batch in images.split(BATCH))

    def network(self, arm: Arm, number: int) -> Record:
        """Train one network and return its record; existing files are reused."""
        training = self.settings.training_of(arm, number)
        folder = self.out / f"{arm.folder}-{training.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        network = make_model(training, self.data)
        label = f"{arm.name}, seed {training.seed}"
        record: Record = {"arm": arm.name, "seed": training.seed, "diverged": False}
        network.to(self.processes.device)
        with settings_errors(kinds=(TypeError, ValueError)):  # a network of the user's own may return anything
            record["at_first"] = self.kept(folder, "at_first", lambda: {"landscape": self.landscape(network)})
        trained = Noisy(network, arm.value) if arm.kind == NOISE else network
        options: dict[str, Any] = {"resume": True, "model": trained, "label": label, "finite": True}
        try:
            history = run.run(training, self.data, folder, self.processes, **options)
        except run.DivergedError as error:  # the other networks are still worth their training
            note(str(error))
            return record | {"diverged": True}
        if trained is not network:  # other commands read the weights by the network's own names
            save_weights(folder / run.WEIGHTS, network.state_dict())
        record["test_accuracies"] = [epoch.test_accuracy for epoch in history]
        record["train_loss"] = history[-1].train_loss
        for name, measure in self.measurements().items():
            record[name] = self.kept(folder, name, partial(measure, network))
        return record

    def kept(self, folder: Path, name: str, what: Callable[[], Record]) -> Record:
        """Return a measurement from its file, which is written where it is missing."""
        path = folder / f"{name}.json"
        if not path.exists():
            note(f"{folder.name}: {name}")
        return cached_json(path, what, _FORMS[name])

    def measurements(self) -> dict[str, Callable[[nn.Module], Record]]:
        """Return the measurements of a trained network, by name."""
        settings = self.settings
        found: dict[str, Callable[[nn.Module], Record]] = {"test": self.test, "landscape": self.landscape}
        found |= {"robustness": self.robustness} if settings.corrupted_images else {}
        found |= {"ablation": self.ablation} if settings.ablated_images else {}
        return found | ({"resampling": self.resampling} if settings.resampled_inputs else {})

    def some(self, samples: Samples, count: int) -> Samples:
        """Return ``count`` random samples, the same for every network."""
        order = torch.randperm(len(samples.labels), generator=torch.Generator().manual_seed(SEED))[:count]
        return Samples(samples.images[order], samples.labels[order]).to(self.processes.device)

    @torch.no_grad()
    def test(self, network: nn.Module) -> Record:
        """Return the loss and accuracies on all test samples."""
        logits = torch.cat([network.eval()(batch) for batch in self.batches(self.data.test.images)])
        labels = self.data.test.labels.to(logits.device)
        best = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
        return {
            "loss": cross_entropy(logits, labels).item(),
            "top1": best[:, 0].double().mean().item(),
            "top5": best.any(1).double().mean().item(),
        }

    def landscape(self, network: nn.Module) -> Record:
        """Return the importance landscape over test images, and its total variation."""
        images, _ = self.some(self.data.test, self.settings.landscape_images)
        landscape = importance_landscape(network, self.batches(images), seed=SEED)
        return {"map": rounded(landscape, DIGITS), "total_variation": total_variation(landscape).item()}

    def robustness(self, network: nn.Module) -> Record:
        """Return accuracy, and what is left of the label's probability, by corruption and level (tables 3 and 4).

        The second is the mean of its probability over that on the clean image, over the images whose clean ones the
        network classifies correctly. The paper does not say which images it takes.
        """
        images, labels = self.some(self.data.test, self.settings.corrupted_images)
        whole = unit_range(images)
        clean = self.probabilities(network, whole)
        right = clean.argmax(1) == labels
        before = clean[right].gather(1, labels[right, None])
        accuracy: dict[str, list[float]] = {name: [] for name in CORRUPTIONS}
        kept: dict[str, list[float]] = {name: [] for name in CORRUPTIONS}
        with progress_bar(LEVELS * len(CORRUPTIONS), "corruptions", unit="corruption") as progress:
            for name, level in itertools.product(CORRUPTIONS, range(1, LEVELS + 1)):
                after = self.probabilities(network, corrupt(whole, name, level, SEED))
                accuracy[name].append((after.argmax(1) == labels).double().mean().item())
                kept[name].append((after[right].gather(1, labels[right, None]) / before).mean().item())
                progress.update()
        return {"clean_accuracy": right.double().mean().item(), "accuracy": accuracy, "kept_probability": kept}

    @torch.no_grad()
    def probabilities(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return float64 probabilities [N, classes] of images with values in [0, 1]."""
        scale = 255 if self.data.test.images.dtype == torch.uint8 else 1
        logits = torch.cat([network.eval()(batch) for batch in self.batches(scale * images)])
        return softmax(logits.double(), 1)

    def ablation(self, network: nn.Module) -> Record:
        """Return the remaining probability of the predicted class for each share of replaced pixels (figure 6).

        The images are the first of a random order that the network classifies correctly.
        """
        images, labels = self.some(self.data.test, len(self.data.test.labels))
        count = self.settings.ablated_images
        baselines, _ = self.some(self.data.train, self.settings.baseline_images)
        starts = torch.cat(list(self.batches(baselines)))
        pixels = self.data.size**2
        counts = [round(share * pixels) for share in ABLATED_SHARES]
        curves: list[Tensor] = []
        left = count
        with progress_bar(count, "ablation", unit="image") as progress:
            for batch, expected in zip(self.batches(images), labels.split(BATCH), strict=True):
                with torch.no_grad():
                    right = network.eval()(batch).argmax(1) == expected
                x, targets = batch[right][:left], expected[right][:left]
                if len(x):
                    relevance = integrated_gradients(network, x, targets, starts, len(starts))
                    curves.append(ablation_curve(network, x, targets, relevance, counts))
                left -= len(x)
                progress.update(len(x))
                if not left:
                    break
        if not curves:
            return {"images": 0, "shares": list(ABLATED_SHARES), "kept_probability": [], "area": None}
        mean = torch.cat(curves, 1).double().mean(1)
        area = torch.trapezoid(mean, torch.tensor(ABLATED_SHARES, dtype=torch.float64, device=mean.device)).item()
        shown = {"shares": list(ABLATED_SHARES), "kept_probability": mean.tolist()}
        return {"images": count - left, **shown, "area": area}

    def resampling(self, network: nn.Module) -> Record:
        """Return how near the two importances of Lemma 1 are over inputs at random, for the logit that is predicted."""
        images, _ = self.some(self.data.test, self.settings.resampling_images)
        x = torch.cat(list(self.batches(images)))
        with torch.no_grad():
            targets = network.eval()(x).argmax(1)
        generator = torch.Generator().manual_seed(SEED)
        sizes = torch.tensor(x.shape[1:])
        units = (torch.rand(self.settings.resampled_inputs, 3, generator=generator) * sizes).long()
        resampled = permutation_importance(network, x, targets, units, seed=SEED)
        predicted = gradient_importance(network, x, targets)[tuple(units.T)]
        roots = resampled.clamp(min=0).sqrt().numpy(), predicted.sqrt().numpy()
        return {
            "spearman": float(stats.spearmanr(resampled.numpy(), predicted.numpy()).statistic),
            "pearson_of_roots": float(np.corrcoef(*roots)[0, 1]),
            "ratio": (predicted.sum() / resampled.sum()).item(),
        }


def family_accuracy(network: Record, family: str, level: int | None = None, what: str = "accuracy") -> float | None:
    """Return the mean over a family's corruptions, and over levels unless one from 1 to 5 is given.

    It is NaN where a value is missing, and None where nothing was measured.
    """
    if "robustness" not in network:
        return None
    found = network["robustness"][what]
    values = np.array([found[name] for name, corruption in CORRUPTIONS.items() if corruption.family == family], float)
    return float(values.mean() if level is None else values[:, level - 1].mean())


# The figures that arms are compared by, from a network's record.
FIGURES: dict[str, Callable[[Record], float | None]] = {
    "accuracy": lambda network: network["test"]["top1"],
    "top5": lambda network: network["test"]["top5"],
    "loss": lambda network: network["test"]["loss"],
    "total_variation": lambda network: network["landscape"]["total_variation"],
    **{family: partial(family_accuracy, family=family) for family in FAMILIES},
    "ablation": lambda network: network.get("ablation", {}).get("area"),
    "spearman": lambda network: network.get("resampling", {}).get("spearman"),
}


def summaries(networks: list[Record]) -> dict[str, Record]:
    """Return each arm's figures: mean and standard error over seeds, and those of the differences from plain.

    Differences are between networks of one seed. A single seed has no standard errors, which are None, as all figures
    are of an arm one of whose networks has diverged.
    """
    arms = landscapes_figures.by_arm(networks)
    plain = {network["seed"]: network for network in arms.get(PLAIN, [])}
    found: dict[str, Record] = {arm: {} for arm in arms}
    for (arm, of_arm), name in itertools.product(arms.items(), FIGURES):
        entry = mean_and_error([_figure(network, name) for network in of_arm])
        if arm != PLAIN and plain:
            differences = [_figure(network, name) - _figure(plain[network["seed"]], name) for network in of_arm]
            compared = mean_and_error(differences)
            entry |= {"difference": compared["mean"], "difference_standard_error": compared["standard_error"]}
        found[arm][name] = entry
    return found


def _figure(network: Record, name: str) -> float:
    """Return one of FIGURES; NaN where it was not measured, or the network has diverged."""
    value = None if network["diverged"] else FIGURES[name](network)
    return math.nan if value is None else value


def rows(record: Record) -> Rows:
    """Return headers and cells of a table of all arms: means over seeds, plus or minus their standard errors."""
    headers = ["arm", "accuracy", "TV", *FAMILIES, "ablation", "Lemma 1"]
    cells = []
    for arm, summary in record["arms"].items():
        percents = [with_error(summary[name], ".1f", 100) for name in ("accuracy", *FAMILIES)]
        others = [with_error(summary[name], ".2g") for name in ("total_variation", "ablation", "spearman")]
        cells.append([arm, percents[0], others[0], *percents[1:], *others[1:]])
    return headers, cells
