"""The command ``loco-ext frontier``."""

import argparse

from loco_ext import options
from loco_ext.commands import add_data, add_device, add_out, add_resume, add_samples, given, tell, writing_to
from loco_ext.experiments import data, frontier
from loco_ext.experiments.report import print_table
from loco_ext.experiments.settings import PRESETS, Settings, from_preset
from loco_ext.output import json_text

DESCRIPTION = (
    "Trains a network without a penalty, then from there with many strengths of one that takes away rings of kernels, "
    "or kernels; compacts what is left and writes accuracies, multiply-adds and figures to a folder. Strengths run "
    "from the least that leaves nothing down, if none are given."
)
EPILOG = "Epochs, learning rate and optimizer are those of each point; --dense-* those of the training before."
POINT = {"epochs": 2, "learning_rate": 0.02, "penalty": "rings"}  # replaces the preset's values
TRAINING = {"model", "data", "image_size", "epochs", "batch_size", "optimizer", "learning_rate", "momentum"}
TRAINING |= {"weight_decay", "augment", "seed", "width", "penalty", "weighting", "kind"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext frontier``."""
    add_data(parser)
    add_samples(parser)
    add_out(parser, "of the frontier")
    add_resume(parser)
    options.add_options(parser, Settings, {"quick": PRESETS["quick"] | POINT}, TRAINING)
    options.add_options(parser, frontier.FrontierSettings, {"quick": {}})
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Train the points of a frontier, write record and figures to ``--out`` and print a table."""
    point = {name: value for name, value in POINT.items() if name != "penalty" or arguments.method != "width"}
    training = from_preset("quick", **point | given(arguments, Settings))
    setting = frontier.FrontierSettings(training, **given(arguments, frontier.FrontierSettings))
    dataset = data.load(training.data, arguments.folder, training.image_size)
    if arguments.samples is not None:
        dataset = dataset.first(arguments.samples)
    with writing_to(arguments.out):
        record = frontier.measure(setting, dataset, arguments.out, arguments.device, resume=arguments.resume)

    def show() -> None:
        print_table(*frontier.rows(record))
        print(f"frontier.json and figures are in {arguments.out}")

    tell(arguments, lambda: json_text(record, indent=2), show)
