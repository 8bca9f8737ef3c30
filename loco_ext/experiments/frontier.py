"""The frontier of accuracy against cost: one network trained with penalties of many strengths, from a dense start.

    settings.json    the settings, commit and versions
    dense-W/         the run that trains the network of width W without a penalty
    runs/            the run of every point, each in a folder named by its start weights and its strength
    path-W/          the records of the path from that network, see sparsity.frontier
    frontier.json    everything: settings, commit, versions, and per width the path with its points
    *.png            figures like the draft's 1, 3, 4 and 5

After a kill, a run resumes from its last complete epoch and a path from its last complete point, to the same numbers.

The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers": sections 3.3 and 4. Its own
method is "subgradient": the penalty is part of the loss, and weights not above tau are set to zero afterwards. "prox"
is this package's method. "width" is the baseline for both: the base architecture with all layers narrowed by one
factor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval
from typer import Option

from loco_ext import sparsity
from loco_ext.experiments import figures, frontier_figures, run
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import digest
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import begin
from loco_ext.experiments.settings import EFFECTS as TRAINING_EFFECTS
from loco_ext.experiments.settings import (
    Effects,
    Settings,
    SettingsError,
    check_fields,
    count_option,
    list_option,
    settings_errors,
)
from loco_ext.experiments.train import evaluate, make_model
from loco_ext.folders import owned
from loco_ext.option_parsers import MOST
from loco_ext.output import Rows, write_json
from loco_ext.penalties import GroupPenalty
from loco_ext.penalties.strengths import convolutions
from loco_ext.sparsity.folded_norms import convolutions_and_norms
from loco_ext.sparsity.frontier import Frontier

LOSS_SAMPLES = 1000  # training samples on which alpha_max is estimated
LATENCY_BATCH = 16


@dataclass(frozen=True)
class FrontierSettings:
    """Settings of one path, or of one path per width.

    ``training`` is the training of each point. Its strength and solver are ignored, and its width and penalty as
    well for the method "width". By default batch norms stay, and the penalty is on the product of weights and their
    scales (the draft, eqs. 30 and 31), which determines the function of the network. A penalty not only selects
    weights but also shrinks those it keeps, which the refit undoes: points before the last are refitted for as many
    more epochs as the path still takes, so that all networks are trained for the same number of epochs.
    """

    training: Settings
    method: Annotated[
        Literal["prox", "subgradient", "width"],
        Option(
            help="How networks become smaller: prox, this package's method; subgradient, the draft's; width, without "
            "a penalty, by fewer channels."
        ),
    ] = "prox"
    dense_optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    dense_learning_rate: Annotated[
        float, Option("--dense-lr", min=0, help="Learning rate of the first training, without a penalty.")
    ] = 0.1
    dense_epochs: Annotated[
        int,
        Option(
            min=0,
            max=MOST,
            help="Number of epochs of the first training, without a penalty, from which all points start. With 0, they "
            "start from the initial weights, as in the draft. The method width has only this training.",
        ),
    ] = 8
    refit_epochs: Annotated[
        int, Option(min=0, help="Number of epochs for which each compacted network is trained further; 0 skips this.")
    ] = 1
    points: Annotated[int, count_option(help="Number of strengths of the penalty.")] = 15
    span: Annotated[float, Option(help="Ratio of the smallest to the largest strength.")] = 1e-4
    strengths: Annotated[
        tuple[float, ...] | None,
        list_option(
            float,
            "NUMBERS",
            show_default="chosen by --points and --span",
            help="Strengths of the penalty, separated by commas. The method subgradient needs them.",
        ),
    ] = None
    path: Annotated[
        Literal["dense", "up", "down"],
        Option(
            help="Network from which a point starts: dense, the one trained without a penalty; up, that of the next "
            "weaker point; or down, that of the next stronger point."
        ),
    ] = "dense"
    taus: Annotated[
        tuple[float, ...],
        list_option(float, "NUMBERS", help="Thresholds of the method subgradient, separated by commas."),
    ] = (1e-4, 1e-3, 1e-2, 1e-1)
    widths: Annotated[
        tuple[float, ...],
        list_option(
            float, "NUMBERS", help="Factors of the method width for all numbers of channels, separated by commas."
        ),
    ] = (1.0, 0.75, 0.5, 0.35, 0.25, 0.125)
    batch_norm: Annotated[
        Literal["scaled", "folded", "live"],
        Option(
            help="Treatment of batch norms. scaled penalises filters times the scale of the batch norm behind them. "
            "folded merges batch norms into the convolutions before the first point. live penalises the filters only, "
            "which can shrink without any change of the network."
        ),
    ] = "scaled"
    latency: Annotated[bool, Option(help="Measure the latency of networks before and after compaction.")] = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("strengths", "taus", "widths"):
            values = getattr(self, name)
            if values is not None and not (values and all(math.isfinite(v) and v >= 0 for v in values)):
                raise SettingsError(f"{name}: expected finite numbers, at least 0, got {values}")
        if not 0 < self.span <= 1:
            raise SettingsError(f"span: expected more than 0 and at most 1, got {self.span}")
        if (self.training.penalty is None) == self.penalises:
            expected = "rings or kernels" if self.penalises else "none with the method width"
            raise SettingsError(f"penalty: expected {expected}, got {self.training.penalty}")
        if self.training.penalty == "complexity":  # a path begins where nothing is left; this penalty never gets there
            raise SettingsError("penalty: expected rings or kernels, got complexity")
        if self.method == "subgradient" and self.strengths is None:  # the search for the largest needs exact zeros
            raise SettingsError("strengths: expected numbers with the method subgradient, got none")
        for width in self.used_widths:
            self.dense(width)

    @property
    def penalises(self) -> bool:
        """Return whether points are trained with a penalty."""
        return self.method != "width"

    @property
    def trains_points(self) -> bool:
        return self.penalises or self.refit_epochs > 0

    @property
    def used_widths(self) -> tuple[float, ...]:
        return (self.training.width,) if self.penalises else self.widths

    def dense(self, width: float) -> Settings:
        """Return the settings of the training that a path starts from, of one epoch if there is none."""
        return replace(
            self.without_penalty(width, max(1, self.dense_epochs)),
            optimizer=self.dense_optimizer,
            learning_rate=self.dense_learning_rate,
        )

    def without_penalty(self, width: float, epochs: int) -> Settings:
        """Return a point's training settings without the penalty, for a network that already has its structure."""
        none = {"penalty": None, "group_norm": "l2", "power": 1, "folded": None, "strength": 0.0, "solver": "prox"}
        return replace(self.training, epochs=epochs, width=width, **none)  # type: ignore[arg-type]

    def point(self, width: float, strength: float) -> Settings:
        """Return the training settings of one point."""
        point = replace(self.training, width=width, strength=strength, folded=self.batch_norm == "scaled")
        return replace(point, solver="subgradient" if self.method == "subgradient" else "prox")


def _of_training(has_effect: Callable[[Settings], object]) -> Callable[[FrontierSettings], object]:
    return lambda settings: has_effect(settings.training)


def _uses_sgd(settings: FrontierSettings) -> bool:
    first = settings.dense_epochs > 0 and settings.dense_optimizer == "sgd"
    return first or (settings.trains_points and settings.training.optimizer == "sgd")


_WITH_PENALTY = "--method prox or subgradient"
EFFECTS: Effects = {
    **{name: (_of_training(has_effect), needed) for name, (has_effect, needed) in TRAINING_EFFECTS.items()},
    **dict.fromkeys(("epochs", "path", "strengths", "weighting", "width"), (lambda s: s.penalises, _WITH_PENALTY)),
    **dict.fromkeys(
        ("learning_rate", "optimizer"), (lambda s: s.trains_points, f"{_WITH_PENALTY}, or with --refit-epochs")
    ),
    **dict.fromkeys(
        ("points", "span"),
        (lambda s: s.method == "prox" and s.strengths is None, "--method prox and without --strengths"),
    ),
    "dense_learning_rate": (lambda s: s.dense_epochs > 0, "at least 1 in --dense-epochs"),
    "momentum": (_uses_sgd, "--optimizer sgd or a first training (--dense-epochs)"),
    "taus": (lambda s: s.method == "subgradient", "--method subgradient"),
    "widths": (lambda s: s.method == "width", "--method width"),
}


def measure(
    settings: FrontierSettings, data: Dataset, out: Path, device: str, *, resume: bool = False
) -> dict[str, Any]:
    """Train and measure all points, or resume those in ``out``; write the files listed above there.

    The result is the content of ``frontier.json``.

    Raises:
        SettingsError: settings do not fit the data or the model, or as for :func:`loco_ext.experiments.records.begin`.
        DivergedError: the loss of a training is not finite; its last good epoch is left.
        OSError: as for :func:`loco_ext.folders.owned`.
    """
    settings.training.check_data(data)
    processes = Processes(torch.device(device))
    with owned(out):
        record = begin(out, settings, data, processes, resume=resume, latency_batch=LATENCY_BATCH)
        record["paths"] = [
            {"width": width, **_Path(settings, width, data, out, processes).measure().to_dict()}
            for width in settings.used_widths
        ]
        write_json(out / "frontier.json", record)
        figures.save(frontier_figures.draw(record), out)
    return record


class _Path:
    """The path of one width: its training and its measurements."""

    def __init__(
        self, settings: FrontierSettings, width: float, data: Dataset, out: Path, processes: Processes
    ) -> None:
        self.settings, self.width, self.data, self.out, self.processes = settings, width, data, out, processes
        self.normalization = Normalization(data.train).to(processes.device)
        self.test = data.test.to(processes.device)

    def measure(self) -> Frontier:
        settings = self.settings
        dense = settings.dense(self.width)
        model = make_model(dense, self.data)
        if settings.batch_norm == "folded":
            with settings_errors("batch_norm: expected scaled or live for this model; "):
                convolutions_and_norms(model)
        if settings.dense_epochs:
            self.run(dense, self.out / f"dense-{self.width:g}", model)
        if settings.batch_norm == "folded":
            fold(model)
        try:
            return sparsity.frontier(
                model,
                self.fit,
                self.evaluate,
                settings.training.make_penalty() or sparsity.RingPenalty(0.0),
                example_inputs=self.normalization(self.test.images[:LATENCY_BATCH]),
                strengths=settings.strengths if settings.penalises else (0.0,),
                points=settings.points,
                span=settings.span,
                loss=self.loss,
                refit=self.refit if settings.refit_epochs else None,
                path=settings.path,
                taus=settings.taus if settings.method == "subgradient" else (0.0,),
                folded=settings.method == "subgradient" and settings.batch_norm == "scaled",
                latency=settings.latency,
                folder=self.out / f"path-{self.width:g}",
            )
        except ValueError as error:
            # The argument's name is that of the command's folder of data.
            raise SettingsError(str(error).removeprefix("folder: ")) from error

    def fit(self, model: nn.Module, penalty: GroupPenalty) -> None:
        """Train a point; for the method "width" there is nothing to train."""
        if self.settings.penalises:
            self.train(model, self.settings.point(self.width, penalty.strength), f"{penalty.strength:.6e}")

    def refit(self, model: nn.Module, to_come: int) -> None:
        epochs = self.settings.refit_epochs + to_come * self.settings.training.epochs
        self.train(model, self.settings.without_penalty(self.width, epochs), f"refit-{epochs}")

    def train(self, model: nn.Module, setting: Settings, name: str) -> None:
        """Train in a folder named after the start weights, which also give the seed, so that augmentations differ."""
        start = digest(model)
        folder, seed = self.out / "runs" / f"{start}-{name}", int(start[:8], 16)
        self.run(replace(setting, seed=seed), folder, model)

    def run(self, setting: Settings, folder: Path, model: nn.Module) -> None:
        run.run(setting, self.data, folder, self.processes, resume=True, model=model, finite=True)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss on the first training samples, without augmentation, in evaluation mode."""
        images, labels = self.data.train.first(LOSS_SAMPLES).to(self.processes.device)
        return cross_entropy(model.eval()(self.normalization(images)), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        loss, accuracy = evaluate(model, self.test, self.normalization, self.processes)
        return {"accuracy": accuracy, "loss": loss, **filter_norms(model)}


def fold(model: nn.Module) -> None:
    """Fold each batch norm with a scale that reads a convolution alone into it, in place; the function stays.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    model.eval()
    names = {module: name for name, module in model.named_modules()}
    for name, (convolution, norm) in convolutions_and_norms(model).items():
        if norm is not None:
            model.set_submodule(name, fuse_conv_bn_eval(convolution, norm))
            model.set_submodule(names[norm], nn.Identity())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def filter_norms(model: nn.Module) -> dict[str, float]:
    """Return the means of ``||k||`` and of ``||k|| |gamma| / sigma`` over the filters ``k`` that are not zero.

    gamma is the scale and sigma the running standard deviation of the batch norm that reads the convolution alone; both
    are 1 where there is none. The scale of a filter does not matter before a normalisation, so the second product is
    unchanged when a penalty only shrinks the weights. The means are NaN where all filters are zero, and the second one
    where torch.fx cannot trace the model.
    """
    norms = {module: module.weight.flatten(1).norm(dim=1).double() for module in convolutions(model).values()}
    effective = dict(norms)
    try:
        for module, norm in convolutions_and_norms(model).values():
            if norm is not None and norm.running_var is not None:
                effective[module] = norms[module] * (norm.weight.abs() / (norm.running_var + norm.eps).sqrt())
    except ValueError:
        effective = {module: norm * math.nan for module, norm in norms.items()}

    def mean(values: dict[_ConvNd, Tensor]) -> float:
        return torch.cat([values[module][norm > 0] for module, norm in norms.items()]).mean().item()

    return {"weight_norm": mean(norms), "effective_norm": mean(effective)}


def rows(record: dict[str, Any]) -> Rows:
    """Return headers and cells of a table of all points."""
    width_only = record["settings"]["method"] == "width"
    headers = ["width" if width_only else "strength", "tau", "test error", "MACs", "of dense", "filters", "ms"]
    dense = frontier_figures.dense_path(record)["macs"]
    cells = []
    for path in record["paths"]:
        for point in path["points"]:
            live = sum(sum(counts[1:]) for counts in point["kernels"].values())
            times = point["latency_before"], point["latency_after"]
            cells.append(
                [
                    f"{path['width'] if width_only else point['strength']:.3g}",
                    f"{point['tau']:g}",
                    f"{frontier_figures.error(point):.2f}%",
                    f"{point['macs']:,}",
                    f"{point['macs'] / dense:.1%}",
                    str(live),
                    "" if None in times else " -> ".join(f"{1e3 * time:.2f}" for time in times),
                ]
            )
    return headers, cells
