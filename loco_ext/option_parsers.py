"""Parsers and checks of the values of command-line options, beyond the types that typer has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

MOST = 10**6  # epochs, samples and the like that a command takes


def separated(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of values separated by commas, each converted by ``kind``; an empty text gives none.

    >>> separated(int)("70,140")
    (70, 140)
    """

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(",")) if text else ()
        except ValueError:
            wanted = {int: "integers", float: "numbers"}[kind]  # type: ignore[index]
            raise typer.BadParameter(f"expected {wanted} separated by commas, got {text!r}") from None

    return parse


def name_or_none(text: str) -> str | None:
    """Return the text, or None for ``none``."""
    return None if text == "none" else text


def folder(path: Path) -> Path:
    """Check that the path is text, without which safetensors reads no weights from it, and return it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # Python has other bytes as lone surrogates
        raise typer.BadParameter(f"expected a path in UTF-8, got {str(path)!r}") from None
    return path


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
        raise typer.BadParameter(f"expected a device that torch can use here, got {text!r}")
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
        raise typer.BadParameter(
            f"expected none, GAMMA,ETA or a file that analyze has written, got {str(path)!r}"
        ) from error
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise typer.BadParameter(f"{path}: expected JSON with an entry 'locality', as analyze writes") from error
