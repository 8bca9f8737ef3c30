"""Export of networks for other runtimes."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from loco_ext.argument_checks import check_module
from loco_ext.errors import first_line
from loco_ext.extras import need
from loco_ext.fx.branches import same_as_on_example
from loco_ext.output import replacing
from loco_ext.sparsity.compaction.graph import checks_that_may_fail, record
from loco_ext.sparsity.vocabulary import ModelFileError

_LARGEST = 2**31 - 2**24  # bytes of tensors: protobuf is limited to 2 GiB, and the graph takes space too


def export_onnx(
    model: nn.Module, example_inputs: Tensor | tuple[Tensor, ...], path: str | Path, *, dynamic_size: bool = False
) -> None:
    """Write a network in evaluation mode to one ONNX file, for batches of any size.

    The packages of the extra ``onnx`` are required. The model is not changed; an existing file is replaced once the new
    one is complete.

    Args:
        model: a result of ``compact`` or :func:`loco_ext.sparsity.load`, or any module that ``torch.export`` accepts.
        example_inputs: arguments of the model: a tensor, or several, whose first dimension is the batch.
        path: path of the file.
        dynamic_size: whether all dimensions after the channels may vary too, not only the batch.

    Raises:
        ModuleNotFoundError: onnx or onnxscript is missing.
        TypeError, ValueError: the message names the argument; tensors of 2 GiB and more do not fit in one file.
        ModelFileError: a ValueError: the model fixes a dimension that is to vary, or has operators that ONNX lacks.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from loco_ext import sparsity
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU())
        >>> file = tempfile.mkdtemp() + "/model.onnx"
        >>> sparsity.export_onnx(model, torch.randn(1, 1, 8, 8), file, dynamic_size=True)
    """
    need("loco_ext.sparsity.export_onnx", {"onnx": "onnx", "onnxscript": "onnxscript"}, "onnx")
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    _check(model, examples)
    inputs = tuple(_at_least_two(value.detach().cpu()) for value in examples)
    batch = torch.export.Dim("batch")
    sizes = torch.export.Dim.DYNAMIC
    dimensions = tuple(
        {0: batch, **({d: sizes for d in range(2, value.ndim)} if dynamic_size else {})} for value in inputs
    )
    network = copy.deepcopy(model).cpu().eval()
    if dynamic_size:
        _check_branches(network, inputs)
    with _silence():
        try:
            # Given the model itself, the exporter would make dimensions constant where the model fixes them.
            exported = torch.export.export(network, inputs, dynamic_shapes=dimensions)
            _check_pools(exported.graph)
            program: Any = torch.onnx.export(exported, dynamo=True, external_data=False, verbose=False)
        except Exception as error:  # torch.export, the converter and onnxscript each have their own errors
            raise ModelFileError(f"model: cannot be exported to ONNX: {_reason(error)}") from error
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # they contain paths of source files on this machine
        with replacing(Path(path)) as temporary:
            program.save(temporary, external_data=False)


def _check(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:
    check_module("model", model)
    if not (isinstance(example_inputs, tuple) and all(isinstance(value, Tensor) for value in example_inputs)):
        raise TypeError(f"example_inputs: expected a tensor or a tuple of tensors, got {type(example_inputs).__name__}")
    shapes = [tuple(value.shape) for value in example_inputs]
    if not shapes or any(not shape or 0 in shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f"example_inputs: expected tensors of one batch, not empty, got shapes {shapes}")
    size = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    if size > _LARGEST:
        raise ValueError(f"model: expected tensors of less than 2 GiB, which fit in one ONNX file, got {size:,} bytes")


def _check_branches(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise ModelFileError if the network refuses images of some sizes, which a file for images of any size cannot."""
    if not isinstance(network, fx.GraphModule):
        return
    if network.graph.find_nodes(op="call_function", target=same_as_on_example):
        record(network, inputs)
        for check in checks_that_may_fail(network, requirements=True):
            raise ModelFileError(
                "model: cannot be exported to ONNX for images of any size: it takes the branches of one size in the "
                f"code of {check.args[2]}"
            )


def _check_pools(graph: fx.Graph) -> None:
    """Raise ValueError for adaptive pools of images of any size: the converter takes their windows from the example.

    Pools to one pixel are means or maxima of whole images, and those to the image's own size change nothing.
    """
    for node in graph.nodes:
        if node.op == "call_function" and "adaptive_" in node.target.__name__:
            numbers = [number.meta["val"] if isinstance(number, fx.Node) else number for number in node.args[1]]
            sizes = node.args[0].meta["val"].shape[-len(numbers) :]
            whole = all(number == 1 for number in numbers) or list(map(str, numbers)) == list(map(str, sizes))
            if not whole and any(isinstance(size, torch.SymInt) for size in sizes):
                to = ", ".join(map(str, numbers))
                raise ValueError(f"ONNX has no adaptive pooling of images of any size to ({to}) pixels")


def _at_least_two(value: Tensor) -> Tensor:
    """Return the input with a batch of at least two: torch.export specialises dimensions of size 1."""
    return value if len(value) > 1 else torch.cat([value, value])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence the exporter's messages, which are meant for its developers; errors are raised as usual."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost error of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
