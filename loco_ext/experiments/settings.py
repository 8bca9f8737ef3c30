"""Settings that determine a training run: the same settings give the same numbers on the same kind of machine."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import Option

from loco_ext import option_parsers
from loco_ext.errors import UserError
from loco_ext.experiments.data import DATA, FOLDER, FORMATS, IMAGE_SIZE, Dataset, load
from loco_ext.experiments.models import MODELS, find_model, is_own
from loco_ext.option_parsers import MOST, name_or_none, separated
from loco_ext.penalties import GroupPenalty
from loco_ext.sparsity import KernelPenalty, RingPenalty
from loco_ext.sparsity.budget.distillation import TEMPERATURE, WEIGHT

Factors = tuple[float, ...]
Locality = None | Factors | Mapping[str, Factors]


def count_option(**more: Any) -> Any:
    """Return the option of a number of epochs, samples and the like, at least 1."""
    return Option(min=1, max=MOST, **more)


def share_option(help: str) -> Any:
    """Return the option of the share of a network's cost that may remain."""
    return Option(metavar="SHARE", show_default="no limit", help=help)


def list_option(kind: Callable[[str], Any], metavar: str, *, name: str | None = None, **more: Any) -> Any:
    """Return the option of values that are separated by commas; ``name`` replaces that of the field."""
    return Option(*filter(None, [name]), parser=separated(kind), metavar=metavar, **more)


class SettingsError(UserError, ValueError):
    """Raised for an invalid setting; the message names it."""


@contextmanager
def settings_errors(
    begin: str = "", kinds: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Raise SettingsError for an error of these kinds inside the ``with``; its text is ``begin`` and the error's."""
    try:
        yield
    except kinds as error:
        raise SettingsError(f"{begin}{error}") from error


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise SettingsError unless ``value`` is one of the choices."""
    if value not in choices:
        raise SettingsError(f"{name}: expected one of {', '.join(map(str, choices))}, got {value!r}")


def check_fields(settings: Any) -> None:
    """Raise SettingsError for a field whose value its Literal does not list or its option does not allow."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        kind, *options = get_args(hint) if get_origin(hint) is Annotated else [hint]
        kinds = [kind, *get_args(kind)]
        if value is None and type(None) in kinds:
            continue
        for literal in (kind for kind in kinds if get_origin(kind) is Literal):
            check_choice(name, value, get_args(literal))
        for option in options:
            if option.min is not None and not (math.isfinite(value) and value >= option.min):
                raise SettingsError(f"{name}: expected a finite number, at least {option.min}, got {value}")
            if option.max is not None and value > option.max:
                raise SettingsError(f"{name}: expected at most {option.max}, got {value}")


# By option, when it has an effect, and what it needs for that.
Effects = Mapping[str, tuple[Callable[[Any], object], str]]


def check_effects(settings: Any, effects: Effects, given: Mapping[str, Any]) -> None:
    """Raise SettingsError for an option that was given and has no effect beside the others."""
    for name, value in given.items():
        has_effect, needed = effects.get(name, (lambda _: True, ""))
        if not has_effect(settings):
            raise SettingsError(f"{name}: expected it only with {needed}, got {value}")


BUDGETS = ("macs", "parameters", "latency")


def budget_of(settings: Any) -> tuple[str, float] | None:
    """Return the name and the share of the budget that is given, or None; raise SettingsError if it is no budget."""
    given = [(name, share) for name in BUDGETS if (share := getattr(settings, name, None)) is not None]
    if len(given) > 1:
        raise SettingsError(f"{', '.join(name for name, _ in given)}: expected at most one of them")
    for name, share in given:
        if not 0 < share <= 1:
            raise SettingsError(f"{name}: expected a share in (0, 1], got {share}")
    return given[0] if given else None


def check_temperature(settings: Any) -> None:
    """Raise SettingsError unless the temperature is a positive number, the default one without distillation."""
    temperature = settings.temperature
    if not (math.isfinite(temperature) and temperature > 0):
        raise SettingsError(f"temperature: expected a finite number, more than 0, got {temperature}")
    if settings.distillation is None and temperature != TEMPERATURE:
        raise SettingsError(f"temperature: expected {TEMPERATURE:g} without distillation, got {temperature}")


@dataclass(frozen=True)
class Settings:
    """Settings of one training run.

    The defaults are the schedule of all of LOCO-REG's experiments (section 7); its lambda is half the weight decay.
    """

    model: Annotated[
        str,
        Option(
            help=f"Network: {', '.join(MODELS)}; or MODULE:FUNCTION, your own function that returns a torch.nn.Module. "
            "It is called with num_classes if it has that parameter."
        ),
    ]
    data: Annotated[
        str,
        Option(
            "--dataset",
            metavar="NAME",
            help=f"Data set: {', '.join(FORMATS)}; or folder, your own images, which --data has as train/CLASS/*.png "
            "and likewise in val or test.",
        ),
    ] = FOLDER
    image_size: Annotated[
        int | None,
        count_option(
            metavar="PIXELS",
            show_default=str(IMAGE_SIZE),
            help="Height and width to which the images of --dataset folder are resized and cropped.",
        ),
    ] = None
    epochs: Annotated[int, count_option(help="Number of passes over the training samples.")] = 250
    batch_size: Annotated[
        int, Option(min=2, max=MOST, help="Number of samples per step, over all processes together.")
    ] = 128
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], Option(help="Optimizer of the training.")] = "sgd"
    learning_rate: Annotated[float, Option("--lr", min=0, help="Learning rate in the first epoch.")] = 0.1
    momentum: Annotated[float, Option(min=0, help="Momentum of SGD, less than 1.")] = 0.9
    weight_decay: Annotated[float, Option(min=0, help="Weight decay; it is twice the lambda of LOCO-REG.")] = 0.001
    schedule: Annotated[
        Literal["steps", "cosine"],
        Option(help="How the learning rate falls: in steps, after each milestone; or along a cosine, to 0."),
    ] = "steps"
    milestones: Annotated[
        tuple[int, ...],
        list_option(
            int,
            "EPOCHS",
            help="Epochs after which the learning rate falls, separated by commas, such as 70,140. Unless they are "
            "given they scale with --epochs.",
        ),
    ] = (70, 140, 190, 230, 245)
    factor: Annotated[
        float, Option(min=0, help="Factor by which the learning rate is multiplied after each milestone.")
    ] = 0.316
    locality: Annotated[
        Locality,
        Option(
            parser=option_parsers.locality,
            metavar="FACTORS",
            help="How the decay varies within a filter: none; GAMMA,ETA; one factor for each distance class; or a file "
            "that the command analyze has written.",
        ),
    ] = None
    norm: Annotated[Literal["l2", "l1"], Option(help="Norm of the weights that the decay reduces.")] = "l2"
    augment: Annotated[
        bool, Option(help="Crop and flip training images at random. The digits are never augmented.")
    ] = True
    crop: Annotated[
        bool, Option(help="Let --augment crop images as well as flip them; --no-crop leaves only the flips.")
    ] = True
    shuffle: bool = True
    seed: Annotated[
        int,
        Option(
            min=0, max=2**63 - 1, help="Seed of the initial weights, the order of samples, augmentation and dropout."
        ),
    ] = 0
    width: Annotated[
        float,
        Option(min=0, help="Factor by which all numbers of channels are multiplied, for resnet* and plain* only."),
    ] = 1.0
    penalty: Annotated[
        Literal["rings", "kernels", "complexity"] | None,
        Option(
            parser=name_or_none,
            help="Penalty on all convolutions: none; rings, on rings of taps; kernels, on whole filters; or "
            "complexity, on the network's multiply-accumulates.",
        ),
    ] = None
    strength: Annotated[float, Option(min=0, help="Strength of --penalty, called alpha in the draft.")] = 0.0
    weighting: Annotated[
        Literal["plain", "normalized", "scaled"],
        Option(help="Factor of a group of n weights in the penalty: plain: 1; normalized: 1/sqrt(n); scaled: sqrt(n)."),
    ] = "plain"
    kind: Annotated[Literal["half", "full"], Option(help="Whether the penalty removes half or full rings of taps.")] = (
        "half"
    )
    group_norm: Annotated[
        Literal["l2", "linf"], Option(help="Norm of the penalty's groups of weights; complexity allows only l2.")
    ] = "l2"
    power: Annotated[
        int,
        Option(
            min=1,
            max=2,
            help="Power of the penalty's sums, which run over each filter's rings or over each layer's filters.",
        ),
    ] = 1
    folded: Annotated[
        bool | None,
        Option(
            show_default="on for the penalties rings and kernels, otherwise off",
            help="Penalise each filter times the scale of the batch norm behind it. Without this, the batch norm "
            "undoes the penalty's effect on a filter's length.",
        ),
    ] = None
    solver: Annotated[
        Literal["prox", "subgradient"],
        Option(
            help="How the penalty is minimised: prox sets exact zeros after each step; subgradient adds it to the loss."
        ),
    ] = "prox"
    macs: Annotated[
        float | None,
        share_option(
            "Share of the network's multiply-accumulates that may remain. Filters are removed between a tenth and "
            "half of the training; afterwards, the command compact makes the small network."
        ),
    ] = None
    parameters: Annotated[
        float | None, share_option("Share of the network's parameters that may remain; an alternative to --macs.")
    ] = None
    latency: Annotated[
        float | None,
        share_option(
            "Share of the network's latency for one image, measured on this machine, that may remain; an "
            "alternative to --macs."
        ),
    ] = None
    method: Annotated[
        Literal["pruning", "penalty"],
        Option(
            help="How --macs, --parameters or --latency removes filters: pruning removes more and more of the least "
            "important filters; penalty shrinks all filters until the network meets the limit, which is slower."
        ),
    ] = "pruning"
    granularity: Annotated[
        Literal["rings", "filters"],
        Option(
            help="What --macs, --parameters or --latency removes. rings: outer rings of taps and whole filters; "
            "filters: whole filters only."
        ),
    ] = "rings"
    round_to: Annotated[
        int,
        count_option(
            help="With --macs, --parameters or --latency, make all numbers of channels multiples of this number; 8 "
            "suits fast kernels.",
        ),
    ] = 1
    pilcro: Annotated[
        Literal["curvature", "target"] | None,
        Option(
            parser=name_or_none,
            help="Regulariser of the importance landscape, applied every ten steps: none; curvature, which flattens "
            "the landscape; or target, which makes it as smooth as the training images.",
        ),
    ] = None
    alpha: Annotated[
        float,
        Option(
            min=0,
            help="Strength of --pilcro, whose losses are means over pixels. The paper uses 1, 10 and 100, which suit "
            "target. curvature is a steeper loss and needs a smaller strength, such as 0.1.",
        ),
    ] = 0.0
    distillation: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            metavar="WEIGHT",
            show_default=f"{WEIGHT} with --teacher",
            help="Weight of the teacher's outputs in the loss.",
        ),
    ] = None
    temperature: Annotated[
        float, Option(help="Temperature that softens the outputs of --teacher and of the network.")
    ] = TEMPERATURE
    amp: Annotated[
        bool,
        Option(help="Train under autocast in bfloat16, or in float16 with a GradScaler on GPUs without bfloat16."),
    ] = False
    weights: str | None = None  # digest of the initial weights; None means that they are drawn at random
    teacher: str | None = None  # digest of the teacher's weights

    def __post_init__(self) -> None:
        check_fields(self)
        if not is_own(self.model):
            check_choice("model", self.model, MODELS)
        check_choice("data", self.data, DATA)
        if self.image_size is not None and self.data != FOLDER:
            raise SettingsError(f"image_size: expected none for {self.data}, got {self.image_size}")
        if self.norm == "l1" and self.optimizer == "adamw":
            raise SettingsError("norm: expected l2 for adamw, whose decay is decoupled")
        if self.momentum >= 1:
            raise SettingsError(f"momentum: expected less than 1, got {self.momentum}")
        if budget_of(self) is None:
            for name, default in (("method", "pruning"), ("granularity", "rings"), ("round_to", 1)):
                if (value := getattr(self, name)) != default:
                    raise SettingsError(f"{name}: expected {default} without macs, parameters or latency, got {value}")
        check_temperature(self)
        if self.penalty in (None, "complexity"):
            which = "without a penalty" if self.penalty is None else "with the penalty complexity"
            if self.folded:
                raise SettingsError(f"folded: expected False {which}, got True")
            if (self.group_norm, self.power) != ("l2", 1):
                raise SettingsError(f"group_norm, power: expected l2, 1 {which}, got {self.group_norm}, {self.power}")
        if self.strength and self.penalty is None:
            raise SettingsError(f"strength: expected 0 without a penalty, got {self.strength}")
        if (self.alpha == 0) != (self.pilcro is None):
            expected = "0 without pilcro" if self.pilcro is None else f"more than 0 with pilcro {self.pilcro}"
            raise SettingsError(f"alpha: expected {expected}, got {self.alpha}")
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

    @property
    def penalises_folded(self) -> bool:
        """Return whether the penalty is on weights times the scale of the batch norm behind them."""
        return self.penalty in ("rings", "kernels") if self.folded is None else self.folded

    def make_penalty(self) -> GroupPenalty | None:
        """Return the penalty shared by all convolutions; None also where it differs from layer to layer."""
        if self.penalty == "rings":
            return RingPenalty(self.strength, self.kind, self.weighting, self.group_norm, self.power)
        if self.penalty == "kernels":
            return KernelPenalty(self.strength, self.weighting, self.group_norm, self.power)
        return None

    def learning_rate_of(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.learning_rate * self.factor ** sum(epoch >= milestone for milestone in self.milestones)

    def load_data(self, folder: Path | None) -> Dataset:
        """Read the data set, whose files are in ``folder``; see :func:`loco_ext.experiments.data.load`."""
        return load(self.data, folder, self.image_size)

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


EFFECTS: Effects = {
    "momentum": (lambda settings: settings.optimizer == "sgd", "--optimizer sgd"),
    "factor": (lambda settings: settings.schedule == "steps", "--schedule steps"),
    "norm": (lambda settings: settings.weight_decay > 0, "a --weight-decay"),
    "locality": (lambda settings: settings.weight_decay > 0 or settings.locality is None, "a --weight-decay"),
    "crop": (lambda settings: settings.augment, "--augment"),
    "weighting": (lambda settings: settings.penalty is not None, "a --penalty"),
    "kind": (lambda settings: settings.penalty in ("rings", "complexity"), "--penalty rings or complexity"),
    "solver": (lambda settings: settings.penalty is not None, "a --penalty"),
}

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "quick": {"epochs": 8, "schedule": "cosine", "milestones": ()}}
PRESETS_MEAN = (
    "Defaults of the other options. paper: LOCO-REG's schedule, section 7; quick: a few epochs whose learning rate "
    "falls to 0 along a cosine, which take a CPU minutes."
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
    check_choice("preset", preset, PRESETS)
    given = {name: value for name, value in overrides.items() if value is not None}
    values = PRESETS[preset] | given
    if "epochs" in given and "milestones" not in given:
        whole = Settings("small", **PRESETS[preset])
        moved = {max(1, round(m * given["epochs"] / whole.epochs)) for m in whole.milestones}
        values["milestones"] = tuple(sorted(m for m in moved if m < given["epochs"]))
    if given.get("schedule") == "cosine" and "milestones" not in given:
        values["milestones"] = ()
    return Settings(**values)


def experiment_preset(
    kind: type, presets: Mapping[str, Mapping[str, Any]], preset: str, overrides: Mapping[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Return the training settings of an experiment's preset and its other values, with some of both replaced.

    Args:
        kind: the dataclass of the experiment's settings, whose fields are not the training's.
        presets: by name, values of the experiment's fields, and what replaces LOCO-REG's settings of the training.
        overrides: values by field; None keeps the preset's value.

    Raises:
        SettingsError: the preset is unknown, or the settings of the training are invalid.
    """
    check_choice("preset", preset, presets)
    values = {**presets[preset], **{name: value for name, value in overrides.items() if value is not None}}
    own = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    return from_preset("paper", **values), own


def check_resumable(settings: Settings, recorded: Mapping[str, Any], epochs: int, path: Path) -> None:
    """Raise SettingsError where settings differ from those of the run to resume.

    The number of epochs may be larger, and milestones may differ among those to come, after the completed ``epochs``.
    """
    kept = [field for field in fields(settings) if field.name not in ("epochs", "milestones")]
    # A run of an earlier version lacks the settings that came later, and had their defaults; it recorded whether the
    # penalty was folded also where that was not chosen.
    before = {field.name: field.default for field in kept} | dict(recorded)
    if before["round_to"] is None:
        before["round_to"] = 1
    if settings.folded is None and before["folded"] == settings.penalises_folded:
        before["folded"] = None
    different = [field.name for field in kept if getattr(settings, field.name) != before[field.name]]
    if settings.epochs < recorded["epochs"]:
        raise SettingsError(f"epochs: expected at least {recorded['epochs']}, as the run in {path} has")
    done = [tuple(m for m in milestones if m < epochs) for milestones in (settings.milestones, recorded["milestones"])]
    if done[0] != done[1]:
        different.append("milestones")
    if different:
        found = ", ".join(str(recorded.get(name)) for name in different)
        raise SettingsError(f"{', '.join(different)}: expected {found}, as the run in {path} has; resume it with them")
