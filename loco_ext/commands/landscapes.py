"""The command ``loco-ext landscapes``."""

from typing import Annotated, Any

import typer

from loco_ext.commands import Data, Device, Out, Result, Resume, Samples, SettingsOptions, command, experiment
from loco_ext.experiments import landscapes
from loco_ext.experiments.landscapes_settings import PRESETS, PRESETS_MEAN, LandscapesSettings, landscapes_preset
from loco_ext.experiments.settings import Settings

OF_THE_NETWORKS = {"model", "data", "image_size", "epochs", "batch_size", "optimizer", "learning_rate", "weight_decay"}
OF_THE_NETWORKS |= {"augment", "crop", "seed", "width"}
OPTIONS = (
    SettingsOptions(Settings, PRESETS, OF_THE_NETWORKS),
    SettingsOptions(LandscapesSettings, PRESETS),
)


@command(*OPTIONS)
def run(
    *,
    preset: Annotated[str, typer.Option(help=PRESETS_MEAN)] = "paper",
    folder: Data = None,
    samples: Samples = None,
    out: Out,
    resume: Resume = False,
    device: Device = "cpu",
    **options: Any,
) -> Result:
    """Train networks with and without PILCRO from the same seeds, and measure their importance landscapes.

    Accuracies, total variations, robustness to corrupted images, predictions from images without their most relevant
    pixels, and figures are written to a folder.
    """
    setting = landscapes_preset(preset, **options)
    dataset = setting.training.load_data(folder).first(samples)
    return experiment(landscapes, setting, dataset, out, device, resume=resume)
