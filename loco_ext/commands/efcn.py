"""The command ``loco-ext efcn``."""

from typing import Annotated, Any

import typer

from loco_ext.commands import Data, Device, Out, Result, Resume, Samples, SettingsOptions, command, experiment
from loco_ext.experiments import efcn
from loco_ext.experiments.efcn_settings import PRESETS, PRESETS_MEAN, EfcnSettings, efcn_preset
from loco_ext.experiments.settings import Settings, settings_errors

OF_THE_NETWORK = {"model", "data", "image_size", "epochs", "batch_size", "learning_rate", "seed", "width"}
OPTIONS = (
    SettingsOptions(Settings, PRESETS, OF_THE_NETWORK),
    SettingsOptions(
        EfcnSettings,
        {
            name: {"switch_times": "0 and 20 epochs that are equally spaced on a logarithmic scale"} | preset
            for name, preset in PRESETS.items()
        },
    ),
)


@command(
    *OPTIONS,
    epilog="--epochs and --lr apply to the convolutional network, --branch-epochs and --branch-lr to lifted networks.",
)
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
    """Train a convolutional network, lift copies of it at several times of its training, and train these further.

    A lifted network computes the same at first, but does not share weights between positions and may have larger
    receptive fields. Accuracies, deviations from the convolutions, gradients, curvatures, interpolations and figures
    are written to a folder.
    """
    setting = efcn_preset(preset, **options)
    dataset = setting.training.load_data(folder).first(samples)
    with settings_errors(kinds=MemoryError):
        return experiment(efcn, setting, dataset, out, device, resume=resume)
