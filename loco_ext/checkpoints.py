"""Checkpoints and weights with a checksum, which are read whole or refused. Code in such a file is never executed.

A file of torch.save is a zip archive: its checksum, SHA-256 of all bytes before it, is the archive's comment. The
checksum of a safetensors file is in its metadata: SHA-256 of the same file without metadata. Other readers read both
files like any other.
"""

import io
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loco_ext.input import open_regular
from loco_ext.output import replacing

_DIGITS = 64  # length of a checksum in hexadecimal
_CHECKSUM = "loco_ext.sha256"


class DamagedFileError(ValueError):
    """A file that has changed since it was written, or of another kind; the message does not name the file.

    Example:
        >>> str(DamagedFileError("changed since it was written"))
        'changed since it was written'
    """


def save_checkpoint(path: Path, state: Any) -> None:
    """Save anything that torch.save takes, by an atomic replacement of the file."""
    content = io.BytesIO()  # torch.save to a file would not report a full disk as an OSError
    torch.save(state, content)
    content.seek(-2, io.SEEK_END)  # the length of the archive's comment
    content.write(_DIGITS.to_bytes(2, "little"))
    content.write(sha256(content.getbuffer()).hexdigest().encode())
    with replacing(path) as temporary:
        # Not a view: Python 3.12.0 and 3.12.1 crash when they collect one that an exception, as of a full disk, keeps.
        temporary.write_bytes(content.getvalue())


def load_checkpoint(path: Path) -> Any:
    """Return the content that :func:`save_checkpoint` was given, with all tensors on the CPU.

    Raises:
        DamagedFileError: the file is not as it was written.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        content = file.read()
    if content[-_DIGITS:] != sha256(content[:-_DIGITS]).hexdigest().encode():
        raise DamagedFileError("changed since it was written, of another kind, or of a version without checksums")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Save a state dict as safetensors, atomically; tied weights, which the format cannot express, are saved twice."""
    as_is = torch.contiguous_format
    tensors = {name: value.detach().to("cpu", copy=True, memory_format=as_is) for name, value in weights.items()}
    content = safetensors.torch.save(tensors, {_CHECKSUM: _checksum(tensors)})
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def load_weights(path: Path, *, foreign: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, by name, on the CPU.

    Args:
        foreign: whether to read files without a checksum, too.

    Raises:
        DamagedFileError: the file is not as it was written.
        OSError: the file cannot be read.
    """
    open_regular(path).close()
    try:
        with safe_open(path, "pt") as file:
            checksum = (file.metadata() or {}).get(_CHECKSUM)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, for it is no dict
    except SafetensorError as error:
        raise DamagedFileError(str(error)) from error
    if checksum is None and foreign:
        return tensors
    if checksum != _checksum(tensors):
        raise DamagedFileError("changed since it was written, or of another kind")
    return tensors


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise DamagedFileError, naming the tensor, if the weights contain NaN or an infinity."""
    for name, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise DamagedFileError(f"NaN or infinity in {name!r}: the training has diverged; remove it to begin anew")


def _checksum(tensors: dict[str, Tensor]) -> str:
    return sha256(safetensors.torch.save(tensors)).hexdigest()
