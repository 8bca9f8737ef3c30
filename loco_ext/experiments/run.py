"""One training run in a folder: settings, metrics after every epoch, a checkpoint to resume from, the final weights.

    settings.json      the settings and versions
    metrics.jsonl      one line per epoch
    checkpoint.pt      weights, optimizer and metrics after the last epoch: torch.load(..., weights_only=True)
    model.safetensors  the weights, when all epochs are done

Every file is replaced in one move. A run killed at any moment goes on from its last whole epoch to the same numbers.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from loco_ext.atomic import replacing
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings, SettingsError, differences
from loco_ext.experiments.train import Epoch, make_model, make_optimizer, train
from loco_ext.version import __version__

CHECKPOINT = "checkpoint.pt"


def run(settings: Settings, data: Dataset, out: Path, processes: Processes, *, resume: bool = False) -> list[Epoch]:
    """Trains as the settings say, or goes on with the run in ``out``; returns the figures of all epochs.

    Args:
        data: of the name in the settings.
        out: a folder; it is made, and written to by the first process only.
        resume: go on from ``out``'s checkpoint, from the beginning where there is none yet.

    Raises:
        SettingsError: settings that do not fit the data or the model; a run in ``out`` already, without ``resume``; a
            checkpoint that cannot be read, or of other settings.
        OSError: ``out`` cannot be written to.
    """
    settings.check_data(data, processes.count)
    path = out / CHECKPOINT
    if path.exists() and not resume:
        raise SettingsError(f"{out}: holds a run already; resume it, or choose another folder")
    model = make_model(settings, data).to(processes.device)
    optimizer = make_optimizer(settings, model)
    history = _restore(path, settings, model, optimizer) if path.exists() else []
    if processes.first:
        out.mkdir(parents=True, exist_ok=True)
        _write_json(out / "settings.json", {"settings": asdict(settings), "versions": versions()})

    def save(epoch: Epoch) -> None:
        history.append(epoch)
        if processes.first:
            _save(out, settings, model, optimizer, history)

    label = f"{settings.model} on {settings.data}"
    train(model, optimizer, data, settings, processes, label=label, start=len(history), after_epoch=save)
    if processes.first:
        _write_metrics(out, history)
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        with replacing(out / "model.safetensors") as temporary:
            save_file(weights, temporary)
    return history


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"loco_ext": __version__, "torch": torch.__version__}


def _save(
    out: Path, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, history: list[Epoch]
) -> None:
    state = {
        "settings": asdict(settings),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": [asdict(epoch) for epoch in history],
    }
    with replacing(out / CHECKPOINT) as temporary:
        torch.save(state, temporary)
    _write_metrics(out, history)


def _restore(path: Path, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Epoch]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        recorded = state["settings"]
        history = [Epoch(**epoch) for epoch in state["history"]]
    except Exception as error:  # a damaged file makes the unpickler fail in any way
        raise SettingsError(f"{path}: not a checkpoint of a run ({type(error).__name__})") from error
    if different := differences(settings, recorded):
        raise SettingsError(f"{path}: of a run that differs in {', '.join(different)}; resume it with its own settings")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return history


def _write_metrics(out: Path, history: list[Epoch]) -> None:
    with replacing(out / "metrics.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(asdict(epoch)) + "\n" for epoch in history))


def _write_json(path: Path, record: object) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
