"""The command ``loco-ext train``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from loco_ext.commands import Data, Device, Out, Result, Resume, SettingsOptions, command, writing_to
from loco_ext.errors import UserError
from loco_ext.experiments import curves, data, processes
from loco_ext.experiments import run as runs
from loco_ext.experiments.models import digest, load_weights
from loco_ext.experiments.settings import PRESETS, PRESETS_MEAN, Settings, from_preset
from loco_ext.experiments.tensorboard import TensorBoard
from loco_ext.experiments.train import make_model
from loco_ext.foreign_checkpoints import CheckpointError
from loco_ext.output import json_text

EPILOG = (
    "A run is resumed with the options that it was started with; --epochs may be larger, and milestones to come "
    "others. A run whose loss is not finite any more stops with exit code 1 and leaves the checkpoint of its last good "
    "epoch."
)


@command(SettingsOptions(Settings, PRESETS), epilog=EPILOG)
def run(
    *,
    preset: Annotated[str, typer.Option(help=PRESETS_MEAN)] = "paper",
    folder: Data = None,
    out: Out,
    resume: Resume = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights to start from: safetensors, or a torch file of weights only."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write events for TensorBoard to the folder as well.")
    ] = False,
    device: Device = "cpu",
    **options: Any,
) -> Result | None:
    """Train a network on images and write settings, metrics, their curves, a checkpoint and the weights to a folder.

    To train in several processes, start it with `torchrun -m loco_ext.cli train ...`.
    """
    setting = from_preset(preset, **options)
    milestones = runs.recorded_milestones(out) if resume and "milestones" not in options else None
    if milestones is not None and setting.schedule == "steps":
        setting = replace(setting, milestones=milestones)
    dataset = data.load(setting.data, folder, setting.image_size)
    setting, model = _start(setting, dataset, weights)
    board = TensorBoard(out / "tensorboard") if tensorboard else None
    with writing_to(out), processes.joined(device) as joined:
        after_epoch = (lambda epoch: None) if board is None else board.write
        history = runs.run(
            setting, dataset, out, joined, resume=resume, model=model, finite=True, after_epoch=after_epoch
        )
        if joined.first:
            curves.save(history, out / "curves.png")
    if board is not None:
        board.close()
    if not joined.first:
        return None
    said = f"Test accuracy {history[-1].test_accuracy:.2%}. Metrics, curves, checkpoint and weights are in {out}"
    return Result(lambda: json_text(vars(history[-1])), lambda: print(said))


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
