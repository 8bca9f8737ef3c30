"""A penalty on the MACs of a network, in which the layers' costs depend on each other (the draft's eq. 34)."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from loco_ext import ops
from loco_ext.argument_checks import check_number
from loco_ext.fx.operations import operation
from loco_ext.fx.trace import trace
from loco_ext.nn.computed import check_plain, is_convolution
from loco_ext.nn.modes import evaluating
from loco_ext.ops.penalties import OfStep
from loco_ext.penalties import Penalty, RingPenalty
from loco_ext.penalties.penalty_checks import check_convolution, check_metric
from loco_ext.sparsity.compaction.compact import check_inputs
from loco_ext.sparsity.compaction.graph import copies
from loco_ext.sparsity.folded_norms import convolution_of
from loco_ext.sparsity.former_names import FormerNames

_LARGEST = torch.finfo(torch.float64).max


def complexity_penalties(
    model: nn.Module, example_inputs: Tensor | Sequence[Any], strength: float, **settings: Any
) -> "dict[str, ComplexityPenalty]":
    """Return a penalty for each Conv module; together they reduce a relaxation of the number of MACs, eq. 34.

    With ``s'_ij`` as in eq. 21 and ``d'_i`` as in eq. 12, the whole regularizer is

    ``strength * sum_i r_i c_i d'_(i-1) sum_j s'_ij^2``,

    ``r_i c_i`` being the output pixels of layer i (summed over its calls) and ``d'_(i-1)`` the sum of the norms of its
    input channels, divided by its groups. A layer contributes to its own term through ``s'_ij``, and to the terms of
    the layers that read it through ``d'_i``; see :class:`ComplexityPenalty`. The norm of a channel is

    - the norm of the filter that produces it, also after norms, activations, pooling, and factors such as gates, which
      have one number per channel (of two factors of full size, the first counts);
    - the root of the sum of squares of the norms of all filters that residual connections and other functions of
      several tensors combine in it;
    - 1 if no Conv module produces it, as for the image, or if a split or shuffle of channels, or an operation that
      mixes them, hides which one does.

    A channel that several layers read counts in the term of each of them.

    Args:
        model: a model that torch.fx can trace. It is run in evaluation mode; its weights are not changed. The penalties
            read them whenever they are used.
        example_inputs: a tensor, or several arguments, for one call of the model. Their size determines ``r_i c_i``;
            the batch size does not matter.
        strength: finite and at least 0.
        settings: further arguments of :class:`RingPenalty`, all but ``power``. ``weighting`` applies to the groups in
            ``s'_ij``; ``norm="linf"`` is used for groups in ``s'_ij`` and filters in ``d'_i``.

    Returns:
        Penalties by module name, as :func:`loco_ext.optim.parameter_groups` takes them.

    Raises:
        TypeError, ValueError: the message names the argument; also if torch.fx cannot trace the model, or a
            parametrization or a hook computes one of its weights.

    Source:
        The draft "Optimal Convolutional Architectures Via Structured Sparsity Regularizers", section 3.5.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import optim, sparsity
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
        >>> penalties = sparsity.complexity_penalties(model, (torch.zeros(1, 3, 16, 16),), strength=1e-9)
        >>> optimizer = optim.SGD(optim.parameter_groups(model, 5e-4, penalty=penalties), lr=0.1)
        >>> round(penalties["0"].strength / 1e-9)  # 12 x 12 pixels, 3 channels
        432
    """
    inputs = check_inputs(model, example_inputs)
    if is_convolution(model):
        kind = type(model).__name__
        raise ValueError(f"model: expected a network, got a single {kind}, which an nn.Sequential can hold")
    check_plain(model)
    rings = RingPenalty(strength, power=2, **settings)
    with evaluating(model), torch.no_grad():
        readers = _Readers(trace(model, example_inputs=inputs))
        readers.run(*copies(inputs))
        called = _called_convolutions(model, copies(inputs))
    if missing := [name for name, module in called.items() if module not in readers.layers.values()]:
        raise ValueError(
            f"model: expected one that torch.fx can trace, got one whose graph lacks a call of {missing[0]!r}; its "
            "code may ask whether a value is a tensor"
        )
    if not readers.layers:
        raise ValueError("model: expected convolutions that torch.fx traces as modules, got none")
    network = CountedNetwork(readers.layers, readers.calls)
    return {name: ComplexityPenalty(rings, network, name) for name in network.layers}


def _called_convolutions(model: nn.Module, inputs: Sequence[Any]) -> dict[str, nn.Module]:
    """Return the convolutions that the model calls, by name."""
    names = {module: name for name, module in model.named_modules() if is_convolution(module)}
    called: dict[str, nn.Module] = {}
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(lambda m, _: called.update({names[m]: m})))
        model(*inputs)
    return called


@dataclass(frozen=True)
class ComplexityPenalty(FormerNames, Penalty):
    """Eq. 34 as a function of one layer's weight, all other layers being fixed:

    ``a sum_j s'_ij^2 + sum_j b_j ||k_ij||``,

    with ``a = strength * r_i c_i d'_(i-1)``, computed from the layers that it reads, and
    ``b_j = strength * sum r_k c_k sum_l s'_kl^2`` over the layers k that read its channel j. ``a`` and ``b`` are
    computed from the model's weights at every :meth:`value` and :meth:`prox`, and before every step of an optimizer.
    For the gradient they are constants. Together, the gradients of all layers' values are the gradient of eq. 34. The
    sum of the values is not eq. 34, because each term appears in several of them.

    If residual connections add several filters in one channel, ``b_j`` is multiplied by the filter's share
    ``||k_ij|| / sqrt(sum of squares of all of them)``, which is 1 if all are zero. A layer that reads its own output,
    such as one that runs twice, has both parts as well. Filters without a finite norm are not counted.

    :func:`complexity_penalties` creates it. An optimizer's checkpoint does not contain the model; load the checkpoint
    into an optimizer that has a ComplexityPenalty in the same place.

    Args:
        rings: penalty that defines ``s'_ij``, with ``power=2``; its strength is that of eq. 34.
        network: the layers and which of them read which.
        layer: name of the module.

    Raises:
        TypeError, ValueError: in use, as for :class:`RingPenalty`; an optimizer's parameter is not the weight of the
            module (the model was copied, or the module replaced: create the penalties again).
        NotImplementedError: an optimizer's parameter is a DTensor.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from loco_ext import sparsity
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 1, 1, bias=False)).double()
        >>> for conv, value in zip(model, (2.0, 3.0)):
        ...     _ = nn.init.constant_(conv.weight, value)
        >>> penalty = sparsity.complexity_penalties(model, (torch.ones(1, 1, 4, 4).double(),), 0.01)["0"]
        >>> penalty.strength, [round(b, 2) for b in penalty.filter_strengths.tolist()]  # 16 * 1; 16 * (9 + 9)
        (0.16, [2.88, 2.88])
    """

    rings: RingPenalty
    network: "CountedNetwork"
    layer: str
    _stored = "rings"

    @property
    def strength(self) -> float:
        """The factor ``a``."""
        return self.network.measure(self.rings)[self.layer][0]

    @property
    def filter_strengths(self) -> Tensor:
        """The factors ``b``: float64 ``(C_out,)`` on the CPU."""
        return self.network.measure(self.rings)[self.layer][1]

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of the weight, as :meth:`loco_ext.sparsity.RingPenalty.value` does."""
        a, b = self._strengths(weight)
        norms, sizes = _norms_and_sizes(self.rings, weight)
        return a * sizes.square().sum() + (b.to(weight.device) * norms).sum()

    def prox(self, weight: Tensor, step: float, metric: Tensor | None = None) -> Tensor:
        """Return the exact prox of the weight, as :meth:`loco_ext.sparsity.RingPenalty.prox` does."""
        size = check_number("step", step)
        a, b = self._strengths(weight)
        check_metric(metric, weight)
        return self._shrink(weight, size, metric, a, b)

    def threshold(self, weight: Tensor, tau: float) -> Tensor:
        """Set small groups of the weight to zero, as :meth:`loco_ext.sparsity.RingPenalty.threshold` does."""
        return self.rings.threshold(weight, tau)

    def for_step(self, weight: Tensor) -> OfStep:
        """Return the argument that the optimizer step's operators take for this weight."""
        module = self.network.layers[self.layer]
        if weight is not module.weight:
            raise ValueError(
                f"expected the weight of the model's {self.layer!r} that complexity_penalties was given, got another "
                f"parameter of shape {tuple(weight.shape)}; make the penalties anew for this model"
            )
        if type(weight) is not nn.Parameter:
            raise NotImplementedError(
                f"penalty: expected an ordinary parameter with a ComplexityPenalty, got a {type(weight).__name__}"
            )
        self._strengths(weight)
        refresh, strengths = _Refresh(self.network, self.rings), self.network.ahead_of_step
        if self.rings not in strengths:
            refresh()

        def prox(w: Tensor, step: float, metric: Tensor | None) -> Tensor:
            return self._shrink(w, step, metric, *strengths[self.rings][self.layer])

        return ops.LayerPenalty(prox, refresh)

    def _strengths(self, weight: Tensor) -> tuple[float, Tensor]:
        check_convolution("weight", weight)
        expected = self.network.layers[self.layer].weight.shape
        if weight.shape != expected:
            raise ValueError(f"weight: expected shape {tuple(expected)} as {self.layer!r}, got {tuple(weight.shape)}")
        return self.network.measure(self.rings)[self.layer]

    def _shrink(self, weight: Tensor, step: float, metric: Tensor | None, a: float, b: Tensor) -> Tensor:
        """Return the prox, without checking the arguments."""
        squared = math.sqrt(step) * math.sqrt(a) * self.rings.group_weights(weight)
        thresholds = torch.zeros(len(weight), len(squared), dtype=torch.float64, device="cpu")
        thresholds[:, -1] = (step * b).clamp(max=_LARGEST)
        squared = squared.clamp(max=_LARGEST).expand_as(thresholds)
        taps, linf = self.rings.filters(weight).rings, self.rings.norm == "linf"
        return ops.ring_prox(weight, taps, thresholds, squared, metric, linf=linf)


@dataclass(frozen=True)
class ChannelNorms:
    """The contributions to the norms of a tensor's channels.

    Args:
        constant: the part of the squared norms that no filter contributes, float64 ``(C,)``.
        writers: for each layer that produces some channels: its name, the channels, and the filter of each.
    """

    constant: Tensor
    writers: list[tuple[str, Tensor, Tensor]]

    def __len__(self) -> int:
        return len(self.constant)

    def norms(self, of_filters: dict[str, Tensor]) -> Tensor:
        """Return the norm of each channel, float64 ``(C,)``, given those of each layer's filters."""
        parts = [self.constant.sqrt()[:, None]]
        for layer, channels, filters in self.writers:
            parts.append(torch.zeros(len(self), 1, dtype=torch.float64, device="cpu"))
            parts[-1][channels, 0] = of_filters[layer][filters]
        return _hypotenuse(torch.cat(parts, 1))


def _hypotenuse(sizes: Tensor) -> Tensor:
    """Return the root of the sum of squares of each row, without overflow for numbers as large as float64 holds."""
    largest = sizes.amax(1)
    scale = torch.where(largest > 0, largest, 1.0)
    return scale * torch.linalg.vector_norm(sizes / scale[:, None], dim=1)


@dataclass(frozen=True)
class LayerCall:
    """One call of a Conv module: ``cost`` is output pixels divided by groups, ``channels`` its input channels."""

    layer: str
    cost: float
    channels: ChannelNorms


class CountedNetwork:
    """The Conv modules of a model by name, and the input channels of each of their calls.

    Attributes:
        ahead_of_step: results of :meth:`measure` before the current step, for the settings of each optimizer's
            penalties.
    """

    def __init__(self, layers: dict[str, _ConvNd], calls: list[LayerCall]) -> None:
        self.layers, self.calls = layers, calls
        self.ahead_of_step: dict[RingPenalty, dict[str, tuple[float, Tensor]]] = {}

    @torch.no_grad()
    def measure(self, rings: RingPenalty) -> dict[str, tuple[float, Tensor]]:
        """Return ``a`` and ``b`` of each layer, see :class:`ComplexityPenalty`, computed from the current weights."""
        on_devices = {name: _norms_and_sizes(rings, module.weight.detach()) for name, module in self.layers.items()}
        # [2, C_out], 0 where a filter's are not finite
        measured = {name: torch.where(both.isfinite(), both, 0.0).cpu() for name, both in on_devices.items()}
        norms = {name: both[0] for name, both in measured.items()}
        a = dict.fromkeys(self.layers, 0.0)
        b = {name: torch.zeros_like(of_layer) for name, of_layer in norms.items()}
        for call in self.calls:
            of_channels = call.channels.norms(norms)
            unit = rings.strength * call.cost
            a[call.layer] += unit * of_channels.sum().item()
            size = unit * measured[call.layer][1].square().sum()
            for writer, channels, filters in call.channels.writers:
                whole = of_channels[channels]
                share = torch.where(whole > 0, norms[writer][filters] / torch.where(whole > 0, whole, 1.0), 1.0)
                b[writer].index_add_(0, filters, size * share)
        return {name: (min(a[name], _LARGEST), b[name].nan_to_num(0.0).clamp(max=_LARGEST)) for name in self.layers}


def _norms_and_sizes(rings: RingPenalty, weight: Tensor) -> Tensor:
    """Return ``||k_j||`` and ``s'_j`` of each filter: ``(2, C_out)``."""
    groups = rings.group_norms(weight)
    return torch.stack([groups[:, -1], (groups * rings.group_weights(weight).to(weight.device)).sum(1)])


@dataclass(frozen=True)
class _Refresh:
    """Callable that computes the strengths of all layers before a step; it is equal for all penalties of one model."""

    network: CountedNetwork
    rings: RingPenalty

    def __call__(self) -> None:
        self.network.ahead_of_step[self.rings] = self.network.measure(self.rings)


class _Readers(fx.Interpreter):
    """Interpreter that finds, for each call of a Conv module, what produces its input channels."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would append to the messages of errors
        self.layers: dict[str, _ConvNd] = {}
        self.calls: list[LayerCall] = []
        self.channels: dict[fx.Node, ChannelNorms] = {}  # norms of the channels of tensors (N, C, ...)
        self.shapes: dict[fx.Node, torch.Size] = {}  # of the same tensors
        self.names: dict[int, str] = {}  # name of the first module that has a weight, by the weight's id

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Tensor) and value.dim() > 1:
            self.channels[node], self.shapes[node] = self._channels(node, value), value.shape
        return value

    def _channels(self, node: fx.Node, value: Tensor) -> ChannelNorms:
        sources = [self.channels[source] for source in node.all_input_nodes if source in self.channels]
        if (module := convolution_of(node)) is not None:
            if value.dim() < module.weight.dim():
                raise ValueError(f"example_inputs: expected a batch, got one sample at {node.target}")
            layer = self.names.setdefault(id(module.weight), str(node.target))
            self.layers.setdefault(layer, module)
            self.calls.append(LayerCall(layer, value.shape[2:].numel() / module.groups, sources[0]))
            filters = torch.arange(len(module.weight), device="cpu")
            return ChannelNorms(
                torch.zeros(len(filters), dtype=torch.float64, device="cpu"), [(layer, filters, filters)]
            )
        name = operation(node)
        tensors = node.kwargs["tensors"] if "tensors" in node.kwargs else node.args[0] if node.args else None
        if name == "cat" and isinstance(tensors, list | tuple):  # it is one node if a function has returned a tuple
            whole = _concatenated([self.channels[each] for each in tensors])
            sources = [whole] if len(whole) == value.shape[1] else sources  # else they join along another axis
        fitting = [source for source in sources if len(source) == value.shape[1]]
        if not fitting or _hides_channels(node, name, value.dim()):
            return ChannelNorms(torch.ones(value.shape[1], dtype=torch.float64, device="cpu"), [])
        if name in ("mul", "div"):  # a gate has the size of a channel
            full = [self.channels[n] for n in node.all_input_nodes if self.shapes.get(n) == value.shape]
            fitting = [*full, *fitting][:1]
        return _added(fitting)


def _hides_channels(node: fx.Node, name: str, dims: int) -> bool:
    """Return whether channel i of the result may depend on others than channel i of what the node reads."""
    if name in _MIXES_CHANNELS or (name == "linear" and dims == 2):
        return True
    if name == "getitem":  # slices that leave all channels leave their order
        entries = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return any(isinstance(entry, list | fx.Node) for entry in entries)
    if name not in _MOVES_AXES:
        return False
    given: list[Any] = []
    for argument in (*node.args[1:], *node.kwargs.values()):
        given += argument if isinstance(argument, list | tuple) else [argument]
    if name == "roll" or not all(isinstance(axis, int) for axis in given):  # numbers that the network computes
        return True
    axes = [axis % dims for axis in given]
    return axes[1] != 1 if name == "permute" else 1 in axes


_MIXES_CHANNELS = frozenset(
    [
        *("conv1d", "conv2d", "conv3d", "convtranspose1d", "convtranspose2d", "convtranspose3d", "matmul", "mm", "bmm"),
        *("einsum", "channelshuffle", "pixelshuffle", "pixelunshuffle", "sort", "cumsum", "softmax", "logsoftmax"),
        *("indexselect", "gather", "takealongdim"),
    ]
)
_MOVES_AXES = frozenset(["transpose", "swapaxes", "swapdims", "movedim", "permute", "flip", "roll"])


def _concatenated(sources: list[ChannelNorms]) -> ChannelNorms:
    writers, before = [], 0
    for source in sources:
        writers += [(layer, channels + before, filters) for layer, channels, filters in source.writers]
        before += len(source)
    return ChannelNorms(torch.cat([source.constant for source in sources]), writers)


def _added(sources: list[ChannelNorms]) -> ChannelNorms:
    constant = torch.stack([source.constant for source in sources]).sum(0)
    writers: list[tuple[str, Tensor, Tensor]] = []
    for new in (writer for source in sources for writer in source.writers):
        if not any(new[0] == old[0] and all(map(torch.equal, new[1:], old[1:])) for old in writers):
            writers.append(new)
    return ChannelNorms(constant, writers)
