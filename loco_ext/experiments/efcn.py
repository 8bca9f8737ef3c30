"""The eFCN experiment: a network trained, lifted at several times to one with fewer constraints, and trained on.

    settings.json       the settings and versions
    cnn/                the network's own run, with its weights at the switch times
    branches/T-R/       the run from switch time T, relaxed as R says; "cnn" is the network itself, trained on
    fcn/                the run of the standard fully connected network
    efcn.json           all of it: settings, versions, and the figures of every run
    *.png               like the paper's figures 2 to 8 and 12, drawn from that

Runs go on from their last whole epoch after a kill, to the same numbers.

d'Ascoli, Sagun, Bruna, Biroli, "Finding the Needle in the Haystack with Convolutions" (2019), sections 4.1 to 4.4,
appendices A to C. The paper has no networks between the convolutional and the fully connected one.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loco_ext.analysis import gradient_norm, interpolate, only_blocks, top_hessian_eigenvalue
from loco_ext.analysis.interpolation import METHODS
from loco_ext.experiments import efcn_figures, run
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.efcn_pictures import corner_of, filter_of
from loco_ext.experiments.efcn_settings import CNN, FCN, FULL, LCN, EfcnSettings
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.samples import Samples
from loco_ext.experiments.settings import SettingsError
from loco_ext.experiments.train import Epoch, evaluate, make_model
from loco_ext.nn import deviation, to_efcn
from loco_ext.nn.locally_connected import LocallyConnectedNd
from loco_ext.output import json_text, remove_leftovers, replacing

Record = dict[str, Any]
TOLERANCE = 1e-2  # of the power iteration's residual
EPOCH = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")


def measure(settings: EfcnSettings, data: Dataset, out: Path, device: str, *, resume: bool = False) -> Record:
    """Trains and measures all networks, or goes on with those in ``out``; writes its files there.

    Returns:
        What ``efcn.json`` holds.

    Raises:
        SettingsError: settings that do not fit the data or the model; another experiment in ``out``, or without
            ``resume`` any; files in it that cannot be read.
        MemoryError: a lifted network would take more than half of the free memory.
        OSError: ``out`` cannot be written to.
    """
    settings.training.check_data(data)
    settings_path, processes = out / "settings.json", Processes(torch.device(device))
    record: Record = {
        "settings": asdict(settings),
        "training_samples": len(data.train.labels),
        "test_samples": len(data.test.labels),
        "device": processes.device.type,
        "versions": run.versions(),
    }
    text = json_text(record, indent=2) + "\n"
    if settings_path.exists():
        if not resume:
            raise SettingsError(f"{out}: holds an experiment already; resume it, or choose another folder")
        if settings_path.read_text() != text:
            raise SettingsError(f"{settings_path}: of another experiment; resume it with its own settings")
    out.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)
    _write(settings_path, text)
    experiment = _Experiment(settings, data, out, processes)
    record["cnn"] = experiment.cnn()
    record["branches"] = [
        experiment.lifted(relax, time) for time in settings.switch_times for relax in (CNN, *settings.relaxations)
    ]
    record["fcn"] = experiment.lifted(FCN) if settings.fcn_epochs else None
    _write(out / "efcn.json", json_text(record) + "\n")
    efcn_figures.save(record, out)
    return record


class _Experiment:
    """The networks of one experiment."""

    def __init__(self, settings: EfcnSettings, data: Dataset, out: Path, processes: Processes) -> None:
        self.settings, self.data, self.out, self.processes = settings, data, out, processes
        self.normalization = Normalization(data.train).to(processes.device)
        self.train, self.test = (samples.to(processes.device) for samples in (data.train, data.test))
        self.some = Samples(*(part[: settings.landscape_samples] for part in self.train))

    def cnn(self) -> Record:
        """The network's own training, which leaves its weights at the switch times."""
        folder, model = self.out / CNN, self.network(0)

        def keep(epoch: int) -> dict[str, float | None]:
            if epoch in (*self.settings.switch_times, self.settings.training.epochs):
                with replacing(_snapshot(folder, epoch)) as temporary:
                    temporary.write_bytes(safetensors({name: t.cpu() for name, t in model.state_dict().items()}))
            return {}

        start = self.evaluate(model)
        setting = self.settings.training
        history = run.run(setting, self.data, folder, self.processes, resume=True, model=model, measure=keep)
        return {"parameters": _size(model), "start": start, "epochs": _epochs(history)}

    def network(self, epoch: int) -> nn.Module:
        """The convolutional network as it was after an epoch of its training."""
        model = make_model(self.settings.training, self.data)
        if epoch:
            path = _snapshot(self.out / CNN, epoch)
            try:
                model.load_state_dict(load_file(path))
            except Exception as error:  # what a damaged file raises is not documented
                raise SettingsError(f"{path}: not the weights of this network ({type(error).__name__})") from error
        return model.to(self.processes.device)

    def lift(self, relax: str, epoch: int) -> nn.Module:
        """The network of a switch time, relaxed; or the fully connected one, as nn.Linear would initialise it."""
        model = self.network(epoch)
        if relax == CNN:
            return model
        example = torch.zeros(1, self.data.channels, self.data.size, self.data.size, device=self.processes.device)
        how = {LCN: "sharing", FULL: "all", FCN: "all"}.get(relax) or int(relax)
        lifted = to_efcn(model, example, how)
        if relax == FCN:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.settings.training.seed)
                for layer in _layers(lifted):
                    layer.reset_parameters(like="linear")
        return lifted

    def lifted(self, relax: str, time: int | None = None) -> Record:
        """Everything about one lifted network, or the fully connected one; from its file where that is there."""
        folder = self.out / FCN if time is None else self.out / "branches" / f"{time:03}-{relax}"
        label = relax if time is None else f"{relax} from epoch {time}"
        model = self.lift(relax, time or 0)
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

        def before() -> Record:
            # What a network computes is what the one that it was lifted from does, which is faster.
            same = model if time is None else self.network(time)
            return {
                "switch_time": time,
                "relax": relax,
                "parameters": _size(model),
                "start": self.evaluate(same) | self.deviations(model, relax),
                "before": self.landscape(model, label),
            }

        def after() -> Record:
            history = self.train_on(model, folder, relax, label)
            return {
                "epochs": _epochs(history),
                "after": self.landscape(model, label),
                "filters": {str(epoch): _read(_picture(folder, epoch)) for epoch in self.pictured(relax)},
                "corners": self.corners(model, relax, time),
                "interpolations": {} if time is None else self.interpolations(model, relax, label),
            }

        record = _once(folder / "before.json", before) | _once(folder / "after.json", after)
        (folder / run.CHECKPOINT).unlink(missing_ok=True)  # the final weights are in model.safetensors
        return record

    def train_on(self, model: nn.Module, folder: Path, relax: str, label: str) -> list[Epoch]:
        """The training of a lifted network, with what is measured after each epoch."""
        epochs = self.epochs(relax)

        def after_epoch(epoch: int) -> dict[str, float | None]:
            if epoch in self.pictured(relax):
                _write(_picture(folder, epoch), json_text(filter_of(model)) + "\n")
            return {} if epoch == 0 else self.deviations(model, relax) | self.masked(model, relax)

        if not (folder / run.CHECKPOINT).exists():
            after_epoch(0)
        setting = self.settings.branch(epochs)
        options: dict[str, Any] = {"resume": True, "model": model, "label": label, "measure": after_epoch}
        return run.run(setting, self.data, folder, self.processes, **options)

    def epochs(self, relax: str) -> int:
        return self.settings.fcn_epochs if relax == FCN else self.settings.branch_epochs

    def pictured(self, relax: str) -> list[int]:
        """The epochs whose filter is kept: as in the paper's figures 5 and 6, and the last."""
        last = self.epochs(relax)
        return [] if relax == CNN else sorted({0, max(1, round(0.11 * last)), round(0.78 * last), last})

    def corners(self, model: nn.Module, relax: str, time: int | None) -> list[Any]:
        """Of the weight matrix before and after; of the networks that were lifted last."""
        if relax == CNN or time != self.settings.switch_times[-1]:
            return []
        return [corner_of(self.lift(relax, time)), corner_of(model)]

    def evaluate(self, model: nn.Module, train: Samples | None = None) -> dict[str, float]:
        """Losses and accuracies on the training samples, all or those given, and on the test samples."""
        sets = {"train": train or self.train, "test": self.test}
        found = {
            name: evaluate(model, samples, self.normalization, self.processes) for name, samples in sets.items()
        }
        return {f"{name}_{what}": value for name in sets for what, value in zip(EVALUATED, found[name], strict=True)}

    def deviations(self, model: nn.Module, relax: str) -> dict[str, float | None]:
        return {} if relax == CNN else deviation(model)._asdict()

    def masked(self, model: nn.Module, relax: str) -> dict[str, float | None]:
        """Test accuracies of the local and of the other blocks alone, of networks that have both."""
        if relax in (CNN, LCN):
            return {}
        accuracies: dict[str, float | None] = {}
        for kept in ("local", "off-local"):
            with only_blocks(model, kept):
                _, accuracy = evaluate(model, self.test, self.normalization, self.processes)
            accuracies[f"{kept.replace('-', '_')}_accuracy"] = accuracy
        return accuracies

    def landscape(self, model: nn.Module, label: str) -> dict[str, float]:
        """The norm of the gradient and the largest eigenvalue of the Hessian."""
        batches = _Batches(self.some, self.normalization, self.settings.training.batch_size)
        found = {"gradient_norm": gradient_norm(model, cross_entropy, batches)}
        if self.settings.power_iterations:
            print(f"{label}: curvature", file=sys.stderr)
            limits: dict[str, Any] = {"iterations": self.settings.power_iterations, "tolerance": TOLERANCE}
            top = top_hessian_eigenvalue(model, cross_entropy, batches, **limits)
            found |= {"top_eigenvalue": top.value, "residual": top.residual, "iterations": top.iterations}
        return found

    def interpolations(self, model: nn.Module, relax: str, label: str) -> dict[str, list[dict[str, float]]]:
        """Losses and accuracies along the paths from the trained network, relaxed in the same way."""
        settings = self.settings
        if not settings.interpolation_points:
            return {}
        first = self.lift(relax, settings.training.epochs)
        batches = _Batches(self.train, self.normalization, settings.training.batch_size)
        options: dict[str, Any] = {"loss": cross_entropy, "data": batches, "steps": settings.string_steps}
        options |= {"learning_rate": settings.branch_learning_rate, "stiffness": settings.stiffness}
        found = {}
        for method in METHODS:
            print(f"{label}: interpolation, {method}", file=sys.stderr)
            path = interpolate(first, model, settings.interpolation_points, method, **options)
            found[method] = [{"alpha": alpha} | self.evaluate(point, self.some) for alpha, point in path]
        return found


EVALUATED = ("loss", "accuracy")


class _Batches(Sequence[tuple[Tensor, Tensor]]):
    """Samples in their order, each batch normalised when it is asked for."""

    def __init__(self, samples: Samples, normalization: Normalization, batch_size: int) -> None:
        self.images, self.labels = (part.split(batch_size) for part in samples)
        self.normalization = normalization

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        return self.normalization(self.images[index]), self.labels[index]


def rows(record: Record) -> tuple[list[str], list[list[str]]]:
    """Headers and cells of a table of all networks."""
    headers = ["network", "from epoch", "parameters", "test accuracy", "best", "delta locality", "delta sharing"]
    headers += ["gradient", "top eigenvalue"]
    own = {"relax": CNN, "switch_time": None, "before": {}, "after": {}}
    cells = []
    for network in [own | record["cnn"], *record["branches"], *([record["fcn"]] if record["fcn"] else [])]:
        last, before, after = network["epochs"][-1], network["before"], network["after"]
        accuracies = [epoch["test_accuracy"] for epoch in network["epochs"]]
        cells.append(
            [
                network["relax"],
                "" if network["switch_time"] is None else str(network["switch_time"]),
                f"{network['parameters']:,}",
                f"{network['start']['test_accuracy']:.1%} -> {last['test_accuracy']:.1%}",
                f"{max(accuracies):.1%}",
                *(_text(last.get(name), "{:.2%}") for name in ("delta_locality", "delta_sharing")),
                *(
                    " -> ".join(_text(part.get(name), "{:.3g}") for part in (before, after) if part)
                    for name in ("gradient_norm", "top_eigenvalue")
                ),
            ]
        )
    return headers, cells


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _layers(model: nn.Module) -> list[LocallyConnectedNd]:
    return [module for module in model.modules() if isinstance(module, LocallyConnectedNd)]


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _epochs(history: list[Epoch]) -> list[Record]:
    """Without the times, which differ from run to run."""
    return [{name: getattr(epoch, name) for name in EPOCH} | epoch.measures for epoch in history]


def _snapshot(folder: Path, epoch: int) -> Path:
    return folder / f"weights-{epoch:03}.safetensors"


def _picture(folder: Path, epoch: int) -> Path:
    return folder / f"filter-{epoch:03}.json"


def _once(path: Path, make: Callable[[], Record]) -> Record:
    """What the file holds, which is made where it is missing."""
    if not path.exists():
        _write(path, json_text(make()) + "\n")
    return _read(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, FileNotFoundError) as error:
        raise SettingsError(f"{path}: cannot be read ({type(error).__name__})") from error


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)
