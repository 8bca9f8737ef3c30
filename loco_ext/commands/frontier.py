"""The command ``loco-ext frontier``."""

from dataclasses import replace
from typing import Any

from loco_ext.commands import Data, Device, Out, Result, Resume, Samples, SettingsOptions, command, experiment
from loco_ext.experiments import frontier
from loco_ext.experiments.settings import PRESETS, Settings, check_effects, experiment_preset

POINT = PRESETS["quick"] | {"epochs": 2, "learning_rate": 0.02, "penalty": "rings"}
OF_A_POINT = {"model", "data", "image_size", "epochs", "batch_size", "optimizer", "learning_rate", "momentum"}
OF_A_POINT |= {"weight_decay", "augment", "seed", "width", "penalty", "weighting", "kind"}
OF_A_POINT |= {"group_norm", "power"}
OPTIONS = (
    SettingsOptions(Settings, {"quick": POINT}, OF_A_POINT),
    SettingsOptions(frontier.FrontierSettings, {"quick": {}}),
)


EPILOG = (
    "--epochs and --lr apply to the training of each point, --dense-epochs and --dense-lr to the training before the "
    "first."
)


@command(*OPTIONS, epilog=EPILOG)
def run(
    *,
    folder: Data = None,
    samples: Samples = None,
    out: Out,
    resume: Resume = False,
    device: Device = "cpu",
    **options: Any,
) -> Result:
    """Train a network without a penalty, and then with many strengths of a penalty that removes rings or filters.

    Each network is compacted. Accuracies, MACs and figures are written to a folder. If --strengths is not given, the
    largest strength is the smallest that removes everything.
    """
    training, path = experiment_preset(frontier.FrontierSettings, {"quick": POINT}, "quick", options)
    if path.get("method") == "width" and "penalty" not in options:
        training = replace(training, penalty=None)
    setting = frontier.FrontierSettings(training, **path)
    if not (resume and (out / "settings.json").exists()):  # one goes on with the options that it was started with
        check_effects(setting, frontier.EFFECTS, options)
    dataset = training.load_data(folder).first(samples)
    return experiment(frontier, setting, dataset, out, device, resume=resume)
