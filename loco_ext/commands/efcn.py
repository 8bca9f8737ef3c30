"""The command ``loco-ext efcn``."""

import argparse

from loco_ext import options
from loco_ext.commands import add_data, add_device, add_out, add_resume, add_samples, given, tell, writing_to
from loco_ext.errors import UserError
from loco_ext.experiments import data, efcn
from loco_ext.experiments.efcn_settings import PRESETS, PRESETS_MEAN, EfcnSettings, efcn_preset
from loco_ext.experiments.report import print_table
from loco_ext.experiments.settings import PAPER, Settings
from loco_ext.output import json_text

DESCRIPTION = (
    "Trains a convolutional network; lifts it, as it was at several times of its training, to networks whose weights "
    "are not shared and whose receptive fields are larger; trains those on. Writes accuracies, deviations from the "
    "convolutions, gradients, curvatures, interpolations and figures to a folder."
)
EPILOG = "Epochs and learning rate are those of the network, --branch-* those of the lifted ones."
TRAINING = {"model", "data", "image_size", "epochs", "batch_size", "learning_rate", "seed", "width"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext efcn``."""
    parser.add_argument("--preset", default="paper", help=f"{PRESETS_MEAN} (default: %(default)s)")
    add_data(parser)
    add_samples(parser)
    add_out(parser, "of the experiment")
    add_resume(parser)
    trainings = {name: PAPER | training for name, (training, _) in PRESETS.items()}
    options.add_options(parser, Settings, trainings, TRAINING)
    times = {"switch_times": "0 and 20 at equal distances of their logarithm"}
    options.add_options(parser, EfcnSettings, {name: times | own for name, (_, own) in PRESETS.items()})
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the eFCN experiment, write its record and figures to ``--out`` and print a summary."""
    setting = efcn_preset(arguments.preset, **given(arguments, Settings), **given(arguments, EfcnSettings))
    training = setting.training
    dataset = data.load(training.data, arguments.folder, training.image_size)
    if arguments.samples is not None:
        dataset = dataset.first(arguments.samples)
    try:
        with writing_to(arguments.out):
            record = efcn.measure(setting, dataset, arguments.out, arguments.device, resume=arguments.resume)
    except MemoryError as error:
        raise UserError(str(error)) from error

    def show() -> None:
        print_table(*efcn.rows(record))
        print(f"efcn.json and figures are in {arguments.out}")

    tell(arguments, lambda: json_text(record), show)
