"""Helpers of the tests of training runs: a device, settings, few samples, and a way to end a run."""

from contextlib import contextmanager

import pytest
import torch

from loco_ext.experiments import data, run
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
