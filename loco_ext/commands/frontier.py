"""The command ``loco-ext frontier``."""

from typing import Any

from loco_ext.commands import Data, Device, Out, Result, Resume, Samples, SettingsOptions, command, experiment
from loco_ext.experiments import data, frontier
from loco_ext.experiments.settings import PRESETS, Settings, check_effects, from_preset

POINT = {"epochs": 2, "learning_rate": 0.02, "penalty": "rings"}  # replaces the preset's values
OF_A_POINT = {"model", "data", "image_size", "epochs", "batch_size", "optimizer", "learning_rate", "momentum"}
OF_A_POINT |= {"weight_decay", "augment", "seed", "width", "penalty", "weighting", "kind"}
OF_A_POINT |= {"group_norm", "power"}
OPTIONS = (
    SettingsOptions(Settings, {"quick": PRESETS["quick"] | POINT}, OF_A_POINT),
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
    given = dict(options)
    path = {name: options.pop(name) for name in set(options) - OF_A_POINT}
    point = {name: value for name, value in POINT.items() if name != "penalty" or path.get("method") != "width"}
    training = from_preset("quick", **point | options)
    setting = frontier.FrontierSettings(training, **path)
    if not (resume and (out / "settings.json").exists()):  # one goes on with the options that it was started with
        check_effects(setting, frontier.EFFECTS, given)
    dataset = data.load(training.data, folder, training.image_size).first(samples)
    return experiment(frontier, setting, dataset, out, device, resume=resume)
