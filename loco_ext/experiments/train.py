"""A training loop, and the accuracy it reports."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from loco_ext.experiments.data import Samples


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: tuple[Samples, Samples],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    label: str,
) -> list[float]:
    """Trains ``model`` in place by cross-entropy, the learning rate falling to 0 along a cosine.

    Args:
        model: maps images to logits; on the device of the samples.
        optimizer: over the parameters of ``model``.
        samples: ``(train, test)``.
        epochs: passes over the training samples.
        batch_size: samples per step; the last step of an epoch takes what remains.
        seed: decides the order of the samples, and nothing else.
        label: stands in front of the progress bar, which goes to stderr.

    Returns:
        The test accuracy after every epoch, in [0, 1].
    """
    training, test = samples
    generator = torch.Generator().manual_seed(seed)
    schedule = CosineAnnealingLR(optimizer, T_max=epochs)
    accuracies = []
    with tqdm(total=epochs, desc=label, unit="epoch") as progress:
        for _ in range(epochs):
            model.train()
            order = torch.randperm(len(training.labels), generator=generator).to(training.labels.device)
            for batch in order.split(batch_size):
                optimizer.zero_grad()
                cross_entropy(model(training.images[batch]), training.labels[batch]).backward()
                optimizer.step()
            schedule.step()
            accuracies.append(accuracy(model, test))
            progress.set_postfix_str(f"test accuracy {accuracies[-1]:.1%}", refresh=False)
            progress.update()
    return accuracies


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """Share of ``samples`` whose largest logit is their label's. Leaves ``model`` in evaluation mode."""
    model.eval()
    return (model(samples.images).argmax(1) == samples.labels).double().mean().item()
