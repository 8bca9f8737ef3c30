"""Evaluation mode for the duration of a with block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode and restore the mode of each module on exit.

    Flags are set one by one: a model's own ``train()`` may do more.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training
