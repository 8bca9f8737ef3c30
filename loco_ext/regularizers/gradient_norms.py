"""Norms of the gradients of all bends of a network in its input, in a few passes instead of one for each unit.

Each pass propagates tangents of many directions of the input, and a unit's tangents are numbers of its gradient:

- *Coloured probes*, exact for every norm: a direction is a set of pixels of one channel that are so far apart that no
  unit sees two of them, so that C times the size of the largest receptive field directions suffice. Where a unit sees
  the whole input, each direction is one number of the input, which gives all Jacobians.
- *The Gram recursion*, exact for p = 2, for networks that begin with a linear layer: norms only depend on
  ``G_i = J_i J_i^T``. It is propagated as a factor, ``J_1 J_1^T = G_1`` and ``J_i = W_i M J_{i-1}`` with the units that
  are switched on in ``M``, so the cost does not depend on the size of the input.
- *Rademacher probes*, random: with signs ``v``, ``(J v)^2`` has the squared norms as its expectation.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from loco_ext.fx.operations import operation
from loco_ext.regularizers.frozen import Frozen

_GRAMS = WeakIdKeyDictionary()  # copies of first layers' weights and their Gram matrices, by weight
_KEEPING_ORDER = ("flatten", "view", "contiguous", "identity", "dropout")


@dataclass(frozen=True)
class Probes:
    """Directions whose tangents contain the gradients.

    Attributes:
        node: the node whose results are moved along the directions.
        count: number of directions.
        shape: shape of a direction.
        extents: number of colours along each axis of pixels; None for the Gram recursion.
    """

    node: fx.Node
    count: int
    shape: torch.Size
    extents: tuple[int, ...] | None


def choose_probes(frozen: Frozen, q: float, memory_limit: int | None = None) -> Probes:
    """Return the exact probes that take the fewest directions; finding them takes about ``memory_limit`` bytes."""
    size, network = frozen.shapes[frozen.network.input], frozen.network
    extents = receptive_extents(frozen, memory_limit)
    colored = Probes(network.input, size[0] * math.prod(extents), size, extents)
    layer = first_linear(frozen) if q == 2 else None
    if layer is None or frozen.shapes[layer][0] >= colored.count:
        return colored
    return Probes(layer, frozen.shapes[layer][0], frozen.shapes[layer], None)


def receptive_extents(frozen: Frozen, memory_limit: int | None = None) -> tuple[int, ...]:
    """Return how far apart the first and last pixel are that a unit depends on, at most, along each axis of pixels.

    Axes of pixels are those of the input behind samples and channels; an input of numbers has none.
    """
    size = frozen.shapes[frozen.network.input]
    if len(size) == 1 or not frozen.bends:
        return (1,) * (len(size) - 1)
    like = next(iter(frozen.bends.values())).distances
    numbers = max(1, frozen.most_tangents({frozen.network.input: like}))
    chunk = max(size) if memory_limit is None else max(1, memory_limit // (numbers * like.element_size()))
    extents = []
    for axis, length in enumerate(size[1:], 1):
        lines = torch.eye(length, dtype=like.dtype, device=like.device)
        lines = lines.view(length, *(length if a == axis else 1 for a in range(len(size))))
        first: dict[fx.Node, Tensor] = {}
        last: dict[fx.Node, Tensor] = {}
        extent = 1
        for places in _ends_first(length, chunk, like.device):
            part = lines[places]
            for node, seen in frozen.dependences(part.expand(len(part), *size)):
                index = places.int().view(-1, *[1] * (seen.dim() - 1))
                nearest = torch.where(seen > 0, index, length).amin(0)
                farthest = torch.where(seen > 0, index, -1).amax(0)
                first[node] = torch.minimum(first.get(node, nearest), nearest)
                last[node] = torch.maximum(last.get(node, farthest), farthest)
                if seen.numel():
                    extent = max(extent, int((last[node] - first[node]).amax()) + 1)
            if extent == length:
                break
        extents.append(extent)
    return tuple(extents)


def _ends_first(length: int, chunk: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the numbers below ``length``, at most ``chunk`` at a time: the two ends, then those between them."""
    yield from torch.arange(0, length, max(length - 1, 1), device=device).split(chunk)
    if length > 2:
        yield from torch.arange(1, length - 1, device=device).split(chunk)


def first_linear(frozen: Frozen) -> fx.Node | None:
    """Return the linear layer of vectors that everything else depends on the input through; None if there is none."""
    network, node = frozen.network, frozen.network.input
    while len(readers := network.readers(node)) == 1:
        (user,) = readers
        name = operation(user)
        if name == "linear" and len(frozen.shapes[node]) == 1:
            return user
        if name not in _KEEPING_ORDER:
            return None
        node = user
    return None


def directions(probes: Probes, frozen: Frozen, chunk: int, like: Tensor) -> Iterator[Tensor]:
    """Yield tangents of the node of ``probes``, ``[at most chunk, 1, ...]``."""
    if probes.extents is None:
        weight = frozen.linear_weight(probes.node)
        if torch.is_grad_enabled():  # the rows of the weight stay in the span of a constant basis of theirs
            basis, _ = torch.linalg.qr(weight.detach().mT)
            factor = (weight @ basis).mT
        else:
            factor = torch.linalg.qr(weight.mT, mode="r").R
        yield from factor.unsqueeze(1).split(chunk)
        return
    channels, *size = probes.shape
    colors = itertools.product(range(channels), *(range(extent) for extent in probes.extents))
    while places := list(itertools.islice(colors, chunk)):
        each = like.new_zeros(len(places), 1, channels, *size)
        for direction, (channel, *offsets) in zip(each[:, 0], places, strict=True):
            steps = zip(offsets, probes.extents, strict=True)
            direction[(channel, *(slice(offset, None, extent) for offset, extent in steps))] = 1
        yield each


def random_directions(x: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return random signs for each sample, ``[count, N, ...]``."""
    signs = torch.randint(0, 2, (count, *x.shape), generator=generator, device=x.device)
    return signs.to(x.dtype).mul_(2).sub_(1)


def _norm(tangents: Tensor, q: float) -> Tensor:
    """Return the norm over the first axis; powers neither overflow nor vanish."""
    if q in (1, math.inf):
        return torch.linalg.vector_norm(tangents, q, dim=0)
    if q != 2:
        return _scaled_norm(tangents, q)
    squares = tangents.square().sum(0)
    info = torch.finfo(tangents.dtype)
    norm = squares.sqrt()
    rounded = ~((squares > info.tiny / info.eps) & (squares < info.max))  # or NaN
    if rounded.any():
        rounded &= tangents.abs().amax(0) != 0  # most are units that no direction reaches
    if rounded.any():
        norm[rounded] = _scaled_norm(tangents[:, rounded], q)
    return norm


def _scaled_norm(tangents: Tensor, q: float) -> Tensor:
    """Return the norm over the first axis, of numbers that are divided by the largest first."""
    largest = tangents.abs().amax(0)
    scale = torch.where(largest > 0, largest, 1)
    return torch.linalg.vector_norm(tangents / scale, q, dim=0) * scale


def gradient_norms(frozen: Frozen, probes: Probes, q: float, chunk: int, like: Tensor) -> dict[fx.Node, Tensor]:
    """Return ``||dz/dx||_q`` of all bends ``z``, ``[N or 1, ...]`` by node."""
    norms: dict[fx.Node, Tensor] = {}

    def add(node: fx.Node, tangents: Tensor) -> None:
        part = _norm(tangents, q)
        norms[node] = _norm(torch.stack([norms[node], part]), q) if node in norms else part

    relu = _only_relu_behind(frozen, probes.node) if probes.extents is None else None
    if relu is not None:
        weight, live = frozen.linear_weight(probes.node), frozen.bends[relu].sides
        add(relu, weight.mT.unsqueeze(1))
        for tangents in _live_factor(weight, live, chunk):
            frozen.tangents({relu: tangents}, add)
        return norms
    for tangents in directions(probes, frozen, chunk, like):
        frozen.tangents({probes.node: tangents}, add)
    return norms


def _only_relu_behind(frozen: Frozen, layer: fx.Node) -> fx.Node | None:
    """Return the ReLU that all results of a layer go through; None if they go elsewhere."""
    readers = frozen.network.readers(layer)
    return readers[0] if len(readers) == 1 and operation(readers[0]) == "relu" else None


def _live_factor(weight: Tensor, live: Tensor, most: int) -> Iterator[Tensor]:
    """Yield a factor of ``W W^T`` that takes only the live rows of W, ``[directions, N, units]``; zero for the others.

    Args:
        weight: W, ``[units, numbers of the input]``.
        live: which rows count for each sample, ``[N, units]``.
        most: number of directions at once; up to this number, each sample may have its own factor.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and len(weight) <= most:
        factor = _factor_of_each(_cached_gram(weight), live)
        if factor is not None:
            yield factor
            return
    places = live.any(0).nonzero().flatten()
    shared = torch.linalg.qr(weight[places].mT, mode="r").R
    factor = weight.new_zeros(max(1, len(shared)), 1, len(weight))
    factor[: len(shared), 0, places] = shared
    for part in factor.split(most):
        yield part * live.to(factor.dtype)


def _cached_gram(weight: Tensor) -> Tensor:
    """Return ``W W^T`` in float64, computed anew only if the weight has other numbers than at the last call."""
    cached = _GRAMS.get(weight)
    if cached is not None and torch.equal(cached[0], weight):
        return cached[1]
    double = weight.detach().double()
    gram = double @ double.mT
    _GRAMS[weight] = weight.detach().clone(), gram
    return gram


def _factor_of_each(gram: Tensor, live: Tensor) -> Tensor | None:
    """Return a factor of the live rows of each sample, float32, or None if rows of the weight depend on each other.

    They are Cholesky factors in float64, whose errors are smaller than those of a QR decomposition in float32 would be
    and which are found in less time.

    Args:
        gram: products of the rows with each other.
        live: which rows count for each sample, ``[N, units]``.
    """
    factor = gram.new_zeros(max(1, int(live.sum(1).max())), *live.shape, dtype=torch.float32)
    for sample, each in enumerate(live):
        own = each.nonzero().flatten()
        lower, failed = torch.linalg.cholesky_ex(gram[own][:, own])
        if failed:
            return None
        factor[: len(own), sample].index_copy_(1, own, lower.mT.float())
    return factor
