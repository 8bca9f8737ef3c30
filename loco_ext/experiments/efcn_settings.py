"""Settings that determine a run of the eFCN experiment."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from typer import Option

from loco_ext.analysis.interpolation import STIFFNESS
from loco_ext.experiments.settings import (
    Settings,
    SettingsError,
    check_fields,
    count_option,
    experiment_preset,
    list_option,
)

CNN, LCN, FULL, FCN = "cnn", "lcn", "full", "fcn"  # how networks are relaxed; otherwise a radius, as text
SNAPSHOTS = 20


@dataclass(frozen=True)
class EfcnSettings:
    """Settings of one convolutional network and of the networks it is lifted to.

    ``training`` is the training of the network. Lifted networks are trained in the same way, except for epochs and
    learning rate; so is the network itself, as a baseline.
    """

    training: Settings
    switch_times: Annotated[
        tuple[int, ...],
        list_option(
            int,
            "EPOCHS",
            help="Epochs after which the network is lifted, ascending, such as 0,3,10,30; 0 is its initialisation.",
            name="--switch",
        ),
    ]
    relaxations: Annotated[
        tuple[str, ...],
        list_option(
            str,
            "HOW",
            help="How the network is lifted; several ways are separated by commas, such as lcn,2,full. lcn stops "
            "sharing weights between positions. A number also widens receptive fields by that many pixels on each "
            "side. full connects everything.",
            name="--relax",
        ),
    ] = (FULL,)
    branch_epochs: Annotated[int, count_option(help="Number of epochs for which each lifted network is trained.")] = 100
    branch_learning_rate: Annotated[
        float, Option("--branch-lr", min=0, help="Learning rate of the lifted and fully connected networks.")
    ] = 0.01
    fcn_epochs: Annotated[
        int,
        Option(
            min=0,
            help="Number of epochs for which a fully connected network of the shape of full is trained from scratch; 0 "
            "trains none.",
        ),
    ] = 100
    landscape_samples: Annotated[
        int,
        count_option(help="Number of training samples on which gradients, curvatures and interpolations are measured."),
    ] = 1000
    power_iterations: Annotated[
        int, Option(min=0, help="Maximum number of products with the Hessian; 0 skips the curvature.")
    ] = 50
    interpolation_points: Annotated[
        int,
        Option(min=0, help="Number of points on each path from the trained network to a lifted one; 0 skips paths."),
    ] = 11
    string_steps: Annotated[
        int,
        Option(min=0, help="Number of steps that relax the string between two networks, at --branch-lr."),
    ] = 100
    stiffness: Annotated[
        float, Option(help="How far each step draws neighbouring points of the string together; less than 0.5.")
    ] = STIFFNESS

    def __post_init__(self) -> None:
        check_fields(self)
        last, times = self.training.epochs, self.switch_times
        if not times or list(times) != sorted(set(times)) or not 0 <= times[0] <= times[-1] <= last:
            raise SettingsError(f"switch_times: expected ascending epochs from 0 to {last}, got {times}")
        for relax in self.relaxations:
            if relax not in (LCN, FULL) and not (relax.isdecimal() and int(relax) > 0):
                raise SettingsError(f"relaxations: expected lcn, full or a radius of at least 1, got {relax!r}")
        if len(set(self.relaxations)) < max(len(self.relaxations), 1):
            raise SettingsError(f"relaxations: expected some, each once, got {self.relaxations}")
        if self.interpolation_points == 1:
            raise SettingsError("interpolation_points: expected 0 or at least 2, got 1")
        if not 0 <= self.stiffness < 0.5:
            raise SettingsError(f"stiffness: expected at least 0 and less than 0.5, got {self.stiffness}")
        if self.training.penalty is not None:
            raise SettingsError(f"penalty: expected none, got {self.training.penalty}")
        self.branch(self.branch_epochs)

    def branch(self, epochs: int) -> Settings:
        """Return the training settings of a lifted network."""
        return replace(
            self.training, epochs=epochs, learning_rate=self.branch_learning_rate, schedule="steps", milestones=()
        )


def switch_times(epochs: int) -> tuple[int, ...]:
    """Return the paper's switch times: 0, and epochs equally spaced on a logarithmic scale up to the last.

    >>> switch_times(30)
    (0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 14, 17, 20, 25, 30)
    """
    return 0, *np.unique(np.geomspace(1, epochs, SNAPSHOTS).astype(int)).tolist()


# eFCN, section 4: plain gradient descent, with the samples always in the same order.
_TRAINING: dict[str, Any] = {
    "model": "vanilla",
    "data": "cifar10",
    "epochs": 150,
    "batch_size": 250,
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "milestones": (),
    "augment": False,
    "shuffle": False,
}
_QUICK = {"switch_times": (0, 3, 10, 30), "relaxations": (LCN,), "branch_epochs": 10, "fcn_epochs": 0}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _TRAINING,
    # eFCN, appendix B.
    "alexnet": _TRAINING | {"model": "alexnet", "data": "cifar100"},
    # Takes about an hour without a GPU: weights are no longer shared, locality stays.
    "quick": _TRAINING | {"epochs": 30} | _QUICK,
}
PRESETS_MEAN = (
    "Defaults of the other options. paper: d'Ascoli et al. 2019, section 4, on CIFAR-10; alexnet: their appendix B, on "
    "CIFAR-100; quick: an hour on a CPU, lifting only to unshared weights."
)


def efcn_preset(preset: str, **overrides: Any) -> EfcnSettings:
    """Return a preset's settings with some replaced, those of the training too; None keeps the preset's value.

    Without given switch times, those of the preset up to the last epoch are used, or the paper's for that many epochs.

    Raises:
        SettingsError: the preset is unknown, or the settings are invalid.

    >>> efcn_preset("quick", epochs=20).switch_times
    (0, 3, 10)
    """
    training, own = experiment_preset(EfcnSettings, PRESETS, preset, overrides)
    if overrides.get("switch_times") is None:
        times = own.get("switch_times") or switch_times(training.epochs)
        own["switch_times"] = tuple(time for time in times if time <= training.epochs)
    return EfcnSettings(training, **own)
