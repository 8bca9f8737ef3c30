"""Analysis of which channels of each value in a graph vary, which are constant everywhere, and which are needed.

Channels that must be kept or removed together are *atoms* of one class of a disjoint-set structure: the operands of a
sum, the two sides of a depthwise convolution. A class is needed if a reader of one of its atoms uses more of it than a
constant that the reader can fold into its own bias.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from loco_ext.sparsity.compaction.atoms import Atoms, Integers
from loco_ext.sparsity.compaction.convolution import paddings
from loco_ext.sparsity.compaction.roles import (
    BATCH_NORMS,
    Reader,
    Role,
    arithmetic,
    is_depthwise,
    is_padding,
    is_resampling,
    keeps_constants,
)

Floats = NDArray[np.float64]

_NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_RATHER = 1e-3  # a constant channel that is kept anyway replaces others that are larger by at most the inverse


@dataclass
class Value:
    """The channels of a node's result: their atoms, and the constant value of each (NaN if it varies)."""

    atoms: Integers
    constants: Floats

    @property
    def varies(self) -> NDArray[np.bool_]:
        return np.isnan(self.constants)


@dataclass
class Layer:
    """A convolution or linear layer as numbers."""

    node: fx.Node
    module: Any
    live: NDArray[np.bool_]  # [C_out, C_in/groups]: any weight is not zero
    foldable: NDArray[np.bool_]  # same shape: the channel is constant despite padding, so that a bias can replace it
    drops: NDArray[np.bool_]  # same shape: the smaller network does not read the channel

    @property
    def groups(self) -> int:
        return getattr(self.module, "groups", 1)


class Channels:
    """Channel analysis of one graph.

    Args:
        traced: a result of :func:`loco_ext.sparsity.compaction.trace.trace`.
        scatter: for names of sums, the operand (0 or 1) that is added into the other, so that its constant channels can
            be removed.
        fixed_size: constants are folded into a map of biases where zero padding makes them visible.
        keep_all: every channel is kept.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        scatter: Mapping[str, int] | None = None,
        fixed_size: bool = False,
        keep_all: bool = False,
    ) -> None:
        self.reader = Reader(traced)
        self.readings = {node: self.reader.read(node) for node in traced.graph.nodes}
        self.atoms = Atoms()
        self.values: dict[fx.Node, Value] = {}
        self.layers: dict[fx.Node, Layer] = {}
        self._grouped: list[int] = []  # atoms of the inputs and outputs of grouped layers
        self.scatter = scatter or {}
        self.fixed_size, self.keep_all = fixed_size, keep_all
        for node in traced.graph.nodes:
            value = self._value(node)
            if value is not None:
                self.values[node] = value
                if keep_all:
                    self.atoms.need(value.atoms, "all stay")
        self._find_needs()
        self._even_out(1)

    def kept(self, node: fx.Node) -> Integers:
        """Return the indices of the channels of the node's result that the smaller network keeps."""
        return np.flatnonzero(self.atoms.kept(self.values[node].atoms))

    def needed(self, node: fx.Node) -> NDArray[np.bool_]:
        """Return which channels of the result matter; others that are kept have zero weights on both sides."""
        return self.atoms.needed(self.values[node].atoms)

    def fill(self, multiple: int) -> bool:
        """Keep more of the unneeded channels of convolutions so that their numbers become multiples of ``multiple``.

        Processors compute that many channels at once, and some operations are slow for other numbers. Return whether
        any channels were added.
        """
        changed = False
        grouped = set(self.atoms.roots(self._grouped).tolist())
        for node, layer in self.layers.items():
            value = self.values[node]
            kept, roots = self.atoms.kept(value.atoms), self.atoms.roots(value.atoms).tolist()
            count = int(kept.sum())
            if layer.groups > 1 or not count:
                continue
            spare = [i for i in np.flatnonzero(~kept) if roots[i] not in grouped]
            spare.sort(key=lambda i: bool(value.varies[i]))  # dead kernels first
            step = multiple if count > multiple // 2 else multiple // 2
            fillers = value.atoms[spare[: -count % step]].tolist()
            self.atoms.fill(fillers)
            changed |= bool(fillers)
        return self._even_out(multiple) or changed

    def _even_out(self, multiple: int) -> bool:
        """Keep more channels until all remaining groups of a layer have the same number, a multiple of ``multiple``.

        Return whether any channels were added.
        """
        changed, more = False, True
        while more:
            more = False
            for node, layer in self.layers.items():
                if layer.groups > 1:
                    sides = [self.values[x].atoms.reshape(layer.groups, -1) for x in (self._source(node), node)]
                    more |= self._even_out_layer(sides, multiple)
            changed |= more
        return changed

    def _even_out_layer(self, sides: Sequence[Integers], multiple: int) -> bool:
        kept = [self.atoms.kept(atoms.reshape(-1)).reshape(atoms.shape) for atoms in sides]
        alive = kept[0].any(1) | kept[1].any(1)
        fillers: list[int] = []
        for atoms, there in zip(sides, kept, strict=True):
            most = int(there.sum(1).max(initial=1))
            wanted = min(-(-most // multiple) * multiple, atoms.shape[1])
            for group in np.flatnonzero(alive):
                fillers += atoms[group, ~there[group]][: wanted - there[group].sum()].tolist()
        self.atoms.fill(fillers)
        return bool(fillers)

    def _source(self, node: fx.Node) -> fx.Node:
        (source,) = self.readings[node].sources
        return source

    def constant_operand(self, node: fx.Node) -> int | None:
        """Return which operand of a JOIN is constant, so that a vector can replace it; None if neither or both are.

        None too if that operand might have more samples or pixels than the other.
        """
        if self.readings[node].role is not Role.JOIN:
            return None
        sources = self.readings[node].sources
        constant = [not self.values[source].varies.any() for source in sources]
        if self.keep_all or sum(constant) != 1 or not self.same_size(sources[constant.index(False)], node):
            return None
        return constant.index(True)

    def same_size(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two values have the same shape for all sizes of the inputs."""
        return self.reader.sizes.same(one, other)

    def classes(self, node: fx.Node) -> tuple[int, ...]:
        """Return the class of each channel of the result."""
        return tuple(self.atoms.roots(self.values[node].atoms).tolist())

    def fixed(self) -> set[int]:
        """Return the classes read by an operation that depends on their order, and those of grouped layers."""
        return set(self.atoms.roots([*self.atoms.ordered, *self._grouped]).tolist())

    def free(self, node: fx.Node) -> bool:
        """Return whether the channels may have any order, because all readers are rewritten along with the node."""
        atoms = self.values[node].atoms
        return self.atoms.alone(atoms) and self.atoms.ordered.isdisjoint(atoms.tolist())

    def scatterable(self) -> dict[str, int]:
        """Return names of sums with an operand that has constant channels and no other reader, and the operand."""
        found = {}
        for node, reading in self.readings.items():
            if reading.role is not Role.JOIN or arithmetic(node) != "add" or self.constant_operand(node) is not None:
                continue
            constant = [int((~self.values[source].varies).sum()) for source in reading.sources]
            whole = all(self.same_size(source, node) for source in reading.sources)
            operand = 0 if constant[0] > constant[1] else 1
            if whole and constant[operand] and len(reading.sources[operand].users) == 1:
                found[node.name] = operand
        return found

    # Forward pass: atoms and constants.

    def _value(self, node: fx.Node) -> Value | None:
        reading = self.readings[node]
        if reading.role is Role.SIZE:
            self._keep_for_size(node)
            return None
        sources = [self.values[source] for source in reading.sources if source in self.values]
        if reading.role is Role.OTHER:
            for source in sources:
                self.atoms.need(source.atoms, "the network's output" if node.op == "output" else f"read by {node.name}")
                self.atoms.ordered.update(source.atoms.tolist())
            return self._unknown(node)
        if reading.role is Role.CONVOLUTION:
            return self._convolution(node, sources[0])
        if reading.role is Role.PER_CHANNEL:
            return Value(sources[0].atoms, self._per_channel(node, sources[0]))
        if reading.role is Role.JOIN:
            return self._join(node, sources)
        if reading.role is Role.PARTS:
            return None
        if reading.role is Role.PERMUTE:
            return sources[0]
        if reading.role is Role.TAKE:
            taken = self.reader.taken(node)
            return Value(sources[0].atoms[taken], sources[0].constants[taken])
        if reading.role is Role.CAT:
            parts = [self.values[part] for part in node.args[0]]  # type: ignore[union-attr,index]
            return Value(np.concatenate([p.atoms for p in parts]), np.concatenate([p.constants for p in parts]))
        pixels = node.meta["shape"][1] // reading.sources[0].meta["shape"][1]
        return Value(np.repeat(sources[0].atoms, pixels), np.repeat(sources[0].constants, pixels))

    def _keep_for_size(self, node: fx.Node) -> None:
        """Keep at least one channel if anything reads the size, except for a flattening, which is rewritten."""
        users = [
            reader for user in node.users for reader in (user.users if user.target is operator.getitem else [user])
        ]
        source = self.values.get(self.readings[node].sources[0])
        if source is not None and any(self.readings[user].role is not Role.FLATTEN for user in users):
            self.atoms.need(source.atoms[:1], f"{node.name} asks for its size")

    def _unknown(self, node: fx.Node) -> Value | None:
        count = self.reader.channels(node)
        if count is None:  # the number may depend on the inputs' sizes
            return None
        vector = self.reader.buffer(node)
        if vector is not None and vector.numel() == count and vector.isfinite().all():
            return Value(self.atoms.new(count), vector.double().cpu().numpy().reshape(-1))
        value = Value(self.atoms.new(count), np.full(count, np.nan))
        self.atoms.need(value.atoms, f"made by {node.name}")
        self.atoms.ordered.update(value.atoms.tolist())
        return value

    def _convolution(self, node: fx.Node, source: Value) -> Value:
        module = self.reader.module(node)
        weight = module.weight.detach()
        live, groups, width = _live(weight), getattr(module, "groups", 1), weight.shape[1]
        constants = source.constants.reshape(groups, 1, width)
        known = np.broadcast_to(np.isfinite(constants), (groups, len(weight) // groups, width)).reshape(live.shape)
        zero = np.broadcast_to(constants == 0, (groups, len(weight) // groups, width)).reshape(live.shape)
        foldable = known & (zero | self._inside(module))
        self.layers[node] = Layer(node, module, live, foldable, known if self.fixed_size else foldable)
        value = Value(self.atoms.new(len(weight)), _outputs(module, constants, live, foldable))
        if groups > 1:  # a channel has to stay in its group
            self._grouped += [*source.atoms.tolist(), *value.atoms.tolist()]
            self.atoms.ordered.update(self._grouped)
        return value

    def _inside(self, module: Any) -> NDArray[np.bool_]:
        """Return, as [C_out, C_in/groups], whether no non-zero weight meets zero padding at any size of the input."""
        weight = module.weight.detach()
        if weight.dim() == 2 or module.padding_mode != "zeros":
            return np.ones(tuple(weight.shape[:2]), dtype=bool)
        never = torch.ones(weight.shape[2:], dtype=torch.bool)
        for axis, (lower, upper) in enumerate(paddings(module)):
            taps, step = weight.shape[2 + axis], module.dilation[axis]
            place = torch.arange(taps).reshape([-1 if i == axis else 1 for i in range(never.dim())])
            never = never & (place * step >= lower) & ((taps - 1 - place) * step >= upper)
        return ((weight.cpu() == 0) | never).flatten(2).all(2).numpy()

    def _per_channel(self, node: fx.Node, source: Value) -> Floats:
        module = self.reader.module(node)
        if module is not None and is_depthwise(module):
            constants = source.constants[:, None]
            foldable = np.isfinite(constants) & ((constants == 0) | self._inside(module))
            live = _live(module.weight.detach())
            return _outputs(module, constants.reshape(-1, 1, 1), live, foldable.reshape(-1, 1, 1))
        if is_padding(node):
            zeros = node.kwargs.get("mode", "constant") == "constant"
            return np.where((source.constants != 0) & zeros, np.nan, source.constants)
        if node.target is operator.getitem:
            return source.constants
        if is_resampling(node, module):
            kept = source.constants if keeps_constants(module) else np.where(source.constants == 0, 0.0, np.nan)
            return kept.copy()
        if type(module) in BATCH_NORMS and module.running_mean is None:
            return np.full_like(source.constants, np.nan)
        return _evaluate(node, module, source.constants)

    def _join(self, node: fx.Node, sources: list[Value]) -> Value:
        one, other = sources
        with np.errstate(all="ignore"):
            constants = _finite(_NUMPY[str(arithmetic(node))](one.constants, other.constants))
        if arithmetic(node) == "mul":  # as for a kernel of zeros, 0 times anything is 0
            constants = np.where((one.constants == 0) | (other.constants == 0), 0.0, constants)
        constant = self.constant_operand(node)
        if constant is not None:
            return Value(sources[1 - constant].atoms, constants)
        if node.name in self.scatter:
            return Value(sources[1 - self.scatter[node.name]].atoms, constants)
        self.atoms.unite(one.atoms, other.atoms)
        return Value(one.atoms, constants)

    # Backward pass: needed channels.

    def _find_needs(self) -> None:
        changed = True
        while changed:
            changed = False
            for node in reversed(self.values):
                changed |= self._ask(node)

    def _ask(self, node: fx.Node) -> bool:
        """Mark the channels that the node must read of its sources and return whether any was new."""
        reading = self.readings[node]
        if reading.role is Role.JOIN and node.name in self.scatter and self.constant_operand(node) is None:
            other = self.values[reading.sources[self.scatter[node.name]]]
            wanted = self.atoms.needed(self.values[node].atoms) & other.varies
            return self.atoms.need(other.atoms[wanted], f"read by {node.name}")
        layer = self.layers.get(node)
        if layer is None:
            return False
        source = self.values[reading.sources[0]]
        present = self.atoms.needed(self.values[node].atoms)
        wanted = self._wanted(layer, present)
        by = f"read by {node.target}"
        changed = self.atoms.need(source.atoms[wanted & source.varies], by)
        changed |= self._ask_for_constant(layer, source, wanted & ~source.varies)
        if present.any() and not self.atoms.needed(source.atoms).any():
            changed |= self.atoms.need(source.atoms[:1], f"{node.target} needs one channel at least")
        return changed

    def _ask_for_constant(self, layer: Layer, source: Value, wanted: NDArray[np.bool_]) -> bool:
        """Keep one constant channel for all of each group: behind the same padding, they differ only by factors."""
        changed = False
        sizes = np.abs(np.nan_to_num(source.constants))
        needed = self.atoms.needed(source.atoms)
        for group in np.split(np.arange(len(wanted)), layer.groups):
            some = group[wanted[group]]
            if len(some):
                largest = some[sizes[some].argmax()]
                if not (needed[group] & (sizes[group] >= _RATHER * sizes[largest])).any():
                    why = f"a constant that the padding of {layer.node.target} makes visible"
                    changed |= self.atoms.need(source.atoms[[largest]], why)
        return changed

    def _wanted(self, layer: Layer, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return, as [C_in], the channels that a kept kernel reads and that are not folded into its bias."""
        reads = layer.live & ~layer.drops & present[:, None]
        return reads.reshape(layer.groups, -1, reads.shape[1]).any(1).reshape(-1)


def _live(weight: Tensor) -> NDArray[np.bool_]:
    return (weight != 0).flatten(2).any(2).cpu().numpy() if weight.dim() > 2 else (weight != 0).cpu().numpy()


def _outputs(module: Any, constants: Floats, live: NDArray[np.bool_], foldable: NDArray[np.bool_]) -> Floats:
    """Return the constant output of each kernel, [C_out]; NaN if it varies.

    ``constants`` has shape [groups, 1, C_in/groups], ``live`` and ``foldable`` have [C_out, C_in/groups].
    """
    groups, _, width = constants.shape
    live, foldable = live.reshape(groups, -1, width), foldable.reshape(groups, -1, width)
    sums = (
        module.weight.detach().double().flatten(2).sum(2)
        if module.weight.dim() > 2
        else module.weight.detach().double()
    )
    read = np.where(live & foldable, constants, 0.0)
    outputs = (sums.cpu().numpy().reshape(live.shape) * read).sum(2).reshape(-1)
    if module.bias is not None:
        outputs = outputs + module.bias.detach().double().cpu().numpy()
    return _finite(np.where((live & ~foldable).any(2).reshape(-1), np.nan, outputs))


def _evaluate(node: fx.Node, module: Any, constants: Floats) -> Floats:
    """Return the constants after a pointwise operation, computed by running it in float64."""
    dims = len(node.meta["shape"])
    x = torch.from_numpy(np.nan_to_num(constants)).reshape(1, -1, *[1] * (dims - 2))
    with torch.no_grad():
        if module is not None:
            y = copy.deepcopy(module).double().cpu().eval()(x.clone())
        else:
            args = [x.clone() if isinstance(arg, fx.Node) else arg for arg in node.args]
            operation: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
            y = operation(*args, **node.kwargs)
    return np.where(np.isnan(constants), np.nan, _finite(y.reshape(-1).numpy()))


def _finite(constants: Floats) -> Floats:
    """Replace constants that are not finite by NaN: such channels count as varying, so that they are not hidden."""
    return np.where(np.isfinite(constants), constants, np.nan)
