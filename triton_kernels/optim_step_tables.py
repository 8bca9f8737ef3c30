"""Tables in device memory that tell the optimizer step's kernels the layout of its tensors.

A tensor's elements are numbered in the memory order of its parameter. Every operand (parameter, gradient, states, also
the decay map and the index in a contiguous tensor of the same shape) has a nest of axes (size, stride), fastest first,
that maps such a number to the operand's element. A nest of one axis of stride 1 is flat.

A table is never modified: other tensors or numbers get a table of their own (:mod:`loco_ext.triton_kernels.uploads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from loco_ext.triton_kernels.uploads import Uploads, upload
from torch import Tensor

BLOCK = 2048  # elements that one program steps, a power of 2
STATES = 3  # most states of a parameter
OPERANDS = 2 + STATES  # parameter, gradient, states
NARROW = 2**31 - BLOCK  # most elements whose indices fit into 32 bits
KINDS = {None: 0, torch.float32: 1, torch.float64: 2}  # codes for a number's dtype in device memory; None: no number

# The table row of a tensor. A nest is the index of its first axis among all axes, and the number of its axes.
ROW = np.dtype(
    [
        ("numel", "i8"),
        ("first_chunk", "i8"),  # the index of the program that steps the first elements
        ("group", "i8"),
        ("lr", "i8"),  # address of the learning rate
        ("lr_kind", "i8"),
        ("step", "i8"),  # address of Adam's step count
        ("step_kind", "i8"),
        ("first", "i8"),
        ("ordinal", "i8"),
        ("map", "i8"),  # index of the map's first value among the values of all maps, or -1
        ("pointers", "i8", (OPERANDS,)),
        ("nests", "i8", (OPERANDS + 2, 2)),  # the last two: logical index, map
    ]
)

Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Step:
    """The lists of a step, as in :mod:`loco_ext.ops.optim_step`; ``states`` and ``steps`` are empty if unused."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    group_index: Sequence[int]
    lrs: Sequence[Tensor]
    lr_index: Sequence[int]
    maps: Sequence[Tensor]
    map_index: Sequence[int]
    steps: Sequence[Tensor] = ()
    first: Sequence[int] = ()
    ordinals: Sequence[int] = ()

    def operands(self, index: int) -> list[Tensor]:
        return [self.params[index], self.grads[index], *(state[index] for state in self.states)]

    def check(self) -> None:
        """Raise TypeError for lazily negated views, as kernels ignore the negation flag."""
        for name, tensors in (("params", self.params), ("grads", self.grads), *(("states", s) for s in self.states)):
            for i, tensor in enumerate(tensors):
                if tensor.is_neg():
                    raise TypeError(f"{name}[{i}]: expected no lazily negated view; resolve_neg() makes a tensor of it")

    def key(self) -> object:
        """Return everything that the tables depend on: addresses and strides of tensors, the values of maps."""
        lists = (self.params, self.grads, *self.states, self.steps, self.lrs)
        tensors = list(chain.from_iterable(lists))
        places = [t.data_ptr() for t in tensors], [t.dtype for t in tensors], [t.stride() for t in tensors]
        shapes = [p.shape for p in self.params]  # those of gradients and states are the same
        maps = [(m.shape, m.contiguous().numpy().tobytes()) for m in self.maps]
        indices = (self.group_index, self.lr_index, self.map_index, self.first, self.ordinals)
        return places, shapes, list(map(len, lists)), maps, [list(index) for index in indices]


class Kind(NamedTuple):
    """The properties shared by all tensors of one launch."""

    dtypes: tuple[torch.dtype, ...]  # the dtypes of the operands
    flat: bool  # whether all operands are flat
    aligned: bool  # flat, and all operands begin at a multiple of 16 bytes
    wide: bool  # whether element indices have 64 bits


@dataclass(frozen=True)
class Batch:
    """One launch: ``owners[i]`` (int32) is the tensor of program ``i``."""

    kind: Kind
    owners: Tensor


@dataclass(frozen=True)
class Plan:
    """The tables of one step on the device, and the scratch memory that its kernels share."""

    rows: Tensor  # int64, [tensors, columns]
    axes: Tensor  # int64, [axes, 2]
    maps: Tensor  # float64
    scalars: Tensor  # float64, [tensors, 8], which Adam's first kernel writes for the others
    batches: tuple[Batch, ...]
    host: Any = field(repr=False)  # the host memory that the tables were copied from


@lru_cache(maxsize=4096)
def nest(shape: tuple[int, ...], lead: tuple[int, ...], strides: tuple[int, ...]) -> Axes:
    """Return the axes along which an operand of these strides visits the elements in the memory order of ``lead``.

    Args:
        shape: the shape of parameter and operand, without a 0.
        lead: the parameter's strides.
        strides: the operand's strides; 0 along axes that it is broadcast along.

    Returns:
        (size, stride) in elements, the fastest in the parameter's memory first; axes that continue evenly are merged.
    """
    order = sorted((d for d in reversed(range(len(shape))) if shape[d] != 1), key=lambda d: lead[d])
    axes: list[tuple[int, int]] = []
    for d in order:
        if axes and strides[d] == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * shape[d], axes[-1][1])
        else:
            axes.append((shape[d], strides[d]))
    return tuple(axes) or ((1, 1),)


def is_flat(axes: Axes) -> bool:
    return len(axes) == 1 and axes[0][1] == 1


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1] if shape else ()


@lru_cache(maxsize=4096)
def map_strides(map_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous map broadcast to a parameter's shape."""
    own = contiguous_strides(map_shape)
    kept = tuple(0 if size == 1 else stride for size, stride in zip(map_shape, own, strict=True))
    return (0,) * (len(shape) - len(map_shape)) + kept


class _Builder:
    """Builder of the rows of a step's tensors, the axes that they share, and the launches."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.axes: list[tuple[int, int]] = []
        self.places: dict[Axes, int] = {}
        self.owners: dict[Kind, list[tuple[int, int]]] = {}  # (tensor, number of its chunks)
        self.programs: dict[Kind, int] = {}
        sizes = [m.numel() for m in step.maps]
        self.map_places = [0, *accumulate(sizes)]
        self.rows = np.zeros(len(step.params), dtype=ROW)
        for i, row in enumerate(self.rows):
            self._fill(i, row)

    def _fill(self, index: int, row: Any) -> None:
        step = self.step
        row["group"] = step.group_index[index]
        row["lr"], row["lr_kind"] = self._learning_rate(step.group_index[index])
        if step.steps:
            row["step"], row["step_kind"] = step.steps[index].data_ptr(), KINDS[step.steps[index].dtype]
        row["first"] = bool(step.first) and step.first[index]
        row["ordinal"] = step.ordinals[index] & 0xFFFFFFFF if step.ordinals else 0
        row["map"] = -1
        operands = step.operands(index)
        param = operands[0]
        row["numel"] = param.numel()
        if param.numel() == 0:
            return
        shape, lead = tuple(param.shape), param.stride()
        nests = [nest(shape, lead, t.stride()) for t in operands]
        row["pointers"][: len(operands)] = [t.data_ptr() for t in operands]
        places = [self._keep(axes) for axes in nests]
        row["nests"][: len(places)] = places
        row["nests"][OPERANDS] = self._keep(nest(shape, lead, contiguous_strides(shape)))
        if (which := step.map_index[index]) >= 0:
            row["map"] = self.map_places[which]
            row["nests"][OPERANDS + 1] = self._keep(
                nest(shape, lead, map_strides(tuple(step.maps[which].shape), shape))
            )
        flat = all(map(is_flat, nests))
        aligned = flat and all(t.data_ptr() % 16 == 0 for t in operands)
        kind = Kind(tuple(t.dtype for t in operands), flat, aligned, param.numel() > NARROW)
        chunks = -(-param.numel() // BLOCK)
        row["first_chunk"] = self.programs.get(kind, 0)
        self.programs[kind] = row["first_chunk"] + chunks
        self.owners.setdefault(kind, []).append((index, chunks))

    def _learning_rate(self, group: int) -> tuple[int, int]:
        which = self.step.lr_index[group] if self.step.lr_index else -1
        if which < 0:
            return 0, KINDS[None]
        return self.step.lrs[which].data_ptr(), KINDS[self.step.lrs[which].dtype]

    def _keep(self, axes: Axes) -> tuple[int, int]:
        if axes not in self.places:
            self.places[axes] = len(self.axes)
            self.axes.extend(axes)
        return self.places[axes], len(axes)

    def plan(self, device: torch.device) -> Plan:
        values = [m.contiguous().numpy().ravel() for m in self.step.maps]
        owners = [np.repeat(*np.array(owned).T).astype(np.int32) for owned in self.owners.values()]
        (rows, axes, maps, *programs), host = upload(
            [
                self.rows.view(np.int64),
                np.array(self.axes, dtype=np.int64).ravel(),
                np.concatenate([*values, np.zeros(0)]),
                *owners,
            ],
            device,
        )
        scalars = torch.empty((len(self.rows) if self.step.steps else 0, 8), dtype=torch.float64, device=device)
        batches = tuple(map(Batch, self.owners, programs))
        return Plan(rows, axes, maps, scalars, batches, host)


class Tables(Uploads):
    """Cache of the tables of steps."""

    def plan(self, step: Step) -> Plan:
        device = step.params[0].device
        return self.find("plan", device, step.key, lambda: _Builder(step).plan(device))

    def hyper(self, hyper: Tensor, device: torch.device) -> Tensor:
        """Return the rows of hyperparameters, float64, in device memory."""
        rows = hyper.contiguous().numpy()
        tensors, _host = self.find("hyper", device, rows.tobytes, lambda: upload([rows.ravel()], device))
        return tensors[0]
