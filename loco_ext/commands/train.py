"""The command ``loco-ext train``."""

import argparse
from dataclasses import replace
from pathlib import Path

from torch import nn

from loco_ext import options
from loco_ext.commands import add_data, add_device, add_out, add_resume, given, tell, writing_to
from loco_ext.errors import UserError
from loco_ext.experiments import curves, data, processes
from loco_ext.experiments import run as runs
from loco_ext.experiments.models import digest, load_weights
from loco_ext.experiments.settings import PRESETS, PRESETS_MEAN, Settings, from_preset
from loco_ext.experiments.tensorboard import TensorBoard
from loco_ext.experiments.train import make_model
from loco_ext.foreign_checkpoints import CheckpointError
from loco_ext.output import json_text

DESCRIPTION = (
    "Trains a network on images and writes settings, metrics, their curves, a checkpoint and the weights to a folder. "
    "Start it with `torchrun -m loco_ext.cli train ...` to train in several processes."
)
EPILOG = (
    "A run is resumed with the options that it was started with; --epochs may be larger, and milestones to come "
    "others. A run whose loss is not finite any more stops with exit code 1 and leaves the checkpoint of its last good "
    "epoch."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loco-ext train``."""
    parser.add_argument("--preset", default="paper", help=f"{PRESETS_MEAN} (default: %(default)s)")
    add_data(parser)
    add_out(parser, "of the run")
    add_resume(parser)
    options.add_options(parser, Settings, PRESETS)
    start = "start from the weights in this file: safetensors, or a torch file of weights only"
    parser.add_argument("--weights", type=Path, metavar="FILE", help=start)
    parser.add_argument("--tensorboard", action="store_true", help="write events for TensorBoard to the folder as well")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Train a network, write the run to ``--out`` and print its last accuracy."""
    out: Path = arguments.out
    setting = from_preset(arguments.preset, **given(arguments, Settings) | {"weights": None})
    milestones = runs.recorded_milestones(out) if arguments.resume and arguments.milestones is None else None
    if milestones is not None and setting.schedule == "steps":
        setting = replace(setting, milestones=milestones)
    dataset = data.load(setting.data, arguments.folder, setting.image_size)
    setting, model = _start(setting, dataset, arguments.weights)
    board = TensorBoard(out / "tensorboard") if arguments.tensorboard else None
    with writing_to(out), processes.joined(arguments.device) as joined:
        after_epoch = (lambda epoch: None) if board is None else board.write
        history = runs.run(
            setting, dataset, out, joined, resume=arguments.resume, model=model, finite=True, after_epoch=after_epoch
        )
        if joined.first:
            curves.save(history, out / "curves.png")
    if board is not None:
        board.close()
    if joined.first:
        said = f"Test accuracy {history[-1].test_accuracy:.2%}. Metrics, curves, checkpoint and weights are in {out}"
        tell(arguments, lambda: json_text(vars(history[-1])), lambda: print(said))


def _start(setting: Settings, dataset: data.Dataset, path: Path | None) -> tuple[Settings, nn.Module | None]:
    """Return the settings and network of a run that starts from the weights in a file; no network without a file."""
    if path is None:
        return setting, None
    setting.check_data(dataset)
    model = make_model(setting, dataset)
    try:
        load_weights(model, path)
    except CheckpointError as error:
        raise UserError(f"--weights: {error}") from error
    return replace(setting, weights=digest(model)), model
