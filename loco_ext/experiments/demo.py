"""The demo: one network trained twice on handwritten digits, with ordinary and with locality-promoting weight decay.

Both trainings start from the same weights and see the same batches. The baseline uses torch.optim.SGD itself; the
other uses this package's SGD with a decay map that is small at the centre of each kernel and large at its corners
(LOCO-REG, section 6), with the same mean.
"""

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from loco_ext import optim, sparsity
from loco_ext.checkpoints import save_checkpoint
from loco_ext.experiments import data, demo_budget, demo_networks, lifting, settings
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import provenance
from loco_ext.experiments.train import make_model, make_optimizer, train
from loco_ext.folders import owned
from loco_ext.output import write_json
from loco_ext.threads import num_threads


@dataclass(frozen=True)
class DemoSettings:
    """Settings that determine the result: the same settings give the same numbers on the CPU of one machine."""

    seed: int
    device: str
    epochs: int
    batch_size: int = 64
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.005
    locality: tuple[float, float] = (0.5, 2.0)

    def training(self, locality: tuple[float, float] | None) -> settings.Settings:
        """Return the settings of one of the two trainings."""
        return settings.from_preset(
            "quick",
            model="small",
            data="digits",
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            locality=locality,
            seed=self.seed,
        )


class DemoResults(NamedTuple):
    """The two networks, a third one with a given budget, and the second one after it was given unshared weights."""

    networks: list[demo_networks.DemoNetwork]
    shrunk: demo_budget.ShrunkDemo
    lifted: lifting.Lifted


def run(settings: DemoSettings, out: Path) -> DemoResults:
    """Train both networks and one of half of the MACs, lift the second, and write the results to the folder ``out``.

    The results are demo.json, demo.png, a checkpoint per network and the folder ``smaller``.

    A checkpoint is a plain state dict, readable by ``torch.load(path, weights_only=True)``; ``sparsity.load`` reads the
    smaller network. Existing files are replaced atomically, so that none is ever half written.

    Raises:
        OSError: ``out`` cannot be written to, or another process is writing to it.
    """
    with owned(out):
        samples = data.load("digits", None)
        trainings = make_trainings(settings, samples)
        networks = train_both(settings, samples, trainings)
        with num_threads(1):
            processes = Processes(torch.device(settings.device))
            shrunk = demo_budget.shrink(trainings[0].model, samples, trainings[0].settings, processes)
            _, model, _, setting = trainings[1]
            lifted = lifting.lift(model, samples, setting, processes)
        results = DemoResults(networks, shrunk, lifted)
        _write(settings, trainings, results, out)
    return results


def _write(settings: DemoSettings, trainings: list["Training"], results: DemoResults, out: Path) -> None:
    for training in trainings:
        state = {key: value.cpu().contiguous() for key, value in training.model.state_dict().items()}
        save_checkpoint(out / f"{training.name}.pt", state)
    sparsity.save(results.shrunk.network, out / "smaller", results.shrunk.report)
    demo_networks.save_figure(results.networks, out / "demo.png")
    write_json(out / "demo.json", to_dict(settings, results))


def print_tables(results: DemoResults) -> None:
    """Print the tables of the two networks, of the smaller one and of the lifted one."""
    demo_budget.print_shrunk(results.shrunk)
    demo_networks.print_networks(results.networks)
    lifting.print_lifted(results.lifted)


def to_dict(settings: DemoSettings, results: DemoResults) -> dict[str, Any]:
    """Return the settings, commit, versions and all measurements as plain data."""
    return {
        "settings": asdict(settings),
        **provenance(),
        "networks": [asdict(network) for network in results.networks],
        "smaller": results.shrunk.to_dict(),
        "lifted": results.lifted.to_dict(),
    }


class Training(NamedTuple):
    """One of the two networks, with the optimizer and settings that train it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: settings.Settings


def make_trainings(demo: DemoSettings, samples: data.Dataset) -> list[Training]:
    """Return the two networks, equal but separate, each with its optimizer."""
    uniform, local = demo.training(None), demo.training(demo.locality)
    model = make_model(uniform, samples).to(demo.device)
    other = copy.deepcopy(model)
    groups = optim.parameter_groups(model, demo.weight_decay)
    peer = torch.optim.SGD(groups, lr=demo.learning_rate, momentum=demo.momentum)
    return [
        Training("ordinary", model, peer, uniform),
        Training("locality", other, make_optimizer(local, other), local),
    ]


def train_both(demo: DemoSettings, samples: data.Dataset, trainings: list[Training]) -> list[demo_networks.DemoNetwork]:
    """Train the networks in place, one after the other, and describe each."""
    # With one thread, sums do not depend on the number of cores, and a network this small gains nothing from more.
    with num_threads(1):
        return [_train(training, samples, demo) for training in trainings]


def _train(training: Training, samples: data.Dataset, demo: DemoSettings) -> demo_networks.DemoNetwork:
    processes = Processes(torch.device(demo.device))
    _, model, optimizer, setting = training
    history = train(model, optimizer, samples, setting, processes, label=training.name)
    accuracies = [epoch.test_accuracy for epoch in history]
    locality = (1.0, 1.0) if setting.locality is None else demo.locality
    return demo_networks.describe(training.name, model, optimizer, locality, accuracies)
