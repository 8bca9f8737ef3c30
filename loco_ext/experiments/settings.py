"""What decides a training run: the same settings give the same numbers on the same kind of machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from loco_ext.experiments.data import CLASSES, Dataset
from loco_ext.experiments.models import MODELS
from loco_ext.sparsity import KernelPenalty, RingPenalty
from loco_ext.sparsity.penalties import GroupPenalty
from loco_ext.sparsity.weightings import WEIGHTINGS

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("steps", "cosine")
PENALTIES = ("rings", "kernels", "complexity")
SOLVERS = ("prox", "subgradient")

Factors = tuple[float, ...]
Locality = None | Factors | Mapping[str, Factors]


class SettingsError(ValueError):
    """A setting that cannot be; the text names it."""


@dataclass(frozen=True)
class Settings:
    """One training run.

    Args:
        model, data: names, see MODELS and :func:`loco_ext.experiments.data.load`.
        epochs: passes over the training samples.
        batch_size: samples per step, over all processes.
        optimizer: "sgd", "adam" or "adamw", ours.
        learning_rate, momentum, weight_decay: momentum is SGD's; the paper's lambda is half the weight decay.
        schedule: "steps" multiplies the learning rate by ``factor`` after each of ``milestones``, counted in epochs;
            "cosine" lets it fall to 0.
        locality: None; factors for all convolutions, (gamma, eta) or one per distance class; or factors by layer.
        norm: "l2" or "l1", of the decay.
        augment: crops and flips, where the data allow them.
        shuffle: the samples in another order in every epoch.
        seed: decides initial weights, order and augmentations, and what dropout takes away.
        width: by which the numbers of channels are multiplied, of the models that can be scaled.
        penalty: None, or of all convolutions "rings", "kernels", or "complexity", the multiply-adds of the whole
            network (:func:`loco_ext.sparsity.complexity_penalties`); see :mod:`loco_ext.sparsity`.
        strength, weighting, kind: of the penalty; kind is that of rings.
        folded: the penalty is one of the kernels times the scales of the batch normalisations behind them; not with
            "complexity".
        solver: "prox" ends every step with the penalty's exact prox, "subgradient" adds its value to the loss.
    """

    model: str
    data: str
    epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    schedule: str
    milestones: tuple[int, ...]
    factor: float
    locality: Locality
    norm: str
    augment: bool
    shuffle: bool
    seed: int
    width: float
    penalty: str | None
    strength: float
    weighting: str
    kind: str
    folded: bool
    solver: str

    def __post_init__(self) -> None:
        _choice("model", self.model, tuple(MODELS))
        _choice("data", self.data, tuple(CLASSES))
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
        self._check_penalty()
        if self.width == 0 or (self.width != 1 and not MODELS[self.model].scalable):
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
        if self.penalty and self.solver == "prox" and self.optimizer == "sgd" and self.momentum >= 1:
            raise SettingsError(f"momentum: expected less than 1 with a penalty, got {self.momentum}")

    def make_penalty(self) -> GroupPenalty | None:
        """The penalty of each convolution; None also where they differ from layer to layer."""
        if self.penalty == "rings":
            return RingPenalty(self.strength, self.kind, self.weighting)
        return KernelPenalty(self.strength, self.weighting) if self.penalty == "kernels" else None

    def learning_rate_of(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.learning_rate * self.factor ** sum(epoch >= milestone for milestone in self.milestones)

    def check_data(self, data: Dataset, processes: int = 1) -> None:
        """Raises SettingsError where the network or the batches do not fit the data."""
        least = MODELS[self.model].least_size
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
_PAPER: dict[str, Any] = {
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
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # What a processor without a GPU trains in minutes: few epochs, the learning rate falling to 0 over them.
    "quick": _PAPER | {"epochs": 8, "schedule": "cosine", "milestones": ()},
}


def from_preset(preset: str, **overrides: Any) -> Settings:
    """A preset's settings, some replaced; None leaves the preset's. Milestones move along with a new number of epochs.

    Raises:
        SettingsError: an unknown preset, or settings that cannot be.

    >>> from_preset("paper", model="vgg13", data="cifar10", epochs=25).milestones
    (7, 14, 19, 23, 24)
    """
    _choice("preset", preset, tuple(PRESETS))
    given = {name: value for name, value in overrides.items() if value is not None}
    values = PRESETS[preset] | given
    if "epochs" in given and "milestones" not in given:
        whole = PRESETS[preset]["epochs"]
        values["milestones"] = tuple(max(1, round(m * given["epochs"] / whole)) for m in values["milestones"])
    return Settings(**values)


def differences(settings: Settings, others: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which a run on record differs."""
    return [field.name for field in fields(settings) if getattr(settings, field.name) != others.get(field.name)]


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
