"""Read the tensors of a checkpoint file of any network. Loading never executes code from the file."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loco_ext.checkpoints import DamagedFileError, load_weights
from loco_ext.errors import UserError, first_line
from loco_ext.input import open_regular

# Keys under which training scripts store the weights next to other entries.
_WEIGHTS = ("model", "state_dict", "model_state_dict", "net")
# Prefixes that DistributedDataParallel, AveragedModel and torch.compile put in front of every name.
_WRAPPERS = ("module.", "_orig_mod.")
_COUNT = "n_averaged"  # the entry without a prefix that AveragedModel adds
# Tensors may share storage, so they may add up to more than the file: up to _MOST_COPIES times its size plus
# _ANY_SIZE bytes. More than that is rejected.
_MOST_COPIES = 16
_ANY_SIZE = 1 << 26


class CheckpointError(UserError, ValueError):
    """Raised for a file from which no weights can be read; the message names the file."""


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the weights in a file, by name.

    Args:
        path: a safetensors file, or a file written by ``torch.save`` that ``torch.load`` can read with
            ``weights_only=True``: a state dict, or a dict with one under "model", "state_dict", "model_state_dict" or
            "net".

    Returns:
        The tensors on the CPU. Their names lack the prefixes of DistributedDataParallel, AveragedModel and
        torch.compile.

    Raises:
        CheckpointError: the file is missing, truncated, or of another kind.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.pt"
    >>> torch.save({"model": {"module.0.weight": torch.ones(2, 1, 3, 3)}, "epoch": 3}, path)
    >>> list(read_checkpoint(path))
    ['0.weight']
    """
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    nested = [state[key] for key in _WEIGHTS if isinstance(state.get(key), Mapping)]
    tensors = next((found for found in map(_tensors, [*nested, state]) if found), {})
    if not tensors:
        raise CheckpointError(f"{path}: expected a state dict, found no tensors by name")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{path}: expected dense tensors with data, {name!r} is not")
    _check_size(path, tensors)
    return without_wrappers(tensors)[1]


def without_wrappers(state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the prefixes of wrappers that all names of a state dict begin with, and its entries without them.

    The modules of a network may have such names themselves: then the first result tells what its own file lacks.

    >>> without_wrappers({"_orig_mod.module.0.weight": 1})
    ('_orig_mod.module.', {'0.weight': 1})
    """
    prefixes, entries = "", dict(state)
    while prefix := _wrapper_of(entries.keys() - {_COUNT}):
        entries = {name.removeprefix(prefix): value for name, value in entries.items() if name != _COUNT}
        prefixes += prefix
    return prefixes, entries


def _wrapper_of(names: Set[str]) -> str | None:
    """Return the prefix of a wrapper that all names begin with, None if there is none."""
    return next((prefix for prefix in _WRAPPERS if names and all(name.startswith(prefix) for name in names)), None)


def _check_size(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where tensors have far more bytes than the file: expanded tensors take no space in it."""
    size, total = path.stat().st_size, sum(tensor.nbytes for tensor in tensors.values())
    if total > _MOST_COPIES * size + _ANY_SIZE:
        raise CheckpointError(f"{path}: expected weights that fill the file, its {size} bytes hold tensors of {total}")


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_weights(path, foreign=True)
    except (OSError, DamagedFileError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {_reason(error)}") from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        with open_regular(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind can make the unpickler raise anything
        raise CheckpointError(f"{path}: cannot be read as a torch file of weights only: {_reason(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, found a {type(state).__name__}")
    return state


def _reason(error: BaseException) -> str:
    """Return the reason; torch's own texts tell how to run code from the file."""
    if "weights_only" in str(error):
        return "it is of another kind, or has other objects than tensors in it"
    return getattr(error, "strerror", None) or first_line(error)
