"""The demo: one network trained twice on handwritten digits, with ordinary and with locality-promoting weight decay.

Both trainings start from the same weights and see the same batches. The peer is torch.optim.SGD itself; the other is
this package's SGD with a decay map that is light at the centre of each kernel and heavy at its corners (LOCO-REG,
section 6), of the same mean.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from loco_ext import optim
from loco_ext.experiments import report
from loco_ext.experiments.data import digits
from loco_ext.experiments.models import small_cnn
from loco_ext.experiments.train import train
from loco_ext.version import __version__


@dataclass(frozen=True)
class Settings:
    """What decides the result: the same settings give the same numbers on the same machine's CPU."""

    seed: int
    device: str
    epochs: int
    batch_size: int = 64
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.005
    locality: tuple[float, float] = (0.5, 2.0)


def run(settings: Settings, out: Path) -> list[report.Network]:
    """Trains both networks, then writes demo.json, demo.png and a checkpoint per network to ``out``, a folder.

    A checkpoint is a plain state dict: ``torch.load(path, weights_only=True)`` reads it. Files that are there already
    are replaced, each in one move, so that none is ever half written.

    Raises:
        OSError: ``out`` cannot be written to.
    """
    trainings = _trainings(settings)
    with _one_thread():
        networks = [_train(training, settings) for training in trainings]

    for training in trainings:
        state = {key: value.cpu() for key, value in training.model.state_dict().items()}
        with report.replacing(out / f"{training.name}.pt") as path:
            torch.save(state, path)
    report.save_figure(networks, out / "demo.png")
    with report.replacing(out / "demo.json") as path:
        path.write_text(to_json(settings, networks) + "\n")
    return networks


def to_json(settings: Settings, networks: list[report.Network]) -> str:
    """The settings, the versions and all that was measured, as one JSON object."""
    versions = {"loco_ext": __version__, "torch": torch.__version__}
    record = {"settings": asdict(settings), "versions": versions, "networks": [asdict(network) for network in networks]}
    return json.dumps(record, indent=2)


class _Training(NamedTuple):
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    locality: tuple[float, float]


def _trainings(settings: Settings) -> list[_Training]:
    """The two networks, equal but separate, each with its optimizer."""
    # Drawn on the CPU, so that every device starts from the same weights; the caller's random state is left alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = small_cnn()
    ordinary, local = model.to(settings.device), copy.deepcopy(model).to(settings.device)
    lr, momentum, weight_decay = settings.learning_rate, settings.momentum, settings.weight_decay
    peer = torch.optim.SGD(optim.parameter_groups(ordinary, weight_decay), lr=lr, momentum=momentum)
    groups = optim.parameter_groups(local, weight_decay, locality=settings.locality)
    ours = optim.SGD(groups, lr=lr, momentum=momentum)
    return [_Training("ordinary", ordinary, peer, (1.0, 1.0)), _Training("locality", local, ours, settings.locality)]


def _train(training: _Training, settings: Settings) -> report.Network:
    device = torch.device(settings.device)
    train_samples, test_samples = digits()
    accuracies = train(
        training.model,
        training.optimizer,
        (train_samples.to(device), test_samples.to(device)),
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        seed=settings.seed,
        label=training.name,
    )
    return report.describe(training.name, training.model, training.optimizer, training.locality, accuracies)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same sums whatever the number of cores; and so small a network only waits for further threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
