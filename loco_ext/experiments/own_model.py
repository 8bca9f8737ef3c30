"""A network built by a function that the user wrote."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loco_ext.errors import UserError, first_line


class ModelError(UserError, ValueError):
    """Raised for a function that returns no suitable network; the message names the function."""


def own_model(name: str, channels: int, classes: int, size: int) -> nn.Module:
    """Return the network built by a function, after checking its logits for two images and its state dict.

    Args:
        name: ``MODULE:FUNCTION``; modules in the working directory are found too. The function is called with
            ``num_classes`` if it takes that.
        channels, size: shape of the images, [N, channels, size, size].
        classes: number of logits, [N, classes].

    Raises:
        ModelError: there is no such function, it fails, or its result is not such a network.
    """
    make = _find(name)
    parameters = inspect.signature(make).parameters
    takes = "num_classes" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    model = _try(name, lambda: make(num_classes=classes) if takes else make())
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module from {name}, got {type(model).__name__}")
    with torch.no_grad():
        logits = _try(name, lambda: model.eval()(torch.zeros(2, channels, size, size)))
    found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != (2, classes):
        raise ModelError(
            f"model: expected logits of shape {(2, classes)} from {name} for two images of {channels}x{size}x{size}, "
            f"got {found}"
        )
    for key, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"model: expected tensors in the state dict of {name}, got {type(value).__name__} at {key!r}"
            )
    return model.train()


def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _try(name, lambda: importlib.import_module(module))
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ModelError(f"model: expected MODULE:FUNCTION, found no function {function!r} in {module}")
    return found


def _try(name: str, call: Callable[[], Any]) -> Any:
    """Return the result of the call; convert any exception of the user's code to a ModelError that names the line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[2:] if frame.filename[0] != "<"]
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        raise ModelError(f"model: {name} failed: {type(error).__name__}: {first_line(error)}{place}") from error
