"""Make a trained network smaller, to a budget, train it on and compact it.

start/             the smaller network before it is trained on, see sparsity.save
shrink.json        what it was made of and how; it is written after start/, so that a run that was killed resumes
training/          the run that trains it on, see loco_ext.experiments.run
model.safetensors, manifest.json, report.json      as of loco_ext.experiments.compacting
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typer import Option

from loco_ext import sparsity
from loco_ext.errors import first_line
from loco_ext.experiments import compacting, run
from loco_ext.experiments.compacting import Compacted, Trained
from loco_ext.experiments.data import FOLDER, Dataset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.models import digest
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import read
from loco_ext.experiments.settings import (
    BUDGETS,
    Settings,
    SettingsError,
    budget_of,
    check_fields,
    check_temperature,
    count_option,
    from_preset,
    settings_errors,
    share_option,
)
from loco_ext.experiments.train import check_rounding, measure_accuracies
from loco_ext.folders import check_results, owned
from loco_ext.output import print_table, remove_leftovers, write_json
from loco_ext.sparsity.budget.distillation import TEMPERATURE

SAMPLES = 2048  # training samples whose gradients tell the importance of filters
RATE_SHARE = 0.5  # learning rate of the first epoch, as a share of the training's before
# Settings of the run before that training on takes over.
KEPT = (
    "batch_size",
    "optimizer",
    "learning_rate",
    "momentum",
    "weight_decay",
    "norm",
    "augment",
    "crop",
    "seed",
    "amp",
)


@dataclass(frozen=True)
class Shrinking:
    """Settings that say how small a network becomes and how it is trained on; exactly one budget is given."""

    macs: Annotated[float | None, share_option("Share of the network's multiply-accumulates that may remain.")] = None
    parameters: Annotated[float | None, share_option("Share of the network's parameters that may remain.")] = None
    latency: Annotated[
        float | None, share_option("Share of the network's latency, measured on this machine, that may remain.")
    ] = None
    granularity: Annotated[
        Literal["rings", "filters"],
        Option(help="What is removed. rings: outer rings of taps and whole filters; filters: whole filters only."),
    ] = "rings"
    round_to: Annotated[
        int, count_option(help="Make all numbers of channels multiples of this number; 8 suits fast kernels.")
    ] = 1
    importance: Annotated[
        Literal["taylor", "norm"],
        Option(
            help="How importance is measured: taylor, by the effect on the training loss; norm, by the size of weights."
        ),
    ] = "taylor"
    epochs: Annotated[int, count_option(help="Number of passes over the training samples afterwards.")] = 10
    learning_rate: Annotated[
        float | None,
        Option(
            "--lr",
            min=0,
            show_default="half of the run's, or 0.05 for a checkpoint",
            help="Learning rate in the first epoch; it falls to 0 along a cosine.",
        ),
    ] = None
    distillation: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            metavar="WEIGHT",
            show_default="no distillation",
            help="Weight in the loss of the outputs of the original network, which teach the small one.",
        ),
    ] = None
    temperature: Annotated[
        float, Option(help="Temperature of --distillation that softens the outputs of both networks.")
    ] = TEMPERATURE
    batch_size: Annotated[int, count_option(help="Number of images per batch for which speed is measured.")] = 64

    def __post_init__(self) -> None:
        check_fields(self)
        check_temperature(self)
        if budget_of(self) is None:
            raise SettingsError(f"{', '.join(BUDGETS)}: expected exactly one of them, got none")


@dataclass
class Shrunk:
    """The compacted network after training on, and what it replaces.

    Args:
        before: the trained network, compacted without being made smaller: its accuracy, cost and latency.
        after: the small network.
        accuracy_untrained: test accuracy in [0, 1] of the smaller network before it was trained on.
    """

    before: Compacted
    after: Compacted
    accuracy_untrained: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the networks, as plain data."""
        networks = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        return {"accuracy_untrained": self.accuracy_untrained, **networks}

    def show(self, batch_size: int) -> None:
        """Print accuracy, cost and latency of the trained network and of the small one."""
        dense, small = self.before.report, self.after.report
        accuracies = self.before.accuracy_before, self.accuracy_untrained, self.after.accuracy_after
        costs = (
            ("as trained", dense.macs_before, dense.parameters_before, dense.latency_before),
            ("made smaller", small.macs_before, small.parameters_before, None),
            ("and trained further", small.macs_after, small.parameters_after, small.latency_after),
        )
        print_table(
            ["network", "test accuracy", "MACs of an image", "parameters", f"latency of {batch_size}"],
            [
                [name, f"{accuracy or 0:.2%}", f"{macs:,}", f"{parameters:,}", f"{1e3 * time:.2f} ms" if time else ""]
                for accuracy, (name, macs, parameters, time) in zip(accuracies, costs, strict=True)
            ],
        )


def shrink(
    trained: Trained, how: Shrinking, dataset: Dataset, out: Path, device: str, *, resume: bool = False
) -> Shrunk:
    """Make a trained network smaller, train it on, and compact it; write ``start``, ``shrink.json`` and ``training``.

    With ``resume``, it goes on with what is in ``out``, if there is anything.

    Raises:
        SettingsError: the budget cannot be met; ``out`` holds a network already and ``resume`` is false, or another
            one than was asked for; files in it cannot be read.
        DivergedError: the loss of training on is not finite; its last good epoch is left.
        OSError: ``out`` cannot be written to, or another process is writing to it.
    """
    processes, setting = Processes(torch.device(device)), _settings(trained, how)
    record = {"shrinking": asdict(how), "weights": digest(trained.model)}
    with owned(out):
        path = out / "shrink.json"
        if not path.exists():
            remove_leftovers(out / "start")
            network, report = _smaller(trained, how, dataset, setting, processes)
            sparsity.save(network, out / "start", report)
            write_json(path, record)
        elif resume:
            _check_same(read(path), record, path)
        else:
            raise SettingsError(f"{out}: holds a run already; resume it, or choose another folder")
    network = sparsity.load(out / "start").to(processes.device)
    before = compacting.compact(trained, batch_size=how.batch_size, dataset=dataset, device=device)
    (untrained,) = measure_accuracies(dataset, processes, network)
    teacher = None if how.distillation is None else trained.model
    setting = replace(setting, weights=digest(network), teacher=None if teacher is None else digest(teacher))
    options: dict[str, Any] = {"model": network, "teacher": teacher, "label": "training on", "finite": True}
    run.run(setting, dataset, out / "training", processes, resume=True, **options)
    after = compacting.compact(
        replace(trained, model=network.eval()), batch_size=how.batch_size, dataset=dataset, device=device
    )
    return Shrunk(before, after, untrained)


def check_folder(out: Path) -> None:
    """Raise UserError if ``out`` has results of something else than shrinking, which would be replaced."""
    check_results(out, ("shrink.json", *compacting.FILES) if (out / "shrink.json").exists() else ())


def _check_same(recorded: Any, record: dict[str, Any], path: Path) -> None:
    """Raise SettingsError where the record of a run to resume differs; options that it lacks had their defaults."""
    try:
        before, weights = asdict(Shrinking(**recorded["shrinking"])), recorded["weights"]
    except (KeyError, TypeError, SettingsError) as error:
        raise SettingsError(f"{path}: expected the record of a run to resume ({first_line(error)})") from error
    others = [name for name, value in record["shrinking"].items() if before[name] != value]
    if others or weights != record["weights"]:
        raise SettingsError(
            f"{path}: expected the options and the network of the run to resume, got another "
            f"{', '.join(others) or 'network'}"
        )


def _settings(trained: Trained, how: Shrinking) -> Settings:
    """Return the settings of training on: the run's, as far as they matter, with a cosine of the learning rate."""
    kept = {name: trained.settings[name] for name in KEPT if name in trained.settings}
    rate = RATE_SHARE * kept.pop("learning_rate", 0.1) if how.learning_rate is None else how.learning_rate
    options: dict[str, Any] = {"model": trained.name, "data": trained.data, "epochs": how.epochs, "learning_rate": rate}
    options |= {"distillation": how.distillation, "temperature": how.temperature}
    if trained.data == FOLDER:
        options["image_size"] = trained.images.size
    return from_preset("quick", **kept | options)


def _smaller(
    trained: Trained, how: Shrinking, dataset: Dataset, setting: Settings, processes: Processes
) -> tuple[nn.Module, sparsity.Report]:
    """Return the smaller network, which has batch norms, and its report."""
    check_rounding(how.round_to, trained.model)
    normalization = Normalization(dataset.train)
    generator = torch.Generator().manual_seed(setting.seed)
    chosen = torch.randperm(len(dataset.train.labels), generator=generator)[:SAMPLES].split(setting.batch_size)
    batches: list[tuple[Tensor, Tensor]] = [
        (normalization(dataset.train.images[i]).to(processes.device), dataset.train.labels[i].to(processes.device))
        for i in chosen
    ]
    example = compacting.example(trained, how.batch_size, processes.device)
    model = trained.model.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    names = (*BUDGETS, "importance", "granularity", "round_to")
    options: dict[str, Any] = {name: getattr(how, name) for name in names}
    with settings_errors():
        return sparsity.shrink_to(model, example, batches=batches, **options)
