"""Inputs of other sizes and batch sizes than the example's, for further checks of a smaller network."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loco_ext.ops.memory_format import FORMATS, is_channels_last
from loco_ext.sparsity.compaction.agreement import Pair, results_of

Axis = tuple[int, int]  # the position of an argument, and one of its axes
_MOST_RUNS = 40  # calls of the model, which may refuse every other size, and only in its last layer


def pairs_of_other_sizes(model: nn.Module, inputs: Sequence[Any], batch_alone: bool = False) -> list[Pair]:
    """Return arguments of up to two other batch sizes and sizes, with the model's results; [] if it accepts none.

    Each axis of each tensor is tried, because only the model knows which of them are channels. Axes with the same
    position and size in several tensors are changed together, and also one by one. Arguments that the model refuses are
    skipped.

    Args:
        model: the model, in eval mode.
        inputs: the example's arguments; the values of the new tensors are drawn from theirs.
        batch_alone: whether only axis 0 changes.
    """
    return _Search(model, inputs).pairs(batch_alone)


class _Search:
    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        self._model, self._inputs, self._runs = model, inputs, 0
        self._shapes = {i: tuple(x.shape) for i, x in enumerate(inputs) if isinstance(x, Tensor)}

    def pairs(self, batch_alone: bool) -> list[Pair]:
        """Return two pairs with as many axes changed as possible, and one for each argument that changes alone."""
        batch, *others = self._groups()
        batches = self._taken(batch, (1, 3, 2, self._size(batch[0]) + 1), {}, 2) if batch else []
        least = batches[0] if batches and batches[0][batch[0]] < self._size(batch[0]) else {}
        larger, smaller = [], []  # each changes one group of axes
        for group in [] if batch_alone else others:
            n = self._size(group[0])
            larger += self._taken(group, (n + n // 2 + 1, n + 1, n + 32, 2 * n), least, 1)
            smaller += self._taken(group, (n - n // 3, n - 1, n + 5), least, 1) if larger else []
        if not larger and not batch_alone:
            larger = self._scaled(least)
        found = [*self._combined(batches[:1], larger), *self._combined(batches[1:] or batches[:1], smaller)]
        return [*found, *self._alone()]

    def _groups(self) -> list[list[Axis]]:
        """Return groups of axes with the same position and size in several tensors; the first is the batch axis."""
        groups: dict[tuple[int, int], list[Axis]] = {}
        for i, shape in self._shapes.items():
            for axis, size in enumerate(shape):
                groups.setdefault((axis, size), []).append((i, axis))
        return sorted(groups.values(), key=lambda group: group[0][1]) or [[]]

    def _size(self, axis: Axis) -> int:
        return self._shapes[axis[0]][axis[1]]

    def _taken(
        self, group: Sequence[Axis], sizes: Sequence[int], others: Mapping[Axis, int], most: int
    ) -> list[dict[Axis, int]]:
        """Return the first of these sizes of the group's axes that the model accepts, with the others as given."""
        found: list[dict[Axis, int]] = []
        for size in sizes:
            change = dict.fromkeys(group, size)
            if len(found) < most and size > 0 and size != self._size(group[0]) and self._run({**others, **change}):
                found.append(change)
        return found

    def _scaled(self, least: Mapping[Axis, int]) -> list[dict[Axis, int]]:
        """Double all image sizes: for models that only accept square images, or inputs whose sizes are related."""
        for first in (2, 1):
            change = {(i, a): 2 * n for i, shape in self._shapes.items() for a, n in enumerate(shape) if a >= first}
            if change and self._run({**least, **change}):
                return [change]
        return []

    def _combined(self, batches: Sequence[dict[Axis, int]], changes: Sequence[dict[Axis, int]]) -> list[Pair]:
        """Return the first pair that the model accepts: with all changes at once, or else with fewer of them."""
        batch = batches[0] if batches else {}
        whole = {axis: size for change in changes for axis, size in change.items()}
        for change in ({**batch, **whole}, whole, *({**batch, **change} for change in changes), batch):
            pair = self._run(change) if change else None
            if pair is not None:
                return [pair]
        return []

    def _alone(self) -> Iterator[Pair]:
        """Yield pairs in which one of several tensors, which may broadcast, has more samples than the others."""
        for i, shape in self._shapes.items() if len(self._shapes) > 1 else ():
            pair = self._run({(i, 0): shape[0] + 2}) if shape else None
            if pair is not None:
                yield pair

    def _run(self, change: Mapping[Axis, int]) -> Pair | None:
        """Return new arguments of these sizes and their results; None if the model refuses them."""
        self._runs += 1
        if self._runs > _MOST_RUNS:
            return None
        inputs = []
        for i, x in enumerate(self._inputs):
            sizes = [change.get((i, axis), size) for axis, size in enumerate(self._shapes.get(i, ()))]
            inputs.append(_draw(x, sizes) if isinstance(x, Tensor) else x)
        try:
            return Pair(self._model, inputs, results_of(self._model, inputs))
        except Exception:  # the model's own code may raise anything for inputs that it does not accept
            return None


def _draw(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a tensor of these sizes with values of ``x`` and its memory format; random if all are equal."""
    generator = torch.Generator().manual_seed(0)
    flat = x.detach().flatten()
    if not len(flat):
        return x.detach().clone()
    count = torch.Size(sizes).numel()
    if x.is_floating_point() and (flat == flat[0]).all():
        flat = torch.rand(count, generator=generator).to(flat)
    places = torch.randint(len(flat), (count,), generator=generator)
    result = flat[places.to(flat.device)].reshape(sizes)
    return result.contiguous(memory_format=FORMATS[x.dim()]) if is_channels_last(x) else result
