"""Storage of networks in files that any process can load without executing code from them.

A folder contains one network:

    model.safetensors  its parameters and buffers, shared ones once
    manifest.json      its graph, modules and report, and the checksum of model.safetensors

Files of torch.export are no substitute: ``torch.export.load`` unpickles what a file marks as pickled, so files have to
be trusted, and its result has neither layers nor ``train()`` and ``eval()``, so nothing can train or compact it again.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from loco_ext.errors import first_line
from loco_ext.input import open_regular
from loco_ext.output import json_text, replacing
from loco_ext.sparsity.description import describe, named_classes, rebuild, result_classes
from loco_ext.sparsity.vocabulary import ModelFileError
from loco_ext.version import __version__

TENSORS = "model.safetensors"
MANIFEST = "manifest.json"
FORMAT = "loco_ext.sparsity"
VERSION = 1


def save(model: nn.Module, folder: str | Path, report: Any = None) -> None:
    """Write a network to a folder, for :func:`load`.

    It saves the graph, layers, parameters and buffers (with shared tensors, bits, memory format, dtype and
    ``requires_grad``), the training mode and plain attributes of each layer, and the report. It does not save the
    device, hooks and what passes have recorded in ``meta``. The files of an earlier save are replaced once both new
    ones are written. If the process is killed between the two replacements, load refuses the pair.

    Args:
        model: a result of ``compact`` for a model that can be traced, or any graph of torch.nn's layers and functions.
            Its output may be a dataclass, which :func:`load` then needs permission to create.
        folder: path of the folder, which is created if it does not exist.
        report: any object with ``to_dict()`` that returns plain data; numbers that are not finite become null.

    Raises:
        TypeError: an argument, which the message names, has a wrong type.
        ModelFileError: a ValueError that names a node, module or tensor that could not be loaded again, such as a layer
            with hooks; nothing has been written.
        OSError: the folder cannot be written to.

    Example:
        >>> import tempfile, torch
        >>> from loco_ext import sparsity
        >>> model = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU()))
        >>> folder = tempfile.mkdtemp()
        >>> sparsity.save(model, folder)
        >>> images = torch.randn(2, 1, 8, 8)
        >>> torch.equal(sparsity.load(folder)(images), model(images))
        True
    """
    import safetensors.torch

    if not isinstance(model, fx.GraphModule):
        raise TypeError(
            f"model: expected a torch.fx.GraphModule, as of models that can be traced, got {type(model).__name__}"
        )
    content, tensors = describe(model)
    try:
        data = safetensors.torch.save({name: _packed(tensor) for name, tensor in tensors.items()})
        rebuild(json.loads(json.dumps(content)), safetensors.torch.load(data), result_classes(model))
    except ModelFileError:
        raise
    except Exception as error:  # torch or safetensors may refuse a combination of parts that are allowed one by one
        raise ModelFileError(f"model: could not be loaded again: {first_line(error)}") from error
    content["report"] = _plain(report)
    content["written_by"] = {"loco_ext": __version__, "torch": torch.__version__}
    content["tensors_sha256"] = sha256(data).hexdigest()
    manifest = {"format": FORMAT, "version": VERSION, "sha256": _checksum(content), "content": content}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / MANIFEST) as new_manifest, replacing(folder / TENSORS) as new_tensors:
        new_manifest.write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n")
        new_tensors.write_bytes(data)


def load(folder: str | Path, device: str | torch.device = "cpu") -> fx.GraphModule:
    """Return the network that :func:`save` has written; it can be called, trained, compiled and saved again.

    It creates and calls only layers, functions and methods from fixed tables, and dataclasses that
    ``torch.serialization.add_safe_globals`` or ``safe_globals`` has been given. Nothing is unpickled.

    Args:
        folder: as for :func:`save`.
        device: device of the parameters and buffers.

    Returns:
        The network; ``meta["report"]`` is what the report's ``to_dict`` returned, or None.

    Raises:
        ModelFileError: a ValueError that names a file which is missing, damaged, of another kind, from another save
            than the file beside it, or contains something that is in no table.
        TypeError, ValueError: ``device`` is wrong.

    Example:
        >>> import tempfile, torch
        >>> from loco_ext import sparsity
        >>> folder = tempfile.mkdtemp()
        >>> sparsity.save(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))), folder)
        >>> sparsity.load(folder).get_submodule("0")
        Linear(in_features=2, out_features=3, bias=True)
    """
    import safetensors.torch

    device = _device(device)
    manifest, tensors = Path(folder) / MANIFEST, Path(folder) / TENSORS
    text, data = _read(manifest), _read(tensors)
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise ModelFileError(f"of the format {record['format']!r}, expected {FORMAT!r}")
        if record["version"] != VERSION:
            raise ModelFileError(f"of version {record['version']!r}, this loco_ext reads version {VERSION}")
        content = record["content"]
        if record["sha256"] != _checksum(content):
            raise ModelFileError("has been changed since it was written")
        if content["tensors_sha256"] != sha256(data).hexdigest():
            raise ModelFileError(f"does not belong to the {TENSORS} beside it")
        values = safetensors.torch.load(data)
        if unknown := values.keys() - {entry["name"] for entry in content["tensors"]}:
            raise ModelFileError(f"does not know the tensor {min(unknown)!r}")
        allowed = named_classes(torch.serialization.get_safe_globals())
        model = rebuild(content, {name: value.to(device) for name, value in values.items()}, allowed)
        model.meta["report"] = content["report"]
    except ModelFileError as error:
        raise ModelFileError(f"{manifest}: {error}") from error
    except Exception as error:  # damaged or foreign content makes torch, safetensors and dicts raise various errors
        raise ModelFileError(f"{manifest}: not a network that save has written: {first_line(error)}") from error
    return model


def _packed(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _plain(report: Any) -> Any:
    if report is None:
        return None
    if not callable(getattr(report, "to_dict", None)):
        raise TypeError(f"report: expected None or an object with to_dict(), got {type(report).__name__}")
    try:
        return json.loads(json_text(report.to_dict()))
    except (TypeError, ValueError) as error:
        raise TypeError(f"report: expected plain data from to_dict(): {error}") from error


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the type of torch's error depends on the device
        raise ValueError(f"device: expected one that torch can use here, got {device!r}") from error


def _checksum(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not fit into the memory"
        raise ModelFileError(f"{path}: cannot be read: {reason}") from error
