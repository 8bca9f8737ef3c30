"""Compact a trained run: save the smaller network as a portable file and as ONNX, and report what changed.

model.safetensors  the smaller network's tensors
manifest.json      its graph, see sparsity.save
report.json        layers, MACs, latency; accuracies where the data are at hand; it comes after those
model.onnx         where asked for
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext import sparsity
from loco_ext.experiments.data import DATA, FORMATS, Dataset, ImageFormat, load
from loco_ext.experiments.files import DataError
from loco_ext.experiments.models import MODELS, find_model, is_own, load_weights
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import provenance
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import measure_accuracies
from loco_ext.folders import check_results, owned
from loco_ext.output import json_text, note, replacing, unfinished

FILES = ("report.json", "manifest.json", "model.safetensors")


@dataclass
class Compacted:
    """The smaller network, its report, and test accuracies in [0, 1] before and after (None without data)."""

    network: nn.Module
    report: sparsity.Report
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the network, as plain data."""
        accuracies = {"accuracy_before": self.accuracy_before, "accuracy_after": self.accuracy_after}
        return {**accuracies, **self.report.to_dict()}


@dataclass(frozen=True)
class Trained:
    """A trained network in eval mode, the names of its model and data set, and the images that it is for.

    ``settings`` are those of its run and ``digest`` that of its data; a checkpoint has neither.
    """

    model: nn.Module
    name: str
    data: str
    images: ImageFormat
    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None

    def load_data(self, folder: Path | None) -> Dataset | None:
        """Return its data set, or None where that needs files and ``folder`` is None; say so if its images are others.

        Raises:
            DataError: files cannot be read, or the images have another shape or other classes.
        """
        if folder is None and self.data != "digits":
            return None
        dataset = load(self.data, folder, self.images.size)
        if dataset.images != self.images:
            raise DataError(f"folder: expected {self.images}, as for the training, got {dataset.images}")
        self.note_other_images(dataset)
        return dataset

    def note_other_images(self, dataset: Dataset) -> None:
        """Say so if the network was trained on other images: a data set is normalised by its own training images."""
        if self.digest not in (None, dataset.description["digest"]):
            note(
                "The trained network was trained on other images; these are normalised by their own mean and standard "
                "deviation"
            )


def read_trained(path: Path, name: str | None = None, data: str | None = None, *, own: str | None = None) -> Trained:
    """Load a checkpoint into the network of a run's folder, or into the network ``name`` for the data set ``data``.

    Args:
        own: the user's function whose network a run may also be of.

    Raises:
        SettingsError: there is no such run, a name is unknown or missing, the run had another data set than ``data``,
            or the weights are of another network.
        CheckpointError: the file holds no weights.
    """
    settings: Mapping[str, Any] = {}
    images, digest = FORMATS.get(data or ""), None
    if path.is_dir():
        settings, images, digest = _read_settings(path / "settings.json")
        recorded = settings.get("model")
        if name is None and isinstance(recorded, str) and is_own(recorded) and recorded != own:
            raise SettingsError(f"model: expected {recorded}, as for the training: code is run only where it is named")
        if data not in (None, settings.get("data")):
            raise SettingsError(f"data: expected {settings.get('data')}, as for the training, got {data}")
        name, data = name or recorded, settings.get("data")
        path = path / "model.safetensors"
    elif not path.exists():
        raise SettingsError(f"{path}: expected the folder of a run or a checkpoint, found neither")
    if not isinstance(name, str) or not (is_own(name) or name in MODELS):
        raise SettingsError(f"model: expected one of {', '.join(MODELS)}, or MODULE:FUNCTION, got {name!r}")
    if data not in DATA or images is None:
        raise SettingsError(f"data: expected one of {', '.join(FORMATS)}, got {data!r}")
    kind = find_model(name)
    if (size := images.size) < (least := kind.least_size):
        raise SettingsError(f"model: {name} needs images of at least {least}x{least} pixels, {data} has {size}x{size}")
    width = {"width": settings["width"]} if kind.scalable and "width" in settings else {}
    model = kind.make(images.channels, images.classes, images.size, **width)
    load_weights(model, path)
    return Trained(model.eval(), name, data, images, settings, digest)


def compact(
    trained: Trained,
    *,
    batch_size: int,
    cost: str = "measured",
    fold_norms: bool = True,
    dataset: Dataset | None = None,
    device: str = "cpu",
) -> Compacted:
    """Compact a trained network for batches of its images, in channels_last as in training.

    Args:
        batch_size, device: size and device of the batches to optimise latency for.
        cost, fold_norms: as for :func:`loco_ext.sparsity.compact`.
        dataset: both networks are evaluated on its test samples; with None they are not evaluated.
    """
    images = example(trained, batch_size, torch.device(device))
    model = trained.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    network, report = sparsity.compact(model, images, cost=cost, fold_norms=fold_norms)
    if dataset is None:
        return Compacted(network, report)
    return Compacted(network, report, *measure_accuracies(dataset, Processes(torch.device(device)), model, network))


def example(trained: Trained, batch_size: int, device: torch.device) -> Tensor:
    """Return random images of the network's size, in channels_last."""
    generator = torch.Generator().manual_seed(0)
    channels, size, *_ = trained.images
    images = torch.randn(batch_size, channels, size, size, generator=generator)
    return images.to(device, memory_format=torch.channels_last)


def check_folder(out: Path) -> None:
    """Raise UserError if ``out`` has results of something else than compaction, which would be replaced."""
    report = out / "report.json"
    check_results(out, FILES if report.exists() or unfinished(report) else ())


def save(compacted: Compacted, trained: Trained, out: Path, *, onnx: bool) -> None:
    """Write the files named above to the folder ``out``.

    Raises:
        OSError: ``out`` cannot be written to, or another process is writing to it.
        ModelFileError: the network cannot be saved; or it cannot be exported to ONNX, and the other files are written.
    """
    device_type = next(trained.model.parameters()).device.type
    facts = {"model": trained.name, "data": trained.data, "device": device_type, **provenance()}
    report, exported = out / "report.json", out / "model.onnx"
    with owned(out):
        if report.exists():
            exported.unlink(missing_ok=True)  # it is of the network that is replaced
        with replacing(report) as temporary:  # by which check_folder knows the folder of a killed process
            temporary.write_text(json_text(facts | compacted.to_dict(), 2) + "\n")
            sparsity.save(compacted.network, out, compacted.report)
        if onnx:
            device = next(compacted.network.parameters()).device
            channels, size, *_ = trained.images
            sparsity.export_onnx(compacted.network, torch.zeros(2, channels, size, size, device=device), exported)


def _read_settings(path: Path) -> tuple[Mapping[str, Any], ImageFormat, str | None]:
    """Return a run's settings, and the format and the digest of its images."""
    try:
        record = json.loads(path.read_text())
        dataset = record["dataset"]
        channels, size, classes = (int(dataset[name]) for name in ("channels", "size", "classes"))
        images = ImageFormat(channels, size, classes, tuple(map(str, dataset.get("class_names", ()))))
        return {**record["settings"]}, images, dataset.get("digest")
    except FileNotFoundError:
        raise SettingsError(f"{path.parent}: expected the folder of a run, found no settings.json in it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path}: expected the settings of a run") from error
