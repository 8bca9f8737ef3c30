"""The demo: one network trained twice on handwritten digits, with ordinary and with locality-promoting weight decay.

Both trainings start from the same weights and see the same batches. The baseline uses torch.optim.SGD itself; the
other uses this package's SGD with a decay map that is small at the centre of each kernel and large at its corners
(LOCO-REG, section 6), with the same mean.
"""

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from loco_ext import optim, sparsity
from loco_ext.checkpoints import save_checkpoint
from loco_ext.experiments import data, demo_budget, demo_networks, lifting, settings
from loco_ext.experiments.demo_networks import DemoNetwork
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.records import Record, provenance
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
    """The two networks, and the records of one with a given budget and of the second one with unshared weights."""

    networks: list[DemoNetwork]
    smaller: Record
    lifted: Record


def run(settings: DemoSettings, out: Path) -> DemoResults:
    """Train both networks and one of half of the MACs, lift the second, and write the results to the folder ``out``.

    The results are demo.json, demo.png, a checkpoint per network and the folder ``smaller``.

    A checkpoint is a plain state dict, readable by ``torch.load(path, weights_only=True)``; ``sparsity.load`` reads the
    smaller network. Existing files are replaced atomically, so that none is ever half written.

    Raises:
        OSError: ``out`` cannot be written to, or another process is writing to it.
    """
    # With one thread, sums do not depend on the number of cores, and networks this small gain nothing from more.
    with owned(out), num_threads(1):
        samples, processes = data.load("digits", None), Processes(torch.device(settings.device))
        models, networks = train_both(settings, samples, processes)
        smaller, report, costs = demo_budget.shrink(models[0], samples, settings.training(None), processes)
        lifted = lifting.lift(models[1], samples, settings.training(settings.locality), processes)
        results = DemoResults(networks, costs, lifted)
        for model, network in zip(models, networks, strict=True):
            state = {key: value.cpu().contiguous() for key, value in model.state_dict().items()}
            save_checkpoint(out / f"{network.name}.pt", state)
        sparsity.save(smaller, out / "smaller", report)
        demo_networks.save_figure(networks, out / "demo.png")
        write_json(out / "demo.json", to_dict(settings, results))
    return results


def print_tables(results: DemoResults) -> None:
    """Print the tables of the two networks, of the smaller one and of the lifted one."""
    demo_budget.print_shrunk(results.smaller)
    demo_networks.print_networks(results.networks)
    lifting.print_lifted(results.lifted)


def to_dict(settings: DemoSettings, results: DemoResults) -> Record:
    """Return the settings, commit, versions and all measurements as plain data."""
    networks = [asdict(network) for network in results.networks]
    return {"settings": asdict(settings), **provenance(), **results._asdict(), "networks": networks}


def train_both(
    demo: DemoSettings, samples: data.Dataset, processes: Processes
) -> tuple[list[nn.Module], list[DemoNetwork]]:
    """Train the two networks, which begin equal, one after the other, and describe each."""
    start = make_model(demo.training(None), samples).to(processes.device)
    models, networks = [], []
    for name, locality in (("ordinary", None), ("locality", demo.locality)):
        setting, model = demo.training(locality), copy.deepcopy(start)
        if locality is None:
            groups = optim.parameter_groups(model, demo.weight_decay)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=demo.learning_rate, momentum=demo.momentum)
        else:
            optimizer = make_optimizer(setting, model, samples)
        history = train(model, optimizer, samples, setting, processes, label=name)
        accuracies = [epoch.test_accuracy for epoch in history]
        models.append(model)
        networks.append(demo_networks.describe(name, model, optimizer, locality or (1.0, 1.0), accuracies))
    return models, networks
