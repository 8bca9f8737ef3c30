"""Locally linear regions of piecewise linear networks: the distance to their boundary, and how many there are."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from loco_ext import compiler
from loco_ext.argument_checks import check_count, check_module, check_tensor
from loco_ext.regularizers.frozen import Frozen, FrozenNetwork
from loco_ext.regularizers.gradient_norms import Probes, choose_probes, gradient_norms
from loco_ext.regularizers.ieee import ieee_arithmetic

MEMORY_LIMIT = 2**26
_MOST_DIRECTIONS = 512  # directions at once beyond which a pass does not get faster


@dataclass(frozen=True)
class Unit:
    """A unit whose bend is a boundary of a linear region.

    Attributes:
        module: name of the module that bends; for a function, that of the module whose code calls it, and its own name.
        call: which of several calls of this module or function it is, from 0.
        index: index of the unit in the module's input without the batch; for max-pooling, its index in the output, and
            the tap of the window that the largest number is compared with.

    Example:
        >>> from loco_ext import regularizers
        >>> regularizers.Unit("features.1", 0, (3, 0, 2)).index
        (3, 0, 2)
    """

    module: str
    call: int
    index: tuple[int, ...]


@overload
def region_radius(
    model: nn.Module, x: Tensor, p: float = ..., return_unit: Literal[False] = ..., *, memory_limit: int = ...
) -> Tensor:
    """Return only the radii."""


@overload
def region_radius(
    model: nn.Module, x: Tensor, p: float = ..., *, return_unit: Literal[True], memory_limit: int = ...
) -> tuple[Tensor, list[Unit | None]]:
    """Return the radii and the units whose boundaries are nearest."""


@compiler.disable
def region_radius(
    model: nn.Module, x: Tensor, p: float = 2, return_unit: bool = False, *, memory_limit: int = MEMORY_LIMIT
) -> Tensor | tuple[Tensor, list[Unit | None]]:
    """Return the radius of the largest l_p ball around each sample in which the network is affine.

    It is the minimum of ``|z| / ||dz/dx||_q`` with ``1/p + 1/q = 1`` over all bends ``z``: pre-activations of ReLU,
    leaky ReLU, PReLU, ReLU6, Hardtanh and abs, and for max-pooling the differences between the largest number of a
    window and the others. Bends that do not depend on the input around the sample have no boundary. If there is no
    boundary, the radius is infinite. It is 0 for a sample on a boundary, such as an image of one colour if convolutions
    without padding are max-pooled.

    These layers are affine: convolutions, linear and locally connected layers, sums, concatenations, average pooling,
    and, in evaluation mode, batch normalisations and dropout. Their weights may be parametrized; a parametrization with
    buffers, such as a spectral norm, has to be in evaluation mode. Everything is computed without TF32 or autocast.

    The gradients need at most as many directions as the input's channels times the pixels that a unit depends on. For
    p = 2 and networks that begin with a linear layer, they need at most as many as that layer has units. Where units
    see the whole image, a sample costs about as much as ``C * H * W`` forward passes: ResNet-18 with images of 32 x 32
    pixels takes 3,072, a minute on one core of a CPU.

    Args:
        model: network with one input and only layers as above. Neither it nor its modes are changed. Wrappers of
            torch.compile, around the model or its parts, and of DistributedDataParallel are accepted and ignored.
        x: inputs ``[N, ...]``, float32 or float64 like the model's parameters. Because of rounding errors, certificates
            hold up to 1e-10 in float64, and up to about 1e-4 in float32.
        p: exponent of the norm, at least 1, or ``float("inf")``.
        return_unit: also return the unit whose boundary is nearest.
        memory_limit: bytes that the computation may use beside the model and ``x``, approximately.

    Returns:
        Radii ``[N]`` in the dtype of ``x``, in the units of ``x``; with ``return_unit`` also a list of :class:`Unit`,
        None where the radius is infinite.

    Raises:
        TypeError: an argument has the wrong type, or the dtypes of ``x`` and the parameters differ or are others.
        ValueError: ``p`` is below 1, ``x`` has no axis of samples, or the limit is too small for one sample.
        NotPiecewiseLinearError: a module, which the message names, is not known to be piecewise linear, or mixes
            samples. It is a ValueError.

    Source:
        Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019), section 4.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> _ = model[0].bias.data.zero_()
        >>> x = torch.tensor([[1.0, 0.5], [0.0, 0.0]])
        >>> radius, units = regularizers.region_radius(model, x, return_unit=True)
        >>> radius, units[0]
        (tensor([0.5000, 0.0000]), Unit(module='1', call=0, index=(1,)))
        >>> regularizers.region_radius(model, x, p=float("inf"))
        tensor([0.5000, 0.0000])
    """
    network = checked_network(model, x)
    q = dual_exponent(p)
    check_count("memory_limit", memory_limit, 1)
    found = nearest_bends(network, x, q, memory_limit)
    return (found.radius, found.units(network)) if return_unit else found.radius


@dataclass(frozen=True)
class Nearest:
    """The bend whose boundary is nearest to each sample.

    Attributes:
        radius: ``[N]``.
        operation: which of :attr:`FrozenNetwork.bending_operations` bends, int64 ``[N]``; -1 if there is no boundary.
        index: which of its bends it is, int64 ``[N]``.
        shapes: shape of the bends of each operation.
    """

    radius: Tensor
    operation: Tensor
    index: Tensor
    shapes: list[torch.Size]

    def units(self, network: FrozenNetwork) -> list[Unit | None]:
        """Return the names of the bends."""
        units: list[Unit | None] = []
        for number, flat in zip(self.operation.tolist(), self.index.tolist(), strict=True):
            if number < 0:
                units.append(None)
                continue
            operation, index = network.bending_operations[number], np.unravel_index(flat, self.shapes[number])
            units.append(Unit(operation.module, operation.call, tuple(map(int, index))))
        return units


@torch.no_grad()
def nearest_bends(network: FrozenNetwork, x: Tensor, q: float, memory_limit: int) -> Nearest:
    """Return the bends with the smallest ``|z| / ||dz/dx||_q``."""
    parts, shapes = [], []
    with ieee_arithmetic(x.device):
        for frozen, probes, chunk in _chunks(network, x.detach(), q, memory_limit):
            norms = gradient_norms(frozen, probes, q, chunk, x)
            parts.append(_nearest(frozen, norms, x))
            shapes = [frozen.bends[operation.node].distances.shape[1:] for operation in network.bending_operations]
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        return Nearest(x.new_empty(0), none, none, shapes)
    radius, operation, index = (torch.cat(part) for part in zip(*parts, strict=True))
    return Nearest(radius, operation, index, shapes)


def dual_exponent(p: Any) -> float:
    """Return q with ``1/p + 1/q = 1``.

    Raises:
        TypeError: ``p`` is not a number.
        ValueError: ``p`` is not at least 1.
    """
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"p: expected a number, got {p!r}")
    p = float(p)
    if not p >= 1:
        raise ValueError(f"p: expected at least 1, got {p}")
    return math.inf if p == 1 else 1.0 if p == math.inf else p / (p - 1)


@compiler.disable
def count_regions(model: nn.Module, x: Tensor, *, batch_size: int = 1024) -> int:
    """Return the number of different linear regions that the samples are in.

    Two samples are in the same region if all units of the network are on the same linear piece for both: the same
    pre-activations are positive, and the largest numbers of pooling windows are at the same places.

    Args:
        model, x: as for :func:`region_radius`.
        batch_size: number of samples that are evaluated together.

    Raises:
        TypeError, ValueError: as for :func:`region_radius`; ``batch_size`` is below 1.

    Source:
        Lee, Alvarez-Melis, Jaakkola, "Towards Robust, Locally Linear Deep Networks" (ICLR 2019), section 4.

    Example:
        >>> import torch
        >>> from loco_ext import regularizers
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU())
        >>> _ = model[0].weight.data.fill_(1.0), model[0].bias.data.copy_(torch.tensor([0.0, -1.0]))
        >>> regularizers.count_regions(model, torch.linspace(-2, 3, 11).unsqueeze(1))
        3
    """
    network = checked_network(model, x)
    check_count("batch_size", batch_size, 1)
    found: set[bytes] = set()
    with torch.no_grad(), ieee_arithmetic(x.device):
        for part in x.detach().split(batch_size):
            found.update(region_patterns(network, part))
    return len(found)


def region_patterns(network: FrozenNetwork, x: Tensor) -> list[bytes]:
    """Return an identifier of each sample's linear region."""
    frozen = Frozen(network, x)
    network.check_result(x)
    sides = [bend.sides.flatten(1).to(torch.int32) for bend in frozen.bends.values()]
    if not sides:
        return [b""] * len(x)
    return [row.tobytes() for row in torch.cat(sides, 1).cpu().numpy()]


def checked_network(model: Any, x: Any) -> FrozenNetwork:
    """Check the arguments and return the network."""
    check_module("model", model)
    check_tensor("x", x)
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x: expected float32 or float64, got {x.dtype}")
    if x.dim() < 2 or x.shape[1:].numel() == 0:
        raise ValueError(f"x: expected an axis of samples and numbers in each, got shape {tuple(x.shape)}")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != x.dtype:
            raise TypeError(f"x: expected {parameter.dtype}, as {name} of the model has it, got {x.dtype}")
    with ieee_arithmetic(x.device):  # the trace computes what depends on buffers alone
        return FrozenNetwork(model, x)


def _chunks(network: FrozenNetwork, x: Tensor, q: float, memory_limit: int) -> Iterator[tuple[Frozen, Probes, int]]:
    """Yield the network around some samples at a time, and how many directions go through it at once."""
    if not len(x):
        return
    first = Frozen(network, x[:1])
    network.check_result(x[:1])
    stored = x.element_size() * first.elements
    probes = choose_probes(first, q, max(1, memory_limit - stored))
    moving = x.element_size() * first.most_tangents({probes.node: x})
    if stored + moving > memory_limit:
        raise ValueError(
            f"memory_limit: expected at least {stored + moving} bytes, for one sample and one direction, "
            f"got {memory_limit}"
        )
    chunk = max(1, min(probes.count, _MOST_DIRECTIONS, (memory_limit - stored) // max(1, moving)))
    for part in x.split(max(1, memory_limit // max(1, stored + chunk * moving))):
        yield Frozen(network, part), probes, chunk


def _nearest(frozen: Frozen, norms: dict[Any, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's radius, the operation that limits it, and the index of its bend."""
    radius = x.new_full((frozen.batch,), math.inf)
    operation, index = (torch.full((frozen.batch,), none, device=x.device) for none in (-1, 0))
    for number, bending in enumerate(frozen.network.bending_operations):
        distances = frozen.bends[bending.node].distances
        norm = norms[bending.node].expand(distances.shape)
        ratio = torch.where(norm == 0, math.inf, distances.abs() / norm).flatten(1)
        if not ratio.shape[1]:
            continue
        least, where = ratio.min(1)  # NaN where there is one
        better = (least < radius) | least.isnan()
        radius, index = torch.where(better, least, radius), torch.where(better, where, index)
        operation = torch.where(better, number, operation)
    return radius, operation, index
