"""A trained run, compacted: the smaller network as a file that loads anywhere, as ONNX, and what became of it.

model.safetensors  the smaller network's tensors
manifest.json      its graph, see sparsity.save
report.json        layers, multiply-adds, latency; accuracies where the data are at hand
model.onnx         where asked for
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.analysis.checkpoint import CheckpointError, read_checkpoint
from loco_ext.experiments.data import CLASSES, Dataset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import MODELS
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import evaluate
from loco_ext.folders import owned
from loco_ext.output import json_text, replacing

# Channels, and height and width, of the images of each data set.
IMAGES = {"digits": (1, 8), "cifar10": (3, 32), "cifar100": (3, 32), "fashion-mnist": (1, 32)}


@dataclass
class Compacted:
    """The smaller network, its report, and test accuracies in [0, 1] before and after, None without data."""

    network: nn.Module
    report: sparsity.Report
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All but the network, as plain data."""
        accuracies = {"accuracy_before": self.accuracy_before, "accuracy_after": self.accuracy_after}
        return {**accuracies, **self.report.to_dict()}


@dataclass(frozen=True)
class Trained:
    """A trained network, in eval mode, and the names of its kind and of its data."""

    model: nn.Module
    name: str
    data: str


def read_trained(path: Path, name: str | None = None, data: str | None = None) -> Trained:
    """The network of a run's folder, or the one named ``name``, for the data set ``data``, with a checkpoint's weights.

    Raises:
        SettingsError: no such run, unknown or missing names, or weights of another network.
        CheckpointError: a file that holds no weights.
    """
    if path.is_dir():
        settings = _settings(path / "settings.json")
        name, data = name or settings.get("model"), data or settings.get("data")
        path = path / "model.safetensors"
    if name not in MODELS:
        raise SettingsError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    if data not in CLASSES:
        raise SettingsError(f"data: expected one of {', '.join(CLASSES)}, got {data!r}")
    model = MODELS[name].make(*_shape(name, data))
    _load(model, read_checkpoint(path), path)
    return Trained(model.eval(), name, data)


def compact(
    trained: Trained,
    *,
    batch_size: int,
    cost: str = "measured",
    fold_norms: bool = True,
    dataset: Dataset | None = None,
    device: str = "cpu",
) -> Compacted:
    """Compacts a trained network for batches of its images, channels_last as training has them.

    Args:
        batch_size, device: of the batches that the network is to be fast on.
        cost, fold_norms: as for :func:`loco_ext.sparsity.compact`.
        dataset: whose test samples both networks are tried on; None: they are not.
    """
    channels, size = IMAGES[trained.data]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, channels, size, size, generator=generator).to(device)
    model = trained.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    network, report = sparsity.compact(
        model, images.contiguous(memory_format=torch.channels_last), cost=cost, fold_norms=fold_norms
    )
    result = Compacted(network, report)
    if dataset is not None:
        normalization, processes = Normalization(dataset.train), Processes(torch.device(device))
        test = dataset.test.to(processes.device)
        _, result.accuracy_before = evaluate(model, test, normalization, processes)
        _, result.accuracy_after = evaluate(network, test, normalization, processes)
    return result


def save(compacted: Compacted, trained: Trained, out: Path, *, onnx: bool) -> None:
    """Writes the files named above to the folder ``out``.

    Raises:
        OSError: ``out`` cannot be written to, or another process does.
    """
    record = {"model": trained.name, "data": trained.data, **compacted.to_dict()}
    with owned(out):
        sparsity.save(compacted.network, out, compacted.report)
        if onnx:
            channels, size = IMAGES[trained.data]
            images = torch.zeros(2, channels, size, size, device=next(compacted.network.parameters()).device)
            sparsity.export_onnx(compacted.network, images, out / "model.onnx")
        with replacing(out / "report.json") as path:
            path.write_text(json_text(record, indent=2) + "\n")


def _shape(name: str, data: str) -> tuple[int, int, int]:
    channels, size = IMAGES[data]
    if size < MODELS[name].least_size:
        least = MODELS[name].least_size
        raise SettingsError(f"model: {name} needs images of at least {least}x{least} pixels, {data} has {size}x{size}")
    return channels, CLASSES[data], size


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(path.read_text())["settings"]
    except FileNotFoundError:
        raise SettingsError(f"{path.parent}: expected the folder of a run, found no settings.json in it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path}: expected the settings of a run") from error
    if not isinstance(settings, Mapping):
        raise SettingsError(f"{path}: expected the settings of a run")
    return settings


def _load(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise CheckpointError(f"{path}: weights of another network: {lines[-1].strip()}") from error
