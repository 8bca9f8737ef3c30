"""One training run in a folder: settings, metrics after every epoch, a checkpoint to resume from, the final weights.

    settings.json      the settings, what the run runs on, and versions
    metrics.jsonl      one line per epoch; what is not finite is null
    checkpoint.pt      weights, optimizer and metrics after the last epoch: torch.load(..., weights_only=True)
    model.safetensors  the weights, when all epochs are done

Every file is replaced in one move. A run killed at any moment goes on from its last whole epoch to the same numbers,
given the same number of processes and, on a CPU, of threads. On CUDA that holds as far as its algorithms are
deterministic; those of cuDNN are chosen so.
"""

import io
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from loco_ext.experiments.data import Dataset
from loco_ext.experiments.memory import keep_freed_memory
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import Settings, SettingsError, differences
from loco_ext.experiments.train import Epoch, make_model, make_optimizer, train
from loco_ext.output import json_text, remove_leftovers, replacing
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
            checkpoint that cannot be read, or of other settings.
        OSError: ``out`` cannot be written to.
    """
    settings.check_data(data, processes.count)
    keep_freed_memory()
    path = out / CHECKPOINT
    if path.exists() and not resume:
        raise SettingsError(f"{out}: holds a run already; resume it, or choose another folder")
    model = (make_model(settings, data) if model is None else model).to(processes.device)
    optimizer = make_optimizer(settings, model, data)
    history = _restore(path, settings, processes, model, optimizer) if path.exists() else []
    if processes.first:
        out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        if not history:
            record = {"settings": asdict(settings), "processes": _describe(processes), "versions": versions()}
            _write(out / "settings.json", (json_text(record, indent=2) + "\n").encode())

    def save(epoch: Epoch) -> None:
        history.append(replace(epoch, measures=measure(epoch.epoch)))
        if processes.first:
            _save(out, settings, processes, model, optimizer, history)

    strength = f", strength {settings.strength:.3g}" if settings.penalty else ""
    label = label or f"{settings.model} on {settings.data}{strength}"
    train(model, optimizer, data, settings, processes, label=label, start=len(history), after_epoch=save)
    if settings.folded:
        zero_dead_kernels(model)
    if processes.first:
        _write_metrics(out, history)
        save_weights(model, out / "model.safetensors")
    return history


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes a state dict as safetensors, in one move."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    _write(path, safetensors.torch.save(weights))


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"loco_ext": __version__, "torch": torch.__version__}


def _describe(processes: Processes) -> dict[str, Any]:
    """What the order of sums, and with it the last bits, depends on."""
    return {"count": processes.count, "device": processes.device.type}


def _save(
    out: Path,
    settings: Settings,
    processes: Processes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: list[Epoch],
) -> None:
    content = io.BytesIO()  # torch.save into a file would not report a full disk as an OSError
    state = {
        "settings": asdict(settings),
        "processes": _describe(processes),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": [asdict(epoch) for epoch in history],
    }
    torch.save(state, content)
    _write(out / CHECKPOINT, content.getbuffer())
    _write_metrics(out, history)


def _restore(
    path: Path, settings: Settings, processes: Processes, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[Epoch]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        different = differences(settings, dict(state["settings"]))
        ran_on = state["processes"]
        history = [Epoch(**epoch) for epoch in state["history"]]
        if not different:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # a damaged file makes the unpickler, or what follows it, fail in any way
        raise SettingsError(f"{path}: not a checkpoint of such a run ({type(error).__name__})") from error
    if different:
        raise SettingsError(f"{path}: of a run that differs in {', '.join(different)}; resume it with its own settings")
    if ran_on != _describe(processes):
        raise SettingsError(f"{path}: of a run on {ran_on}, resumed on {_describe(processes)}: expected the same")
    if not history or [epoch.epoch for epoch in history] != list(range(1, len(history) + 1)):
        raise SettingsError(f"{path}: not a checkpoint of such a run (its epochs are not 1, 2, ...)")
    return history


def _write_metrics(out: Path, history: list[Epoch]) -> None:
    lines = "".join(json_text(asdict(epoch)) + "\n" for epoch in history)
    _write(out / "metrics.jsonl", lines.encode())


def _write(path: Path, content: bytes | memoryview) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
