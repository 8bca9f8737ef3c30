"""Bounds of the Python numbers and sequences that a graph computes from sizes and constants, valid for every input.

Python's integers and sequences are unbounded: a power, or a few products in a row, could take all memory or run for
hours. Every size of a tensor is below 2**63, so that the value of each node has a bound that is known before anything
is computed.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from loco_ext.sparsity.vocabulary import FUNCTION_NAMES, GETATTR, ModelFileError

_MOST_BITS = 1 << 16  # limit for an integer
_LONGEST = 1 << 24  # limit for a sequence


@dataclass(frozen=True)
class Bound:
    """The largest magnitude of an integer, or of the integers in a sequence of at most ``length`` entries.

    ``length`` is None if the value is not a sequence; ``largest`` is 0 for sequences of tensors only. Tensors, floats
    and everything else that is computed within fixed limits have no bound of their own and are represented by None.
    """

    largest: int
    length: int | None = None


_SIZE = Bound(2**63)
_DIMENSIONS = Bound(64)
_SHAPE = Bound(2**63, 64)
_TENSORS = Bound(0, 1 << 20)  # limit for the pieces that a tensor is split into
_PAIR = Bound(0, 2)
_TRUTH = Bound(1)
_OF_FLOAT = Bound(2**1024)  # an integer that a float is rounded to
_OF_TENSORS = {  # results of tensor attributes, methods and functions, by name
    **{"numel": _SIZE, "dim": _DIMENSIONS, "ndim": _DIMENSIONS, "shape": _SHAPE, "size": _SHAPE},
    **{"split": _TENSORS, "chunk": _TENSORS, "unbind": _TENSORS},
}
_TRUTHS = {"eq", "ge", "gt", "le", "lt", "ne", "not_"}


def check_arithmetic(model: fx.GraphModule) -> None:
    """Raise ModelFileError, naming the node, if an integer or a sequence of the graph has no acceptable bound."""
    bounds: dict[fx.Node, Bound | None] = {}
    for node in model.graph.nodes:
        try:
            bounds[node] = _bound(node, bounds, model)
        except ModelFileError as error:
            raise ModelFileError(f"node {node.name!r}: {error}") from error


def _bound(node: fx.Node, bounds: Mapping[fx.Node, Bound | None], model: nn.Module) -> Bound | None:
    if node.op == "call_module":
        layers = model.get_submodule(str(node.target)).modules()
        if any(getattr(layer, "return_indices", False) for layer in layers):
            return _PAIR
        return _operand(node.args[0] if node.args else node.kwargs.get("input"), bounds)  # some return their input
    if node.op == "call_method":
        return _of_tensor(str(node.target), node, bounds)
    if node.op == "placeholder" and str(node.target).startswith("*"):
        return _TENSORS
    if node.op != "call_function":
        return None
    if isinstance(node.target, type):  # what its class computes has no bound that is known here
        if not all(user.op == "output" or isinstance(user.target, type) for user in node.users):
            raise ModelFileError(f"expected an instance of {node.target.__qualname__} that is returned, got one in use")
        return None
    name = FUNCTION_NAMES[node.target]  # type: ignore[index]
    if name == GETATTR:
        return _OF_TENSORS.get(str(node.args[1]))
    if name == "math.prod":
        operands = [_operand(value, bounds) for value in (*node.args, *node.kwargs.values())]
        factors = [bound for bound in operands if bound is not None and bound.largest > 0]
        if any(factor.length is not None for factor in factors[1:]):
            raise ModelFileError("expected a number that the product starts with")
        return _product(factors) if len(factors) == len(operands) else None
    if name in ("math.ceil", "math.floor"):
        return _operand(node.args[0], bounds) or _OF_FLOAT
    if name == "loco_ext.length":
        return _SIZE
    if node.target is torch.adaptive_max_pool1d:
        return _PAIR
    if not name.startswith("operator."):
        return _of_tensor(name.rpartition(".")[2], node, bounds)
    if node.target is operator.getitem:
        return _entry(node, bounds)
    return _result(name.removeprefix("operator."), [_operand(value, bounds) for value in node.args])


def _of_tensor(name: str, node: fx.Node, bounds: Mapping[fx.Node, Bound | None]) -> Bound | None:
    """Return the bound of the result of the function or method of this name whose first argument is a tensor."""
    others = [*node.args[1:], *node.kwargs.values()]
    if name == "size" and others:
        return _SIZE
    if name in ("max", "min"):  # one tensor for all elements or with another tensor, a pair along a dimension
        return _PAIR if any(_operand(value, bounds) is not None for value in others) else None
    if "max_pool" in name:
        given = node.kwargs.get("return_indices", node.args[2:3] if "adaptive" in name else node.args[6:7])
        return None if given in (False, (), (False,)) and not name.endswith("_with_indices") else _PAIR
    return _OF_TENSORS.get(name)


def _operand(value: Any, bounds: Mapping[fx.Node, Bound | None]) -> Bound | None:
    if isinstance(value, fx.Node):
        return bounds[value]
    if isinstance(value, int):
        return Bound(max(abs(value), 1))
    if isinstance(value, list | tuple):
        entries = [_operand(entry, bounds) for entry in value]
        if any(entry is not None and entry.length is not None for entry in entries):
            raise ModelFileError("a sequence within a sequence cannot be computed with")
        return Bound(_largest([0 if entry is None else entry.largest for entry in entries]), len(entries))
    if value is None or isinstance(value, float):
        return None
    raise ModelFileError(f"{value!r} cannot be computed with")


def _entry(node: fx.Node, bounds: Mapping[fx.Node, Bound | None]) -> Bound | None:
    """Return the bound of an item: a number for shapes, None for tuples of tensors; that of the whole for a slice."""
    if not isinstance(node.args[0], fx.Node):
        raise ModelFileError("expected a node to take an item of")
    bound = bounds[node.args[0]]
    if bound is None or isinstance(node.args[1], slice):
        return bound
    return replace(bound, length=None) if bound.largest else None


def _result(name: str, operands: list[Bound | None]) -> Bound | None:
    """Return the bound of an operator's result."""
    numbers = [bound.largest for bound in operands if bound is not None and bound.length is None]
    sequences = [bound for bound in operands if bound is not None and bound.length is not None]
    if name in _TRUTHS:
        return _TRUTH
    if sequences:
        return _of_sequences(name, numbers, sequences, len(operands))
    if len(numbers) < len(operands):
        return None
    if name in ("mul", "imul"):
        return _product([Bound(number) for number in numbers])
    if name == "pow":
        base, exponent = numbers
        return _product([Bound(base, exponent)])
    return _checked(sum(numbers) + (name == "invert"), None)  # ~n is -n - 1


def _of_sequences(name: str, numbers: list[int], sequences: list[Bound], operands: int) -> Bound | None:
    """Return the bound of an operator's result for operands that include sequences; most operators raise for them."""
    if name in ("iadd", "imul"):
        raise ModelFileError(f"{name} may change a list in place")
    if name not in ("add", "mul"):
        return None
    if name == "mul" and len(numbers) + len(sequences) < operands:
        raise ModelFileError("a sequence may be repeated as often as a tensor says")
    lengths = [bound.length or 0 for bound in sequences]
    length = sum(lengths) if name == "add" else math.prod([*lengths, *numbers])
    return _checked(_largest([bound.largest for bound in sequences if bound.length]), length)


def _largest(magnitudes: list[int]) -> int:
    """Return the largest of the magnitudes, of which those of tensors and floats are 0."""
    if 0 < magnitudes.count(0) < len(magnitudes):
        raise ModelFileError("a sequence of numbers and tensors cannot be computed with")
    return max(magnitudes, default=1)


def _product(factors: list[Bound]) -> Bound:
    largest = 1
    for factor in factors:
        count = 1 if factor.length is None else factor.length
        if largest.bit_length() + factor.largest.bit_length() * count > _MOST_BITS:
            raise ModelFileError("a product of such values may be too large")
        largest *= max(factor.largest, 1) ** count
    return Bound(largest)


def _checked(largest: int, length: int | None) -> Bound:
    if largest.bit_length() > _MOST_BITS or (length is not None and length > _LONGEST):
        raise ModelFileError("a value may be too large")
    return Bound(largest, length)
