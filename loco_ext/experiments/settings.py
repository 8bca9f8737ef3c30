"""Settings that determine a training run: the same settings give the same numbers on the same kind of machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from loco_ext import arguments
from loco_ext.errors import UserError
from loco_ext.experiments.data import CLASSES, DATA, FOLDER, Dataset
from loco_ext.experiments.models import MODELS, find_model, is_own
from loco_ext.options import Option
from loco_ext.penalties import GroupPenalty
from loco_ext.penalties.filters import WEIGHTINGS
from loco_ext.sparsity import KernelPenalty, RingPenalty

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("steps", "cosine")
PENALTIES = ("rings", "kernels", "complexity")
SOLVERS = ("prox", "subgradient")

Factors = tuple[float, ...]
Locality = None | Factors | Mapping[str, Factors]


class SettingsError(UserError, ValueError):
    """Raised for an invalid setting; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Settings of one training run. The paper's lambda is half the weight decay."""

    model: Annotated[
        str,
        Option(
            f"{', '.join(MODELS)}; or a function of yours that returns a torch.nn.Module, as MODULE:FUNCTION, which is "
            "called with num_classes if it takes that"
        ),
    ]
    data: Annotated[
        str,
        Option(
            f"{', '.join(CLASSES)}; or folder, images of your own: --data has train/CLASS/*.png, and val or test alike",
            flag="--dataset",
            metavar="NAME",
        ),
    ]
    image_size: Annotated[
        int | None,
        Option(
            "height and width that a folder's images are brought to, by resizing and a crop of the centre; none: 32",
            arguments.count,
            metavar="PIXELS",
        ),
    ]
    epochs: Annotated[int, Option("passes over the training samples; milestones move along", arguments.count)]
    batch_size: Annotated[int, Option("samples per step, over all processes", arguments.count)]
    optimizer: Annotated[str, Option("sgd, adam or adamw")]
    learning_rate: Annotated[float, Option("learning rate of the first epoch", arguments.number, flag="--lr")]
    momentum: Annotated[float, Option("of SGD, less than 1", arguments.number)]
    weight_decay: Annotated[float, Option("twice LOCO-REG's lambda", arguments.number)]
    schedule: Annotated[
        str, Option("steps: the learning rate falls after each milestone; cosine: it falls to 0 along a cosine")
    ]
    milestones: Annotated[
        tuple[int, ...],
        Option("epochs after which the learning rate falls: 70,140", arguments.epochs, metavar="EPOCHS"),
    ]
    factor: Annotated[float, Option("by which the learning rate is multiplied after a milestone", arguments.number)]
    locality: Annotated[
        Locality,
        Option(
            "none, GAMMA,ETA, one factor per distance class, or a file that analyze has written", arguments.locality
        ),
    ]
    norm: Annotated[str, Option("l2 or l1, of the weight decay")]
    augment: Annotated[bool, Option("random crops and flips, of all data but digits", bool)]
    shuffle: bool
    seed: Annotated[int, Option("decides initial weights, order, augmentations and dropout", arguments.seed)]
    width: Annotated[float, Option("factor of the numbers of channels, of resnet* and plain*", arguments.number)]
    penalty: Annotated[
        str | None, Option("none, rings, kernels or complexity, of all convolutions", arguments.name_or_none)
    ]
    strength: Annotated[float, Option("of the penalty, the draft's alpha", arguments.number)]
    weighting: Annotated[str, Option("plain, normalized or scaled, of the penalty")]
    kind: Annotated[str, Option("half or full rings")]
    folded: Annotated[
        bool, Option("penalise weights times the scale of the batch norm behind them; not with complexity", bool)
    ]
    solver: Annotated[str, Option("prox: exact zeros; subgradient: the penalty is part of the loss")]
    amp: Annotated[
        bool, Option("compute under autocast: in bfloat16; on GPUs without it in float16, with a GradScaler", bool)
    ]
    weights: str | None  # digest of the initial weights; None means that they are drawn at random

    def __post_init__(self) -> None:
        if not is_own(self.model):
            _choice("model", self.model, tuple(MODELS))
        _choice("data", self.data, DATA)
        if self.image_size is not None and self.data != FOLDER:
            raise SettingsError(f"image_size: expected none for {self.data}, got {self.image_size}")
        _choice("optimizer", self.optimizer, OPTIMIZERS)
        _choice("schedule", self.schedule, SCHEDULES)
        _choice("norm", self.norm, ("l2", "l1"))
        if self.norm == "l1" and self.optimizer == "adamw":
            raise SettingsError("norm: expected l2 for adamw, whose decay is decoupled")
        if self.epochs < 1:
            raise SettingsError(f"epochs: expected at least 1, got {self.epochs}")
        if self.batch_size < 2:
            raise SettingsError(f"batch_size: expected at least 2, got {self.batch_size}")
        for name in ("learning_rate", "momentum", "weight_decay", "factor", "width", "strength"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"{name}: expected a finite number, at least 0, got {value}")
        if self.momentum >= 1:
            raise SettingsError(f"momentum: expected less than 1, got {self.momentum}")
        self._check_penalty()
        if self.width == 0 or (self.width != 1 and not find_model(self.model).scalable):
            scalable = ", ".join(name for name, model in MODELS.items() if model.scalable)
            raise SettingsError(f"width: expected 1, or more than 0 for {scalable}; got {self.width} for {self.model}")
        if any(milestone < 1 for milestone in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise SettingsError(f"milestones: expected ascending epochs from 1 on, got {self.milestones}")
        if self.milestones and self.schedule == "cosine":
            raise SettingsError(f"milestones: expected none with the cosine schedule, got {self.milestones}")
        try:
            rates = [self.learning_rate_of(epoch) for epoch in (0, *self.milestones)]
        except OverflowError:
            rates = [math.inf]
        if not all(map(math.isfinite, rates)):
            raise SettingsError(f"factor: expected one that leaves the learning rate finite, got {self.factor}")

    def _check_penalty(self) -> None:
        if self.penalty is not None:
            _choice("penalty", self.penalty, PENALTIES)
            if self.folded and self.penalty == "complexity":
                raise SettingsError("folded: expected False with the penalty complexity, got True")
        elif self.folded:
            raise SettingsError("folded: expected False without a penalty, got True")
        elif self.strength:
            raise SettingsError(f"strength: expected 0 without a penalty, got {self.strength}")
        _choice("weighting", self.weighting, tuple(WEIGHTINGS))
        _choice("kind", self.kind, ("half", "full"))
        _choice("solver", self.solver, SOLVERS)

    def make_penalty(self) -> GroupPenalty | None:
        """Return the penalty shared by all convolutions; None also where it differs from layer to layer."""
        if self.penalty == "rings":
            return RingPenalty(self.strength, self.kind, self.weighting)
        return KernelPenalty(self.strength, self.weighting) if self.penalty == "kernels" else None

    def learning_rate_of(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.learning_rate * self.factor ** sum(epoch >= milestone for milestone in self.milestones)

    def check_data(self, data: Dataset, processes: int = 1) -> None:
        """Raise SettingsError where the network or the batches do not fit the data."""
        least = find_model(self.model).least_size
        if data.size < least:
            raise SettingsError(
                f"model: {self.model} needs images of at least {least}x{least} pixels, got {data.name}, "
                f"{data.size}x{data.size}"
            )
        if self.batch_size < 2 * processes:
            raise SettingsError(
                f"batch_size: expected at least 2 for each of {processes} processes, got {self.batch_size}"
            )
        if len(data.train.labels) < 2 * processes:
            raise SettingsError(
                f"data: expected at least {2 * processes} training samples, got {len(data.train.labels)}"
            )


# LOCO-REG, section 7: the schedule of all its experiments; lambda = 0.0005 is a weight decay of 0.001.
PAPER: dict[str, Any] = {
    "data": FOLDER,
    "image_size": None,
    "epochs": 250,
    "batch_size": 128,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.001,
    "schedule": "steps",
    "milestones": (70, 140, 190, 230, 245),
    "factor": 0.316,
    "locality": None,
    "norm": "l2",
    "augment": True,
    "shuffle": True,
    "seed": 0,
    "width": 1.0,
    "penalty": None,
    "strength": 0.0,
    "weighting": "plain",
    "kind": "half",
    "folded": False,
    "solver": "prox",
    "amp": False,
    "weights": None,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "quick": PAPER | {"epochs": 8, "schedule": "cosine", "milestones": ()},
}
PRESETS_MEAN = (
    "paper: LOCO-REG's schedule, section 7; quick: what a CPU trains in minutes, few epochs whose learning rate falls "
    "to 0 along a cosine"
)


def from_preset(preset: str, **overrides: Any) -> Settings:
    """Return a preset's settings with some replaced; None keeps the preset's value.

    Milestones scale with the number of epochs. Those that coincide are merged, and those after the last epoch dropped.

    Raises:
        SettingsError: the preset is unknown, or the settings are invalid.

    >>> from_preset("paper", model="vgg13", data="cifar10", epochs=25).milestones
    (7, 14, 19, 23, 24)
    >>> from_preset("paper", model="vgg13", data="cifar10", epochs=3).milestones
    (1, 2)
    """
    _choice("preset", preset, tuple(PRESETS))
    given = {name: value for name, value in overrides.items() if value is not None}
    values = PRESETS[preset] | given
    if "epochs" in given and "milestones" not in given:
        whole = PRESETS[preset]["epochs"]
        moved = {max(1, round(m * given["epochs"] / whole)) for m in values["milestones"]}
        values["milestones"] = tuple(sorted(m for m in moved if m < given["epochs"]))
    if given.get("schedule") == "cosine" and "milestones" not in given:
        values["milestones"] = ()
    return Settings(**values)


def check_same(settings: Settings, recorded: Mapping[str, Any], epochs: int, path: Path) -> None:
    """Raise SettingsError where settings differ from those of the run to resume.

    The number of epochs may be larger, and milestones may differ among the epochs to come.

    Args:
        recorded: the settings of the run that ``path`` holds.
        epochs: number of completed epochs.
    """
    names = [field.name for field in fields(settings) if field.name not in ("epochs", "milestones")]
    different = [name for name in names if getattr(settings, name) != recorded.get(name)]
    if settings.epochs < recorded["epochs"]:
        raise SettingsError(f"epochs: expected at least {recorded['epochs']}, as the run in {path} has")
    done = [tuple(m for m in milestones if m < epochs) for milestones in (settings.milestones, recorded["milestones"])]
    if done[0] != done[1]:
        different.append("milestones")
    if different:
        found = ", ".join(str(recorded.get(name)) for name in different)
        raise SettingsError(f"{', '.join(different)}: expected {found}, as the run in {path} has; resume it with them")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
