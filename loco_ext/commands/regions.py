"""The command ``loco-ext regions``."""

from typing import Annotated, Any

import typer

from loco_ext.commands import Data, Device, Out, Result, Resume, Samples, SettingsOptions, command, experiment
from loco_ext.experiments import regions
from loco_ext.experiments.regions import PRESETS, PRESETS_MEAN, RegionsSettings


@command(SettingsOptions(RegionsSettings, PRESETS))
def run(
    *,
    preset: Annotated[str, typer.Option(help=PRESETS_MEAN)] = "quick",
    folder: Data = None,
    samples: Samples = None,
    out: Out,
    resume: Resume = False,
    device: Device = "cpu",
    **options: Any,
) -> Result:
    """Train fully connected networks with and without ROLL, and measure how far their linear regions reach.

    Accuracies, radii, their ratios and figures are written to a folder, with a picture of the linear regions of three
    networks that have two inputs.
    """
    setting = regions.settings_of(preset, **options)
    dataset = regions.load(setting, folder).first(samples)
    return experiment(regions, setting, dataset, out, device, resume=resume)
