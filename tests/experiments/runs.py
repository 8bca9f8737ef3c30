"""Helpers of the tests of training runs: a device, settings, few samples, and a way to kill a run."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
import torch

from loco_ext.experiments import data, run
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.settings import from_preset

CPU = Processes(torch.device("cpu"))
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def quick(**overrides):
    """Return settings of a short run on the digits."""
    values = {"model": "small", "data": "digits", "epochs": 2, "batch_size": 100, "learning_rate": 0.05}
    return from_preset("quick", **values | overrides)


def digits(samples=200):
    """Return the digits with only the first training samples."""
    return data.load("digits", None).first(samples)


@contextmanager
def killed_after(epochs):
    """End a run inside the ``with`` once it has saved so many epochs."""

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


def kill_when(command, ready):
    """Run a command in a process of its own, which is killed as soon as ``ready()`` is true."""
    process = subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not ready():
        time.sleep(0.001)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
