"""The command ``loco-ext train``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from loco_ext.commands import Data, Device, Out, Result, Resume, SettingsOptions, command, writing_to
from loco_ext.experiments import curves, processes
from loco_ext.experiments import run as runs
from loco_ext.experiments.compacting import read_trained
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.models import digest, load_weights
from loco_ext.experiments.settings import (
    EFFECTS,
    PRESETS,
    PRESETS_MEAN,
    Settings,
    SettingsError,
    check_effects,
    from_preset,
    settings_errors,
)
from loco_ext.experiments.tensorboard import TensorBoard
from loco_ext.experiments.train import make_model
from loco_ext.foreign_checkpoints import CheckpointError
from loco_ext.output import json_text
from loco_ext.sparsity.budget.distillation import WEIGHT

EPILOG = (
    "A run must be resumed with the options that it was started with, except that --epochs may be larger and future "
    "milestones may change. A run whose loss becomes infinite or NaN stops with exit code 1 and keeps the checkpoint "
    "of its last good epoch."
)
OF_A_FILE = (CheckpointError, SettingsError)  # errors about the content of a file that an option names


@command(SettingsOptions(Settings, PRESETS), epilog=EPILOG)
def run(
    *,
    preset: Annotated[str, typer.Option(help=PRESETS_MEAN)] = "paper",
    folder: Data = None,
    out: Out,
    resume: Resume = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights to start from: safetensors, or a torch file of weights only.  [default: random]",
        ),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Trained network whose outputs the network also learns: the folder of a run, or a file of weights for "
            "the same network.  [default: no teacher]",
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")] = False,
    device: Device = "cpu",
    **options: Any,
) -> Result | None:
    """Train a network on images, and write the settings, metrics, curves, checkpoint and weights to a folder.

    To train in several processes, start it with `torchrun -m loco_ext.cli train ...`.
    """
    if teacher is not None:
        options.setdefault("distillation", WEIGHT)
    setting = from_preset(preset, **options)
    if not (resume and (out / "settings.json").exists()):  # a run goes on with the options that it was started with
        check_effects(setting, EFFECTS, options)
    if setting.penalty is not None and setting.strength == 0:
        raise SettingsError(f"strength: expected more than 0 with a penalty, got {setting.strength}")
    milestones = runs.recorded_milestones(out) if resume and "milestones" not in options else None
    if milestones is not None and setting.schedule == "steps":
        setting = replace(setting, milestones=milestones)
    dataset = setting.load_data(folder)
    setting.check_data(dataset)
    model: nn.Module | None = None
    taught_by: nn.Module | None = None
    if weights is not None:
        with settings_errors("--weights: ", OF_A_FILE):
            model = _with_weights(setting, dataset, weights)
        setting = replace(setting, weights=digest(model))
    if teacher is not None:
        with settings_errors("--teacher: ", OF_A_FILE):
            taught_by = _read_teacher(setting, dataset, teacher)
        setting = replace(setting, teacher=digest(taught_by))
    board = TensorBoard(out / "tensorboard") if tensorboard else None
    with writing_to(out), processes.joined(device) as joined:
        after_epoch = (lambda epoch: None) if board is None else board.write
        networks: dict[str, Any] = {"model": model, "teacher": taught_by}
        history = runs.run(
            setting, dataset, out, joined, resume=resume, finite=True, after_epoch=after_epoch, **networks
        )
        if joined.first:
            curves.save(history, out / "curves.png")
    if board is not None:
        board.close()
    if not joined.first:
        return None
    said = f"Test accuracy {history[-1].test_accuracy:.2%}. Metrics, curves, checkpoint and weights are in {out}"
    return Result(lambda: json_text(vars(history[-1])), lambda: print(said))


def _with_weights(setting: Settings, dataset: Dataset, path: Path) -> nn.Module:
    """Return the network that the settings name, with the weights of a file."""
    model = make_model(setting, dataset)
    load_weights(model, path)
    return model


def _read_teacher(setting: Settings, dataset: Dataset, path: Path) -> nn.Module:
    """Return the network of a run for such data, or one :func:`_with_weights` of a file."""
    if not path.is_dir():
        return _with_weights(setting, dataset, path)
    trained = read_trained(path, own=setting.model)
    wanted, found = f"{dataset.name}, {dataset.images}", f"{trained.data}, {trained.images}"
    if found != wanted:
        raise SettingsError(f"{path}: expected a network for {wanted}, got one for {found}")
    trained.note_other_images(dataset)
    return trained.model
