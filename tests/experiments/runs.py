"""Helpers of the tests of training runs: a device, settings, few samples, a way to end a run, a loop written out."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import cross_entropy

from loco_ext.experiments import data, run
from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import from_preset

CPU = Processes(torch.device("cpu"))


def quick(**overrides):
    """Return settings of a short run on the digits."""
    values = {"model": "small", "data": "digits", "epochs": 2, "batch_size": 100, "learning_rate": 0.05}
    return from_preset("quick", **values | overrides)


def digits(samples=200):
    """Return the digits with only the first training samples."""
    return data.load("digits", None).first(samples)


@contextmanager
def killed_after(epochs):
    """End a run inside the ``with`` once it has saved this number of epochs."""

    class Killed(Exception):
        pass

    save = run._save

    def save_then_die(*arguments):
        save(*arguments)
        if len(arguments[-1]) == epochs:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_save", save_then_die)
        with pytest.raises(Killed):
            yield


def written_out(setting, samples, model, teacher=None, extra=None):
    """Train a network in place in a loop with torch.optim's SGD; return its figures by epoch, in the order of Epoch's.

    extra: maps the network and its images to a term of the loss, or to None.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": setting.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=setting.learning_rate, momentum=setting.momentum, foreach=False)
    normalization, penalty = Normalization(samples.train), setting.make_penalty()
    kernels, figures = [p for p in decayed if p.dim() == 4], []
    options = {"batch_size": setting.batch_size, "seed": setting.seed, "shuffled": setting.shuffle}
    loader = Loader(
        samples.train, normalization, CPU.device, augmented=samples.augmented and setting.augment, **options
    )
    for epoch in range(setting.epochs):
        rate = setting.learning_rate_of(epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses, correct = [], []
        for images, labels, _ in loader.epoch(epoch):
            model.train()
            optimizer.zero_grad()
            term = None if extra is None else extra(model, images)
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.amp):
                logits = model(images)
                taught = None if teacher is None else teacher(images).detach()
            loss = minimised = cross_entropy(logits.float(), labels)
            if setting.distillation is not None:  # Hinton et al. 2015
                q, p = ((each.float() / setting.temperature).softmax(1) for each in (logits, taught))
                soft = setting.temperature**2 * (p * (p / q).log()).sum(1).mean()
                minimised = (1 - setting.distillation) * loss + setting.distillation * soft
            if setting.solver == "subgradient":
                minimised = minimised + sum(penalty.value(kernel) for kernel in kernels)
            (minimised if term is None else minimised + term).backward()
            optimizer.step()
            if penalty is not None and setting.solver == "prox":
                with torch.no_grad():
                    for kernel in kernels:
                        kernel.copy_(penalty.prox(kernel, rate / (1 - setting.momentum)))
            losses.append(loss.item())
            correct.append((logits.argmax(1) == labels).double().mean().item())
        with torch.no_grad():
            logits, labels = model.eval()(normalization(samples.test.images)), samples.test.labels
        tested = cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()
        figures.append((sum(losses) / len(losses), sum(correct) / len(correct), *tested))
    return figures
