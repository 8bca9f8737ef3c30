"""One training run in a folder: settings, metrics after every epoch, a checkpoint to resume from, the final weights.

    settings.json      the settings, what the run runs on, and versions
    metrics.jsonl      one line per epoch; what is not finite is null
    checkpoint.pt      weights, optimizer and metrics after the last epoch: torch.load(..., weights_only=True)
    model.safetensors  the weights, when all epochs are done
    .lock              held by the process that writes, see loco_ext.folders

Every file is replaced in one move. A run killed at any moment goes on from its last whole epoch to the same numbers,
given the same number of processes and, on a CPU, of threads. On CUDA that holds as far as its algorithms are
deterministic; those of cuDNN are chosen so.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loco_ext.checkpoints import DamagedFileError, check_finite, load_checkpoint, save_checkpoint, save_weights
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.memory import keep_freed_memory
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings, SettingsError, differences
from loco_ext.experiments.train import Epoch, make_model, make_optimizer, train
from loco_ext.folders import owned
from loco_ext.output import json_text, replacing
from loco_ext.sparsity import zero_dead_kernels
from loco_ext.version import __version__

CHECKPOINT = "checkpoint.pt"


def run(
    settings: Settings,
    data: Dataset,
    out: Path,
    processes: Processes,
    *,
    resume: bool = False,
    model: nn.Module | None = None,
    label: str | None = None,
    measure: Callable[[int], dict[str, float | None]] = lambda epoch: {},
) -> list[Epoch]:
    """Trains as the settings say, or goes on with the run in ``out``; returns the figures of all epochs.

    Args:
        data: of the name in the settings.
        out: a folder; it is made, and written to by the first process only.
        resume: go on from ``out``'s checkpoint, from the beginning where there is none yet.
        model: trained in place, from its present weights; None: a new one, as the settings say.
        label: of the progress bar.
        measure: called after each epoch, counted from 1, before it counts as done; what it returns goes into the
            epoch's figures. A file that it writes is written once more if the run is killed before that.

    Raises:
        SettingsError: settings that do not fit the data or the model; a run in ``out`` already, without ``resume``; a
            checkpoint that is damaged, of other settings, or has diverged before its last epoch.
        OSError: ``out`` cannot be written to, or another process does.
    """
    settings.check_data(data, processes.count)
    keep_freed_memory()
    model = (make_model(settings, data) if model is None else model).to(processes.device)
    optimizer = make_optimizer(settings, model, data)
    strength = f", strength {settings.strength:.3g}" if settings.penalty else ""
    label = label or f"{settings.model} on {settings.data}{strength}"
    with owned(out) if processes.first else nullcontext():
        history = _begin(out, settings, processes, model, optimizer, resume=resume)

        def save(epoch: Epoch) -> None:
            history.append(replace(epoch, measures=measure(epoch.epoch)))
            if processes.first:
                _save(out, settings, processes, model, optimizer, history)

        train(model, optimizer, data, settings, processes, label=label, start=len(history), after_epoch=save)
        if settings.folded:
            zero_dead_kernels(model)
        if processes.first:
            _write_metrics(out, history)
            save_weights(out / "model.safetensors", model.state_dict())
    return history


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"loco_ext": __version__, "torch": torch.__version__}


def _describe(processes: Processes) -> dict[str, Any]:
    """What the order of sums, and with it the last bits, depends on."""
    return {"count": processes.count, "device": processes.device.type}


def _begin(
    out: Path,
    settings: Settings,
    processes: Processes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    resume: bool,
) -> list[Epoch]:
    """Returns the epochs that are done, whose weights and states the model and the optimizer then have."""
    path = out / CHECKPOINT
    if path.exists():
        if not resume:
            raise SettingsError(f"{out}: holds a run already; resume it, or choose another folder")
        return _restore(path, settings, processes, model, optimizer)
    if processes.first:
        record = {"settings": asdict(settings), "processes": _describe(processes), "versions": versions()}
        _write(out / "settings.json", json_text(record, indent=2) + "\n")
    return []


def _save(
    out: Path,
    settings: Settings,
    processes: Processes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: list[Epoch],
) -> None:
    state = {
        "settings": asdict(settings),
        "processes": _describe(processes),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": [asdict(epoch) for epoch in history],
    }
    save_checkpoint(out / CHECKPOINT, state)
    _write_metrics(out, history)


def _restore(
    path: Path, settings: Settings, processes: Processes, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[Epoch]:
    try:
        state: dict[str, Any] = load_checkpoint(path)
        different = differences(settings, dict(state["settings"]))
        ran_on = state["processes"]
        history = [Epoch(**epoch) for epoch in state["history"]]
        if len(history) < settings.epochs:
            check_finite(state["model"])
        if not different:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # a damaged file makes the unpickler, or what follows it, fail in any way
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise SettingsError(f"{path}: not a checkpoint of such a run ({reason})") from error
    if different:
        raise SettingsError(f"{path}: of a run that differs in {', '.join(different)}; resume it with its own settings")
    if ran_on != _describe(processes):
        raise SettingsError(f"{path}: of a run on {ran_on}, resumed on {_describe(processes)}: expected the same")
    if not history or [epoch.epoch for epoch in history] != list(range(1, len(history) + 1)):
        raise SettingsError(f"{path}: not a checkpoint of such a run (its epochs are not 1, 2, ...)")
    return history


def _write_metrics(out: Path, history: list[Epoch]) -> None:
    lines = "".join(json_text(asdict(epoch)) + "\n" for epoch in history)
    _write(out / "metrics.jsonl", lines)


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)
