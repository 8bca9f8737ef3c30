"""The parts of a model that can be removed: the layers with filters, the channels that they share, and their costs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from loco_ext import geometry
from loco_ext.argument_checks import check_choice
from loco_ext.errors import first_line
from loco_ext.fx.modules import copied, unwrapped
from loco_ext.fx.operations import module_of, owner_of
from loco_ext.fx.trace import UntraceableError
from loco_ext.nn.computed import check_plain
from loco_ext.sparsity.budget.layer_time import LayerTime, time_layer
from loco_ext.sparsity.budget.size_problem import LayerChoices, SizeProblem, Sizes
from loco_ext.sparsity.compaction.agreement import results_of
from loco_ext.sparsity.compaction.channels import Channels, classes_of_channels, unite_groups
from loco_ext.sparsity.compaction.constants import Booleans, Floats
from loco_ext.sparsity.compaction.describe import kept_channels, pixels_of, samples_of
from loco_ext.sparsity.compaction.disjoint_set import Integers
from loco_ext.sparsity.compaction.graph import annotated_graph
from loco_ext.sparsity.compaction.layers import COMPUTED
from loco_ext.sparsity.compaction.macs import macs_of
from loco_ext.sparsity.compaction.roles import Role, is_depthwise
from loco_ext.sparsity.compaction.whole_filters import filter_weights, filters_first, has_whole_filters
from loco_ext.warning import warn_caller

_OF_THE_LAST = 1e-6  # part of a layer's most important filter that counts as left without it
_NAMED = 4  # operations in a message at most
_NONZERO = 1e-3  # value of all weights of the copy that is analysed, as what can be removed does not depend on them


@dataclass(frozen=True)
class PrunableLayer:
    """A convolution, transposed or not, or a linear layer of a model.

    Args:
        name: name of the module.
        module: the module itself.
        timed: a layer of torch's that computes what the module computes: itself, or a copy if it has code of its own.
        norms: the normalisations that alone read the layer's output, in all of its calls.
        scales: these, or those behind concatenations and the like that alone read its channels, and where each of these
            is in them, ``[C_out]``.
        rings: ring of each tap, counted from the outside in; all 0 if filters have only one size.
        pixels: number of pixels of one sample, in all calls, at which all weights act; a fraction where several samples
            share them.
        writes: class of each filter's channel, ``[C_out]``.
        reads: class of each input channel, ``[C_in]``; None for layers with groups, whose inputs all stay or, if they
            are depthwise, go with the filter that reads them.
        kept: whether every filter stays whole.
        follower: name of the convolution with groups that alone reads the layer's output, so that channels of both go
            together; empty if there is none.
        inputs: shape, dtype, device and memory format of the layer's input on the example, for each call.
    """

    name: str
    module: Any
    timed: Any
    norms: list[Any]
    scales: list[tuple[Any, Integers]]
    rings: Integers
    pixels: float
    writes: Integers
    reads: Integers | None
    kept: bool
    follower: str
    inputs: list[Mapping[str, Any]]

    @property
    def weight(self) -> Tensor:
        """The weight, or a view of it, ``(C_out, C_in/groups, *kernel_size)``."""
        return filter_weights(self.module)

    @property
    def taps(self) -> Integers:
        """Number of taps of each choice: without any ring, without the outermost, and so on to 0."""
        return np.asarray([(self.rings >= ring).sum() for ring in range(self.rings.max() + 2)])


@dataclass(frozen=True)
class Structure:
    """The layers of a model and the classes of channels that are kept or removed together.

    Args:
        layers: in the order in which they run.
        norms: every normalisation of channels, and the class of each of them.
        fixed: for each class, whether it stays in any case.
        parameters_elsewhere: number of the model's parameters outside these layers and norms.
        macs_elsewhere: MACs of one sample outside these layers.
    """

    layers: list[PrunableLayer]
    norms: list[tuple[Any, Integers]]
    fixed: np.ndarray[Any, np.dtype[np.bool_]]
    parameters_elsewhere: int
    macs_elsewhere: float

    def times(self) -> list[LayerTime]:
        """Return the times of the layers at smaller numbers of channels."""
        return [time_layer(layer.timed, layer.inputs) for layer in self.layers]

    def problem(
        self,
        cost: str,
        lost: Mapping[str, Tensor],
        least: Mapping[str, int],
        round_to: int = 1,
        times: Sequence[LayerTime | None] | None = None,
        followers_alone: bool = False,
    ) -> SizeProblem:
        """Return the problem of choosing sizes.

        Args:
            cost: "macs", "parameters" or "latency", the sum of ``times``.
            lost: importance that each choice of each filter loses, ``(C_out, choices)``, by the layer's name.
            least: number of filters that stay, by the layer's name.
            round_to: see :class:`SizeProblem`.
            followers_alone: whether filters that go with a follower's lose no importance beside it, because the change
                of the loss without both is that without the follower's.
        """
        layers, of_classes = [], np.zeros(len(self.fixed))
        fixed = self.fixed | self._read_in_parts(lost)
        for layer, time in zip(self.layers, times or [None] * len(self.layers), strict=True):
            weight, table = layer.weight, log_importance_lost(lost[layer.name].double().cpu().numpy(), layer.writes)
            if followers_alone and layer.follower in lost and bool(lost[layer.follower].any()):
                table[:, -1] = 0.0
            if layer.kept:
                table[:, 1:] = np.inf
            table[fixed[layer.writes], -1] = np.inf
            unit = layer.pixels if cost == "macs" else 1
            width = weight.shape[1] if layer.reads is None else 1
            reads = layer.writes, layer.reads
            layers.append(LayerChoices(unit * width, layer.taps, table, *reads, least[layer.name], time))
            if cost == "parameters":
                np.add.at(of_classes, layer.writes, float(_has(layer.module, "bias")))
        for norm, classes in self.norms:
            if cost == "parameters":
                np.add.at(of_classes, classes, float(_has(norm, "weight") + _has(norm, "bias")))
        rest = {"macs": self.macs_elsewhere, "parameters": self.parameters_elsewhere}.get(cost, 0.0)
        return SizeProblem(layers, fixed, of_classes, rest, round_to)

    def _read_in_parts(self, lost: Mapping[str, Tensor]) -> Booleans:
        """Return the most important class of each layer that reads a part of what other layers write, behind a split.

        Without it, the layer would be cut off, though the layers before it are not empty.
        """
        found, worth = np.zeros(len(self.fixed), bool), np.zeros(len(self.fixed))
        for layer in self.layers:
            np.add.at(worth, layer.writes, lost[layer.name][:, -1].double().cpu().numpy())
        for layer in self.layers:
            reads = np.unique([] if layer.reads is None else layer.reads).astype(np.int64)
            in_parts = any(0 < np.isin(other.writes, reads).sum() < len(other.writes) for other in self.layers)
            if in_parts and not self.fixed[reads].any():
                found[reads[worth[reads].argmax()]] = True
        return found

    def masks(self, sizes: Sizes) -> "Masks":
        """Return factors of 0 and 1 for what sizes leave out: rings, filters, and shifts of the norms behind."""
        found, stays = Masks(), np.ones(len(self.fixed), bool)
        for layer in self.layers:  # other channels, such as those that a padding adds, stay as they are
            stays[layer.writes] = self.fixed[layer.writes]
        for layer, chosen in zip(self.layers, sizes, strict=True):
            kept = torch.from_numpy(layer.rings >= chosen[:, None])  # [C_out, taps]
            by_weight = kept.reshape(len(kept), 1, *layer.weight.shape[2:])
            found.add(layer.module, "weight", filters_first(layer.module, by_weight).numpy())
            alive = chosen != len(layer.taps) - 1
            stays[layer.writes[alive]] = True
            for module in (layer.module, *layer.norms):
                found.add_shifts(module, alive)
        for norm, classes in self.norms:
            found.add_shifts(norm, stays[classes])
        return found


def log_importance_lost(lost: Floats, classes: Integers) -> Floats:
    """Return ``total log(total / kept)`` of a layer's importance, divided among the filters as they go in order.

    While little is lost, this is the sum of what is lost; but a layer that is nearly empty blocks the whole network,
    which a sum of importances would not tell. Filters of one class, such as a group, go together. A class is compared
    with the more important ones, which go after it; a choice that loses a part of the class, such as a ring of a
    filter, loses that part of its fall. The most important one is compared with a millionth of itself.

    Args:
        lost: importance that each choice of each filter loses, ``[C_out, choices]``; the last choice loses all of it.
        classes: class of each filter, ``[C_out]``.
    """
    _, places = np.unique(classes, return_inverse=True)
    whole = np.bincount(places, lost[:, -1])
    order = np.argsort(-whole, kind="stable")
    kept = whole[order].cumsum()
    rest = np.concatenate([_OF_THE_LAST * kept[:1], kept[:-1]])
    falls = np.zeros(len(whole))
    falls[order] = np.log(np.divide(kept, rest, out=np.ones_like(kept), where=rest > 0))
    of_class = whole[places, None]
    parts = np.divide(lost, of_class, out=np.zeros_like(lost), where=of_class > 0)
    return whole.sum() * falls[places, None] * parts


class Masks:
    """Factors of 0 and 1 for tensors of modules.

    ``removed`` are the values that :meth:`cut` has set to zero, zeros elsewhere, one tensor for each mask.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[Any, str], Tensor] = {}
        self.removed: list[Tensor] = []

    def add(self, module: Any, name: str, kept: Booleans) -> None:
        """Set to zero what is not kept in one of the module's tensors; ``kept`` has a shape that expands to it."""
        if not kept.all():
            tensor, before = getattr(module, name), self._masks.get((module, name), 1.0)
            self._masks[module, name] = torch.ones_like(tensor) * before * torch.from_numpy(kept).to(tensor.device)

    def add_shifts(self, module: Any, alive: Booleans) -> None:
        """Let channels of zeros remain zeros behind a module; None is one without shifts."""
        for name in ("bias", "running_mean"):
            if _has(module, name):
                self.add(module, name, alive)

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the tensors that have a mask."""
        return [mask.shape for mask in self._masks.values()]

    @torch.no_grad()
    def apply(self) -> None:
        """Multiply the tensors by their masks, in place."""
        if self._masks:
            tensors = [getattr(*place) for place in self._masks]
            masks = [mask.to(tensor) for mask, tensor in zip(self._masks.values(), tensors, strict=True)]
            torch._foreach_mul_(tensors, masks)

    @torch.no_grad()
    def cut(self) -> None:
        """Do as :meth:`apply`, and keep what it removes for :meth:`restore`."""
        whole = [getattr(*place).clone() for place in self._masks]
        self.apply()
        self.removed = [before - getattr(*place) for before, place in zip(whole, self._masks, strict=True)]

    @torch.no_grad()
    def restore(self) -> None:
        """Give removed weights the values that they had when they were cut."""
        self.apply()  # a wrapper of the optimizer, such as Lookahead, may have made others of the zeros
        for place, removed in zip(self._masks, self.removed, strict=False):  # none if nothing was kept
            tensor = getattr(*place)
            tensor.add_(removed.to(tensor))


def structure_of(
    model: nn.Module, inputs: Sequence[Any], kind: str, granularity: str, skip: Collection[str] = ()
) -> Structure:
    """Return the parts of a model that can be removed.

    Args:
        model: it is not changed.
        inputs: arguments for one call.
        kind: kind of the rings, see :func:`loco_ext.geometry.ring_index`.
        granularity: "rings", or "filters" if each filter is kept whole or removed.
        skip: names of modules whose filters all stay whole.

    Raises:
        TypeError, ValueError: the message names the argument; the model refuses the inputs, torch.fx cannot trace it,
            or code computes one of its weights.
    """
    check_plain(model)
    check_choice("kind", kind, ("half", "full"))
    check_choice("granularity", granularity, ("rings", "filters"))
    if isinstance(skip, str) or not isinstance(skip, Collection):
        raise TypeError(f"skip: expected several names of the model's modules, got {skip!r}")
    inner = unwrapped(model)
    copy = copied(inner).eval()
    channels = _channels_of(copy, inputs)
    own, ids = dict(inner.named_modules()), np.arange(len(channels.sets))
    numbers, classes_of = np.unique(channels.sets.roots(ids), return_inverse=True)
    fixed = channels.sets.needed(numbers)
    layers, norms = list[PrunableLayer](), list[tuple[Any, Integers]]()
    samples = samples_of(channels.graph)
    for node, value in channels.values.items():
        module, classes = module_of(node), classes_of[value.ids]
        is_norm = channels.info.is_norm(node)
        if channels.role(node) is Role.MEAN:  # no layer writes it
            fixed[classes] = True
        if not (is_norm or channels.role(node) is Role.CONVOLUTION or is_depthwise(module)):
            continue
        mine = _own(own, node)
        if mine is None:
            fixed[classes] = True
        elif is_norm:
            norms += [] if any(norm is mine for norm, _ in norms) else [(mine, classes)]
        elif (place := next((k for k, layer in enumerate(layers) if layer.module is mine), None)) is not None:
            first, pixels = layers[place], float(pixels_of(node, module, samples))
            layers[place] = replace(first, pixels=first.pixels + pixels, inputs=[*first.inputs, _kind(channels, node)])
        else:
            kept = COMPUTED in node.meta or any(f"{node.target}.".startswith(f"{name}.") for name in skip)
            fixed[classes] |= kept
            (source,) = channels.sources(node)
            is_grouped = getattr(module, "groups", 1) > 1
            reads = None if is_grouped else classes_of[channels.values[source].ids]
            norms_behind = (_own(own, x) for x in channels.info.norms_behind(node))
            behind = [norm for norm in norms_behind if norm is not None]
            scales = [(norm, np.arange(len(classes))) for norm in behind] or _scales(channels, own, node)
            # Groups, and layers with several calls, run at the size of their largest filter: smaller ones save nothing.
            is_whole = is_grouped or has_whole_filters(module) or channels.info.is_called_again(node)
            size, has_rings = tuple(module.weight.shape[2:]), granularity == "rings" and not is_whole
            rings = np.asarray(geometry.ring_list(size, kind) if has_rings else [0] * prod(size))  # of each tap
            pixels, read = float(pixels_of(node, module, samples)), [_kind(channels, node)]
            timed = mine if type(mine) is type(module) else module
            known = str(node.target), mine, timed, behind, scales, rings, pixels, classes, reads, kept
            layers.append(PrunableLayer(*known, _follower(channels, node), read))
    counted = {id(p) for module, *_ in [*((each.module,) for each in layers), *norms] for p in module.parameters()}
    elsewhere = sum(p.numel() for p in inner.parameters() if id(p) not in counted)
    in_layers = sum(layer.pixels * layer.module.weight.numel() for layer in layers)
    structure = Structure(layers, norms, fixed, elsewhere, max(0.0, _macs_of(copy, inputs) - in_layers))
    if not any(len(np.unique(layer.rings)) > 1 or not fixed[layer.writes].all() for layer in layers if not layer.kept):
        computed = [str(node.target) for node in channels.layers if COMPUTED in node.meta]
        names = ", ".join([*computed, *kept_channels(channels)][:_NAMED])
        why = f"; all channels are kept that these read or return: {names}" if names else ""
        raise ValueError(f"model: expected convolutions or linear layers that can be made smaller, got none{why}")
    for name in skip:
        if name not in own:
            raise ValueError(f"skip: expected names of the model's modules, got {name!r}")
    return structure


def _channels_of(model: nn.Module, inputs: Sequence[Any]) -> Channels:
    """Return the classes of channels of the model if no weight is zero; those of a convolution's group are one class.

    All groups that are left must be as large as each other, so that each goes whole.
    """
    try:
        results_of(model, inputs)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"model, example_inputs: expected a model that takes these arguments, got {why}") from error
    try:
        graph = annotated_graph(model, inputs)
    except UntraceableError as error:
        why = str(error)
        named = why if why.startswith("model:") else f"model: expected one that torch.fx can trace; {why}"
        raise ValueError(named) from error
    with torch.no_grad():
        for parameter in graph.parameters():
            parameter.fill_(_NONZERO)
    channels = classes_of_channels(Channels(graph, {}, False, False))
    for node, layer in channels.layers.items():
        if layer.groups > 1:
            sides = [value.ids.reshape(layer.groups, -1) for value in (layer.source, channels.values[node])]
            unite_groups(channels, np.concatenate(sides, 1))
    return channels


def _scales(channels: Channels, own: Mapping[str, nn.Module], node: fx.Node) -> list[tuple[Any, Integers]]:
    """Return the normalisations that a layer's channels reach, and their places there; [] if they reach anything else.

    On the way there, channels stay apart, as in concatenations.
    """
    info, found, ids = channels.info, list[tuple[Any, Integers]](), channels.values[node].ids
    for end in _readers(channels, node, info.is_norm, (Role.PER_CHANNEL, Role.CAT, Role.WIDEN)):
        norm, numbers = _own(own, end), channels.values[end].ids
        if norm is None or any(np.sum(numbers == each) != 1 for each in ids):
            return []
        found.append((norm, np.asarray([np.argmax(numbers == each) for each in ids])))
    return found


def _follower(channels: Channels, node: fx.Node) -> str:
    """Return the name of the convolution with groups that alone reads a layer's output; empty if there is none.

    Norms and activations may be before it.
    """
    found = _readers(channels, node, lambda user: getattr(module_of(user), "groups", 1) > 1, (Role.PER_CHANNEL,))
    return str(found[0].target) if len(found) == 1 else ""


def _readers(
    channels: Channels, node: fx.Node, is_reader: Callable[[fx.Node], bool], through: Collection[Role]
) -> list[fx.Node]:
    """Return the nodes of a kind that read a layer's output, through nodes of these roles.

    Empty if any other node reads it, or if the layer or one of these is called again.
    """
    found, ways = dict[fx.Node, None](), [node]
    for way in ways:  # which grow
        for user in way.users:
            if is_reader(user):
                found[user] = None
            elif channels.role(user) in through:
                ways += [user] if user not in ways else []
            elif channels.role(user) is not Role.SIZE:
                return []
    return [] if any(map(channels.info.is_called_again, (node, *found))) else [*found]


def _kind(channels: Channels, node: fx.Node) -> Mapping[str, Any]:
    """Return shape, dtype, device and memory format of a layer's input."""
    (source,) = channels.sources(node)
    return {name: source.meta[name] for name in ("shape", "dtype", "device", "channels_last")}


def _macs_of(model: nn.Module, inputs: Sequence[Any]) -> float:
    """Return the MACs of the model for one sample; 0, with a warning, if torch cannot count them."""
    try:
        return float(macs_of(model, inputs))
    except Exception as error:  # torch's formulas of operators have conditions of their own
        warn_caller(f"macs: those outside of layers that can be made smaller are not counted: {first_line(error)}")
        return 0.0


def _own(own: Mapping[str, nn.Module], node: fx.Node) -> Any:
    """Return the model's module that has the weights of the one that a node calls; None if none of its own has them."""
    module = module_of(node)
    for name in (str(node.target), owner_of(node)):
        found = own.get(name)
        weights = [getattr(each, "weight", None) for each in (found, module)]
        if found is not None and all(isinstance(each, Tensor) for each in weights):
            return found if weights[0].shape == weights[1].shape else None  # type: ignore[union-attr]
        if type(found) is type(module):
            return found
    return None


def _has(module: Any, name: str) -> bool:
    """Return whether a module has a tensor of this name; modules with their own code may lack the attribute."""
    return getattr(module, name, None) is not None
