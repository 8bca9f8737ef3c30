"""Parsers for the values of command-line options: they return the value, or raise one line that says what to pass."""

import argparse
import json
import math
from pathlib import Path


def integer(text: str, allowed: range) -> int:
    """Parse a decimal integer in ``allowed``."""
    if not text.isdecimal() or int(text) not in allowed:
        raise argparse.ArgumentTypeError(f"expected an integer from {allowed[0]} to {allowed[-1]}, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    return integer(text, range(1, 10**6 + 1))


def whole(text: str) -> int:
    """Parse an integer of at least 0."""
    return integer(text, range(10**6 + 1))


def seed(text: str) -> int:
    """Parse a seed that torch accepts, of 63 bits."""
    return integer(text, range(2**63))


def number(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number, at least 0, got {text!r}")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    return tuple(number(part) for part in text.split(","))


def epochs(text: str) -> tuple[int, ...]:
    """Parse numbers of epochs separated by commas; an empty text gives none."""
    return tuple(count(part) for part in text.split(",")) if text else ()


def wholes(text: str) -> tuple[int, ...]:
    """Parse integers of at least 0, separated by commas."""
    return tuple(whole(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(text.split(","))


def name_or_none(text: str) -> str | None:
    """Return the text, or None for ``none``."""
    return None if text == "none" else text


def device(text: str) -> str:
    """Check that the text names a torch device that exists and works, and return it."""
    import torch

    try:
        found = torch.device(text)
        if found.type == "cuda":  # ask the driver: a tensor would take memory on a device that others may use
            usable = (found.index or 0) < torch.cuda.device_count()
        else:
            usable = torch.zeros(1, device=found).item() == 0
    except (RuntimeError, AssertionError, ImportError):  # what torch raises differs from device to device
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"expected a device that torch can use here, got {text!r}")
    return text


def locality(text: str) -> tuple[float, ...] | dict[str, tuple[float, ...]] | None:
    """Parse ``none``, factors separated by commas, or the path of a JSON file that ``loco-ext analyze`` has written."""
    if text == "none":
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return _locality_file(Path(text))


def _locality_file(path: Path) -> dict[str, tuple[float, ...]]:
    try:
        layers = json.loads(path.read_text())["locality"]
        if not all(isinstance(factors, list) for factors in layers.values()):
            raise TypeError
        return {str(name): tuple(float(factor) for factor in factors) for name, factors in layers.items()}
    except (FileNotFoundError, IsADirectoryError) as error:
        raise argparse.ArgumentTypeError(
            f"expected none, GAMMA,ETA or a file that analyze has written, got {str(path)!r}"
        ) from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{path}: expected JSON with an entry 'locality', as analyze writes"
        ) from error
