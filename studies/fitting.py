"""Training by the recipe of the experiments, without their files and measurements after each epoch."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from loco_ext.experiments.data import Dataset
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.settings import Settings
from loco_ext.experiments.train import train_epoch
from loco_ext.output import progress_bar
from loco_ext.sparsity import Budget


def fit(
    network: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset,
    training: Settings,
    epochs: range,
    budget: Budget | None = None,
    teacher: Teacher | None = None,
) -> nn.Module:
    """Train a network in place, on its device, for these epochs, counted from 0, with augmented samples; return it."""
    normalization = Normalization(dataset.train)
    options: dict[str, Any] = {"batch_size": training.batch_size, "seed": training.seed, "augmented": dataset.augmented}
    loader = Loader(dataset.train, normalization, next(network.parameters()).device, **options)
    with progress_bar(len(epochs) * len(loader), f"seed {training.seed}", unit="step", shown=True) as progress:
        for epoch in epochs:
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate_of(epoch)
            train_epoch(network, optimizer, loader, epoch, progress, budget=budget, teacher=teacher)
    return network
