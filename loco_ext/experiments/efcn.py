"""The eFCN experiment: train a network, lift it at several times to one with fewer constraints, and train that on.

    settings.json       the settings, commit and versions
    cnn/                the network's own run, with its weights at the switch times
    branches/T-R/       the run from switch time T, relaxed as R says; "cnn" continues the network itself
    fcn/                the run of the standard fully connected network
    efcn.json           everything: settings, commit, versions, and the metrics of every run
    *.png               figures like the paper's 2 to 8 and 12, drawn from efcn.json

A run that was killed resumes from its last complete epoch and reaches the same numbers.

d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), sections 4.1 to 4.4,
appendices A to C. The paper has no networks between the convolutional and the fully connected one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loco_ext.analysis import gradient_norm, interpolate, only_blocks, top_hessian_eigenvalue
from loco_ext.analysis.interpolation import METHODS
from loco_ext.checkpoints import DamagedFileError, check_finite, load_weights, save_weights
from loco_ext.errors import first_line
from loco_ext.experiments import efcn_figures, figures, run
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.efcn_pictures import corner_of, filter_of
from loco_ext.experiments.efcn_settings import CNN, FCN, FULL, LCN, EfcnSettings
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record, begin, cached_json, read
from loco_ext.experiments.samples import Samples
from loco_ext.experiments.settings import SettingsError, settings_errors
from loco_ext.experiments.train import Epoch, evaluate, make_model
from loco_ext.folders import owned
from loco_ext.nn import deviation, to_efcn
from loco_ext.nn.locally_connected import LocallyConnectedNd
from loco_ext.output import Rows, cell, note, write_json

TOLERANCE = 1e-2  # on the residual of the power iteration
EPOCH = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")


def measure(settings: EfcnSettings, data: Dataset, out: Path, device: str, *, resume: bool = False) -> Record:
    """Train and measure all networks, or resume those in ``out``; write the files listed above there.

    The result is the content of ``efcn.json``.

    Raises:
        SettingsError: settings do not fit the data or the model, or as for :func:`loco_ext.experiments.records.begin`.
        MemoryError: a lifted network would take more than half of the free memory.
        OSError: as for :func:`loco_ext.folders.owned`.
    """
    settings.training.check_data(data)
    processes = Processes(torch.device(device))
    experiment = _Experiment(settings, data, out, processes)
    experiment.check()
    with owned(out):
        record = begin(out, settings, data, processes, resume=resume)
        record["cnn"] = experiment.cnn()
        arms = [_Arm(relax, time) for time in settings.switch_times for relax in (CNN, *settings.relaxations)]
        record["branches"] = [experiment.lifted(arm) for arm in arms]
        record["fcn"] = experiment.lifted(_Arm(FCN)) if settings.fcn_epochs else None
        write_json(out / "efcn.json", record, indent=None)
        record = read(out / "efcn.json")
        figures.save(efcn_figures.draw(record), out)
    return record


@torch.no_grad()
def reset_as_padded(layer: LocallyConnectedNd) -> None:
    """Reinitialise like an nn.Linear whose inputs include the zero padding, as in the authors' code."""
    conv = layer.pattern.conv
    assert conv is not None
    padded = math.prod(size + sum(pads) for size, pads in zip(conv.input_size, conv.padding, strict=True))
    layer.reset_parameters(like="linear")
    for parameter in layer.parameters():
        parameter.mul_(math.sqrt(conv.n_in / padded))


class _Experiment:
    """The networks of one experiment, and the measurements on them."""

    def __init__(self, settings: EfcnSettings, data: Dataset, out: Path, processes: Processes) -> None:
        self.settings, self.data, self.out, self.processes = settings, data, out, processes
        self.normalization = Normalization(data.train).to(processes.device)
        self.train, self.test = (samples.to(processes.device) for samples in (data.train, data.test))
        self.some = self.train.first(settings.landscape_samples)

    def check(self) -> None:
        """Raise SettingsError or MemoryError where the network cannot be lifted; nothing is written."""
        wanted = (*self.settings.relaxations, *([FCN] if self.settings.fcn_epochs else []))
        for relax in wanted:
            with settings_errors("model: expected one that can be lifted: "):
                self.lift(_Arm(relax, 0))

    def cnn(self) -> Record:
        """Train the network itself and keep its weights at the switch times."""
        setting, folder, model = self.settings.training, self.out / CNN, self.network(0)

        def keep(epoch: int) -> dict[str, float | None]:
            if epoch in (*self.settings.switch_times, setting.epochs):
                save_weights(_snapshot(folder, epoch), model.state_dict())
            return {}

        history = run.run(setting, self.data, folder, self.processes, resume=True, model=model, measure=keep)
        return {"parameters": _size(model), "start": self.start(0), "epochs": _epochs(history)}

    def network(self, epoch: int) -> nn.Module:
        """Return the convolutional network as it was after an epoch of its training."""
        model = make_model(self.settings.training, self.data)
        if epoch:
            path = _snapshot(self.out / CNN, epoch)
            try:
                weights = load_weights(path)
                check_finite(weights)
                model.load_state_dict(weights)
            except (DamagedFileError, OSError, RuntimeError) as error:
                raise SettingsError(f"{path}: not the weights of this network ({first_line(error)})") from error
        return model.to(self.processes.device)

    def lift(self, arm: "_Arm") -> nn.Module:
        """Return the network of a switch time, relaxed; or the fully connected one, initialised as the authors do."""
        model = self.network(arm.time or 0)
        if arm.relax == CNN:
            return model
        how = {LCN: "sharing", FULL: "all", FCN: "all"}.get(arm.relax) or int(arm.relax)
        lifted = to_efcn(model, self.data.blank(self.processes.device), how)
        if arm.relax == FCN:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.settings.training.seed)
                for layer in lifted.modules():
                    if isinstance(layer, LocallyConnectedNd):
                        reset_as_padded(layer)
        return lifted

    def lifted(self, arm: "_Arm") -> Record:
        """Return the record of one lifted network, or of the fully connected one; existing files are reused."""
        folder = self.out / arm.folder
        folder.mkdir(parents=True, exist_ok=True)
        before, after = folder / "before.json", folder / "after.json"
        if not after.exists():
            model = self.lift(arm)
            cached_json(before, lambda: self.before(model, arm))
            history = self.train_on(model, arm)
            write_json(after, {"epochs": _epochs(history)} | self.after(model, arm), indent=None)
        (folder / run.CHECKPOINT).unlink(missing_ok=True)  # the final weights are in model.safetensors
        return read(before) | read(after)

    def before(self, model: nn.Module, arm: "_Arm") -> Record:
        # A lifted network computes the same function as the network it was lifted from, which is faster to evaluate.
        start = self.evaluate(model) if arm.time is None else self.start(arm.time)
        return {
            "switch_time": arm.time,
            "relax": arm.relax,
            "parameters": _size(model),
            "start": start | self.deviations(model, arm),
            "before": self.landscape(model, arm),
        }

    def train_on(self, model: nn.Module, arm: "_Arm") -> list[Epoch]:
        """Train a lifted network, with measurements after each epoch."""
        folder, epochs = self.out / arm.folder, arm.epochs(self.settings)

        def after_epoch(epoch: int) -> dict[str, float | None]:
            if epoch in arm.pictured(self.settings):
                write_json(_picture(folder, epoch), filter_of(model), indent=None)
            return self.deviations(model, arm) | self.masked(model, arm)

        if arm.relax != CNN and not (folder / run.CHECKPOINT).exists():
            write_json(_picture(folder, 0), filter_of(model), indent=None)
        options: dict[str, Any] = {"resume": True, "model": model, "label": arm.label, "measure": after_epoch}
        return run.run(self.settings.branch(epochs), self.data, folder, self.processes, **options)

    def after(self, model: nn.Module, arm: "_Arm") -> Record:
        folder = self.out / arm.folder
        return {
            "after": self.landscape(model, arm),
            "filters": {str(epoch): read(_picture(folder, epoch)) for epoch in arm.pictured(self.settings)},
            "corners": self.corners(model, arm),
            "interpolations": {} if arm.time is None else self.interpolations(model, arm),
        }

    def corners(self, model: nn.Module, arm: "_Arm") -> list[Any]:
        """Return corners of the weight matrix before and after; empty unless lifted at the last switch time."""
        if arm.relax == CNN or arm.time != self.settings.switch_times[-1]:
            return []
        return [corner_of(self.lift(arm)), corner_of(model)]

    def start(self, time: int) -> dict[str, float]:
        """Return the losses and accuracies of the network at a switch time."""
        return cached_json(self.out / CNN / f"start-{time:03}.json", lambda: self.evaluate(self.network(time)))

    def evaluate(self, model: nn.Module, train: Samples | None = None) -> dict[str, float]:
        """Return losses and accuracies on the training samples (all, or those given) and on the test samples."""
        found: dict[str, float] = {}
        for name, samples in (("train", train or self.train), ("test", self.test)):
            loss, accuracy = evaluate(model, samples, self.normalization, self.processes)
            found |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        return found

    def deviations(self, model: nn.Module, arm: "_Arm") -> dict[str, float | None]:
        return {} if arm.relax == CNN else deviation(model)._asdict()

    def masked(self, model: nn.Module, arm: "_Arm") -> dict[str, float | None]:
        """Return test accuracies of the local and of the off-local blocks alone, for networks that have both."""
        if arm.relax in (CNN, LCN):
            return {}
        accuracies: dict[str, float | None] = {}
        for kept in ("local", "off-local"):
            with only_blocks(model, kept):
                _, accuracy = evaluate(model, self.test, self.normalization, self.processes)
            accuracies[f"{kept.replace('-', '_')}_accuracy"] = accuracy
        return accuracies

    def landscape(self, model: nn.Module, arm: "_Arm") -> dict[str, float]:
        """Return the norm of the gradient and the largest eigenvalue of the Hessian."""
        batches = _Batches(self.some, self.normalization, self.settings.training.batch_size)
        found = {"gradient_norm": gradient_norm(model, cross_entropy, batches)}
        if self.settings.power_iterations:
            note(f"{arm.label}: curvature")
            limits: dict[str, Any] = {"iterations": self.settings.power_iterations, "tolerance": TOLERANCE}
            top = top_hessian_eigenvalue(model, cross_entropy, batches, **limits)
            found |= {"top_eigenvalue": top.value, "residual": top.residual, "iterations": top.iterations}
        return found

    def interpolations(self, model: nn.Module, arm: "_Arm") -> dict[str, list[dict[str, float]]]:
        """Return losses and accuracies along the paths from the trained network, relaxed in the same way."""
        settings = self.settings
        if not settings.interpolation_points:
            return {}
        first = self.lift(_Arm(arm.relax, settings.training.epochs))
        batches = _Batches(self.train, self.normalization, settings.training.batch_size)
        options: dict[str, Any] = {"loss": cross_entropy, "data": batches, "steps": settings.string_steps}
        options |= {"learning_rate": settings.branch_learning_rate, "stiffness": settings.stiffness}
        found = {}
        for method in METHODS:
            note(f"{arm.label}: interpolation, {method}")
            path = interpolate(first, model, settings.interpolation_points, method, **options)
            found[method] = [{"alpha": alpha} | self.evaluate(point, self.some) for alpha, point in path]
        return found


@dataclass(frozen=True)
class _Arm:
    """One lifted network; ``time`` is its switch time, None for the fully connected one."""

    relax: str
    time: int | None = None

    @property
    def folder(self) -> Path:
        return Path(FCN) if self.time is None else Path("branches") / f"{self.time:03}-{self.relax}"

    @property
    def label(self) -> str:
        return self.relax if self.time is None else f"{self.relax} from epoch {self.time}"

    def epochs(self, settings: EfcnSettings) -> int:
        return settings.fcn_epochs if self.relax == FCN else settings.branch_epochs

    def pictured(self, settings: EfcnSettings) -> list[int]:
        """Return the epochs whose filter is saved: those of the paper's figures 5 and 6, and the last."""
        last = self.epochs(settings)
        return [] if self.relax == CNN else sorted({0, max(1, round(0.11 * last)), round(0.78 * last), last})


class _Batches(Sequence[tuple[Tensor, Tensor]]):
    """Samples in their stored order, each batch normalised on access."""

    def __init__(self, samples: Samples, normalization: Normalization, batch_size: int) -> None:
        self.images, self.labels = (part.split(batch_size) for part in samples)
        self.normalization = normalization

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        return self.normalization(self.images[index]), self.labels[index]


def rows(record: Record) -> Rows:
    """Return headers and cells of a table of all networks, with the curvature after training."""
    headers = ["network", "from", "weights", "test before", "test after", "delta local", "delta share", "top eigen"]
    own: Record = {"relax": CNN, "switch_time": None, "after": {}}
    cells = []
    for network in [own | record["cnn"], *record["branches"], *([record["fcn"]] if record["fcn"] else [])]:
        last, after, time = network["epochs"][-1], network["after"], network["switch_time"]
        cells.append(
            [
                network["relax"],
                cell(time, "d"),
                f"{network['parameters'] / 1e6:.2f}M",
                *(f"{part['test_accuracy']:.1%}" for part in (network["start"], last)),
                *(cell(last.get(name), ".2%") for name in ("delta_locality", "delta_sharing")),
                cell(after.get("top_eigenvalue"), ".2g"),
            ]
        )
    return headers, cells


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _epochs(history: list[Epoch]) -> list[Record]:
    """Return the epochs as records without their times, which differ from run to run."""
    return [{name: getattr(epoch, name) for name in EPOCH} | epoch.measures for epoch in history]


def _snapshot(folder: Path, epoch: int) -> Path:
    return folder / f"weights-{epoch:03}.safetensors"


def _picture(folder: Path, epoch: int) -> Path:
    return folder / f"filter-{epoch:03}.json"
