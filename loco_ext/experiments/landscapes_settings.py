"""Settings that determine a run of the experiment with importance landscapes."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from loco_ext.experiments.settings import (
    Settings,
    SettingsError,
    check_fields,
    count_option,
    experiment_preset,
    list_option,
)
from loco_ext.option_parsers import MOST

PLAIN, TARGET, CURVATURE, NOISE, DECAY = "plain", "target", "curvature", "noise", "decay"
KINDS = (TARGET, CURVATURE, NOISE, DECAY)


@dataclass(frozen=True)
class Arm:
    """One way to train: plain; with PILCRO; or with a common remedy in its place.

    Attributes:
        name: "plain", or the kind and the value as in "target:10".
        kind: "target" and "curvature" are PILCRO's losses, "noise" adds normal noise to the training images, "decay"
            replaces the weight decay.
        value: alpha of the first two; the noise's standard deviation, in standard deviations of the data; the decay.
    """

    name: str
    kind: str
    value: float

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """Return the arm of that name, or raise SettingsError."""
        kind, _, text = name.partition(":")
        if name == PLAIN:
            return cls(name, kind, 0.0)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if kind not in KINDS or not (math.isfinite(value) and value >= 0):
            raise SettingsError(
                f"arms: expected {PLAIN}, or one of {', '.join(KINDS)} with a number as in {TARGET}:10, got {name!r}"
            )
        return cls(name, kind, value)

    @property
    def folder(self) -> str:
        """Name of the arm's folders, before the seed."""
        return self.name.replace(":", "-")


@dataclass(frozen=True)
class LandscapesSettings:
    """Settings of networks trained with and without PILCRO, and of what is measured on them.

    ``training`` is the training of every network. The arms of one seed start from the same weights and see the same
    images in the same order, so that their differences are paired.
    """

    training: Settings
    arms: Annotated[
        tuple[str, ...],
        list_option(
            str,
            "NAMES",
            help="Ways to train, separated by commas, such as plain,target:10. target:ALPHA and curvature:ALPHA use "
            "PILCRO; noise:SIGMA adds noise to the images; decay:NUMBER changes the weight decay; plain does none of "
            "these.",
        ),
    ]
    seeds: Annotated[
        int, count_option(help="Number of networks for each way to train; their seeds begin at --seed.")
    ] = 1
    landscape_images: Annotated[
        int, count_option(help="Number of test images over which the importance landscape is averaged.")
    ] = 10_000
    corrupted_images: Annotated[
        int, Option(min=0, help="Number of test images to corrupt, in 15 ways at 5 levels each; 0 skips this.")
    ] = 10_000
    ablated_images: Annotated[
        int, Option(min=0, help="Number of test images whose most relevant pixels are replaced; 0 skips this.")
    ] = 512
    baseline_images: Annotated[
        int,
        count_option(help="Number of training images from which Integrated Gradients start; each takes one gradient."),
    ] = 1000
    resampled_inputs: Annotated[
        int,
        Option(min=0, help="Number of inputs whose importance is measured by resampling, for Lemma 1; 0 skips this."),
    ] = 300
    resampling_images: Annotated[
        int, Option(min=2, max=MOST, help="Number of test images from which --resampled-inputs are resampled.")
    ] = 1000

    def __post_init__(self) -> None:
        check_fields(self)
        parsed = [Arm.parse(name) for name in self.arms]
        if not parsed or len({(arm.kind, arm.value) for arm in parsed}) < len(parsed):
            raise SettingsError(f"arms: expected some, each once, got {self.arms}")
        if self.training.penalty is not None:
            raise SettingsError(f"penalty: expected none, got {self.training.penalty}")
        if self.training.pilcro is not None:
            raise SettingsError(f"pilcro: expected none but that of the arms, got {self.training.pilcro}")
        for arm in parsed:
            self.training_of(arm, self.seeds - 1)  # which has the largest seed

    def training_of(self, arm: Arm, number: int) -> Settings:
        """Return the training settings of the arm's network of that number, counted from 0."""
        training = replace(self.training, seed=self.training.seed + number)
        if arm.kind in (TARGET, CURVATURE):
            return replace(training, pilcro=arm.kind, alpha=arm.value)  # type: ignore[arg-type]
        return replace(training, weight_decay=arm.value) if arm.kind == DECAY else training


# PILCRO, section 4 and appendix D.1, with random crops (RC+); its crops have reflection padding, these zeros.
_PAPER: dict[str, Any] = {
    "model": "resnet50",
    "data": "cifar100",
    "epochs": 200,
    "batch_size": 128,
    "learning_rate": 0.1,
    "weight_decay": 1e-5,
    "schedule": "cosine",
    "milestones": (),
    "arms": (PLAIN, *(f"{kind}:{alpha}" for kind in (TARGET, CURVATURE) for alpha in (1, 10, 100))),
}
_SHORT = {
    "model": "small",
    "data": "cifar10",
    "epochs": 10,
    "learning_rate": 0.05,
    "weight_decay": 0.0005,
    "arms": (PLAIN, f"{TARGET}:10", f"{CURVATURE}:0.1", f"{NOISE}:0.2"),
    "seeds": 3,
    "landscape_images": 2000,
    "corrupted_images": 500,
    "ablated_images": 128,
    "baseline_images": 32,
    "resampled_inputs": 60,
    "resampling_images": 256,
}
PRESETS = {"paper": _PAPER, "short": _PAPER | _SHORT}
PRESETS_MEAN = (
    "Defaults of the other options. paper: ResNet-50 on CIFAR-100 as in section 4 of PILCRO, days on a CPU; short: the "
    "small CNN on CIFAR-10, with few epochs and measurements on few images."
)


def landscapes_preset(preset: str, **overrides: Any) -> LandscapesSettings:
    """Return a preset's settings with some replaced, those of the training too; None keeps the preset's value.

    Raises:
        SettingsError: the preset is unknown, or the settings are invalid.

    >>> landscapes_preset("short", arms=("plain", "target:1"), epochs=2).training.epochs
    2
    """
    training, own = experiment_preset(LandscapesSettings, PRESETS, preset, overrides)
    return LandscapesSettings(training, **own)
