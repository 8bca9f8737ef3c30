"""One training run in a folder: settings, metrics after every epoch, a checkpoint to resume from, the final weights.

    settings.json      the settings, the machine's relevant properties, commit and versions
    metrics.jsonl      one line per epoch; numbers that are not finite are null
    checkpoint.pt      weights, optimizer and metrics after the last epoch: torch.load(..., weights_only=True)
    model.safetensors  the weights after all epochs; it is removed when a finished run goes on for more
    .lock              held by the process that writes, see loco_ext.folders

Every file is replaced atomically. A run killed at any moment resumes from its last complete epoch to the same numbers,
given the same number of processes and, on a CPU, of threads. On CUDA this holds as far as the algorithms are
deterministic; those of cuDNN are chosen to be.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loco_ext.checkpoints import DamagedFileError, check_finite, load_checkpoint, save_checkpoint, save_weights
from loco_ext.errors import UserError
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.malloc import keep_freed_memory
from loco_ext.experiments.precision import Precision
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record, provenance
from loco_ext.experiments.settings import Settings, SettingsError, check_resumable
from loco_ext.experiments.train import Epoch, make_budget, make_model, make_optimizer, train
from loco_ext.folders import check_results, owned
from loco_ext.output import json_text, replacing, write_json
from loco_ext.sparsity import zero_dead_filters

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes seconds to import

CHECKPOINT = "checkpoint.pt"
WEIGHTS = "model.safetensors"


class DivergedError(UserError, RuntimeError):
    """Raised for a run whose loss is no longer finite; the message names its folder."""

    exit_code = 1


def run(
    settings: Settings,
    data: Dataset,
    out: Path,
    processes: Processes,
    *,
    resume: bool = False,
    model: nn.Module | None = None,
    teacher: nn.Module | None = None,
    label: str | None = None,
    measure: Callable[[int], dict[str, float | None]] = lambda epoch: {},
    finite: bool = False,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> list[Epoch]:
    """Train as the settings say, or resume the run in ``out``; return the metrics of all epochs.

    Args:
        data: the data set named in the settings.
        out: output folder; it is created and written to by the first process only.
        resume: resume from the checkpoint in ``out``; without a checkpoint, start from the beginning.
        model: network to train in place from its present weights; with None, the settings determine a new one.
        teacher: network whose outputs are learned, for settings with ``distillation``; it comes to be in eval mode, and
            is not saved.
        label: label of the progress bar.
        measure: called with the number of each epoch, from 1, before the epoch is saved; its result is added to the
            epoch's metrics. If the run is killed before the epoch is saved, it is called for that epoch again and
            writes its files once more.
        finite: stop after an epoch whose loss is not finite, and keep the checkpoint of the epoch before.
        after_epoch: called in the first process with the metrics of each epoch before it is saved; like ``measure``, it
            may be called again for an epoch.

    Raises:
        DivergedError: the loss is not finite.
        SettingsError: settings do not fit the data or the model; ``out`` has a run already and ``resume`` is false; the
            checkpoint is damaged, has other settings (more epochs are allowed) or other data, or diverged before its
            last epoch.
        UserError: ``out`` has results of something else.
        OSError: ``out`` cannot be written to, or another process is writing to it.
    """
    settings.check_data(data, processes.count)
    check_results(out, ("settings.json", CHECKPOINT, WEIGHTS) if _has_run(out) else ())
    taught_by = _make_teacher(settings, teacher, processes)
    keep_freed_memory()
    model = (make_model(settings, data) if model is None else model).to(processes.device)
    optimizer, precision = make_optimizer(settings, model, data), Precision(settings.amp, processes.device)
    parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "scaler": precision.scaler}
    budget = make_budget(settings, model, optimizer, data, processes)
    if budget is not None:
        parts["budget"] = budget
    # The order of summation, and with it the last bits, depends on the number of processes and the kind of device.
    on = {"count": processes.count, "device": processes.device.type}
    record = {"settings": asdict(settings), "processes": on, "dataset": data.description}
    strength = f", strength {settings.strength:.3g}" if settings.penalty else ""
    label = label or f"{settings.model} on {settings.data}{strength}"
    with owned(out) if processes.first else nullcontext():
        if not resume and any((out / name).exists() for name in (CHECKPOINT, WEIGHTS)):
            raise SettingsError(f"{out}: holds a run already; resume it, or choose another folder")
        history = _restore(out / CHECKPOINT, settings, record, parts) if (out / CHECKPOINT).exists() else []
        if processes.first:
            write_json(out / "settings.json", record | provenance())

        def save(epoch: Epoch) -> None:
            if finite:
                _check_finite(epoch, out)
            history.append(replace(epoch, measures=measure(epoch.epoch)))
            if processes.first:
                after_epoch(history[-1])
                _save(out, record, parts, history)

        options: dict[str, Any] = {"label": label, "start": len(history), "precision": precision}
        options |= {"budget": budget, "teacher": taught_by}
        train(model, optimizer, data, settings, processes, after_epoch=save, **options)
        if settings.penalises_folded:
            zero_dead_filters(model)
        if processes.first:
            _write_metrics(out, history)
            save_weights(out / WEIGHTS, model.state_dict())
    return history


def _make_teacher(settings: Settings, model: nn.Module | None, processes: Processes) -> Teacher | None:
    """Return the teacher that the settings ask for; raise SettingsError for one of the two without the other."""
    if settings.distillation is None:
        if model is not None:
            raise SettingsError("distillation: expected a number with a teacher, got none")
        return None
    if model is None:
        raise SettingsError("distillation: expected a teacher with it, got none")
    moved = model.to(processes.device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    return Teacher(moved, settings.distillation, settings.temperature)


def recorded_milestones(out: Path) -> tuple[int, ...] | None:
    """Return the milestones of the run in ``out``, or None where there is no run or none that can be read."""
    try:
        return tuple(json.loads((out / "settings.json").read_text())["settings"]["milestones"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_run(out: Path) -> bool:
    """Return whether ``out`` has a checkpoint, or the settings of a training, which alone have its processes."""
    try:
        return (out / CHECKPOINT).exists() or "processes" in json.loads((out / "settings.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def _save(out: Path, record: Record, parts: dict[str, "Stateful"], history: list[Epoch]) -> None:
    states = {name: part.state_dict() for name, part in parts.items()}
    epochs = [asdict(epoch) for epoch in history]
    (out / WEIGHTS).unlink(missing_ok=True)  # they are of fewer epochs, if the run goes on for more
    save_checkpoint(out / CHECKPOINT, {**record, **states, "history": epochs})
    _write_metrics(out, history)


def _restore(path: Path, settings: Settings, record: Record, parts: dict[str, "Stateful"]) -> list[Epoch]:
    """Restore the states of the parts from a checkpoint, and return the completed epochs."""
    try:
        state: dict[str, Any] = load_checkpoint(path)
        history = [Epoch(**epoch) for epoch in state["history"]]
        check_resumable(settings, dict(state["settings"]), len(history), path)
        for name in ("processes", "dataset"):
            if state[name] != record[name]:
                raise SettingsError(f"{path}: expected the {name} of its run, {state[name]}, got {record[name]}")
        if len(history) < settings.epochs:
            check_finite(state["model"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except SettingsError:
        raise
    except Exception as error:  # a damaged file can make the unpickler, or the code after it, raise anything
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise SettingsError(f"{path}: not a checkpoint of such a run ({reason})") from error
    if not history or [epoch.epoch for epoch in history] != list(range(1, len(history) + 1)):
        raise SettingsError(f"{path}: not a checkpoint of such a run (its epochs are not 1, 2, ...)")
    return history


def _check_finite(epoch: Epoch, out: Path) -> None:
    if math.isfinite(epoch.train_loss) and math.isfinite(epoch.test_loss):
        return
    left = f"the checkpoint of epoch {epoch.epoch - 1} is left" if epoch.epoch > 1 else "there is no epoch before it"
    raise DivergedError(
        f"{out}: the run has diverged, the loss of epoch {epoch.epoch} is not finite; {left}. "
        "A smaller learning rate may help"
    )


def _write_metrics(out: Path, history: list[Epoch]) -> None:
    with replacing(out / "metrics.jsonl") as temporary:
        temporary.write_text("".join(json_text(asdict(epoch)) + "\n" for epoch in history))
