"""Comparison of a smaller network's outputs with the model's, up to rounding."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from loco_ext.fx.modules import is_hooked
from loco_ext.ops.memory_format import FORMATS, is_channels_last
from loco_ext.sparsity.compaction.graph import copies

# Allowed differences whatever the model is, as parts of a result's largest number.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_TWICE = 2.0  # allowed distance from the float64 result, as a multiple of the model's own distance
_MOST_MOVED = 0.05  # part of the largest number; a model that rounding moves farther cannot judge another network


@dataclass
class Pair:
    """A model, its arguments and its results for them.

    Args:
        model: the model, in eval mode.
        inputs: its arguments.
        expected: its results, tensors or structures of them.
    """

    model: nn.Module
    inputs: list[Any]
    expected: Any

    @cached_property
    def exact(self) -> list[Any] | None:
        """The model's results in float64, flattened; None if the model does not accept float64."""
        try:
            return _leaves(copy.deepcopy(self.model).double(), tree_map_only(Tensor, _to_double, self.inputs))
        except Exception:  # the model's own code may raise anything for another dtype
            return None

    @cached_property
    def rounded(self) -> list[list[Any]]:
        """The model's results, flattened, and, if it accepts that, those for images in the other memory format."""
        found = [tree_leaves(self.expected)]
        with suppress(Exception):  # the model's own code may raise anything for other strides
            found.append(_leaves(self.model, tree_map_only(Tensor, _to_other_format, self.inputs)))
        return found


def is_right(network: nn.Module, pairs: Sequence[Pair]) -> bool:
    """Return whether the network gives the expected results; False if it fails, for example by reading an attribute.

    Numbers may differ from the model's by a tolerance. For a badly conditioned model, rounding can cause larger
    differences: then the results may be as far from the model's in float64 as twice the model's own are, in any memory
    format.
    """
    try:
        return all(_agree(_leaves(network, pair.inputs), pair) for pair in pairs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False


def _agree(results: Sequence[Any], pair: Pair) -> bool:
    expected = tree_leaves(pair.expected)
    if len(results) != len(expected):
        return False
    for place, (x, y) in enumerate(zip(results, expected, strict=True)):
        if not isinstance(y, Tensor):
            continue
        if not isinstance(x, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not (_equal(x, y) or _is_as_exact(x, place, pair)):
            return False
    return True


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return whether the tensors, of one shape and dtype, are equal up to the tolerance of their dtype."""
    if y.dtype not in TOLERANCES:
        return torch.equal(x, y)
    scale = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
    return torch.allclose(x, y, rtol=0, atol=TOLERANCES[y.dtype] * scale, equal_nan=True)


def _is_as_exact(x: Tensor, place: int, pair: Pair) -> bool:
    """Return whether the result at ``place`` is as close to the float64 result as the model's own, within a factor."""
    exact = None if x.dtype not in TOLERANCES or pair.exact is None else pair.exact[place]
    if exact is None or exact.shape != x.shape or not exact.isfinite().all():
        return False
    scale = exact.abs().max().item()
    moved = max((leaves[place].double() - exact).abs().max().item() for leaves in pair.rounded)
    allowed = _TWICE * moved + TOLERANCES[x.dtype] * scale
    return moved <= _MOST_MOVED * scale and (x.double() - exact).abs().max().item() <= allowed


def _leaves(model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    return tree_leaves(results_of(model, inputs))


def results_of(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Return a model's results for copies of the inputs; every call draws the same random numbers."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    with torch.no_grad(), torch.random.fork_rng(devices):
        for generator in generators:
            generator.manual_seed(0)
        # Unlike a call, the forward of a traced model prints no error that it raises.
        call = model.forward if isinstance(model, fx.GraphModule) and not is_hooked(model) else model
        return call(*copies(inputs))


def _to_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _to_other_format(x: Tensor) -> Tensor:
    if x.dim() not in FORMATS or is_channels_last(x):
        return x.contiguous()
    return x.contiguous(memory_format=FORMATS[x.dim()])
